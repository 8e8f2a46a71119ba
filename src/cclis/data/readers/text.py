"""Reading files and text of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cclis.errors import InputError


def read_bytes(file: Path) -> bytes:
    """Read a required file of a dataset."""
    if not file.is_file():
        raise InputError(f"{file} is missing; download the dataset again, or put the file there")
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


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
