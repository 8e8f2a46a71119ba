"""What the trainer says of an epoch, and how records are written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclis.errors import InputError

FORMAT = 1
"""The format of all records. Within a format keys are added, never renamed or removed."""


@dataclass(frozen=True)
class Epoch:
    """An epoch of a task.

    Attributes:
        task: The task, counted from 0.
        epoch: The epoch of that task, counted from 0.
        step: Steps of the task done when the epoch ended.
        loss: Mean over the epoch's steps.
        losses: The same of each term, by name; they add up to `loss`.
        learning_rate: Of the epoch's last step.
        images_per_second: Of the task so far.
    """

    task: int
    epoch: int
    step: int
    loss: float
    losses: dict[str, float]
    learning_rate: float
    images_per_second: float

    def to_json(self) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, record: Any, source: str | Path) -> Epoch:
        """Read a line of metrics.jsonl; errors name the source."""
        with reading(record, source, "the record of an epoch"):
            epoch = int(record["epoch"])
            return cls(
                task=int(record["task"]),
                epoch=epoch,
                step=int(record.get("step", epoch + 1)),  # old runs counted epochs alone
                loss=float(record["loss"]),
                losses={str(name): float(value) for name, value in record["losses"].items()},
                learning_rate=float(record["learning_rate"]),
                images_per_second=float(record["images_per_second"]),
            )


@contextmanager
def reading(record: Any, source: str | Path, kind: str) -> Iterator[None]:
    """Turn whatever fails in the block into an InputError that names the source.

    Args:
        record: What was read. A newer format than ours is refused.
        source: The file it was read from.
        kind: What it should be, in words.
    """
    if not isinstance(record, Mapping):
        raise InputError(f"{source} is not {kind}: it is no JSON object")
    number = record.get("format", FORMAT)
    if isinstance(number, int) and number > FORMAT:
        raise InputError(
            f"{source} is in format {number}, written by a newer cclis; this one reads formats up "
            f"to {FORMAT}"
        )
    try:
        yield
    except KeyError as error:
        raise InputError(f"{source} is not {kind}: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InputError(f"{source} is not {kind}: {error}") from None
