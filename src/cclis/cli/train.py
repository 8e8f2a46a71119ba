"""`cclis train`: learn a benchmark, or resume a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cclis.cli.settings import SettingsParser, look_ahead, parse, print_config, read
from cclis.errors import InputError
from cclis.methods import get, make_config
from cclis.progress import Progress, Screen, duration, print_line
from cclis.settings import Options, setting

ABOUT = "Learn a benchmark task by task."


@dataclass(frozen=True)
class TrainOptions(Options):
    """The run to resume."""

    resume: str | None = setting(None, "Folder of an interrupted run, to resume it.")


def run(arguments: Sequence[str]) -> None:
    """Learn, and show what came out."""
    asked = look_ahead(arguments)
    if "resume" in asked:
        _resume(arguments, asked)
        return
    config = read(arguments, "train", ABOUT, options=TrainOptions).config

    from cclis.experiment.loop import train

    _show(train(config, Progress()))


def _resume(arguments: Sequence[str], asked: dict[str, Any]) -> None:
    """Resume a run by its own settings; flags may change those that may change."""
    from cclis.experiment.loop import resume
    from cclis.runs import Run

    if "config" in asked:
        raise InputError("--config and --resume do not go together: a run keeps its settings")
    if "method" in asked:
        get(asked["method"])  # a method from elsewhere has to be named again
    there = Run.open(asked["resume"])
    used = there.config
    if asked.get("method", used.method) != used.method:
        raise InputError(f"cannot resume: the run used method {used.method}, not {asked['method']}")
    parser = SettingsParser(used.method, used.to_dict(), prog="cclis train", description=ABOUT)
    parser.add_group(TrainOptions)
    flags, options = parse(parser, arguments, type(used))
    config = make_config(used.method, {**used.to_dict(), **flags, "method": used.method})
    if options["print_config"]:
        print_config(config)
    _show(resume(there, config, Progress()))


def _show(run: Any) -> None:
    from cclis.report.table import result_tables

    result = run.result
    out = Screen()
    out.print(result_tables(result))
    out.print(
        f"learned in {duration(result.seconds.train)} ({result.images_per_second:,.0f} images/s), "
        f"evaluated in {duration(result.seconds.evaluation)}, "
        f"{duration(result.seconds.total)} in all"
    )
    print_line(out, f"report   {run.path / 'report.html'}")
    print_line(out, f"numbers  {run.path / 'result.json'}")
