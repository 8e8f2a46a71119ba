"""The settings of a run from a recipe, a YAML file and flags, for `train` and `tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclis.cli.parser import Parser, normalise
from cclis.errors import InputError
from cclis.methods import get, make_config
from cclis.methods.registry import methods_with, setting_of, unknown_setting
from cclis.progress import Screen, print_line
from cclis.settings import (
    AugmentationOptions,
    Config,
    MeansOptions,
    NetworkOptions,
    Options,
    ProbeOptions,
    RunOptions,
    StreamOptions,
    TrainingOptions,
    check_value,
    merge,
    names_of,
    own_names,
    read_yaml_lines,
    recipe_for,
    recipe_settings,
    types_of,
)

FIRST = (StreamOptions, RunOptions, TrainingOptions)
LAST = (NetworkOptions, AugmentationOptions, ProbeOptions, MeansOptions)
"""Groups of settings in the order of the help; a method's own stand between them."""


@dataclass(frozen=True)
class Given:
    """The parsed settings.

    Attributes:
        config: All settings.
        flags: Those that were given as flags.
        base: The settings of the recipe and the file, which the flags are added to.
        options: Options that are no settings of the run.
    """

    config: Config
    flags: dict[str, Any]
    base: dict[str, Any]
    options: dict[str, Any]


class SettingsParser(Parser):
    """The parser for the settings of a method."""

    def __init__(self, method: str, defaults: Mapping[str, Any], **settings: Any):
        super().__init__(usage=f"{settings['prog']} [--SETTING VALUE ...]", **settings)
        kind = get(method).settings
        self.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file of settings, or a recipe by name; `cclis benchmarks` lists them.",
        )
        self.add_argument(
            "--print_config", action="store_true", help="Print all settings as YAML, and stop."
        )
        for group in _groups(kind):
            self.add_group(group, defaults)

    def hint(self, flag: str) -> str:
        """What to say of a flag that does not exist, or that other methods have."""
        others = methods_with(flag)
        return f" It is {setting_of(others)}." if others else super().hint(flag)


def read(
    arguments: Sequence[str],
    command: str,
    description: str,
    *,
    options: type[Options] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Given:
    """The settings that a command line asks for.

    Args:
        arguments: What stands behind the command.
        command: The command.
        description: What it does.
        options: Options that the command has beside the settings.
        overrides: Settings that a recipe or a file does not decide.
    """
    early = look_ahead(arguments)
    file, lines, path = _config_source(early.pop("config", None))
    with _in(path, lines, "recipe"):
        of_recipe = recipe_settings(_named_recipe(early, file))
    with _in(path, lines, "method"):
        method = str(merge({"method": RunOptions.method}, of_recipe, file, early)["method"])
        kind = get(method).settings
    if path is not None:
        file = _of_method(file, lines, path, method)
    recipe = _recipe(early, file, method, path)
    if recipe is not None and recipe_settings(recipe)["method"] != method:
        raise InputError(f"the recipe {recipe} is for another method than {method}")
    sources = (_defaults(kind), recipe_settings(recipe), file, overrides or {})
    named = {"method": method, "recipe": recipe}
    defaults = merge(*sources, named)
    parser = SettingsParser(method, defaults, prog=f"cclis {command}", description=description)
    if options is not None:
        parser.add_group(options)
    flags, others = parse(parser, arguments, kind)
    settings = merge(*sources, flags, named)
    config = make_config(method, {k: v for k, v in settings.items() if k != "method"})
    if others.pop("print_config"):
        print_config(config)
    return Given(config, flags, merge(*sources[1:3]), others)


def parse(
    parser: SettingsParser, arguments: Sequence[str], kind: type[Config]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that are given as flags, and all options that are no settings."""
    hints = types_of(kind)
    plain = normalise(arguments, hints)
    # Not by the parser, which has a meaning of its own for this name.
    printed = "--print_config" in plain
    values = vars(parser.parse_args([part for part in plain if part != "--print_config"]))
    typed = {part[2:].partition("=")[0] for part in plain if part.startswith("--")}
    flags = {name: value for name, value in values.items() if name in typed & hints.keys()}
    others = {name: v for name, v in values.items() if name not in hints and name != "config"}
    return flags, others | {"print_config": printed}


def print_config(config: Config) -> None:
    """Print all settings as YAML, for `--config`, and stop."""
    import yaml

    print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), end="")
    sys.exit(0)


def look_ahead(arguments: Sequence[str]) -> dict[str, Any]:
    """What decides which recipe applies and which flags there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--benchmark", "--method", "--config", "--recipe", "--resume"):
        parser.add_argument(name)
    parser.add_argument("--memory", type=int)
    try:
        given = vars(parser.parse_known_args(normalise(arguments))[0])
    except argparse.ArgumentError:
        return {}
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def _in(path: Path | None, lines: Mapping[str, int], name: str) -> Iterator[None]:
    """Say in which line of a file a setting stands, where it is wrong."""
    try:
        yield
    except InputError as error:
        if name not in lines:
            raise
        raise InputError(f"{path}, line {lines[name]}: {error}") from None


def _config_source(name: str | None) -> tuple[dict[str, Any], dict[str, int], Path | None]:
    """The settings of a file or of a recipe, and in which lines of a file they stand."""
    if name is None:
        return {}, {}, None
    if Path(name).exists():
        return *read_yaml_lines(Path(name)), Path(name)
    if name.endswith((".yaml", ".yml")):
        raise InputError(f"there is no file {name}")
    return recipe_settings(name) | {"recipe": name}, {}, Path(name)


def _of_method(
    file: dict[str, Any], lines: Mapping[str, int], path: Path, method: str
) -> dict[str, Any]:
    """The settings of a file that a method has.

    Those of another method are dropped, with a line that names them, where a flag names another
    method than the file; everything else that is unknown is refused.
    """
    kind = get(method).settings
    other = file.get("method", method) != method
    known = names_of(kind)
    dropped = [name for name in file if name not in known and other and methods_with(name)]
    if dropped:
        said = ", ".join(dropped)
        line = f"{path}: {method} does not have these settings, dropped: {said}"
        print_line(Screen(stderr=True), line)
    if other:
        dropped.append("recipe")
    settings = {name: value for name, value in file.items() if name not in dropped}
    for name, value in settings.items():
        place = f"{path}, line {lines[name]}" if name in lines else str(path)
        if name not in known:
            raise InputError(f"{place}: {unknown_setting(str(name), method)}")
        with _in(path, lines, name):
            check_value(kind, name, value)
    return settings


def _named_recipe(early: Mapping[str, Any], file: Mapping[str, Any]) -> str | None:
    """The recipe that a flag or a file names."""
    name = early.get("recipe", file.get("recipe"))
    return None if name in (None, "none") else str(name)


def _recipe(
    early: Mapping[str, Any], file: Mapping[str, Any], method: str, path: Path | None
) -> str | None:
    """The name of the recipe that the settings start from."""
    if path is not None or "recipe" in early:
        return _named_recipe(early, file)
    benchmark = str(early.get("benchmark", StreamOptions.benchmark))
    return recipe_for(benchmark, method, early.get("memory"))


def _defaults(kind: type[Config]) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in names_of(kind)}


def _groups(kind: type[Config]) -> list[type[Options]]:
    """The groups of settings that a config joins."""
    joined = [c for c in kind.__mro__ if issubclass(c, Options) and own_names(c)]
    own = [c for c in joined if c not in (*FIRST, *LAST)]
    return [*FIRST, *own, *(c for c in LAST if c in joined)]
