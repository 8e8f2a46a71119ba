"""Signals that ask a run to stop: the first at the next safe place, the second at once.

A terminal that closes sends SIGHUP, often more than once: further ones change nothing. Where it was
ignored before, as under `nohup`, it stays ignored.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOPPED = 75
"""Exit code of a run that a signal stopped and that can be resumed."""
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)


class Interrupted(BaseException):
    """A run was asked to stop, and did."""


class Interruption:
    """While the block runs, a first signal is noted for `check`; a second ends the process.

    Attributes:
        waits: Whether a signal waits for `check`. Otherwise it interrupts wherever the program is.
    """

    waits = False

    def __init__(self) -> None:
        self._asked: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked is not None

    def check(self) -> None:
        """Stop here if a signal has come."""
        if self._asked is not None:
            raise Interrupted(signal.Signals(self._asked).name)

    def __enter__(self) -> Interruption:
        # Only the main thread may, and only there do signals arrive.
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._handle)
                for number in SIGNALS
                if not (_is_hangup(number) and signal.getsignal(number) == signal.SIG_IGN)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._asked = number
        # A handler waits for the end of a long operation; the system's own does not.
        for another in self._before:
            signal.signal(another, signal.SIG_IGN if _is_hangup(another) else signal.SIG_DFL)
        if not self.waits:
            self.check()


def ignore_hangups() -> None:
    """From now on, a terminal that closes does not end the process."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _is_hangup(number: int) -> bool:
    return number == getattr(signal, "SIGHUP", None)
