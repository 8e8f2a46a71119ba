"""Locks between processes that prepare the same data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cclis.progress import Progress


@contextmanager
def locked(path: Path, doing: str, progress: Progress) -> Iterator[None]:
    """Lock a file while the block runs; another process waits, and says what is being done."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"another process is {doing}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
