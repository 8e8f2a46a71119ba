"""Fine-tuning: one task after another with nothing against forgetting. The lower bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.methods.base import Batch
from cclis.methods.classifier import ClassifierMethod
from cclis.settings import EvaluationOptions, NoMemoryConfig


@dataclass(frozen=True)
class FinetuneConfig(EvaluationOptions, NoMemoryConfig):
    """Settings of `finetune`: cross-entropy on one task after another, nothing kept."""


class Finetune(ClassifierMethod[FinetuneConfig]):
    """Cross-entropy over the seen classes on the current task alone."""

    settings = FinetuneConfig
    heads = ("linear", "discriminant", "means", "classifier")

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy."""
        logits = self.network.logits(batch.images)
        classes = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(classes >= self.seen_classes, -torch.inf)
        return {"cross_entropy": F.cross_entropy(logits, batch.labels)}
