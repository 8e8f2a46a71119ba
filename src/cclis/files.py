"""Files that are either whole or not there, and tensors without pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cclis.errors import InputError

CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}
"""What the disk says when it is full or broken."""


LONGEST_JSON = 1 << 28
"""Bytes of the longest JSON file that is read."""


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file to write that nobody ever sees half of, even after a crash.

    The temporary file lies beside the target, because a rename is atomic only within one file
    system.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; these are ordinary results.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whose whole content is at hand, as `atomic_writer` does."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that any reader understands: no NaN, no infinity."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON, or say what is wrong with it."""
    try:
        if path.stat().st_size > LONGEST_JSON:
            raise InputError(f"cannot read {path}: it is too long")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from None


def pack_tensors(tensors: dict[str, Any], description: dict[str, Any]) -> bytes:
    """Tensors by name with a JSON description, as the content of a safetensors file."""
    from safetensors.torch import save

    # Copies, because tensors that share memory, as tied weights do, are refused.
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(apart, metadata={"cclis": json.dumps(description)})


def unpack_tensors(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `pack_tensors` packed: tensors by name, and the description."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        # The format: eight bytes say how long the JSON header is that follows.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        description = json.loads(header["__metadata__"]["cclis"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"cannot read {name}: not a file that cclis wrote ({error})") from None
    if not isinstance(description, dict):
        raise InputError(f"cannot read {name}: not a file that cclis wrote")
    return tensors, description


def write_tensors(path: Path, tensors: dict[str, Any], description: dict[str, Any]) -> None:
    """Write tensors by name with a JSON description, as one safetensors file with a checksum."""
    checked = {**description, "sha256": _checksum(tensors, description)}
    write_atomically(path, pack_tensors(tensors, checked))


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what `write_tensors` wrote: tensors by name, and the description."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    tensors, description = unpack_tensors(content, str(path))
    expected = description.pop("sha256", None)
    if expected is not None and expected != _checksum(tensors, description):
        raise InputError(f"{path} is damaged: its checksum is not what it was")
    return tensors, description


def _checksum(tensors: dict[str, Any], description: dict[str, Any]) -> str:
    import torch

    found = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
