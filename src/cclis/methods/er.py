"""ER: experience replay from a reservoir (Riemer et al., ICLR 2019; Chaudhry et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cclis.methods.base import Batch
from cclis.methods.classifier import ClassifierMethod, weighted_cross_entropy
from cclis.settings import ClassifierConfig, StreamReplayOptions


@dataclass(frozen=True)
class ERConfig(StreamReplayOptions, ClassifierConfig):
    """Settings of `er`."""


class ER(ClassifierMethod[ERConfig]):
    """Cross-entropy on the task's batch joined with one from the memory."""

    settings = ERConfig
    streams = True
    replays = 1

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy over both, every sample alike."""
        logits = self.network.logits(batch.images)
        return {"cross_entropy": weighted_cross_entropy(logits, batch.labels, batch.weight)}
