"""Bytes and texts as collections hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cclis.errors import InputError


def read_bytes(file: Path) -> bytes:
    """All of a file that a collection must have."""
    if not file.is_file():
        raise InputError(f"{file} is missing; download the collection again, or put it there")
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def lines(file: Path) -> list[str]:
    """The lines of a text that are not blank."""
    content = read_bytes(file).decode("utf-8", errors="replace")
    return [line.strip() for line in content.splitlines() if line.strip()]


def text(value: Any) -> str:
    """Text of what may be bytes; what UTF-8 cannot hold, as in names on a disk, is escaped."""
    found = value.decode("latin1") if isinstance(value, bytes) else str(value)
    return found.encode("utf-8", "backslashreplace").decode()


def first_line(error: Exception) -> str:
    """What an error says first, or its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
