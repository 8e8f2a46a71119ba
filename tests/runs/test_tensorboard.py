"""Event files that hold what metrics.jsonl holds, once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cclis.cli import main
from cclis.engine.trainer import Trainer
from cclis.errors import InputError
from cclis.experiment import loop as experiment
from cclis.experiment.loop import resume, train
from cclis.experiment.stages import Stage
from cclis.methods import make_config
from cclis.runs.directory import Run
from tests.conftest import QUICK

SMALL = {**QUICK, "tasks": [2, 2], "limit": 20, "memory": 8}


def config(folder: Path, **settings: Any) -> Any:
    return make_config("cclis", {**SMALL, "output": str(folder), **settings})


def events(run: Run) -> dict[str, list[tuple[int, float]]]:
    """By name, the step and value of every event of every file."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in (run.path / "tensorboard").iterdir():
        read = EventAccumulator(str(path))
        read.Reload()
        for name in read.Tags()["scalars"]:
            found.setdefault(name, []).extend((e.step, e.value) for e in read.Scalars(name))
    return found


def expected(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What metrics.jsonl says: two epochs a task, then an evaluation."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in map(json.loads, (run.path / "metrics.jsonl").open(encoding="utf-8")):
        step = 2 * record["task"] + record.get("epoch", 1) + 1
        values = {
            k: record[k] for k in ("loss", "learning_rate", "images_per_second") if k in record
        }
        values |= {f"losses/{term}": value for term, value in record.get("losses", {}).items()}
        for head, found_there in record.get("evaluation", {}).items():
            for scenario, tasks in found_there.items():
                values[f"{scenario}/{head}"] = sum(tasks) / len(tasks)
        for name, value in values.items():
            found.setdefault(name, []).append((step, pytest.approx(value, rel=1e-6)))
    return found


def test_events_are_what_is_logged(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", tensorboard=True))
    found = events(run)
    assert found == expected(run)
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["losses/distill"]] == [3, 4]
    assert [step for step, _ in found["class_il/prototype"]] == [2, 4]


@pytest.mark.parametrize("before", [True, False])
def test_events_are_there_once_after_a_resume(before: bool, tmp_path: Path, monkeypatch) -> None:
    evaluate = experiment.evaluate_stage

    def interrupt(trainer: Trainer, stage: Stage, *rest: Any) -> Any:
        if len(stage.tests) == 2:
            raise KeyboardInterrupt
        return evaluate(trainer, stage, *rest)

    monkeypatch.setattr(experiment, "evaluate_stage", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "run", tensorboard=before))
    monkeypatch.undo()
    run = Run.open(tmp_path / "run")
    # A line that was written after the newest checkpoint will be written again.
    run.log(run.records[-1])
    resume(run, config(tmp_path / "run", tensorboard=True))
    assert events(run) == expected(run)
    assert [step for step, _ in events(run)["loss"]] == [1, 2, 3, 4]


def test_a_run_has_none_unless_asked(tmp_path: Path) -> None:
    assert not (train(config(tmp_path / "run")).path / "tensorboard").exists()


def test_a_missing_package_is_said_before_training(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "--tensorboard", "true"]) == 2
    assert "pip install 'cclis[tensorboard]'" in capsys.readouterr().err
    assert not Path("runs").exists()
    with pytest.raises(InputError, match="tensorboard"):
        train(config(tmp_path / "run", tensorboard=True))
