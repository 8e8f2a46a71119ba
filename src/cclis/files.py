"""Files: atomic writes, JSON, and tensors without pickle."""

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
"""Errors of a disk that is full, broken or read-only."""
MAX_JSON_BYTES = 1 << 28
"""Size of the largest JSON file that is read."""


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when it is complete, even after a crash.

    It is written as a temporary file in the same folder, because renaming is atomic only within a
    file system.
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
        # mkstemp makes private files; these get the usual permissions.
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
    """Write a whole file by `atomic_writer`."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write JSON by `atomic_writer`, without NaN and infinity."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON; raise InputError if the file is missing, damaged or too large."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InputError(f"cannot read {path}: it is larger than {MAX_JSON_BYTES >> 20} MiB")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from None


def pack_tensors(tensors: dict[str, Any], description: dict[str, Any]) -> bytes:
    """The content of a safetensors file: tensors by name, with a JSON description."""
    from safetensors.torch import save

    # Copied, because safetensors refuses tensors that share memory, such as tied weights.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(copies, metadata={"cclis": json.dumps(description)})


def unpack_tensors(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Unpack the content of a file that `pack_tensors` made: tensors by name, description."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        # The format starts with the length of the JSON header, in eight bytes, and the header.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        description = json.loads(header["__metadata__"]["cclis"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"cannot read {name}: not a file that cclis wrote ({error})") from None
    if not isinstance(description, dict):
        raise InputError(f"cannot read {name}: not a file that cclis wrote")
    return tensors, description


def strip_prefix(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors whose names begin with a prefix, by their names without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def write_tensors(path: Path, tensors: dict[str, Any], description: dict[str, Any]) -> None:
    """Write tensors by name and a JSON description to a safetensors file, with a checksum."""
    checked = {**description, "sha256": _checksum(tensors, description)}
    write_atomically(path, pack_tensors(tensors, checked))


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file that `write_tensors` wrote: tensors by name, description."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    tensors, description = unpack_tensors(content, str(path))
    expected = description.pop("sha256", None)
    if expected is not None and expected != _checksum(tensors, description):
        raise InputError(f"{path} is damaged: its checksum does not match its content")
    return tensors, description


def _checksum(tensors: dict[str, Any], description: dict[str, Any]) -> str:
    import torch

    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
