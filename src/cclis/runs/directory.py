"""Run directories: what a run leaves behind, written atomically, read back by all that reports.

config.yaml            every setting
metrics.jsonl          a line per epoch and per evaluation, as they happen
checkpoints/           the model and its memory after each task, and the newest from in between
analysis.safetensors   confusions, the memory and some embeddings, for the report
result.json            the accuracy matrices and their averages: the run has ended
report.html            the same to look at
tensorboard/           event files, where asked for
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from torch import Tensor

from cclis.errors import InputError
from cclis.evaluation.accuracy import Accuracies
from cclis.files import read_json, read_tensors, write_atomically, write_json, write_tensors
from cclis.functional.metrics import (
    SCENARIOS,
    average_accuracy,
    average_forgetting,
    backward_transfer,
)
from cclis.methods.registry import recorded_config, slug
from cclis.runs.checkpoints import Checkpoints
from cclis.settings import Config, read_yaml


class Run:
    """A run directory."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, config: Config) -> Run:
        """A new directory for a run with these settings; what exists is never overwritten."""
        if config.output is not None:
            path = Path(config.output)
            _refuse_occupied(path)
            _make(path)
        else:
            path = _numbered(Path("runs"), _name(config))
        run = cls(path)
        # Of two that create the same run at once, the second finds it there.
        with run.alone():
            _refuse_occupied(path)
            _make(run.checkpoints.folder)
            settings = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
            write_atomically(path / "config.yaml", settings.encode())
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """A directory that a run has written."""
        run = cls(Path(path))
        if not (run.path / "config.yaml").is_file():
            raise InputError(f"{path} is not a run directory: it has no config.yaml")
        return run

    @property
    def checkpoints(self) -> Checkpoints:
        """What can be gone on from."""
        return Checkpoints(self.path / "checkpoints")

    @property
    def ended(self) -> bool:
        """Whether the result is there, which is written last."""
        return (self.path / "result.json").is_file()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs, no other process may write into this directory."""
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(f"another process is working on {self.path}") from None
        except OSError as error:
            raise _cannot_write(self.path / ".lock", error) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def config(self) -> Config:
        """The settings of the run."""
        settings = read_yaml(self.path / "config.yaml")
        try:
            return recorded_config(settings)
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{self.path / 'config.yaml'} is not a run's config: {error}"
            ) from None

    @property
    def result(self) -> dict[str, Any]:
        """What came out."""
        if not self.ended:
            raise InputError(f"{self.path} has no result.json: the run did not end")
        result: dict[str, Any] = read_json(self.path / "result.json")
        if not isinstance(result, dict) or not {"class_il", "task_il", "seconds"} <= result.keys():
            raise InputError(f"{self.path / 'result.json'} is not the result of a run")
        return result

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self._log}: {error.strerror}") from None

    @property
    def logged(self) -> int:
        """How many bytes the log has."""
        return self._log.stat().st_size if self._log.exists() else 0

    def sync_log(self) -> None:
        """Make sure that what was logged is on the disk."""
        if self._log.exists():
            with self._log.open("rb") as file:
                os.fsync(file.fileno())

    def unlog(self, size: int) -> None:
        """Forget what was logged after it had that size: it will happen again."""
        try:
            if self.logged > size:
                os.truncate(self._log, size)
        except OSError as error:
            raise _cannot_write(self._log, error) from None

    def clean(self) -> None:
        """Remove what interrupted writing left behind; nobody else may be writing here."""
        for name in ("config.yaml", "analysis.safetensors", "result.json", "report.html"):
            for path in self.path.glob(f".{name}.*"):
                path.unlink(missing_ok=True)

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was logged; a last line that was not written to its end is left out."""
        if not self.logged:
            return []
        lines = self._log.read_text(encoding="utf-8").split("\n")
        try:
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise InputError(f"{self._log} holds a line that is not JSON: {error}") from None

    def save_analysis(self, tensors: dict[str, Tensor]) -> None:
        """Write what the report shows beside the numbers."""
        write_tensors(self._analysis, tensors, {})

    @property
    def analysis(self) -> dict[str, Tensor]:
        """What the report shows beside the numbers; empty where it was not kept."""
        return read_tensors(self._analysis)[0] if self._analysis.is_file() else {}

    @property
    def _analysis(self) -> Path:
        return self.path / "analysis.safetensors"

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Write what came out."""
        write_json(self.path / "result.json", result)

    @property
    def _log(self) -> Path:
        return self.path / "metrics.jsonl"


def summarise(rows: Sequence[Mapping[str, Accuracies]]) -> dict[str, Any]:
    """Accuracy matrices and their averages, from the evaluation after each task.

    Args:
        rows: For every task, the accuracies of each head on the tasks so far.

    Returns:
        {"class_il": {HEAD: {"matrix", "accuracy", "forgetting", "backward_transfer"}},
        "task_il": ...}; a matrix has None where a task had not been seen yet.
    """
    return {
        scenario: {
            head: _summary([getattr(row[head], scenario) for row in rows]) for head in rows[0]
        }
        for scenario in SCENARIOS
    }


def _summary(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    matrix = [[*row, *[None] * (len(rows) - len(row))] for row in rows]
    return {
        "matrix": matrix,
        "accuracy": average_accuracy(matrix),
        "forgetting": average_forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
    }


def _name(config: Config) -> str:
    return f"{config.benchmark}-{slug(config.method)}-{config.memory}-seed{config.seed}"


def _numbered(parent: Path, name: str) -> Path:
    _make(parent)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _cannot_write(path, error) from None
        else:
            return path


def _refuse_occupied(path: Path) -> None:
    """A folder is free that holds no more than a run leaves that was killed as it began."""
    ours = (".lock", "checkpoints")
    if path.exists() and (not path.is_dir() or any(p.name not in ours for p in path.iterdir())):
        raise InputError(f"{path} exists already; choose another --output or remove it")


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from None
    if not os.access(path, os.W_OK):
        raise InputError(f"cannot write into {path}")


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot write {path}: {error.strerror or error}")
