"""The learning rate over a task: linear warm-up, then cosine decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_WARMUP = 0.2
"""Share of a task's epochs that the warm-up takes at most."""
FLOOR = 1e-3
"""Share of the learning rate that the cosine ends at."""


@dataclass(frozen=True)
class Schedule:
    """Started anew for every task.

    Attributes:
        epochs: Epochs of the task.
        steps: Steps of an epoch.
        warmup_epochs: Epochs of warm-up asked for.
        constant: No decay after the warm-up.
    """

    epochs: int
    steps: int
    warmup_epochs: float
    constant: bool = False

    def factor(self, step: int, warmup_from: float) -> float:
        """What the learning rate is multiplied with at a step counted from the task's start."""
        epoch = step / self.steps
        warmup = min(self.warmup_epochs, LONGEST_WARMUP * self.epochs)
        if epoch < warmup:
            return warmup_from + (self._cosine(warmup) - warmup_from) * epoch / warmup
        return self._cosine(epoch)

    def _cosine(self, epoch: float) -> float:
        if self.constant:
            return 1.0
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
