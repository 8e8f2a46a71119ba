"""What tuning tries: the paper's grid, those around the recipes, or one of the user's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclis.errors import InputError, did_you_mean
from cclis.methods import make_config
from cclis.settings import Config, RunOptions, StreamOptions, TuneOptions, names_of, read_yaml

if TYPE_CHECKING:
    import optuna

Space = dict[str, Any]
"""By setting: a list of values, or a range {low, high, log}."""
RATES = [0.01, 0.03, 0.1]
GRIDS: dict[str, Space] = {
    # Appendix B. Its epochs are not here: they are those of the recipe, and 50 while tuning.
    "cclis": {
        "learning_rate": [0.1, 0.5, 1.0],
        "prototype_learning_rate": [0.01, 0.1, 0.5],
        "batch_size": [256, 512],
        "temperature": [0.1, 0.5, 1.0],
        "teacher_temperature": [0.1, 0.5, 1.0],
        "student_temperature": [0.1, 0.2],
    },
    # Around the values of the recipes.
    "co2l": {
        "learning_rate": [0.1, 0.5, 1.0],
        "batch_size": [256, 512],
        "temperature": [0.1, 0.5, 1.0],
        "teacher_temperature": [0.01, 0.1],
        "student_temperature": [0.1, 0.2],
    },
    "icarl": {"learning_rate": [0.03, 0.1, 0.3], "weight_decay": [0.0, 0.00001, 0.0005]},
    "der": {"learning_rate": RATES, "logit_weight": [0.1, 0.2, 0.3, 0.5, 1.0]},
    "derpp": {
        "learning_rate": RATES,
        "logit_weight": [0.1, 0.2, 0.5, 1.0],
        "label_weight": [0.5, 1.0],
    },
    "gcr": {
        "learning_rate": RATES,
        "logit_weight": [0.1, 0.2, 0.5, 1.0],
        "label_weight": [0.5, 1.0],
    },
    "gem": {"learning_rate": RATES, "memory_strength": [0.0, 0.5, 1.0]},
}
"""What is tried where no grid is given; of other methods the learning rate alone."""


def space_of(config: Config, options: TuneOptions, fixed: Collection[str]) -> Space:
    """What to try, checked value by value."""
    if options.grid is None:
        grid = GRIDS.get(config.method, {"learning_rate": RATES})
        space = {name: values for name, values in grid.items() if name not in fixed}
        where = f"the grid of {config.method}"
    else:
        space, where = read_yaml(Path(options.grid)), options.grid
        for name in sorted(space.keys() & set(fixed)):
            raise InputError(f"{name} is tried by {where} and given as a flag; leave one of them")
    if not space:
        raise InputError(f"{where} leaves nothing to try")
    known = names_of(type(config)) - names_of(RunOptions) - names_of(StreamOptions)
    for name, values in space.items():
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise InputError(f"{where}: {config.method} has no setting '{name}' to tune.{hint}")
        for value in _ends(name, values, where, ranges=options.sampler == "tpe"):
            if isinstance(value, list | dict):
                raise InputError(f"{where}: {name} cannot be {value!r}")
            try:
                settings = {**config.to_dict(), name: value}
                make_config(settings.pop("method"), settings)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
    return space


def _ends(name: str, values: Any, where: str, *, ranges: bool) -> list[Any]:
    """The values of a list, or the ends of a range."""
    if isinstance(values, list) and values:
        return values
    if not isinstance(values, dict) or not {"low", "high"} <= values.keys() <= {
        "low",
        "high",
        "log",
    }:
        raise InputError(f"{where}: {name} must be a list of values or a range {{low, high, log}}")
    if not ranges:
        raise InputError(f"{where}: {name} is a range, for --sampler tpe; a grid needs its values")
    low, high = values["low"], values["high"]
    numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
    if not numbers or not low < high or (values.get("log", False) and low <= 0):
        raise InputError(f"{where}: {name} has no range from {low!r} to {high!r}")
    return [low, high]


def suggest(trial: optuna.Trial, name: str, values: Any) -> None:
    """Let a sampler choose a value of a setting."""
    if isinstance(values, list):
        trial.suggest_categorical(name, values)
        return
    low, high, log = values["low"], values["high"], bool(values.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        trial.suggest_int(name, low, high, log=log)
    else:
        trial.suggest_float(name, low, high, log=log)


def points(space: Space) -> Iterator[dict[str, Any]]:
    """Every point of a grid."""
    return (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
