"""Reading files and text of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cclis.errors import InputError
from cclis.files import read_bytes as read_regular

MAX_BYTES = 1 << 29
"""Size of the largest file that is read whole; the largest of CIFAR's has 155 MB."""


def read_bytes(file: Path) -> bytes:
    """Read a required file of a dataset."""
    if not file.is_file():
        raise InputError(f"{file} is missing; download the dataset again, or put the file there")
    return read_regular(file, MAX_BYTES, times=2)


def lines(file: Path) -> list[str]:
    """Non-blank lines of a text file."""
    content = read_bytes(file).decode("utf-8", errors="replace")
    return [line.strip() for line in content.splitlines() if line.strip()]


def text(value: Any) -> str:
    """Convert bytes or another value to text; characters that UTF-8 cannot encode are escaped."""
    decoded = value.decode("latin1") if isinstance(value, bytes) else str(value)
    return decoded.encode("utf-8", "backslashreplace").decode()


def first_line(error: Exception) -> str:
    """First line of an error's message, or its type if there is no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
