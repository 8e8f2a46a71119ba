"""GSS: gradient-based sample selection, the greedy variant (Aljundi et al., NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.functional.gradients import gss_slots
from cclis.memory import Memory
from cclis.methods.base import Batch
from cclis.methods.classifier import ClassifierMethod, weighted_cross_entropy
from cclis.nn.per_sample import gradient_cosines
from cclis.settings import ClassifierConfig, StreamReplayOptions

FIRST_SCORE = 0.1
"""Of samples that come before there is anything to compare them with (as in Mammoth)."""


@dataclass(frozen=True)
class GSSConfig(StreamReplayOptions, ClassifierConfig):
    """Settings of `gss`."""

    learning_rate: float = 0.03


class GSS(ClassifierMethod[GSSConfig]):
    """Replay as in ER; the memory takes in samples whose gradients are unlike those it has."""

    settings = GSSConfig
    streams = True
    replays = 2

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """Zero scores."""
        return {"score": self.network.mean.new_zeros(count)}

    def before_step(self, batch: Batch) -> None:
        """Score the task's samples: the largest cosine of the gradient with that of any sample of
        the second replay, plus 1 (Algorithm 2).

        Gradients are those of the weights of convolutions and linear layers, in eval mode, by the
        images as they are augmented, and before the step, where the algorithm has them after it:
        the network is a step older.
        """
        task, references = batch.part(0), batch.part(2)
        images = torch.cat([task.images, references.images])
        labels = torch.cat([task.labels, references.labels])

        def loss() -> Tensor:
            return F.cross_entropy(self.network.logits(images), labels, reduction="sum")

        with self.network.eval_uncompiled():
            cosines = gradient_cosines(self.network, loss, len(task.labels), len(references.labels))
        # A step that is not finite is reported by the trainer; nothing is stored.
        score = (cosines.amax(dim=1) + 1).clamp(0, 2).nan_to_num(2.0)
        batch.to_store["score"] = torch.where((~references.padding).any(), score, FIRST_SCORE)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the task's batch joined with the first replay."""
        both = slice(0, batch.sizes[0] + batch.sizes[1])
        logits = self.network.logits(batch.images[both])
        weight = batch.weight[both]
        return {"cross_entropy": weighted_cross_entropy(logits, batch.labels[both], weight)}

    def admit(
        self, slots: Tensor, kept: dict[str, Tensor], memory: Memory, generator: torch.Generator
    ) -> Tensor:
        """Fill the memory, then replace by score (Algorithm 2)."""
        scores = memory.extras.get("score", kept["score"][:0])
        return gss_slots(scores, kept["score"], memory.capacity, generator=generator)
