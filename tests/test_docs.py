"""What the documents promise is there."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from cclis import ContinualLearner, load_benchmark
from cclis.cli import main
from cclis.engine.trainer import Trainer
from cclis.experiment.loop import train
from cclis.methods import available, make_config, registry
from cclis.runs.directory import Run
from cclis.settings import TuneOptions
from cclis.tune.space import space_of
from tests.conftest import QUICK, Outside, learn, on_a_card, state_after

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROMISES = NAMED.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "name"), PROMISES)
def test_every_promise_names_a_test_that_is_there(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_promises() -> None:
    assert len(PROMISES) > 30


def page_on_methods(language: str) -> list[str]:
    """The code of the page on adding methods."""
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_method_of_the_page_on_adding_methods_works(
    outside: Outside, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method, use, tests = page_on_methods("python")
    outside.write("lwf", method)
    outside.write("test_lwf", tests)
    lint = ("ruff", "check", "--isolated", "--select", "E,F,I,W,UP,B", "--line-length", "100", ".")
    subprocess.run([sys.executable, "-m", *lint], check=True, stdout=subprocess.DEVNULL)

    flags = ["--method=lwf:LwF", "--distill_weight=0.5", "--epochs=1", "--limit=10", "--width=8"]
    flags.append("--map_samples=0")
    assert main(["train", *flags]) == 0
    run = Run.open("runs/split-digits-lwf-LwF-0-seed0")
    assert run.config.to_dict()["distill_weight"] == 0.5
    assert str(run.path) in (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    assert main(["train", *flags, "--distil_weight", "2"]) == 2
    capsys.readouterr()
    assert main(["study", "methods", "--method", "lwf:LwF", "er", "joint", "--dry_run"]) == 0
    assert "seq-cifar10-lwf-LwF-0-seed0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--method", "lwf:LwF", "--help"])
    assert "T of the distillation" in capsys.readouterr().out
    config = make_config("lwf:LwF", {})
    assert space_of(config, TuneOptions(), ()).keys() == {"learning_rate"}

    tested = importlib.import_module("test_lwf")
    tested.test_old_classes_follow_the_network_of_before()
    tested.test_it_forgets_less_than_fine_tuning(tmp_path)

    used: dict[str, Any] = {}
    exec(use, used)
    assert used["learner"].config.to_dict() == {**config.to_dict(), "distill_weight": 0.5}
    settings = {"epochs": 4, "momentum": 0.9, "padding": 1, "learning_rate": 0.1, "width": 16}
    digits = load_benchmark("split-digits", limit=30)
    learner = ContinualLearner(used["LwF"], **settings)
    for index, task in enumerate(list(digits)[:2]):
        learner.learn(task.train.images, task.train.labels.tolist())
        assert len(learner.classes) == 2 * (index + 1)
    assert len(learner.predict(digits[1].test.images)) == len(digits[1].test)


def test_the_method_of_the_page_is_resumed_exactly_and_recorded(outside: Outside) -> None:
    outside.write("lwf", page_on_methods("python")[0])
    settings = {"epochs": 4, "momentum": 0.9, "padding": 1, "learning_rate": 0.1, "width": 16}
    config = make_config("lwf:LwF", settings)
    straight, stopped = (Trainer(config, (8, 8, 1), 10) for _ in range(2))
    digits = load_benchmark("split-digits", limit=30)
    for trainer in (straight, stopped):
        learn(trainer, digits[0].train, 2)
    resumed = Trainer.from_state(*state_after(3, stopped, digits[1].train))
    for trainer in (straight, resumed):
        learn(trainer, digits[1].train, 2)
    first, second = straight.state()[0], resumed.state()[0]
    assert all(torch.equal(first[name], second[name]) for name in first)

    # On a card its steps are recorded, in which nothing may wait for the host.
    with on_a_card():
        trainer = Trainer(make_config("lwf:LwF", {**settings, "device": "cuda"}), (8, 8, 1), 10)
        recorded: list[bool] = []
        for task in list(digits)[:2]:
            for _ in trainer.learn(task.train, 2):
                recorded.append(trainer._step._recording.recorded)
        assert any(recorded)


def test_the_entry_point_of_the_page_names_the_method(outside: Outside, monkeypatch) -> None:
    outside.write("lwf", page_on_methods("python")[0])
    (lines,) = page_on_methods("toml")
    ((group, points),) = tomllib.loads(lines)["project"]["entry-points"].items()
    found = EntryPoints(EntryPoint(name, value, group) for name, value in points.items())
    monkeypatch.setattr(registry, "entry_points", found.select)
    monkeypatch.syspath_prepend(".")  # where a package would be installed
    assert "lwf" in available()
    config = ContinualLearner("lwf", distill_weight=0.5).config
    assert (config.method, config.to_dict()["distill_weight"]) == ("lwf", 0.5)


def keys(value: Any, path: str = "") -> set[str]:
    """Every key of a record, with what stands inside after a dot, a name of ours in capitals."""
    names = {
        "losses": "TERM",
        "evaluation": "HEAD",
        "class_il": "HEAD",
        "task_il": "HEAD",
        "versions": "PACKAGE",
        "config": "SETTING",
        "changed": "SETTING",
    }
    if not isinstance(value, dict):
        return {path}
    return {
        found
        for name, inner in value.items()
        for found in keys(inner, f"{path}.{names.get(path, name)}".removeprefix("."))
    }


def test_the_page_on_files_has_every_key_and_no_other(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    documented = [
        set(re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", part, re.MULTILINE))))
        for part in page.split("\n## ")
    ]
    settings = {"tasks": [2, 2], "limit": 20, "memory": 8, "tensorboard": True}
    run = train(make_config("cclis", {**QUICK, **settings, "output": str(tmp_path / "run")}))
    files = {f"{p.name}/" if p.is_dir() else p.name for p in run.path.iterdir()} - {".lock"}
    records = list(map(json.loads, (run.path / "metrics.jsonl").open(encoding="utf-8")))
    epochs = [record for record in records if "epoch" in record]
    evaluations = [record for record in records if "epoch" not in record]
    result = json.loads((run.path / "result.json").read_text())
    for found, written in zip(
        documented,
        [
            files,
            *(set().union(*map(keys, part)) for part in (epochs, evaluations, [result])),
            set(),
        ],
        strict=True,
    ):
        assert found == written
