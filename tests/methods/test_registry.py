"""Methods by name: ours, those of others, and what is imported when."""

from __future__ import annotations

import dataclasses
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cclis import ContinualLearner, InputError, load_benchmark
from cclis.cli import main
from cclis.experiment.loop import train
from cclis.methods import available, get, registry
from cclis.methods.er import ER, ERConfig
from cclis.runs import Run
from cclis.study.catalogue import SCALES, STUDIES, Variant
from cclis.study.plan import plan
from tests.conftest import Outside, quick

MINE = """
from cclis.methods.er import ER

class Mine(ER):
    pass
"""
NAMED = ["--method", "mine:Mine"]
FLAGS = [f"--{k}={v}" for k, v in {**quick("er"), "tasks": 2, "limit": 20, "memory": 10}.items()]


def cut(run: Run) -> Any:
    """Leave of a run what its first task left; returns what its result was."""
    matrices = run.result.class_il
    for path in [run.path / "result.json", *(run.path / "checkpoints").glob("task-1*")]:
        path.unlink()
    return matrices


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says as it refuses."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_imports_nothing_until_its_method_is_named_again(
    outside: Outside, capsys: pytest.CaptureFixture[str]
) -> None:
    outside.write("mine", MINE)
    assert main(["train", *NAMED, *FLAGS, "--output", "run"]) == 0
    run = Run.open("run")
    assert run.result.method == "mine:Mine"
    assert "mine:Mine" in run.result.versions
    before = cut(run)
    outside.forget()
    for command in (["train", "--resume", "run"], ["evaluate", "run"]):
        said = refused(capsys, *command)
        assert "'mine:Mine' is not one of ours" in said
        assert "--method mine:Mine" in said
        assert "mine" not in sys.modules
    assert main(["train", "--resume", "run", *NAMED]) == 0
    assert run.result.class_il == before
    outside.forget()
    assert main(["evaluate", "run", *NAMED, "--output", "again.json"]) == 0
    used = "cannot resume: the run used method mine:Mine, not er"
    assert used in refused(capsys, "train", "--resume", "run", "--method", "er")
    outside.forget()
    page = Path("run/report.html").read_bytes()
    Path("run/report.html").unlink()
    assert main(["report", "run"]) == 0
    assert Path("run/report.html").read_bytes() == page
    assert "mine" not in sys.modules


def test_a_first_task_is_taken_over_by_the_same_method(outside: Outside) -> None:
    outside.write("mine", MINE)
    assert main(["train", *NAMED, *FLAGS, "--output", "one"]) == 0
    outside.forget()
    taken = [*NAMED, *FLAGS, "--start_from", "one", "--output", "two"]
    assert main(["train", *taken]) == 0
    assert Run.open("two").result.class_il == Run.open("one").result.class_il


def test_the_processes_of_a_study_know_the_method(outside: Outside) -> None:
    outside.write("mine", MINE)
    mine = dataclasses.replace(STUDIES["methods"], variants=(Variant("Mine", "mine:Mine"),))
    where: dict[str, Any] = {"benchmarks": ["split-digits"], "seeds": [0], "folder": Path("study")}
    (run,) = plan(mine, scale=SCALES["smoke"], device="cpu", **where)
    before = cut(train(run.config))
    outside.forget()
    flags = ["--scale=smoke", "--device=cpu", "--jobs=1", "--output=study"]
    assert main(["study", "methods", *NAMED, *flags]) == 0
    assert run.result.class_il == before
    assert "mine:Mine" in Path("study/methods.html").read_text()


def test_a_learner_is_loaded_with_the_method_named_again(outside: Outside) -> None:
    outside.write("mine", MINE)
    digits = load_benchmark("split-digits", limit=20)
    by_name, by_class = (
        ContinualLearner(method, 10, padding=1, **quick("er")) for method in ("mine:Mine", ER)
    )
    for learner in (by_name, by_class):
        learner.learn(digits[0].train.images, digits[0].train.labels)
    # The name of a method changes no number.
    test = digits[0].test.images
    np.testing.assert_array_equal(by_name.predict_proba(test), by_class.predict_proba(test))
    by_name.save("model")
    outside.forget()
    for others in ({}, {"method": ER}):
        with pytest.raises(InputError, match=r"'mine:Mine' is not one of ours .* or method="):
            ContinualLearner.load("model", **others)
        assert "mine" not in sys.modules
    loaded = ContinualLearner.load("model", method="mine:Mine")
    for learner in (loaded, by_class):
        learner.learn(digits[1].train.images, digits[1].train.labels)
    np.testing.assert_array_equal(loaded.predict_proba(test), by_class.predict_proba(test))


def test_a_bare_subclass_is_a_method() -> None:
    class Mine(ER):
        pass

    learner = ContinualLearner(method=Mine, memory=10)
    assert type(learner.config) is ERConfig
    assert get(learner.config.method) is Mine
    assert get("er") is get(ER) is ER


BAD = """
import cclis.methods

number = 3

class Plain:
    pass

class Half(cclis.methods.Method):
    pass
"""


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("bad:Gone", "bad:Gone (AttributeError: module 'bad' has no attribute 'Gone')"),
        ("bad:", "bad:"),
        ("gone:LwF", "gone:LwF (ModuleNotFoundError: No module named 'gone')"),
        ("failing:LwF", "cannot import the method failing:LwF (ZeroDivisionError: division by"),
        ("unreadable:LwF", "cannot import the method unreadable:LwF (SyntaxError: "),
        ("bad:number", "3 is not a method: it must be a subclass of cclis.methods.Method"),
        ("bad:Plain", "Plain is not a method: it must be a subclass of cclis.methods.Method"),
        ("bad:Half", "the method Half lacks losses, make_network"),
    ],
)
def test_what_is_no_method_gets_a_sentence(
    method: str, part: str, outside: Outside, capsys: pytest.CaptureFixture[str]
) -> None:
    outside.write("bad", BAD)
    outside.write("failing", "1 / 0")
    outside.write("unreadable", "class LwF(")
    assert part in refused(capsys, "train", "--method", method)
    assert part in refused(capsys, "study", "methods", "--method", method, "--dry_run")
    with pytest.raises(InputError):
        ContinualLearner(method)
    assert method not in available()
    assert not Path("runs").exists()


def test_entry_points_name_methods_and_hide_none_of_ours(outside: Outside, monkeypatch) -> None:
    outside.write("mine", MINE)
    outside.write("failing", "1 / 0")
    points = [("mine", "mine:Mine"), ("er", "mine:Mine"), ("failing", "failing:X")]
    found = EntryPoints(EntryPoint(*point, "cclis.methods") for point in points)
    monkeypatch.setattr(registry, "entry_points", found.select)
    monkeypatch.syspath_prepend(".")  # where a package would be installed
    assert available() == [*registry.OURS, "failing", "mine"]
    assert "mine" not in sys.modules
    assert get("mine").__name__ == "Mine"
    assert get("er") is ER
    with pytest.raises(InputError, match=r"cannot import the method failing \(ZeroDivisionError"):
        get("failing")
    with pytest.raises(InputError, match=r"unknown method 'min'. Did you mean 'mine'\?"):
        get("min")


def test_a_file_in_the_current_folder_hides_no_package(outside: Outside) -> None:
    outside.write("json", MINE)
    assert main(["train", "--method", "json:Mine"]) == 2


def test_a_config_file_that_a_person_names_may_name_a_method(outside: Outside) -> None:
    outside.write("mine", MINE)
    Path("own.yaml").write_text("method: mine:Mine\nepochs: 1\n")
    assert main(["train", "--config", "own.yaml", *FLAGS, "--output", "run"]) == 0
    assert Run.open("run").result.method == "mine:Mine"
