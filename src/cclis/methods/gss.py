"""GSS: gradient-based sample selection, the greedy variant (Aljundi et al., NeurIPS 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.config import GSSConfig
from cclis.gradients import gss_replacements, max_cosine
from cclis.memory import Memory
from cclis.methods.base import Batch
from cclis.methods.classifier import ClassifierMethod, weighted_cross_entropy

FIRST_SCORE = 0.1
"""Of samples that come before there is anything to compare them with."""


class GSS(ClassifierMethod[GSSConfig]):
    """Replay as in ER; the memory takes in samples whose gradients are unlike those it has.

    A simplification: the samples of a batch are scored together, by the batch's gradient against
    that of one replayed batch; the paper scores each against single samples of the memory.
    """

    streams = True
    replays = 2
    sees_gradients = True
    score: Tensor | None = None

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """Scores of nothing."""
        return {"score": self.network.mean.new_zeros(count)}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the task's batch joined with the first replay."""
        both = slice(0, batch.sizes[0] + batch.sizes[1])
        logits = self.network.logits(batch.images[both])
        weight = batch.proposal[both].abs()
        return {"cross_entropy": weighted_cross_entropy(logits, batch.labels[both], weight)}

    def probes(self, batch: Batch) -> list[Tensor]:
        """The loss of the task's batch, and that of the second replay to compare it with."""
        parts = [batch.part(0), batch.part(2)]
        return [F.cross_entropy(self.network.logits(p.images), p.labels) for p in parts]

    def steer(self, gradient: Tensor, probes: Tensor) -> Tensor:
        """Only look: the larger the cosine, the less is there to learn from keeping the batch."""
        self.score = max_cosine(probes[:1], probes[1:])[0]
        return gradient

    def admit(
        self, slots: Tensor, memory: Memory, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Fill the memory, then replace by score (Algorithm 2)."""
        score = float(self.score) if len(memory) and self.score is not None else FIRST_SCORE
        scores = self.network.mean.new_full((len(slots),), score)
        if len(memory) == memory.capacity > 0:
            slots = gss_replacements(memory.extras["score"], scores, generator=generator)
        return slots, {"score": scores}
