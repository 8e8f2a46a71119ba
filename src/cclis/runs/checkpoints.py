"""Checkpoints of a run: whole and verified, or not there.

Each is two files: `NAME.safetensors` and, written last, `NAME.json` with its size and checksum. A
checkpoint without the second was never finished. `task-2` is the state after the third task;
`task-2-step-740` is one from the middle of it, and of those only the newest are kept. `newest.json`
names the last that was finished, so that it is missed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cclis
from cclis.errors import InputError, NotEnoughMemoryError, os_errors
from cclis.files import (
    pack_tensors,
    read_json,
    read_packed,
    remove,
    unpack_tensors,
    write_atomically,
    write_json,
)

FORMAT = 3
"""Raised whenever older checkpoints can no longer be resumed."""
KEPT = 2
"""How many of the newest checkpoints stay, beside those of finished tasks."""
NAME = re.compile(r"task-(\d{1,9})(?:-step-(\d{1,15}))?")

State = tuple[dict[str, Any], dict[str, Any]]
"""Tensors by name, and a description that JSON can hold."""


class OtherVersionError(InputError):
    """A checkpoint of another version of this package, which must not be overwritten."""


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def names(self) -> list[str]:
        """Of those whose writing was finished, oldest first."""
        return sorted((path.stem for path in self._files("*.json")), key=_age)

    def save(self, name: str, state: State) -> None:
        """Write a checkpoint, and then remove those that are no longer needed."""
        tensors, description = state
        content = pack_tensors(tensors, {**description, "format": FORMAT})
        write_atomically(self._tensors(name), content)
        write_json(
            self._manifest(name),
            {
                "format": FORMAT,  # for those of before, which look here
                "cclis": cclis.__version__,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            },
        )
        write_json(self._newest, {"name": name})
        for old in self.names[:-KEPT]:
            if "step" in old:
                # What cannot be removed costs room and nothing else.
                with suppress(OSError):
                    # The manifest first: what is left without one counts as never finished.
                    self._manifest(old).unlink(missing_ok=True)
                    self._tensors(old).unlink(missing_ok=True)

    def load(self, name: str) -> State:
        """Read a checkpoint, if it is what was written."""
        path = self._tensors(name)
        if not self._manifest(name).is_file():
            raise InputError(f"{path} is missing or was never finished")
        manifest = read_json(self._manifest(name))
        expected = {"cclis": str, "bytes": int, "sha256": str}
        if not isinstance(manifest, dict) or any(
            type(manifest.get(key)) is not kind for key, kind in expected.items()
        ):
            raise InputError(f"{self._manifest(name)} is damaged")
        version, size, digest = (manifest[key] for key in expected)
        try:
            # The size first, so that a file of another size is not read at all.
            if path.stat().st_size != size:
                raise InputError(f"{path} is damaged: it has not the {size} bytes it had")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        content = read_packed(path)
        if hashlib.sha256(content).hexdigest() != digest:
            raise InputError(f"{path} is damaged: its checksum is not what it was")
        tensors, description = unpack_tensors(content, str(path))
        made = description.get("format")
        if made != FORMAT:
            raise OtherVersionError(
                f"{path} was written by another cclis ({version}) in format {made}; this is "
                f"{cclis.__version__} with format {FORMAT}. Use that version for it"
            )
        return tensors, description

    def newest(self, warn: Callable[[str], None]) -> State | None:
        """The newest checkpoint that is whole, or None where none was ever finished.

        What is wrong with newer ones is said, and they are removed, as are leftovers of interrupted
        saves: nobody else may be writing here. Nothing is removed where nothing can be read.
        """
        damaged, names = [], self.names
        last = self._last_finished()
        if last is not None and last not in names:
            warn(f"{self._manifest(last)}, the newest, is missing; going back to the one before it")
        for name in reversed(names):
            try:
                state = self.load(name)
            except (OtherVersionError, NotEnoughMemoryError):
                raise
            except InputError as error:
                damaged.append(name)
                warn(f"{error}; going back to the checkpoint before it")
            else:
                self._clean(damaged)
                return state
        unfinished = [p.stem for p in self._files("*.safetensors") if p.stem not in damaged]
        if damaged or any("step" not in name for name in unfinished):
            raise InputError(
                f"no checkpoint in {self.folder} can be resumed; if they are not those of an "
                "older cclis and all is lost, remove them to start over"
            )
        self._clean([])
        return None

    def _last_finished(self) -> str | None:
        """What `newest.json` says, if it is there and says something."""
        with suppress(InputError, TypeError, KeyError):
            name = read_json(self._newest)["name"]
            return name if isinstance(name, str) and NAME.fullmatch(name) else None
        return None

    def _clean(self, damaged: Sequence[str]) -> None:
        for name in damaged:
            remove(self._manifest(name))
        whole = set(self.names)
        hidden = (*self.folder.glob(".task-*"), *self.folder.glob(".newest.json.*"))
        for path in (*self._files("*.safetensors"), *hidden):
            if path.stem not in whole:
                remove(path)

    def _files(self, pattern: str) -> list[Path]:
        """Files of checkpoints; others are none of our business."""
        # Not by glob, which finds nothing where it may not look: all would seem to be lost.
        with os_errors(f"cannot read {self.folder}"):
            there = self.folder.iterdir() if self.folder.is_dir() else ()
            found = [p for p in there if p.match(pattern) and NAME.fullmatch(p.stem)]
            return [path for path in found if path.is_file()]

    @property
    def _newest(self) -> Path:
        return self.folder / "newest.json"

    def _tensors(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _manifest(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _age(name: str) -> tuple[int, float]:
    parts = NAME.fullmatch(name)
    assert parts is not None
    return int(parts[1]), float(parts[2] or "inf")
