"""Fine-tuning: one task after another with nothing against forgetting. The lower bound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclis.config import FinetuneConfig
from cclis.methods.base import Batch, Method
from cclis.nn.network import ClassifierNetwork


class Finetune(Method[FinetuneConfig, ClassifierNetwork]):
    """Cross-entropy over the seen classes on the current task alone."""

    heads = ("linear", "discriminant", "means", "classifier")

    @staticmethod
    def make_network(
        config: FinetuneConfig, encoder: nn.Module, channels: int, features: int, classes: int
    ) -> ClassifierNetwork:
        """Encoder and classifier."""
        return ClassifierNetwork(encoder, channels, features, classes)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy."""
        logits = self.network.logits(batch.images)
        classes = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(classes >= self.seen_classes, -torch.inf)
        return {"cross_entropy": F.cross_entropy(logits, batch.labels)}
