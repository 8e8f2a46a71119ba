"""What the parsers of all commands have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser
from rich.console import Console

from cclis.errors import InputError, did_you_mean
from cclis.settings import Config, names_of


class Parser(ArgumentParser):
    """A parser whose complaints are one sentence, not a screen of usage."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong as an InputError."""
        message = re.sub(r'Parser key "([\w.]+)"[\w ]*:', r"--\1:", " ".join(message.split()))
        message = re.sub(r"<class '(\w+)'>", r"\1", message)
        message = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", message)
        message = re.sub(
            r"Does not validate .*Subtypes: \[(.*)\] Errors: .*Given value:",
            r"Expected one of \1. Got value:",
            message,
        ).replace("Expected a ", "Expected ")
        if flag := re.search(r"unrecognized arguments: --(\w+)", message):
            message += f".{self.hint(flag[1])} `{self.prog} --help` lists all flags"
        raise InputError(message) from None

    def hint(self, flag: str) -> str:
        """What to say of a flag that does not exist."""
        known = {
            option.removeprefix("--")
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--")
        }
        if flag in names_of(Config):
            return " It is a setting of train and tune."
        return did_you_mean(flag, known, prefix="--")


def normalise(
    arguments: Sequence[str], switches: Collection[str] = (), lists: Collection[str] = ()
) -> list[str]:
    """Arguments as the parser wants them, from what people write.

    `--image-size 8` is `--image_size 8`, a switch alone is `--switch true`, and several values
    `--heads means linear` are one list.

    Args:
        arguments: What was typed.
        switches: The settings that are true or false.
        lists: The settings that take lists.
    """
    plain, rest = list[str](), list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*plain, argument, *rest]
        if not argument.startswith("--"):
            plain.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        flag = flag.replace("-", "_").replace("__", "--", 1)
        values = []
        while not equals and rest and not rest[0].startswith("--") and flag[2:] in lists:
            values.append(rest.pop(0))
        plain.append(f"{flag}{equals}{value}")
        if len(values) > 1:
            values = [f"[{','.join(values)}]"]
        elif values and flag == "--heads" and not values[0].startswith("["):
            values = [f"[{values[0]}]"]
        plain += values
        if flag[2:] in switches and not equals and (not rest or rest[0].startswith("--")):
            plain.append("true")
    return plain


def takes(hint: Any, kind: type) -> bool:
    """Whether a type is of a kind, or a union with it."""
    return any((get_origin(part) or part) is kind for part in (hint, *get_args(hint)))


def console() -> Console:
    """Where results are printed; names and paths as they are, whatever brackets they have."""
    return Console(markup=False, highlight=False)
