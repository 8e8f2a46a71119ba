"""Real processes of `cclis train`, forked from one that has imported everything once."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import termios
from multiprocessing.process import BaseProcess
from pathlib import Path

from cclis.cli import entry, main

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["tests.experiment.process", "cclis.cli.train", "cclis.experiment.loop", "sklearn.datasets"]
)


class Training:
    """A process of `cclis train`."""

    def __init__(self, arguments: tuple[str, ...]):
        with tempfile.NamedTemporaryFile(delete=False) as errors:
            self._errors = Path(errors.name)
        self._process = SERVER.Process(target=_train, args=(arguments, errors.name), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return None if self._process.is_alive() else self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        """Wait for its end; returns what it wrote to the standard error."""
        self._process.join()
        errors = self._errors.read_text()
        self._errors.unlink()
        return errors


def _train(arguments: tuple[str, ...], errors: str) -> None:
    with open(os.devnull, "w") as nothing, open(errors, "w") as file:
        os.dup2(nothing.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(["train", *arguments]))


def start(*arguments: str) -> Training:
    """Start `cclis train` with these arguments."""
    return Training(arguments)


def start_in_terminal(
    terminal: str, arguments: tuple[str, ...], *, ignoring_hangups: bool = False
) -> BaseProcess:
    """Start `cclis train` in a terminal that sends it SIGHUP as it closes."""
    process = SERVER.Process(target=_in_terminal, args=(terminal, arguments, ignoring_hangups))
    process.start()
    return process


def start_writing_to(file: str, arguments: tuple[str, ...]) -> BaseProcess:
    """Start `cclis train` with a file, such as a pipe, as both of its outputs."""
    process = SERVER.Process(target=_writing_to, args=(file, arguments))
    process.start()
    return process


def _in_terminal(terminal: str, arguments: tuple[str, ...], ignoring_hangups: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignoring_hangups else signal.SIG_DFL)
    os.environ["TERM"] = "xterm"
    os.setsid()
    with open(terminal) as file:
        fcntl.ioctl(file, termios.TIOCSCTTY, 0)
    _writing_to(terminal, arguments)


def _writing_to(file: str, arguments: tuple[str, ...]) -> None:
    with open(file, "w") as opened:
        for stream in (1, 2):
            os.dup2(opened.fileno(), stream)
    sys.argv = ["cclis", "train", *arguments]
    entry()
