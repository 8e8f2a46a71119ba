"""TensorBoard's event files of a run, from the records that go to metrics.jsonl."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cclis.errors import InputError
from cclis.runs.records import SCENARIOS, Evaluation, Record

SECONDS_UNTIL_WRITTEN = 10


def require_tensorboard() -> type[Any]:
    """The class that writes event files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs a package: pip install 'cclis[tensorboard]'"
        ) from None
    kind: type[Any] = SummaryWriter
    return kind


class TensorBoard:
    """Event files that hold what metrics.jsonl holds; the global step counts epochs of all tasks.

    Args:
        folder: Where they lie. What lies there is written anew, so that nothing is there twice.
        records: The lines of metrics.jsonl so far.
    """

    def __init__(self, folder: Path, records: Iterable[Record]):
        shutil.rmtree(folder, ignore_errors=True)
        writer = require_tensorboard()
        self._writer = writer(str(folder), flush_secs=SECONDS_UNTIL_WRITTEN)
        self._epochs = 0
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Write what one line of metrics.jsonl says."""
        if isinstance(record, Evaluation):
            for head, accuracies in record.accuracies.items():
                for scenario in SCENARIOS:
                    mean = statistics.fmean(getattr(accuracies, scenario))
                    self._add(f"{scenario}/{head}", mean)
            self._writer.flush()
            return
        self._epochs += 1
        self._add("loss", record.loss)
        for term, value in record.losses.items():
            self._add(f"losses/{term}", value)
        self._add("learning_rate", record.learning_rate)
        self._add("images_per_second", record.images_per_second)

    def _add(self, name: str, value: float) -> None:
        self._writer.add_scalar(name, value, self._epochs)

    def close(self) -> None:
        """Make sure that all is written."""
        self._writer.close()
