"""Real training processes whose terminal closes, or whose output nobody reads."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cclis.cli import main
from cclis.experiment.interruption import STOPPED
from cclis.runs.directory import Run
from tests.conftest import quick
from tests.experiment.process import start_in_terminal, start_writing_to

NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
SETTINGS = {"method": "er", **quick("er"), "threads": 1, "tasks": "[2,2]", "limit": 20, "epochs": 3}


def flags(folder: Path, **settings: object) -> tuple[str, ...]:
    given = {"output": folder, **SETTINGS, **settings}
    return tuple(f"--{name}={value}" for name, value in given.items())


def until_training(folder: Path, process: BaseProcess) -> None:
    while not (folder / "metrics.jsonl").exists():
        assert process.is_alive()
        time.sleep(0.002)


def assert_ended_well(process: BaseProcess, folder: Path) -> None:
    process.join()
    assert process.exitcode == 0
    run = Run.open(folder)
    assert run.result.class_il
    assert len(run.records) == 2 * 3 + 2
    assert (folder / "report.html").is_file()


def test_a_closed_pipe_ends_no_run(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start_writing_to(str(pipe), flags(folder))
    with pipe.open() as file:
        assert file.readline().startswith("er on split-digits")
    assert_ended_well(process, folder)


@NEEDS_FULL
def test_a_full_disk_for_the_output_ends_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert_ended_well(start_writing_to("/dev/full", flags(folder)), folder)


def test_a_terminal_that_closes_saves_and_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keeper, inside = os.openpty()
    # No checkpoint is due by time: what is there afterwards, the signal made.
    slow = flags(folder, epochs=100_000, checkpoint_minutes=60)
    process = start_in_terminal(os.ttyname(inside), slow)
    until_training(folder, process)
    os.close(inside)
    os.close(keeper)
    # The shell of the terminal passes it on too.
    os.kill(process.pid or 0, signal.SIGHUP)
    process.join()
    assert process.exitcode == STOPPED
    (name,) = Run.open(folder).checkpoints.names
    assert name.startswith("task-0-step-")


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keeper, inside = os.openpty()
    process = start_in_terminal(os.ttyname(inside), flags(folder), ignoring_hangups=True)
    until_training(folder, process)
    os.close(inside)
    os.close(keeper)
    assert_ended_well(process, folder)


@NEEDS_FULL
def test_the_exit_code_holds_where_nothing_can_be_written() -> None:
    # What is only printed, and was not, is no success.
    for arguments in (("--memory=-5",), ("--print_config",)):
        process = start_writing_to("/dev/full", arguments)
        process.join()
        assert process.exitcode == 2


@NEEDS_FULL
@pytest.mark.parametrize("arguments", [["train", "--print_config"], ["benchmarks"], ["--version"]])
def test_what_is_only_printed_and_was_not_is_said(arguments, capsys, monkeypatch) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    with monkeypatch.context() as there:
        there.setattr(sys, "stdout", full)
        assert main(arguments) == 2
    with pytest.raises(OSError, match="No space"):
        full.close()
    said = capsys.readouterr().err
    assert said == "cclis: error: cannot write the output: No space left on device\n"
