"""Fine-tuning: one task after another with nothing against forgetting. The lower bound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.methods.base import Batch
from cclis.methods.classifier import ClassifierMethod
from cclis.settings import FinetuneConfig


class Finetune(ClassifierMethod[FinetuneConfig]):
    """Cross-entropy over the seen classes on the current task alone."""

    heads = ("linear", "discriminant", "means", "classifier")

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy."""
        logits = self.network.logits(batch.images)
        classes = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(classes >= self.seen_classes, -torch.inf)
        return {"cross_entropy": F.cross_entropy(logits, batch.labels)}
