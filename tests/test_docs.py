"""What the documents promise is there."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cclis import ContinualLearner, load_benchmark
from cclis.cli import main
from cclis.engine.trainer import Trainer
from cclis.experiment.loop import train
from cclis.methods import make_config
from cclis.runs.directory import Run
from cclis.settings import TuneOptions
from cclis.settings import config as config_module
from cclis.study.run import STUDIES
from cclis.tune.space import space_of
from tests.conftest import CONFIGS, METHODS, QUICK, on_a_card, state_after

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROMISES = NAMED.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "name"), PROMISES)
def test_every_promise_names_a_test_that_is_there(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_promises() -> None:
    assert len(PROMISES) > 30


def imported(name: str, text: str, folder: Path, monkeypatch: Any) -> Any:
    """A module of this text."""
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_method_of_the_page_on_adding_methods_works(
    monkeypatch, tmp_path: Path, capsys
) -> None:
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    # Put back afterwards what the page adds.
    for known in (CONFIGS, METHODS):
        monkeypatch.setitem(known, "lwf", None)
    settings_of, method_of, lists_of, tests_of = blocks
    module = imported("lwf_settings", settings_of, tmp_path, monkeypatch)
    monkeypatch.setattr(config_module, "LwFConfig", module.LwFConfig, raising=False)
    imported("cclis.methods.lwf", method_of + lists_of, tmp_path, monkeypatch)
    assert STUDIES["methods"].rows[-1].method == "lwf"
    ours = "lint.isort.known-first-party = ['cclis']"  # also what is not there to be found
    places = {"src/cclis/methods/lwf.py": method_of, "tests/methods/test_lwf.py": tests_of}
    for file, text in places.items():
        lint = ("ruff", "check", "--config", ours, "--stdin-filename", file, "-")
        subprocess.run([sys.executable, "-m", *lint], input=text, text=True, check=True, cwd=ROOT)

    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        flags = ("--method", "lwf", "--distill_weight", "0.5", "--epochs", "1")
        assert main(["train", *flags, "--limit", "10", "--output", "by-command"]) == 0
        assert Run.open("by-command").config.to_dict()["distill_weight"] == 0.5
        assert main(["train", *flags, "--distil_weight", "2"]) == 2
        capsys.readouterr()
        assert main(["study", "methods", "--method", "lwf", "er", "joint", "--dry_run"]) == 0
    assert "seq-cifar10-lwf-0-seed0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--method", "lwf", "--help"])
    assert "T of the distillation" in capsys.readouterr().out
    assert space_of(make_config("lwf", {}), TuneOptions(), ()).keys() == {"learning_rate"}

    tests = imported("test_lwf", tests_of, tmp_path, monkeypatch)
    tests.test_old_classes_follow_the_network_of_before()
    tests.test_it_forgets_less_than_fine_tuning(tmp_path)

    settings = {"epochs": 10, "momentum": 0.9, "padding": 1, "flip": 0.0, "learning_rate": 0.1}
    config = make_config("lwf", settings)
    straight, stopped = (Trainer(config, (8, 8, 1), 10) for _ in range(2))
    digits = load_benchmark("split-digits", limit=30)
    for trainer in (straight, stopped):
        trainer.learn(digits[0].train, 2)
    resumed = Trainer.from_state(*state_after(7, stopped, digits[1].train))
    for trainer in (straight, resumed):
        trainer.learn(digits[1].train, 2)
    first, second = straight.state()[0], resumed.state()[0]
    assert all(torch.equal(first[name], second[name]) for name in first)

    learner = ContinualLearner("lwf", **settings)
    for index, task in enumerate(list(digits)[:2]):
        learner.learn(task.train.images, task.train.labels.tolist())
        assert len(learner.classes) == 2 * (index + 1)
    assert len(learner.predict(digits[1].test.images)) == len(digits[1].test)

    # On a card its steps are recorded, in which nothing may wait for the host.
    with on_a_card():
        trainer = Trainer(make_config("lwf", {**settings, "device": "cuda"}), (8, 8, 1), 10)
        recorded: list[bool] = []
        for task in list(digits)[:2]:
            trainer.learn(
                task.train, 2, on_step=lambda: recorded.append(trainer._step._recording.recorded)
            )
        assert any(recorded)


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
