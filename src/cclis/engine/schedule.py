"""The learning rate over a task: linear warm-up, then cosine decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_WARMUP = 0.2
"""Longest warm-up, as a share of the task's epochs."""
FLOOR = 1e-3
"""Factor at the end of the cosine decay."""


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of one task.

    Attributes:
        epochs: Epochs of the task.
        steps: Steps per epoch.
        warmup_epochs: Epochs of warm-up, shortened to `MAX_WARMUP`.
        constant: No decay after the warm-up.
    """

    epochs: int
    steps: int
    warmup_epochs: float
    constant: bool = False

    def factor(self, step: int, warmup_from: float) -> float:
        """Factor of the learning rate at a step.

        Args:
            step: The step, counted from the start of the task.
            warmup_from: Factor at the start of the warm-up.
        """
        epoch = step / self.steps
        warmup = min(self.warmup_epochs, MAX_WARMUP * self.epochs)
        if epoch < warmup:
            return warmup_from + (self._cosine(warmup) - warmup_from) * epoch / warmup
        return self._cosine(epoch)

    def _cosine(self, epoch: float) -> float:
        if self.constant:
            return 1.0
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
