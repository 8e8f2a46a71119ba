"""Which settings a command line asks for: recipe, file and flags together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cclis.cli import main
from cclis.data.benchmarks import BENCHMARKS
from cclis.evaluation import heads as heads_module
from cclis.runs import Run
from tests.conftest import quick

SMALL = {**quick("cclis"), "tasks": 2, "limit": 10, "memory": 10}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CCLIS_DATA", str(tmp_path / "datasets"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The settings that these arguments ask for."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments, "--print-config"])
    assert not stopped.value.code
    settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return settings


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not Path("runs").exists()
    return line


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        (None, [], (100, 500)),
        (None, ["--epochs", "4"], (4, None)),
        (None, ["--epochs=4", "--first-epochs=7"], (4, 7)),
        (None, ["--first_epochs", "7"], (100, 7)),
        ("epochs: 4", [], (4, None)),
        ("epochs: 4\nfirst_epochs: 7", [], (4, 7)),
        ("first_epochs: 7", [], (100, 7)),
        ("first_epochs: 7", ["--epochs=4"], (4, 7)),
        ("epochs: 4\nfirst_epochs: 7", ["--epochs=5"], (5, None)),
    ],
)
def test_epochs_that_are_given_beat_the_first_epochs_of_a_recipe(
    file: str | None, flags: list[str], expected: tuple[int, int | None], capsys
) -> None:
    asked = ["--benchmark=seq-cifar10", *flags]
    if file is not None:
        Path("own.yaml").write_text(f"recipe: seq-cifar10/cclis-200\n{file}\n")
        asked = ["--config=own.yaml", *flags]
    settings = printed(capsys, *asked)
    assert (settings["epochs"], settings["first_epochs"]) == expected
    # The rest of the recipe stands.
    assert (settings["learning_rate"], settings["recipe"]) == (1.0, "seq-cifar10/cclis-200")


def test_settings_of_another_method_are_dropped_with_one_line(capsys) -> None:
    of_cclis = printed(capsys, "--benchmark=seq-cifar10", "--seed=7")
    Path("cclis.yaml").write_text(yaml.safe_dump(of_cclis))
    other = ["--config=cclis.yaml", "--method=er"]
    with pytest.raises(SystemExit):
        main(["train", *other, "--print-config"])
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("cclis.yaml: er does not have these settings, dropped: ")
    dropped = set(line.partition("dropped: ")[2].split(", "))
    settings = yaml.safe_load(said.out)
    assert dropped == of_cclis.keys() - settings.keys()
    assert {"temperature", "distill_weight", "embedding"} < dropped
    assert (settings["method"], settings["seed"], settings["recipe"]) == ("er", 7, None)
    # What no method has is a mistake, whichever method is asked for.
    Path("cclis.yaml").write_text(yaml.safe_dump({**of_cclis, "temprature": 1.0}))
    assert main(["train", *other]) == 2
    assert "er has no setting 'temprature'" in capsys.readouterr().err


def test_settings_of_another_method_are_refused_where_none_is_named(capsys) -> None:
    Path("own.yaml").write_text("method: er\nepochs: 3\n\ntemperature: 0.1\n")
    said = refused(capsys, "--config=own.yaml")
    assert "own.yaml, line 4: temperature is a setting of cclis and co2l alone, not of er" in said


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("epochs: 3\n# a comment\nepohcs: 4\n", "own.yaml, line 3: cclis has no setting 'epohcs'."),
        ("seed: 1\nbatch_size: 1\n", "own.yaml, line 2: batch_size must be at least 2, not 1"),
        ("seed: 1\n\n\nflip: often\n", "own.yaml, line 4: flip must be float, not 'often'"),
        ("seed: 1\nencoder: resnet81\n", "own.yaml, line 2: unknown encoder 'resnet81'"),
        ("seed: 1\nmethod: cclsi\n", "own.yaml, line 2: unknown method 'cclsi'"),
        ("seed: 1\nrecipe: seq-cifar10/err-1\n", "own.yaml, line 2: unknown recipe"),
        ("seed: 1\nseed: 2\n", "line 2"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(content: str, part: str, capsys) -> None:
    Path("own.yaml").write_text(content)
    assert main(["train", "--config=own.yaml"]) == 2
    assert part in capsys.readouterr().err
    assert not Path("runs").exists()


def test_flags_may_have_dashes_and_lists_commas_or_spaces(capsys) -> None:
    given = printed(capsys, "--batch-size", "16", "--learning-rate=0.5", "--skip-corrupt")
    assert (given["batch_size"], given["learning_rate"], given["skip_corrupt"]) == (16, 0.5, True)
    for heads in (["--heads", "means", "linear"], ["--heads=[means, linear]"]):
        assert printed(capsys, *heads)["heads"] == ["means", "linear"]
    assert printed(capsys, "--heads", "means")["heads"] == ["means"]
    assert printed(capsys, "--tasks", "4", "6")["tasks"] == [4, 6]
    # A dash within a value stays.
    assert printed(capsys, "--benchmark", "seq-cifar10", "--data", "my-data")["data"] == "my-data"
    assert printed(capsys, "--output=a-b--c")["output"] == "a-b--c"


def test_the_bare_command_shows_the_help(capsys) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert bare == capsys.readouterr().out
    for command in ("train", "evaluate", "tune", "report", "study", "benchmarks", "data"):
        assert f"\n  {command} " in bare


@pytest.mark.parametrize("tasks", [["11"], ["6", "5"], ["0"], ["[3,-1]"]])
def test_tasks_that_cannot_be_are_refused_before_images_are_read(
    tasks: list[str], capsys, monkeypatch
) -> None:
    monkeypatch.setattr("cclis.data.benchmarks.read_digits", lambda: pytest.fail("it was read"))
    assert "task" in refused(capsys, "--tasks", *tasks)
    assert BENCHMARKS["split-digits"].sizes is not None


@pytest.mark.parametrize(
    ("memory", "note"), [(100, "\n"), (90, ", the nearest to a memory of 90\n")]
)
def test_the_recipe_that_is_taken_is_said_and_recorded(memory: int, note: str, capsys) -> None:
    flags = [f"--{name}={value}" for name, value in {**SMALL, "memory": memory}.items()]
    assert main(["train", *flags, "--output", "run"]) == 0
    assert f"\nrecipe split-digits/cclis-100{note}" in capsys.readouterr().err
    result = json.loads(Path("run/result.json").read_text())
    assert result["recipe"] == "split-digits/cclis-100"
    assert result["changed"].items() >= {"width": 8, "probe_epochs": 2}.items()
    assert "learning_rate" not in result["changed"]
    assert Run.open("run").config.recipe == "split-digits/cclis-100"


def test_a_recipe_may_be_named_or_left_out(capsys) -> None:
    named = printed(capsys, "--recipe", "seq-cifar10/cclis-500", "--memory", "300")
    assert (named["recipe"], named["memory"]) == ("seq-cifar10/cclis-500", 300)
    assert (named["benchmark"], named["first_epochs"]) == ("seq-cifar10", 500)
    without = printed(capsys, "--recipe=none", "--benchmark=seq-cifar10")
    assert (without["recipe"], without["first_epochs"]) == (None, None)


def test_a_recipe_of_another_method_is_refused(capsys) -> None:
    said = refused(capsys, "--method=er", "--recipe=seq-cifar10/cclis-500")
    assert "the recipe seq-cifar10/cclis-500 is for another method than er" in said


def test_only_the_heads_that_are_asked_for_are_fitted(capsys, monkeypatch) -> None:
    fitted: list[str] = []
    for name, fit in heads_module.HEADS.items():

        def counted(view: Any, name: str = name, fit: Any = fit) -> Any:
            fitted.append(name)
            return fit(view)

        monkeypatch.setitem(heads_module.HEADS, name, counted)
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["train", *flags, "--heads", "means", "--output", "run"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    # The method's own is always among them.
    assert set(result["class_il"]) == set(fitted) == {"means", "prototype"}
    assert result["main_head"] == "prototype"
    said = refused(capsys, *flags, "--heads", "means", "prototpye")
    assert "unknown head 'prototpye'. Did you mean 'prototype'?" in said
