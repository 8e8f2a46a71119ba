"""Files: atomic writes, JSON, and tensors without pickle."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from cclis.errors import InputError, NotEnoughMemoryError, os_errors, shown

CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""What file systems answer that cannot sync a folder; it is no failure."""
MAX_JSON_BYTES = 1 << 28
"""Size of the largest JSON file that is read."""
JSON_TIMES = 25
"""Parsed JSON takes up to so many times the bytes of its text, as `[[],[],[]]` does."""
MAX_HEADER_BYTES = 100_000_000
"""Size of the largest header of tensors that the safetensors format allows."""


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when it is complete, even after a crash.

    It is written as a temporary file in the same folder, because renaming is atomic only within a
    file system.
    """
    if os.path.isdir(path):
        raise InputError(f"cannot write {path}: it is a folder")
    temporary = str(path.with_name(f".{path.name}.{secrets.token_hex(8)}"))
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        # Others are of the block: of a file that it reads, or raised by hand.
        if isinstance(error, OSError) and error.errno and error.filename in (None, temporary):
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        raise
    with os_errors(f"cannot write {path}"):
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder last, where the file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder that may be written and not read
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with os_errors(f"cannot remove {path}"):
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file by `atomic_writer`."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write JSON by `atomic_writer`, without NaN and infinity."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file to read; refuse a folder, a pipe or a device at once, without waiting for it."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"cannot read {path}: it is not a regular file")
            yield file
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"cannot read {shown(str(path))}: {why}") from None
    except MemoryError:
        raise NotEnoughMemoryError(f"cannot read {path}: there is not enough memory") from None


def read_bytes(path: Path, most: int | None = None, *, times: int = 1) -> bytes:
    """Read a regular file, if it is not too large for what it is and fits into memory.

    Args:
        path: The file.
        most: Bytes of the largest file that makes sense.
        times: The memory that reading takes, in sizes of the file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise InputError(
                f"cannot read {path}: it is too long: {size:,} bytes, more than {most:,}"
            )
        check_memory(path, times * size)
        return file.read(size)


def check_memory(path: Path, needed: int) -> None:
    """Refuse to read a file that takes more bytes of memory than there are."""
    free = free_memory()
    if needed > free:
        raise NotEnoughMemoryError(
            f"cannot read {path}: it takes {needed / 2**30:,.1f} GiB of memory, and "
            f"{free / 2**30:,.1f} GiB are free"
        )


def free_memory() -> float:
    """Bytes of memory that may still be taken, at most; infinity if unknown."""
    free = float("inf")
    with suppress(AttributeError, ValueError, OSError):  # all there is, where there is no /proc
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8")
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", lines, re.MULTILINE):
            free = 1024 * int(found[1])
    with suppress(OSError, ValueError):  # a container's limit, or "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return free


def read_json(path: Path) -> Any:
    """Read JSON; raise InputError if the file is missing, damaged or too large."""
    try:
        return json.loads(read_bytes(path, MAX_JSON_BYTES, times=JSON_TIMES).decode())
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
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
        raise _foreign(name, error) from None
    if not isinstance(description, dict):
        raise _foreign(name, "its description is none")
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
    tensors, description = unpack_tensors(read_packed(path), str(path))
    expected = description.pop("sha256", None)
    if expected is not None and expected != _checksum(tensors, description):
        raise InputError(f"{path} is damaged: its checksum does not match its content")
    return tensors, description


def read_packed(path: Path) -> bytes:
    """Read what `pack_tensors` made, if the file is as long as its header claims."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise _foreign(path, "its header is damaged")
        check_memory(path, JSON_TIMES * length)
        try:
            entries = json.loads(file.read(length))
            ends = [entries[name]["data_offsets"][1] for name in entries if name != "__metadata__"]
            claimed = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _foreign(path, error) from None
        if claimed != size:
            raise _foreign(path, f"it has {size:,} bytes, and claims to have {claimed:,}")
        check_memory(path, 2 * size)  # the content, and the tensors that are made of it
        file.seek(0)
        return file.read(size)


def _foreign(name: Path | str, reason: Exception | str) -> InputError:
    return InputError(f"cannot read {name}: damaged, or not a file that cclis wrote ({reason})")


def _open_at_once(path: str, flags: int) -> int:
    # Opened otherwise, a pipe waits until somebody writes to it. A regular file never waits.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _checksum(tensors: dict[str, Any], description: dict[str, Any]) -> str:
    import torch

    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
