"""What the parsers of all commands have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser

from cclis.errors import InputError, did_you_mean
from cclis.settings import Config, Options, info_of, names_of, own_names, types_of


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

    def add_group(self, group: type[Options], defaults: Mapping[str, Any] = {}) -> None:
        """Add the flags of a group of settings."""
        hints = types_of(group)
        title = str(group.__doc__).partition("\n")[0].removesuffix(".")
        shown = self.add_argument_group(title)
        for name in own_names(group):
            shown.add_argument(
                f"--{name}",
                type=hints[name],
                default=defaults.get(name, getattr(group, name)),
                help=info_of(group, name).doc.replace("%", "%%"),
            )

    def hint(self, flag: str) -> str:
        """What to say of a flag that does not exist."""
        known = {
            option.removeprefix("--")
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--") and not option.endswith("+")
        }
        if flag in names_of(Config):
            return " It is a setting of train and tune."
        return did_you_mean(flag, known, prefix="--")


def normalise(arguments: Sequence[str], hints: Mapping[str, Any] | None = None) -> list[str]:
    """Arguments as the parser wants them, from what people write.

    `--image-size 8` is `--image_size 8`, a switch alone is `--switch true`, and the values of
    `--heads means linear` are one list.

    Args:
        arguments: What was typed.
        hints: The types of the settings, by name.
    """
    hints = hints or {}
    plain, rest = list[str](), list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*plain, argument, *rest]
        if not argument.startswith("--"):
            plain.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        flag = f"--{flag[2:].replace('-', '_')}"
        hint = hints.get(flag[2:])
        if hint is None:
            plain.append(f"{flag}{equals}{value}")
            continue
        plain.append(flag)
        values = [value] if equals else []
        while (
            rest and not equals and not rest[0].startswith("--") and (not values or _is(hint, list))
        ):
            values.append(rest.pop(0))
        if not values and _is(hint, bool):
            plain.append("true")
        elif len(values) > 1 or (values and _is_list(values[0], hint)):
            plain.append(f"[{','.join(values)}]")
        else:
            plain += values
    return plain


def _is(hint: Any, kind: type) -> bool:
    """Whether a type is of a kind, or a union with it."""
    return any((get_origin(part) or part) is kind for part in (hint, *get_args(hint)))


def _is_list(value: str, hint: Any) -> bool:
    """Whether a single value is a list without brackets: `a,b`, or `a` where only lists go."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    only = bool(parts) and all(get_origin(part) is list for part in parts)
    return _is(hint, list) and not value.startswith("[") and (only or "," in value)
