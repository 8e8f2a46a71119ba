"""The command `cclis`. Thin: it finds the command, runs it, and gives an exit code."""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import IO

from cclis import __version__
from cclis.cli.parser import Parser
from cclis.errors import InputError, file_error, unknown
from cclis.experiment.interruption import STOPPED, Interrupted, ignore_hangups
from cclis.progress import Expendable, Screen, print_line

COMMANDS = {
    "train": "learn a benchmark",
    "evaluate": "evaluate a run again",
    "tune": "choose settings on a validation split",
    "report": "a page of a run, or of several",
    "study": "a table or figure of the paper, or a comparison of your own",
    "benchmarks": "list benchmarks, methods and recipes",
    "data": "list, check and download datasets",
}
"""Each is a module of this package with a function `run`."""
KEEP = ("train", "tune", "report", "study")
"""Those that leave what they found in files: they end well even if nobody reads what they print."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    out, err = Expendable(sys.stdout), Expendable(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments), out)
        except (InputError, OSError) as error:
            said = file_error(error) if isinstance(error, OSError) else error
            _say(f"error: {said}")
            return 2
        except KeyboardInterrupt:
            _say("interrupted")
            return 130
        except Interrupted as signal:
            _say(f"stopped by {signal}")
            return STOPPED


def _say(text: str) -> None:
    print_line(Screen(stderr=True), f"cclis: {text}")


def _run(arguments: list[str], out: Expendable) -> int:
    """Run the command; what it prints must arrive where it leaves nothing else."""
    for argument in arguments:
        if "\0" in argument:
            raise InputError(f"{argument} holds a null character, which no name or path can")
    try:
        code = _command(arguments)
    except SystemExit:  # --help, --version, --print_config
        out.insist()
        raise
    if not arguments or arguments[0] not in KEEP:
        out.insist()
    return code


def _command(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        # Only this one: help of the others must not wait for torch.
        command = import_module(f"cclis.cli.{arguments[0]}")
        return int(command.run(arguments[1:]) or 0)
    if arguments and not arguments[0].startswith("-"):
        raise unknown("command", arguments[0], COMMANDS)
    commands = "\n".join(f"  {name:12}{about}" for name, about in COMMANDS.items())
    parser = Parser(
        prog="cclis",
        usage="cclis COMMAND ... | --help | --version",
        description="Continual learning of image classes with a small replay memory.",
        epilog=f"commands:\n{commands}\n\n`cclis COMMAND --help` says what a command takes.",
        formatter_class=RawDescriptionHelpFormatter,
        version=__version__,
    )
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def entry() -> None:
    """The console script."""
    try:
        code = main()
        if code == STOPPED:
            ignore_hangups()  # a terminal that closes sends more than one
        sys.exit(code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)


def _let_go(stream: IO[str] | None) -> None:
    """Flush a stream; what cannot be written must not decide the exit code, as it would later."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
