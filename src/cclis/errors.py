"""The error for bad input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input. The message says what is wrong, where, and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


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
