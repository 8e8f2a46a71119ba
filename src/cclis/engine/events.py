"""What happens while a trainer learns a task, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cclis.data.images import ImageSet
from cclis.engine.records import Epoch


@dataclass(frozen=True)
class StepDone:
    """A step was taken.

    Attributes:
        epochs: How many epochs of the task have been trained, parts included.
    """

    epochs: float


@dataclass(frozen=True)
class EpochEnded:
    """An epoch was trained.

    Attributes:
        record: Its losses and its speed.
    """

    record: Epoch


@dataclass(frozen=True)
class TaskTrained:
    """All epochs were trained: only the memory is left to be refilled."""


@dataclass(frozen=True, eq=False)
class TaskLearned:
    """The task was learned to its end.

    Attributes:
        visible: The samples that heads are fitted to: the memory as it was, then the task.
        seconds: How long it took, scoring and selection included.
        diagnosis: How good the choice of exemplars was, where the method says.
    """

    visible: ImageSet
    seconds: float
    diagnosis: dict[str, Any]


Event = StepDone | EpochEnded | TaskTrained | TaskLearned
