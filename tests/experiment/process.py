"""Real processes of `cclis`, forked from one that has imported everything once."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cclis.cli import entry, main

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["tests.experiment.process", "cclis.cli.train", "cclis.experiment.loop", "sklearn.datasets"]
)


class Process:
    """A process of `cclis`."""

    def __init__(self, target: Callable[..., None], *arguments: object):
        with tempfile.NamedTemporaryFile(delete=False) as errors:
            self._errors = Path(errors.name)
        arguments = (errors.name, *arguments)
        self._process = SERVER.Process(target=target, args=arguments, daemon=True)
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


def _run(errors: str, arguments: tuple[str, ...]) -> None:
    with open(os.devnull, "w") as nothing, open(errors, "w") as file:
        os.dup2(nothing.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(list(arguments)))


def start(*arguments: str, command: str = "train") -> Process:
    """Start a command of `cclis` with these arguments."""
    return Process(_run, (command, *arguments))


def start_apart(*arguments: str, before: str = "", after: str = "", **variables: str) -> Process:
    """Start `cclis train` without a network and with mounts that no other process sees.

    Args:
        arguments: Those of `cclis train`.
        before: What a shell does before it, such as mount.
        after: What a shell does after it.
        variables: Other values of the environment.
    """
    if subprocess.run(["unshare", "-rmn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no namespaces")
    return Process(_run_apart, ("train", *arguments), before, after, variables)


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


def _run_apart(
    errors: str, arguments: tuple[str, ...], before: str, after: str, variables: dict[str, str]
) -> None:
    ids = {"uid": os.getuid(), "gid": os.getgid()}
    # Of users, so that anybody may have the others; of mounts; and of the network.
    assert ctypes.CDLL(None).unshare(0x10000000 | 0x00020000 | 0x40000000) == 0
    Path("/proc/self/setgroups").write_text("deny")
    for name, number in ids.items():
        Path(f"/proc/self/{name}_map").write_text(f"0 {number} 1")
    subprocess.run(f"mount --make-rprivate / && {before or 'true'}", shell=True, check=True)
    os.environ.update(variables)
    try:
        _run(errors, arguments)
    finally:
        subprocess.run(after, shell=True, check=True)


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
