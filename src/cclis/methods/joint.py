"""Joint training: all tasks at once. The upper bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cclis.methods.base import Batch
from cclis.methods.classifier import ClassifierMethod
from cclis.settings import NoMemoryConfig


@dataclass(frozen=True)
class JointConfig(NoMemoryConfig):
    """Settings of `joint`."""


class Joint(ClassifierMethod[JointConfig]):
    """Cross-entropy on all data."""

    settings = JointConfig
    joint = True

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy over all classes."""
        logits = self.network.logits(batch.images)
        return {"cross_entropy": F.cross_entropy(logits, batch.labels)}
