"""The options of commands that start many runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cclis.settings.fields import Options, setting, shared
from cclis.settings.groups import RunOptions, StreamOptions

Sampler = Literal["grid", "tpe"]


@dataclass(frozen=True)
class TuneOptions(Options):
    """What `cclis tune` tries."""

    sampler: Sampler = setting(
        "grid",
        "Try every point of the grid, or what Optuna's TPE suggests, pruned where it lags behind.",
    )
    trials: int | None = setting(
        None,
        "Points to try in all, over all workers [default: the whole grid; 50 with tpe].",
        minimum=1,
    )
    seeds: int = setting(
        5,
        "Runs of each point, with seeds from --seed on, that its accuracy is averaged over.",
        minimum=1,
    )
    grid: str | None = setting(
        None,
        "YAML file of what to try, such as `learning_rate: [0.1, 1.0]`; with tpe also ranges, such "
        "as `learning_rate: {low: 0.01, high: 1.0, log: true}` [default: one for the method, the "
        "paper's for cclis, without the settings given as flags].",
        kind="place",
    )
    storage: str | None = setting(
        None,
        "Database URL of the study [default: SQLite, study.db in the output folder]. Workers share "
        "the output folder too: there they see which points are taken, and by whom.",
    )


@dataclass(frozen=True)
class StudyOptions(Options):
    """What `cclis study` runs."""

    benchmark: list[str] | None = setting(
        None,
        "One or several benchmarks [default: those of the paper; split-digits at the scale smoke].",
    )
    method: list[str] | None = setting(
        None, "These methods alone, in this order [default: all of the study's]."
    )
    memory: list[int] | None = setting(
        None,
        "Numbers of samples that may be kept, one or several [default: those of the paper].",
        minimum=0,
    )
    seeds: list[int] | None = setting(
        None, "A run of everything for each [default: 0 1 2; 0 at the scale smoke].", minimum=0
    )
    scale: Literal["paper", "short", "smoke"] = setting(
        "paper",
        "paper: the recipes as they are; short: 50 epochs for the first task and 20 for the others "
        "(10 for methods with a classifier); smoke: seconds, to see that everything runs.",
    )
    output: str | None = setting(
        None,
        "Folder for pages and runs, shared by the studies of a scale [default: studies/SCALE].",
        kind="place",
    )
    jobs: int | None = setting(
        None,
        "Runs at once, which share the card or the cores [default: 1 on a GPU, otherwise one a "
        "core].",
        minimum=1,
    )
    dry_run: bool = setting(False, "List the runs, and stop.")
    data: str | None = shared(StreamOptions, "data")
    tasks: int | list[int] | None = shared(StreamOptions, "tasks")
    image_size: int | None = shared(StreamOptions, "image_size")
    device: str = shared(RunOptions, "device")
