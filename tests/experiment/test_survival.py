"""Real training processes that are killed, stopped, starved of disk, and gone on with."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cclis.cli import main
from cclis.experiment.interruption import STOPPED
from cclis.runs.directory import Run
from tests.conftest import FIGURES, QUICK
from tests.experiment.process import start, start_apart

KILLS = int(os.environ.get("CCLIS_KILLS", "5"))
SETTINGS = {
    **QUICK,
    "tasks": "[2,2,2]",
    "epochs": 10,
    "memory": 40,
    "threads": 1,
    "probe_epochs": 10,
    "mean_passes": 2,
    "score_passes": 6,
    "limit": 60,
    "checkpoint_minutes": 0.001,
}
TASKS = 3
TIMES = ("images_per_second", "seconds")


def flags(**settings: Any) -> list[str]:
    return [part for k, v in {**SETTINGS, **settings}.items() for part in (f"--{k}", str(v))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start("--output", str(folder), *flags())
    errors = process.wait()
    assert process.returncode == 0, errors
    return Run.open(folder)


def log_of(run: Run) -> list[str]:
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return [json.dumps(record) for record in records]


def assert_same_end(run: Run, other: Run) -> None:
    """Weights, momentum, memory, generators, matrices and log, bit by bit."""
    for index in range(TASKS):
        tensors, there = run.checkpoints.load(f"task-{index}")
        others, theirs = other.checkpoints.load(f"task-{index}")
        assert tensors.keys() == others.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
        assert there["journey"]["rows"] == theirs["journey"]["rows"]
    for scenario in ("class_il", "task_il"):
        assert run.result.scores(scenario) == other.result.scores(scenario)
    assert log_of(run) == log_of(other)


def at_random(rng: random.Random) -> Callable[[Path], bool]:
    """Some time after training began."""
    until = None

    def now(folder: Path) -> bool:
        nonlocal until
        if until is None and (folder / "metrics.jsonl").exists():
            until = time.monotonic() + rng.uniform(0, 0.8)
        return until is not None and time.monotonic() > until

    return now


def during_a_save(rng: random.Random) -> Callable[[Path], bool]:
    """While a temporary file lies among the checkpoints."""
    skip = rng.randrange(6)

    def now(folder: Path) -> bool:
        nonlocal skip
        if any((folder / "checkpoints").glob(".task-*")):
            skip -= 1
        return skip < 0

    return now


def after_training(rng: random.Random) -> Callable[[Path], bool]:
    """While the memory is scored and selected, or a probe fitted."""
    seen: set[str] | None = None
    until = None

    def now(folder: Path) -> bool:
        nonlocal seen, until
        # 60 samples a class; the memory of 40 joins from the second task on.
        ends = {p.name for p in (folder / "checkpoints").glob("task-*-step-*.json")}
        ends = {n for n in ends if n == "task-0-step-40.json" or n.endswith("-step-50.json")}
        seen = ends if seen is None else seen
        if until is None and ends - seen:
            until = time.monotonic() + rng.uniform(0, 0.3)
        return until is not None and time.monotonic() > until

    return now


@pytest.mark.soak
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    uninterrupted: Run, tmp_path: Path
) -> None:
    rng = random.Random(0)
    triggers = [at_random, during_a_save, after_training]
    kills, runs, hits = 0, 0, dict.fromkeys(triggers, 0)
    while kills < KILLS:
        runs += 1
        folder = tmp_path / f"run-{runs}"
        process = start("--output", str(folder), *flags())
        for number in range(10**6):
            kind = triggers[(kills + number) % 3]
            trigger = kind(rng)
            while process.poll() is None and (kills >= KILLS or not trigger(folder)):
                time.sleep(0.001)
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            kills, hits[kind] = kills + 1, hits[kind] + 1
            if not (folder / "config.yaml").exists():
                shutil.rmtree(folder, ignore_errors=True)
                process = start("--output", str(folder), *flags())
            else:
                process = start("--resume", str(folder))
        errors = process.wait()
        assert process.returncode == 0, errors
        assert_same_end(Run.open(folder), uninterrupted)
        left = {p.name for p in (folder / "checkpoints").iterdir()} - {"newest.json"}
        assert not [name for name in left if name.startswith(".")]
        assert {n for n in left if n.endswith(".json")} == {
            n.replace(".safetensors", ".json") for n in left if n.endswith(".safetensors")
        }
        shutil.rmtree(folder)
    FIGURES.update(kills=kills, runs=runs, moments={k.__name__: v for k, v in hits.items()})
    print(FIGURES)
    assert KILLS < 5 or all(hits.values())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_says_how_to_go_on(name: str, uninterrupted: Run, tmp_path) -> None:
    folder = tmp_path / "a run"
    # No checkpoint is due by time: what is there afterwards, the signal made.
    process = start("--output", str(folder), *flags(checkpoint_minutes=60))
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.002)
    process.send_signal(getattr(signal, name))
    errors = process.wait()
    assert process.returncode == STOPPED
    hint = f"cclis train --resume {shlex.quote(str(folder))}"
    assert f"stopped by {name}; resume with: {hint}" in errors
    assert "Traceback" not in errors
    assert len(Run.open(folder).checkpoints.names) >= 1
    if name != "SIGTERM":
        return  # the same checkpoint
    process = start("--resume", str(folder))
    errors = process.wait()
    assert process.returncode == 0, errors
    assert "resumed in task" in errors
    assert_same_end(Run.open(folder), uninterrupted)


def test_a_second_signal_ends_at_once(tmp_path) -> None:
    # Steps of seconds: the first signal waits for the end of one, the second does not. Where a step
    # happens to end in between, the first one is heeded, and it is tried again.
    long = {"encoder": "resnet18", "width": 64, "batch_size": 400, "limit": 200, "epochs": 50}
    for number in range(5):
        folder = tmp_path / str(number)
        process = start("--output", str(folder), *flags(**long, checkpoint_minutes=60))
        while not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait()
        if process.returncode != STOPPED:
            break
    assert process.returncode == -signal.SIGTERM


def test_two_processes_on_one_run_are_refused(tmp_path) -> None:
    folder = tmp_path / "run"
    first = start("--output", str(folder), *flags(epochs=200))
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.01)
    for _ in range(2):
        second = start("--resume", str(folder))
        errors = second.wait()
        assert second.returncode == 2
        assert f"another process is working on {folder}" in errors
        (folder / ".lock").unlink()  # which changes nothing
    assert first.poll() is None
    first.kill()
    first.wait()


def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_is_whole(tmp_path) -> None:
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    # Room for a few checkpoints; each task leaves one for good.
    room, keep = f"mount -t tmpfs -o size=400k tmpfs {disk}", f"cp -a {disk}/run {saved}"
    run = ("--output", str(disk / "run"), *flags(checkpoint_minutes=0))
    process = start_apart(*run, before=room, after=keep)
    errors = process.wait()
    assert process.returncode == 2, errors
    assert "No space left on device" in errors
    assert "Traceback" not in errors
    there = Run.open(saved)
    warnings: list[str] = []
    assert there.checkpoints.newest(warnings.append) is not None
    assert warnings == []
    assert not [p for p in (saved / "checkpoints").iterdir() if p.name.startswith(".")]
    # With room again, the run goes on to its end.
    process = start("--resume", str(saved), "--checkpoint_minutes", "5")
    errors = process.wait()
    assert process.returncode == 0, errors


def test_a_broken_disk_is_a_sentence_and_the_run_goes_on_once_it_works(
    uninterrupted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder, sync, synced = tmp_path / "run", os.fsync, Counter[int]()

    def broken(handle: int) -> None:
        synced[os.fstat(handle).st_ino] += 1
        if (folder / "checkpoints").exists() and synced[inode("checkpoints")] > 6:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)

    def inode(name: str) -> int:
        return (folder / name).stat().st_ino

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        arguments = flags(checkpoint_minutes=60)  # at the ends of tasks alone
        assert main(["train", "--output", str(folder), *arguments]) == 2
    assert f"cannot write {folder}" in (said := capsys.readouterr().err)
    assert "Input/output error" in said
    assert synced[inode("metrics.jsonl")]  # what a checkpoint counts on
    assert main(["train", "--resume", str(folder)]) == 0
    assert "resumed after task 1" in capsys.readouterr().err
    assert_same_end(Run.open(folder), uninterrupted)


def test_a_read_only_output_is_said_before_training(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    run = ("--output", str(disk / "run"), *flags())
    process = start_apart(*run, before=f"mount -t tmpfs -o ro tmpfs {disk}")
    errors = process.wait()
    assert process.returncode == 2
    assert "Read-only file system" in errors
    assert "training" not in errors


def test_the_temp_folder_may_be_on_another_file_system(uninterrupted: Run, tmp_path) -> None:
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    run = ("--output", str(tmp_path / "run"), *flags())
    # One without room for anything: a file that passed through it could not be written.
    no_room = f"mount -t tmpfs -o size=4k tmpfs {elsewhere}"
    process = start_apart(*run, before=no_room, TMPDIR=str(elsewhere))
    errors = process.wait()
    assert process.returncode == 0, errors
    assert_same_end(Run.open(tmp_path / "run"), uninterrupted)


def test_a_run_needs_no_network(uninterrupted: Run, tmp_path) -> None:
    process = start_apart("--output", str(tmp_path / "run"), *flags())
    errors = process.wait()
    assert process.returncode == 0, errors
    assert_same_end(Run.open(tmp_path / "run"), uninterrupted)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed in its last task."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    process = start("--output", str(folder), *flags())
    while not (folder / "checkpoints" / "task-1.json").exists():
        time.sleep(0.002)
    process.kill()
    process.wait()
    return folder


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "manifest", "lost"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: str, uninterrupted: Run, killed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    names = Run.open(folder).checkpoints.names
    newest = names[-1]
    file = folder / "checkpoints" / f"{newest}.safetensors"
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        file.write_bytes(content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:])
    elif damage == "gone":
        file.unlink()
    elif damage == "lost":
        # The kill may have come after a manifest and before it was noted as the newest.
        newest = json.loads((folder / "checkpoints" / "newest.json").read_text())["name"]
        for name in names[names.index(newest) :]:
            for suffix in (".safetensors", ".json"):
                (folder / "checkpoints" / f"{name}{suffix}").unlink()
    else:
        file.with_suffix(".json").write_text("{")
    process = start("--resume", str(folder))
    errors = process.wait()
    assert process.returncode == 0, errors
    assert newest in errors
    assert "going back to the" in errors
    assert_same_end(Run.open(folder), uninterrupted)
