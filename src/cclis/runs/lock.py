"""Locking a folder, so that one process at a time works on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cclis.errors import InputError, os_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """While the block runs, no other process that asks for the folder may have it.

    A file in it is locked, which every system can, and the folder itself where the system can: the
    file may be removed by mistake, and another would then be made and locked.

    Yields:
        A handle of the folder for `refuse_another`, where the system has one.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
        handle = _lock(folder)
    except (Timeout, BlockingIOError):
        _release(lock, None)
        raise InputError(f"another process is working on {folder}") from None
    except OSError as error:
        raise InputError(f"cannot write {folder / '.lock'}: {error.strerror or error}") from None
    try:
        yield handle
    finally:
        _release(lock, handle)


def refuse_another(folder: Path, handle: int) -> None:
    """Raise an InputError unless this path still leads to the folder that was locked."""
    with os_errors(f"cannot write into {folder}"):
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return
    raise InputError(
        f"{folder} was removed or moved while this process worked on it, and another folder took "
        "its place"
    )


def _lock(folder: Path) -> int | None:
    """Lock a folder itself; raises BlockingIOError if another process has."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None  # not readable, or on a system without handles of folders
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        pass  # some network file systems lock files alone
    return handle


def _release(lock: FileLock, handle: int | None) -> None:
    """Unlock what is locked; what fails is unlocked when the process ends."""
    if handle is not None:
        with suppress(OSError):
            os.close(handle)
    with suppress(OSError):
        lock.release()
