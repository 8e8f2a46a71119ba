"""Places that cannot be used: a folder of somebody else, too long a path, what is no path."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cclis import ContinualLearner, InputError, Run, load_benchmark
from cclis.cli import main
from cclis.settings import StudyOptions, TuneOptions
from tests.conftest import QUICK
from tests.unprivileged import of_somebody_else

FIXTURES = Path(__file__).parents[1] / "fixtures" / "d376e8e" / "cclis"
FLAGS = [f"--{name}={value}" for name, value in QUICK.items()]
COMMANDS = {
    "report": ["report", "PLACE"],
    "report of several": ["report", "finished", "PLACE"],
    "report elsewhere": ["report", "finished", "--output", "PLACE"],
    "evaluate": ["evaluate", "PLACE"],
    "evaluate into a file": ["evaluate", "finished", "--output", "PLACE"],
    "data": ["data", "--data", "PLACE"],
    "tune": ["tune", *FLAGS, "--output", "PLACE"],
    "tune a grid": ["tune", *FLAGS, "--output", "tuned", "--grid", "PLACE"],
    "study": ["study", "methods", "--scale=smoke", "--output", "PLACE"],
    "study of npz": ["study", "methods", "--benchmark", "npz", "--output", "s", "--data", "PLACE"],
    "train --resume": ["train", "--resume", "PLACE"],
    "train --output": ["train", *FLAGS, "--output", "PLACE"],
    "train --config": ["train", "--config", "PLACE"],
    "train --start_from": ["train", *FLAGS, "--start_from", "PLACE"],
    "train npz": ["train", "--benchmark=npz", "--data", "PLACE"],
    "train image-folder": ["train", "--benchmark=image-folder", "--data", "PLACE"],
    "train seq-cifar10": ["train", "--benchmark=seq-cifar10", "--data", "PLACE"],
    "train seq-tinyimagenet": ["train", "--benchmark=seq-tinyimagenet", "--data", "PLACE"],
}
LOOKING = [
    *("report", "evaluate", "data", "study", "train --resume", "train --start_from"),
    *("train npz", "train image-folder", "train seq-cifar10", "train seq-tinyimagenet"),
]
"""Those that look into the folder that they are given."""
LONG = "a" * 5000


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "finished", "finished")


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody else that holds all that is asked for."""
    folder = tmp_path / "theirs"
    shutil.copytree(FIXTURES / "finished", folder)
    shutil.copy(FIXTURES / "learner.cclis", folder)
    with of_somebody_else(folder):
        yield folder


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that the command says as it refuses with exit code 2 and makes nothing."""
    before = sorted(Path().iterdir())
    assert main(arguments) == 2
    said = capsys.readouterr().err
    error = said.splitlines()[-1]
    assert error.startswith("cclis: error: ")
    assert "Traceback" not in said
    assert sorted(Path().iterdir()) == before
    return error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_somebody_else_is_named(command, theirs: Path, capsys) -> None:
    place = str(theirs / "place")
    error = refused(capsys, [place if word == "PLACE" else word for word in COMMANDS[command]])
    assert str(theirs) in error
    assert "Permission denied" in error


@pytest.mark.parametrize("command", LOOKING)
def test_a_folder_that_nobody_may_look_into_is_not_called_empty(
    command, theirs: Path, capsys
) -> None:
    place = str(theirs)
    error = refused(capsys, [place if word == "PLACE" else word for word in COMMANDS[command]])
    assert place in error
    assert "Permission denied" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_is_too_long_is_said(command, capsys) -> None:
    error = refused(capsys, [LONG if word == "PLACE" else word for word in COMMANDS[command]])
    assert "aaa" in error
    assert "File name too long" in error
    assert len(error) < 500


@pytest.mark.parametrize("command", COMMANDS)
def test_a_null_character_is_refused(command, capsys) -> None:
    error = refused(capsys, ["a\0b" if word == "PLACE" else word for word in COMMANDS[command]])
    assert r"a\x00b" in error
    assert "null character" in error


@pytest.mark.parametrize("name", ["output", "start_from", "data"])
@pytest.mark.parametrize(("value", "shown"), [(r"a\0b", r"a\x00b"), (r"a\uD800b", r"a\ud800b")])
def test_a_config_names_places_that_there_can_be(name, value, shown, capsys) -> None:
    Path("own.yaml").write_text(f'seed: 1\n{name}: "{value}"\n')
    error = refused(capsys, ["train", "--config", "own.yaml"])
    assert f"own.yaml, line 2: {name} must be a path" in error
    assert shown in error


def test_options_of_commands_name_places_that_there_can_be() -> None:
    for options, name in ((StudyOptions, "output"), (StudyOptions, "data"), (TuneOptions, "grid")):
        with pytest.raises(InputError, match=f"{name} must be a path"):
            options(**{name: "a\0b"})


def test_python_gets_an_input_error_too(theirs: Path) -> None:
    for place in (theirs, theirs / "place", LONG):
        with pytest.raises(InputError):
            Run.open(place)
        for name in ("npz", "image-folder", "seq-cifar10", "seq-tinyimagenet"):
            with pytest.raises(InputError):
                load_benchmark(name, place)
        with pytest.raises(InputError):
            ContinualLearner.load(place)
    learner = ContinualLearner.load(FIXTURES / "learner.cclis")
    for place in (theirs / "learner.cclis", theirs / "new" / "learner.cclis", LONG):
        with pytest.raises(InputError):
            learner.save(place)


def test_what_nobody_may_read_is_not_called_damaged(tmp_path: Path, capsys) -> None:
    Path("own.npz").touch(mode=0)
    with of_somebody_else(tmp_path / "own.npz"):
        error = refused(capsys, ["train", "--benchmark=npz", "--data=own.npz"])
    assert "own.npz" in error
    assert "Permission denied" in error


def test_checkpoints_that_nobody_may_read_cost_no_log(tmp_path: Path, capsys) -> None:
    shutil.copytree(FIXTURES / "stopped", "stopped")
    log = Path("stopped/metrics.jsonl").read_bytes()
    assert log
    with of_somebody_else(tmp_path / "stopped" / "checkpoints"):
        error = refused(capsys, ["train", "--resume", "stopped"])
    assert "stopped/checkpoints" in error
    assert "Permission denied" in error
    assert Path("stopped/metrics.jsonl").read_bytes() == log


def test_a_run_of_somebody_else_among_others_is_left_out_and_named(theirs: Path, capsys) -> None:
    assert main(["report", ".", "--output", "compared"]) == 0
    said = capsys.readouterr()
    assert f"cannot use {theirs.name}/result.json: Permission denied; it is left out" in said.err
    assert "compared/comparison.html" in said.out
