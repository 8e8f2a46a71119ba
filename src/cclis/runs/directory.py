"""Run directories: the files of a run, written atomically.

config.yaml            every setting
metrics.jsonl          a line per epoch and per evaluation, as they happen
checkpoints/           the model and its memory after each task, and the newest from in between
analysis.safetensors   confusions, the memory and some embeddings, for the report
result.json            the scores; written last, so that a run that has it has ended
report.html            the report
tensorboard/           event files, where asked for
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from cclis.errors import InputError, os_errors
from cclis.files import (
    JSON_TIMES,
    MAX_JSON_BYTES,
    read_bytes,
    read_json,
    read_tensors,
    remove,
    write_atomically,
    write_json,
    write_tensors,
)
from cclis.methods.registry import recorded_config, slug
from cclis.runs.checkpoints import Checkpoints
from cclis.runs.lock import locked, refuse_another
from cclis.runs.records import Record, Result, record_from_json
from cclis.settings import Config, read_yaml


class Run:
    """A run directory."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None  # of the folder, while it is locked

    @classmethod
    @os_errors()
    def create(cls, config: Config) -> Run:
        """A new directory for a run with these settings; nothing is overwritten."""
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
    @os_errors()
    def open(cls, path: str | Path) -> Run:
        """A directory that a run has written."""
        run = cls(Path(path))
        if not (run.path / "config.yaml").is_file():
            raise InputError(f"{path} is not a run directory: it has no config.yaml")
        return run

    @property
    def checkpoints(self) -> Checkpoints:
        """What the run can be resumed from."""
        return Checkpoints(self.path / "checkpoints")

    @property
    def ended(self) -> bool:
        """Whether the result is there, which is written last."""
        return (self.path / "result.json").is_file()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs, no other process may write into this directory."""
        with locked(self.path) as handle:
            self._handle = handle
            try:
                yield
            finally:
                self._handle = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run has recorded, by name."""
        return read_yaml(self.path / "config.yaml")

    @property
    def config(self) -> Config:
        """The settings of the run; those that came later have their defaults."""
        try:
            return recorded_config(self.settings)
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{self.path / 'config.yaml'} is not a run's config: {error}"
            ) from None

    @property
    def result(self) -> Result:
        """The result; an InputError where the run has not ended."""
        if not self.ended:
            raise InputError(f"{self.path} has no result.json: the run did not end")
        path = self.path / "result.json"
        return Result.from_json(read_json(path), path)

    def log(self, record: Record) -> None:
        """Append a line to metrics.jsonl."""
        self._refuse_another()
        with os_errors(f"cannot write {self._log}"), self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_json()) + "\n")

    @property
    def logged(self) -> int:
        """How many bytes the log has."""
        with os_errors(f"cannot read {self._log}"):
            return self._log.stat().st_size if self._log.exists() else 0

    def sync_log(self) -> None:
        """Make sure that what was logged is on the disk."""
        self._refuse_another()
        if self.logged:
            with os_errors(f"cannot write {self._log}"), self._log.open("rb") as file:
                os.fsync(file.fileno())

    def unlog(self, size: int) -> None:
        """Forget what was logged after it had that size: it will happen again."""
        if self.logged > size:
            with os_errors(f"cannot write {self._log}"):
                os.truncate(self._log, size)

    def clean(self) -> None:
        """Remove what interrupted writing left behind; nobody else may be writing here."""
        for name in ("config.yaml", "analysis.safetensors", "result.json", "report.html"):
            for path in self.path.glob(f".{name}.*"):
                remove(path)

    @property
    def records(self) -> list[Record]:
        """What was logged; a last line that was not written to its end is left out."""
        if not self.logged:
            return []
        content = read_bytes(self._log, MAX_JSON_BYTES, times=JSON_TIMES)
        try:
            lines = [json.loads(line) for line in content.decode().split("\n")[:-1]]
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._log} holds a line that is not JSON: {error}") from None
        return [
            record_from_json(line, f"{self._log}, line {number},")
            for number, line in enumerate(lines, start=1)
        ]

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

    def save_result(self, result: Result) -> None:
        """Write the result: the run has ended."""
        write_json(self.path / "result.json", result.to_json())

    def _refuse_another(self) -> None:
        """What lies here now may be another run's, which must not be written into."""
        if self._handle is not None:
            refuse_another(self.path, self._handle)

    @property
    def _log(self) -> Path:
        return self.path / "metrics.jsonl"


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
