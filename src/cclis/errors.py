"""The error for bad input."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_SHOWN = 200
"""Characters of a path that are shown; of a longer one, its beginning and its end."""


class InputError(ValueError):
    """Bad input. The message says what is wrong, where, and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class NotEnoughMemoryError(InputError):
    """A file takes more memory than there is now. The file itself may be fine."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An InputError for an unknown name, which suggests the most similar known one."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return InputError(f"unknown {kind} '{name}'.{hint} Known: {', '.join(known)}.")


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The three nearest names to one that does not exist, as a question; empty if none is near."""
    nearest = difflib.get_close_matches(name, sorted(known), cutoff=0.5)
    if not nearest:
        return ""
    *others, last = (f"{prefix}{near}" for near in nearest)
    return f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


@contextmanager
def as_input_errors(what: str) -> Iterator[None]:
    """Turn errors that malformed data raise into an InputError that starts with `what`."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise InputError(f"{what} ({type(error).__name__}: {error})") from None


@contextmanager
def os_errors(what: str = "") -> Iterator[None]:
    """Turn errors of the operating system into an InputError.

    Args:
        what: How the sentence begins [default: with the file that the error names; errors that
            name none pass].
    """
    try:
        yield
    except OSError as error:
        if what:
            raise InputError(f"{what}: {error.strerror or error}") from None
        if error.filename is None:
            raise
        raise file_error(error) from None


def file_error(error: OSError) -> InputError:
    """What the system says of a file, as a sentence."""
    why = error.strerror or str(error) or type(error).__name__
    if not isinstance(error.filename, str | bytes):
        return InputError(f"the system reports: {why}")
    return InputError(f"cannot use {shown(os.fsdecode(error.filename))}: {why}")


def shown(path: str) -> str:
    """A path as an error shows it: the middle of a very long one is left out."""
    if len(path) <= LONGEST_SHOWN:
        return path
    return f"{path[: LONGEST_SHOWN // 2]}…{path[-LONGEST_SHOWN // 2 :]}"


def visible(text: str) -> str:
    """Text as a terminal may show it: what would steer the terminal is escaped, as in `repr`.

    >>> print(visible("a \\x1b[31mred\\x1b[0m cat"))
    a \\x1b[31mred\\x1b[0m cat
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
