"""The command `cclis`. Thin: it finds the command, runs it, and gives an exit code."""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from cclis import __version__
from cclis.cli.parser import Parser
from cclis.errors import InputError, unknown
from cclis.experiment.interruption import STOPPED, Interrupted

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except InputError as error:
        print(f"cclis: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cclis: interrupted", file=sys.stderr)
        return 130
    except Interrupted as signal:
        print(f"cclis: stopped by {signal}", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        # The reader of the output has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
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
    sys.exit(main())
