"""TensorBoard's event files of a run, from the records that go to metrics.jsonl."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cclis.errors import InputError

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


class Events:
    """Event files that hold what metrics.jsonl holds; its global step counts epochs of all tasks.

    Args:
        folder: Where they lie. What lies there is written anew, so that nothing is there twice.
        records: The lines of metrics.jsonl so far.
    """

    def __init__(self, folder: Path, records: Iterable[Mapping[str, Any]]):
        shutil.rmtree(folder, ignore_errors=True)
        writer = require_tensorboard()
        self._writer = writer(str(folder), flush_secs=SECONDS_UNTIL_WRITTEN)
        self._epochs = 0
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write what one line of metrics.jsonl says."""
        if "evaluation" in record:
            for head, found in record["evaluation"].items():
                for scenario, accuracies in found.items():
                    self._add(f"{scenario}/{head}", statistics.fmean(accuracies))
            self._writer.flush()
            return
        self._epochs += 1
        self._add("loss", record["loss"])
        for term, value in record["losses"].items():
            self._add(f"losses/{term}", value)
        for name in ("learning_rate", "images_per_second"):
            self._add(name, record[name])

    def _add(self, name: str, value: float) -> None:
        self._writer.add_scalar(name, value, self._epochs)

    def close(self) -> None:
        """Make sure that all is written."""
        self._writer.close()
