"""Settings chosen on a validation split: every point once, the best one written, nothing tested."""

from __future__ import annotations

import csv
import dataclasses
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import optuna
import pytest
import yaml

from cclis.cli.app import STOPPED, main
from cclis.data import benchmarks
from cclis.data.readers import Dataset, Split, read_digits
from cclis.errors import InputError
from cclis.evaluation.accuracy import Accuracies
from cclis.experiment.loop import train, training
from cclis.methods import make_config
from cclis.progress import QUIET, Progress
from cclis.runs.records import Evaluation
from cclis.settings import TuneOptions, read_yaml
from cclis.tune import tuning as module
from cclis.tune.space import GRIDS, RATES, points, space_of
from cclis.tune.tuning import Trial, lags, tune
from tests.conftest import CONFIGS, QUICK, Bars
from tests.experiment.process import start
from tests.report.made import accuracy as made
from tests.report.made import result

SMALL = {**QUICK, "epochs": 1, "tasks": [2, 2], "limit": 20, "memory": 8, "threads": 1}
GRID = {"learning_rate": [0.05, 0.1], "temperature": [0.1, 0.5]}


def write_grid(folder: Path, **space: Any) -> str:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(space or GRID))
    return str(path)


def tuned(
    folder: Path, space: dict[str, Any] | None = None, progress: Progress = QUIET, **given: Any
) -> list[Trial]:
    names = {field.name for field in dataclasses.fields(TuneOptions)}
    how = {"seeds": 1, "grid": write_grid(folder, **(space or GRID))}
    how |= {k: v for k, v in given.items() if k in names}
    others = {k: v for k, v in given.items() if k not in names}
    settings = {**SMALL, "validation": 0.1, "output": str(folder / "tuning"), **others}
    config, options = make_config("cclis", settings), TuneOptions(**how)
    return tune(config, options, recipe={"epochs": 7}, progress=progress)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of all that is trained."""
    seen: list[dict[str, Any]] = []

    def counted(config: Any, *rest: Any) -> Any:
        seen.append(config.to_dict())
        return training(config, *rest)

    monkeypatch.setattr(module, "training", counted)
    return seen


def test_a_grid_is_gone_through_once_and_its_best_mean_written(tmp_path: Path, runs) -> None:
    trials = tuned(tmp_path, seeds=2)
    tried = sorted((run["learning_rate"], run["temperature"], run["seed"]) for run in runs)
    assert tried == [(r, t, s) for r in (0.05, 0.1) for t in (0.1, 0.5) for s in (0, 1)]
    assert {run["validation"] for run in runs} == {0.1}
    assert [trial.state for trial in trials] == ["complete"] * 4

    def mean(trial: Trial) -> float:
        found = [
            module.Run.open(tmp_path / "tuning" / trial.folder / f"seed{seed}").result
            for seed in (0, 1)
        ]
        return sum(result.class_il["prototype"].accuracy for result in found) / 2

    assert [trial.accuracy for trial in trials] == pytest.approx([mean(t) for t in trials])
    assert trials[0].accuracy == max(trial.accuracy or 0 for trial in trials)
    recipe = read_yaml(tmp_path / "tuning" / "recipe.yaml")
    assert {name: recipe[name] for name in GRID} == trials[0].settings
    # The recipe's epochs, not those of the trials, and nothing of the validation split.
    assert recipe["epochs"] == 7
    assert not {"validation", "seed", "output"} & recipe.keys()
    rows = list(csv.DictReader((tmp_path / "tuning" / "trials.csv").open()))
    assert [float(row["learning_rate"]) for row in rows] == [
        trial.settings["learning_rate"] for trial in trials
    ]
    # A grid of checkpoints would fill the disk.
    assert not list(tmp_path.rglob("checkpoints"))

    bars = Bars()
    again = tuned(tmp_path, progress=bars, seeds=2)
    assert len(runs) == 8
    assert again == trials
    assert bars.begun == [("tuning", 4, 4)]

    config = make_config(recipe.pop("method"), {**recipe, "output": str(tmp_path / "run")})
    assert train(config).ended


def test_other_settings_are_another_study(tmp_path: Path) -> None:
    tuned(tmp_path, trials=1)
    with pytest.raises(
        InputError, match=r"choose another --output: .* holds a tuning with width 8, not 4"
    ):
        tuned(tmp_path, width=4)


def test_more_trials_go_on_with_what_is_left(tmp_path: Path, runs) -> None:
    assert len(tuned(tmp_path, trials=1)) == 1
    assert len(tuned(tmp_path, trials=3)) == 3
    assert len({(run["learning_rate"], run["temperature"]) for run in runs}) == len(runs) == 3


# ----------------------------------------------------------------------- the validation split


def test_each_class_is_divided_and_nothing_of_it_lost() -> None:
    digits = read_digits()
    split = benchmarks.held_out(digits, 0.1, 3)
    for label in range(10):
        whole, kept, held = (
            s.subset(s.labels == label).images.numpy()
            for s in (digits.train, split.train, split.test)
        )
        assert len(held) == round(0.1 * len(whole))
        assert sorted(map(bytes, [*kept, *held])) == sorted(map(bytes, whole))
    other, same = (benchmarks.held_out(digits, 0.1, seed) for seed in (4, 3))
    assert np.array_equal(same.test.rows, split.test.rows)
    assert not np.array_equal(other.test.rows, split.test.rows)
    # The images stay where they are: no copy of a dataset that may be larger than the memory.
    assert split.train.images is split.test.images is digits.train.images


def test_a_class_has_a_sample_on_either_side() -> None:
    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    train_split = Split(images, np.array([0, 0, 1, 1, 1]))
    names = ("ant", "bee")
    for share in (0.01, 0.99):
        split = benchmarks.held_out(Dataset(train_split, train_split, names), share, 0)
        for part in (split.train, split.test):
            assert set(part.labels) == {0, 1}
            assert part.subset(np.arange(len(part))).images.flatten().tolist() == list(part.rows)
    lonely = Split(images, np.array([0, 0, 0, 0, 1]))
    with pytest.raises(InputError, match="class 'bee' has only one training image"):
        benchmarks.held_out(Dataset(lonely, lonely, names), 0.1, 0)


@pytest.mark.parametrize("poison", ["other images", "no images"])
def test_the_test_split_is_never_touched(poison: str, tmp_path: Path, monkeypatch) -> None:
    clean = tuned(tmp_path, trials=1)
    digits = read_digits()

    class Poison(Split):
        def subset(self, chosen: Any) -> Any:
            raise AssertionError("the test split was read")

    test = Poison(digits.test.images[:0], digits.test.labels[:0])
    if poison == "other images":
        noise = np.random.default_rng(0).integers(0, 256, digits.test.images.shape, dtype=np.uint8)
        test = Poison(noise, digits.test.labels[::-1])
    poisoned = Dataset(digits.train, test, digits.class_names)
    monkeypatch.setattr(benchmarks, "read_digits", lambda: poisoned)
    (tmp_path / "again").mkdir()
    assert tuned(tmp_path / "again", trials=1) == clean
    with pytest.raises((AssertionError, InputError)):
        train(make_config("cclis", {**SMALL, "output": str(tmp_path / "run")}))


def test_validation_is_a_setting_of_any_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["train", *flags, "--validation", "0.2", "--output", "run"]) == 0
    assert read_yaml(Path("run/config.yaml"))["validation"] == 0.2
    assert main(["evaluate", "run", "--output", "again.json"]) == 0
    found, again = (read_yaml(Path(name)) for name in ("run/result.json", "again.json"))
    assert found["class_il"] == again["class_il"]


# ----------------------------------------------------------------------------------- pruning


def test_what_lags_behind_is_pruned_and_does_not_win(tmp_path: Path, monkeypatch) -> None:
    said = iter([50, 40, 60, 45, 55, 42, 43])

    @contextmanager
    def pretend(config: Any, progress: Any) -> Iterator[Any]:
        accuracy = next(said)
        # After its first task a pruned trial is ahead of all others' last.
        records = [
            Evaluation(task, {"prototype": Accuracies([x], [x])}, "prototype", 1.0)
            for task, x in enumerate((accuracy + 40.0, float(accuracy)))
        ]
        done = result(heads={"prototype": made(accuracy)})
        yield Mock(result=done, records=[]), iter(records)

    monkeypatch.setattr(module, "training", pretend)
    trials = tuned(tmp_path, sampler="tpe", trials=7, space={"width": {"low": 1, "high": 9999}})
    states = {trial.number: trial.state for trial in trials}
    assert [states[n] for n in range(7)] == ["complete"] * 5 + ["pruned", "complete"]
    assert trials[0].accuracy == 60
    assert trials[-1].accuracy is None
    assert read_yaml(tmp_path / "tuning" / "recipe.yaml")["width"] == trials[0].settings["width"]


def test_pruning_saves_time_and_still_tries_good_points_to_their_end() -> None:
    rng = random.Random(0)
    found, steps, regret = 0, 0, []
    for _ in range(20):
        study = optuna.create_study(direction="maximize")
        best, best_found = -math.inf, -math.inf
        for _ in range(25):
            trial, quality, pruned = study.ask(), rng.gauss(70, 5), False
            for step in range(1, 10):
                # Late tasks tell good points from bad ones.
                accuracy = 70 + (quality - 70) * step / 9 + rng.gauss(0, 1)
                trial.report(accuracy, step)
                steps += 1
                pruned = lags(study, accuracy, step)
                if pruned:
                    break
            best = max(best, quality)
            if pruned:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, quality)
                found, best_found = found + 1, max(best_found, quality)
        regret.append(best - best_found)
    assert found / 20 > 5 + 3  # not only those before pruning begins
    assert steps / (20 * 25 * 9) < 0.75
    assert sum(regret) / 20 < 0.5


def test_a_sampler_suggests_within_its_ranges(tmp_path: Path) -> None:
    space = {"learning_rate": {"low": 0.01, "high": 0.1, "log": True}, "width": [4, 8]}
    trials = tuned(tmp_path, sampler="tpe", trials=3, space=space)
    assert len({trial.settings["learning_rate"] for trial in trials}) == 3
    assert all(0.01 <= trial.settings["learning_rate"] <= 0.1 for trial in trials)
    assert {trial.settings["width"] for trial in trials} <= {4, 8}


# -------------------------------------------------------------------------- failing, going on


def test_a_trial_that_fails_leaves_the_others(tmp_path: Path, runs) -> None:
    trials = tuned(tmp_path, space={"learning_rate": [0.1, 1e30]})
    assert [trial.state for trial in trials] == ["complete", "failed"]
    assert "no longer finite" in trials[1].error
    assert trials[0].settings["learning_rate"] == 0.1
    tuned(tmp_path, space={"learning_rate": [0.1, 1e30]})
    assert len(runs) == 2


def test_if_all_fail_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of 1 trials .*: the loss .* no longer finite"):
        tuned(tmp_path, space={"learning_rate": [1e30]})


def test_an_interrupted_trial_goes_on_where_it_was(tmp_path: Path, monkeypatch) -> None:
    whole = tuned(tmp_path, seeds=2, trials=1)

    def interrupt(config: Any, *rest: Any) -> Any:
        if config.seed == 1:
            raise KeyboardInterrupt
        return training(config, *rest)

    (tmp_path / "half").mkdir()
    monkeypatch.setattr(module, "training", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "half", seeds=2, trials=1)
    monkeypatch.undo()
    trials = tuned(tmp_path / "half", seeds=2, trials=1)
    assert [trial.state for trial in trials] == ["complete", "interrupted"]
    assert [t.accuracy for t in trials[:1]] == [t.accuracy for t in whole]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_a_killed_tuning_goes_on(how: signal.Signals, tmp_path: Path) -> None:
    settings = {**SMALL, "epochs": 25, "seeds": 1, "grid": write_grid(tmp_path), "trials": 1}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    command = [*flags, "--output", str(tmp_path / "tuning")]
    first = start(*command, command="tune")
    runs = tmp_path / "tuning" / "runs"
    # In the first run, between two steps.
    while first.poll() is None and not list(runs.glob("*/seed0/metrics.jsonl")):
        time.sleep(0.01)
    first.send_signal(how)
    said = first.wait()
    if how == signal.SIGINT:
        assert first.returncode == STOPPED
        assert "stopped by SIGINT; the same command resumes it" in said
    assert not list(runs.glob("*/seed0/result.json"))
    assert main(["tune", *command]) == 0
    with (tmp_path / "tuning" / "trials.csv").open() as file:
        states = [row["state"] for row in csv.DictReader(file)]
    assert states == ["complete", "interrupted"]
    assert len(list(runs.glob("*/seed0/result.json"))) == 1
    assert (tmp_path / "tuning" / "recipe.yaml").exists()
    assert not list((tmp_path / "tuning" / "workers").iterdir())


def test_a_point_that_a_living_worker_has_is_left_to_it(tmp_path: Path, monkeypatch) -> None:
    space = {"learning_rate": [0.05, 0.1]}

    def start_another(config: Any, *rest: Any) -> Any:
        monkeypatch.undo()
        others = tuned(tmp_path, space=space)
        assert sorted(trial.state for trial in others) == ["complete", "running"]
        return training(config, *rest)

    monkeypatch.setattr(module, "training", start_another)
    assert [trial.state for trial in tuned(tmp_path, space=space)] == ["complete"] * 2


# -------------------------------------------------------------------------------- bad input


def test_every_method_has_a_grid_of_settings_it_has() -> None:
    assert GRIDS.keys() < CONFIGS.keys()
    for method in CONFIGS:
        found = space_of(make_config(method, {}), TuneOptions(), ())
        assert found == GRIDS.get(method, {"learning_rate": RATES})
    assert len(list(points(GRIDS["cclis"]))) == 3 * 3 * 2 * 3 * 3 * 2


@pytest.mark.parametrize(
    ("grid", "part"),
    [
        (
            "learing_rate: [0.1]",
            "grid.yaml: cclis has no setting 'learing_rate' to tune. Did you mean learn",
        ),
        ("seed: [1, 2]", "grid.yaml: cclis has no setting 'seed' to tune"),
        ("learning_rate: [0.1, -1]", "grid.yaml: learning_rate must be greater than 0, not -1"),
        ("learning_rate: 0.1", "grid.yaml: learning_rate must be a list of values or a range"),
        ("learning_rate: []", "grid.yaml: learning_rate must be a list"),
        ("learning_rate: [[1]]", "grid.yaml: learning_rate cannot be [1]"),
        ("learning_rate: {low: 1, high: 2}", "learning_rate is a range, for --sampler tpe"),
        ("{}", "grid.yaml leaves nothing to try"),
        ("- 1", "'name: value'"),
    ],
)
def test_a_bad_grid_gets_a_sentence(grid, part, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text(grid)
    assert main(["tune", "--grid", "grid.yaml"]) == 2
    assert part in capsys.readouterr().err
    assert not Path("tuning").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--storage", "nonsense"], "storage does not work: Could not parse SQLAlchemy URL"),
        (["--storage", "foo://u:secret@x"], "storage does not work: Can't load plugin"),
        (["--storage", "sqlite:////gone/x.db"], "unable to open database file"),
        (["--trials", "0"], "trials must be at least 1"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--validation", "null"], "tuning never looks at the test split"),
        (["--validation", "1"], "validation must be greater than 0 and less than 1"),
        (["--sampler", "random"], "Expected one of 'grid', 'tpe'"),
        (["--learnin_rate", "1"], "Did you mean --learning_rate"),
        (["--method", "er", "--learning_rate", "1"], "the grid of er leaves nothing to try"),
        (["--benchmark", "npz"], "npz needs --data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_get_a_sentence(flags, part, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *flags]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert "secret" not in said
    assert "Traceback" not in said


def test_a_setting_is_tried_or_given(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    grid = write_grid(tmp_path, learning_rate=[0.1])
    assert main(["tune", "--grid", grid, "--learning_rate", "0.5"]) == 2
    assert "learning_rate is tried by" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/recipe.yaml").write_text("flour: 500\n")
    assert main(["tune", "--output", "mine"]) == 2
    assert "mine holds something else; choose another --output" in capsys.readouterr().err
    assert [path.name for path in Path("mine").iterdir()] == ["recipe.yaml"]


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "cclis.tune.tuning")
    assert main(["tune"]) == 2
    assert "pip install 'cclis[tune]'" in capsys.readouterr().err


def test_the_command_shows_the_best_and_where_it_is(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    # A file's epochs are for the recipe; the trials have their own.
    Path("own.yaml").write_text(
        "epochs: 9\nfirst_epochs: 11\nwidth: 4\nmemory: 50\ntemperature: 0.1\noutput: x\n"
    )
    small = {k: v for k, v in SMALL.items() if k not in ("width", "memory")}
    flags = [f"--{name}={value}" for name, value in small.items()]
    grid = ["--grid", write_grid(tmp_path, learning_rate=[0.1])]
    flags += ["--seeds=1", "--memory=8", "--temperature=0.5", "--output=chosen"]
    assert main(["tune", "--config", "own.yaml", *flags, *grid]) == 0
    shown = capsys.readouterr()
    folder = Path("chosen")
    assert str(folder / "recipe.yaml") in shown.out
    assert "learning_rate" in shown.out
    assert "trial 0  learning_rate 0.1: " in shown.err
    recipe = read_yaml(folder / "recipe.yaml")
    assert (recipe["epochs"], recipe["first_epochs"], recipe["width"]) == (9, 11, 4)
    # A flag overrules the file, even where it asks for the default.
    assert (recipe["memory"], recipe["temperature"]) == (8, 0.5)
    assert not {"output", "limit", "threads", "device"} & recipe.keys()
    (run,) = folder.glob("runs/*/seed0/config.yaml")
    tried = read_yaml(run)
    assert (tried["epochs"], tried["first_epochs"], tried["width"]) == (1, None, 4)
