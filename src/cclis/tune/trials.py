"""The trials of a tuning: what was tried, and what came out."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from cclis.tune.space import Space


@dataclass(frozen=True)
class Trial:
    """A point that was tried.

    Attributes:
        number: Its number in the study.
        state: complete, pruned, failed, interrupted (and tried again) or running.
        accuracy: Mean Class-IL accuracy of the main head on the validation split, if complete.
        deviation: Standard deviation over the seeds.
        settings: What was tried.
        folder: Where its runs lie.
        error: Why it failed.
    """

    number: int
    state: str
    accuracy: float | None
    deviation: float | None
    settings: dict[str, Any]
    folder: str
    error: str


def ranked(study: optuna.Study) -> list[Trial]:
    """Every trial of a study, complete ones first and the best of them before the others."""
    trials = [_as_trial(trial) for trial in study.get_trials(deepcopy=False)]
    return sorted(
        trials, key=lambda t: -math.inf if t.accuracy is None else t.accuracy, reverse=True
    )


def count_ended(trials: Iterable[Trial]) -> int:
    """The number of trials that need not be tried again."""
    return sum(trial.state in ("complete", "pruned", "failed") for trial in trials)


def _as_trial(trial: FrozenTrial) -> Trial:
    complete = trial.state == TrialState.COMPLETE
    accuracies = trial.user_attrs.get("accuracies", [])
    state = {TrialState.FAIL: "interrupted" if is_interrupted(trial) else "failed"}
    return Trial(
        trial.number,
        state.get(trial.state, trial.state.name.lower()),
        trial.value if complete else None,
        statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        trial.params,
        f"runs/{digest(trial.params)}",
        trial.user_attrs.get("error", ""),
    )


def is_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial was stopped before it could fail or end; it is tried again."""
    return trial.state == TrialState.FAIL and "error" not in trial.user_attrs


def as_csv(trials: list[Trial], space: Space) -> str:
    """All trials as a CSV table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "accuracy", "deviation", *space, "folder", "error"])
    for trial in trials:
        settings = [trial.settings.get(name, "") for name in space]
        numbers = ["" if x is None else f"{x:.4f}" for x in (trial.accuracy, trial.deviation)]
        writer.writerow([trial.number, trial.state, *numbers, *settings, trial.folder, trial.error])
    return text.getvalue()


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings in a line."""
    return ", ".join(f"{name} {short(value)}" for name, value in settings.items())


def short(value: Any) -> str:
    """A value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def digest(settings: Mapping[str, Any]) -> str:
    """The name of the folder for the runs of a point."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
