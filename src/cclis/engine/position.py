"""How far the training of a task has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Position:
    """How far the training of a task has come.

    Attributes:
        classes: How many classes the task brings.
        drawn: States of the generators that an epoch is drawn from, before the current one.
        epoch: Epochs done.
        step: Steps of the current epoch done.
        done: Steps of the task done.
        totals: Sums of the loss's terms over the current epoch's steps.
    """

    classes: int
    drawn: dict[str, Tensor]
    epoch: int = 0
    step: int = 0
    done: int = 0
    totals: dict[str, Tensor] = field(default_factory=dict)

    def add(self, losses: dict[str, Tensor]) -> None:
        """Count a step and its losses."""
        for name, value in losses.items():
            total = self.totals.get(name)
            # A recorded step writes its next losses to the same place.
            self.totals[name] = value.clone() if total is None else total + value
        self.step += 1
        self.done += 1

    @property
    def trained_epochs(self) -> float:
        """Epochs done, parts included.

        Without the part of the first epoch: how many steps it has is not known before it ends.
        """
        if not self.epoch or not self.step:
            return float(self.epoch)  # a task that was taken over has no steps of its own
        steps = (self.done - self.step) / self.epoch
        return self.epoch + self.step / steps
