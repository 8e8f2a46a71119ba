"""What methods that train a classifier by cross-entropy have in common."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclis.methods.base import ConfigT, Method
from cclis.nn.network import ClassifierNetwork
from cclis.settings import ClassifierConfig, Config


class ClassifierMethod(Method[ConfigT, ClassifierNetwork]):
    """A method whose network ends in a classifier, its main head."""

    settings = ClassifierConfig
    heads: tuple[str, ...] = ("classifier",)

    @staticmethod
    def make_network(
        config: Config, encoder: nn.Module, channels: int, features: int, classes: int
    ) -> ClassifierNetwork:
        """Encoder and classifier."""
        return ClassifierNetwork(encoder, channels, features, classes)


def weighted_mean(cost: Tensor, weight: Tensor) -> Tensor:
    """Mean of the samples' costs (B,) under weights (B,); 0 where all weights are."""
    return (weight * cost).sum() / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Mean cross-entropy of samples under weights (B,); 0 where all weights are."""
    return weighted_mean(F.cross_entropy(logits, labels, reduction="none"), weight)
