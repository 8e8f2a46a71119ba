"""`cclis tune`: choose settings on a validation split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from cclis.cli.settings import read
from cclis.errors import InputError
from cclis.methods.registry import get, slug
from cclis.progress import Progress, Screen, print_line
from cclis.settings import TuneOptions

WIDTH = 60
"""Characters for the names of settings above the table."""
SHOWN = 10
"""Trials in the table."""
TUNING = {"epochs": 50, "first_epochs": None, "validation": 0.1}
"""What `cclis tune` has other than `cclis train`: Appendix B of the paper."""
ABOUT = (
    "Choose settings on a validation split, averaged over seeds, and write them as a recipe. "
    "Settings that are not tried are flags, as for train; --epochs are those of the trials. "
    "Repeat the command to resume; several at once, with one --output, share the work."
)


def run(arguments: Sequence[str]) -> None:
    """Tune, and show the best trials."""
    given = read(arguments, "tune", ABOUT, options=TuneOptions, overrides=TUNING)
    how, config = TuneOptions(**given.options), given.config
    if config.output is None:
        folder = f"tuning/{config.benchmark}-{slug(config.method)}-{config.memory}"
        config = dataclasses.replace(config, output=folder)

    from rich.table import Table

    try:
        from cclis.tune.trials import short
        from cclis.tune.tuning import tune
    except ImportError as error:
        raise InputError(f"tuning needs Optuna ({error}): pip install 'cclis[tune]'") from None

    trials = tune(config, how, recipe=given.base, fixed=given.flags, progress=Progress())
    best = [trial for trial in trials if trial.accuracy is not None][:SHOWN]
    tried = list(best[0].settings)
    constant = [k for k in tried if len({str(trial.settings[k]) for trial in best}) == 1]
    varied = [name for name in tried if name not in constant]
    # Letters where the names would not fit: they are what one wants to know, and must not break.
    narrow = sum(len(name) + 3 for name in varied) > WIDTH
    letters = dict(zip(varied, ascii_uppercase, strict=False)) if narrow else {}
    columns = [letters.get(name, name) for name in varied]
    head = get(config.method).main_head()
    title = f"The best on the validation split, by the head {head}"
    table = Table("Class-IL", "±", *columns, title=title)
    for trial in best:
        spread = "" if trial.deviation is None else f"{trial.deviation:.2f}"
        values = [short(trial.settings[name]) for name in varied]
        table.add_row(f"{trial.accuracy:.2f}", spread, *values)
    out = Screen()
    out.print(table)
    for name, letter in letters.items():
        print_line(out, f"{letter}  {name}")
    if constant:
        same = ", ".join(f"{name} {short(best[0].settings[name])}" for name in constant)
        print_line(out, f"the same in all of these: {same}")
    for what, name in (("trials", "trials.csv"), ("recipe", "recipe.yaml")):
        print_line(out, f"{what}  {Path(config.output or '') / name}")
