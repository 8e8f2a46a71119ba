"""Every system call of a save fails, in every way: a sentence, and nothing is lost."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cclis.engine.records import Epoch
from cclis.errors import InputError
from cclis.methods import make_config
from cclis.runs.directory import Run
from tests.conftest import QUICK
from tests.report.made import result

CODES = ["EIO", "ENOSPC", "EACCES", "EPERM", "EROFS", "EDQUOT", "EINVAL", "ENOLCK"]
"""Each for one call; a broken disk and one that is read-only from then on too."""
EPOCH = Epoch(0, 0, 3, 1.5, {"loss": 1.5}, 0.1, 9.0)
NEWEST = "task-1-step-7"
LOCK = ".lock"


def state(value: float) -> Any:
    return {"x": torch.full((3,), value)}, {"about": "it"}


class Faults:
    """The system calls that touch a folder; one of them fails, or all from one on."""

    def __init__(self, folder: Path, at: int | None = None, code: int = 0, lasting: bool = False):
        self.folder, self.at, self.code, self.lasting = str(folder), at, code, lasting
        self.calls: list[tuple[str, str]] = []
        self.paths: dict[int, str] = {}

    def call(self, name: str, path: Any) -> None:
        handle, path = path, self.paths.get(path, "") if isinstance(path, int) else os.fspath(path)
        if not path.startswith(self.folder):
            return
        number = len(self.calls)
        self.calls.append((name, os.path.relpath(path, self.folder)))
        # What is not unlocked at all stays locked until the process ends.
        lasting = self.lasting and name != "unlock"
        if self.at is not None and (number == self.at or (lasting and number > self.at)):
            named = () if isinstance(handle, int) else (path,)
            raise OSError(self.code, os.strerror(self.code), *named)

    @contextmanager
    def active(self) -> Iterator[Faults]:
        faults, untouched = self, builtins.open
        real_open, real_close, real_flock = os.open, os.close, fcntl.flock

        class Raw(io.FileIO):
            def __init__(self, path: Any, mode: str):
                faults.call("open", path)
                super().__init__(path, mode)
                faults.paths[self.fileno()] = os.fspath(path)

            def write(self, data: Any) -> int:
                faults.call("write", self.fileno())
                return super().write(data)

            def close(self) -> None:
                if self.closed:
                    return
                path = faults.paths.pop(self.fileno())
                super().close()
                faults.call("close", path)

        def opened(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if isinstance(path, int) or not os.fspath(path).startswith(faults.folder):
                return untouched(path, mode, *rest, **more)
            raw = Raw(path, mode.replace("b", ""))
            buffered: Any = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, "utf-8")

        def os_open(path: Any, *rest: Any, **more: Any) -> int:
            faults.call("open", path)
            handle = real_open(path, *rest, **more)
            faults.paths[handle] = os.fspath(path)
            return handle

        def os_close(handle: int) -> None:
            path = faults.paths.pop(handle, "")
            real_close(handle)
            faults.call("close", path)

        def fsync(handle: int) -> None:
            faults.call("fsync", handle)

        def flock(handle: int, how: int) -> None:
            faults.call("unlock" if how == fcntl.LOCK_UN else "lock", handle)
            real_flock(handle, how)

        def ordinary(name: str) -> Any:
            real = getattr(os, name)

            def wrapped(path: Any, *rest: Any, **more: Any) -> Any:
                faults.call(name, path)
                return real(path, *rest, **more)

            return wrapped

        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "unlink", "truncate", "stat", "listdir"):
                patch.setattr(os, name, ordinary(name))
            for name, new in (("open", os_open), ("close", os_close), ("fsync", fsync)):
                patch.setattr(os, name, new)
            patch.setattr(fcntl, "flock", flock)
            patch.setattr(builtins, "open", opened)
            patch.setattr(io, "open", opened)
            yield self


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints and a log of two lines."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run = Run.create(make_config("cclis", {**QUICK, "output": str(folder)}))
    for _ in range(2):
        run.log(EPOCH)
    for number, name in enumerate(("task-0", "task-1-step-5", "task-1-step-6")):
        run.checkpoints.save(name, state(float(number)))
    return folder


def work(run: Run) -> None:
    """What a run does that goes on, saves and ends."""
    with run.alone():
        run.unlog(run.logged // 2)
        run.log(EPOCH)
        run.sync_log()
        run.checkpoints.save(NEWEST, state(3.0))
        run.save_result(result())


def harmless(name: str, path: str, code: str) -> bool | None:
    """Whether the work is done although a call fails; None where it may be either."""
    refused = code in ("EACCES", "EPERM")
    if path == LOCK or name in ("stat", "listdir"):
        return None  # a library has more than one way
    if path == "." and name in ("open", "close"):
        return True if name == "open" and refused else None  # to lock it, or to sync it
    if path in (".", "checkpoints"):
        return {"open": refused, "fsync": code == "EINVAL", "lock": True}.get(name, False)
    return name == "unlink"  # of what is no longer needed


def said_of(run: Run, faults: Faults) -> str | None:
    """Do the work with faults; returns what is said, if it fails."""
    try:
        with faults.active():
            work(run)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("code", CODES)
def test_every_system_call_of_a_save_may_fail(code: str, saved: Path, tmp_path: Path) -> None:
    number = getattr(errno, code)
    whole = tmp_path / "whole"
    shutil.copytree(saved, whole)
    clean = Faults(whole)
    handles = len(os.listdir("/proc/self/fd"))
    assert said_of(Run.open(whole), clean) is None
    assert {name for name, _ in clean.calls} >= {
        *("open", "write", "fsync", "replace", "close", "unlink", "truncate", "lock", "unlock"),
    }
    line = len((saved / "metrics.jsonl").read_bytes()) // 2
    for at, call in enumerate(clean.calls):
        if call[0] in ("stat", "listdir") and code not in ("EIO", "EACCES"):
            continue  # nothing is written there
        for lasting in {False, code in ("EIO", "EROFS")}:
            folder = tmp_path / f"{at}-{lasting}"
            shutil.copytree(saved, folder)
            run = Run.open(folder)
            said = said_of(run, Faults(folder, at, number, lasting))
            assert len(os.listdir("/proc/self/fd")) == handles, call
            if said is not None:
                assert str(folder) in said, call
                assert os.strerror(number) in said or "another process" in said, call
            if not lasting and (expected := harmless(*call, code)) is not None:
                assert (said is None) == expected, (call, said)
            # Once the system works again, the newest checkpoint is there, and so is the log.
            with run.alone():
                run.clean()
                found = run.checkpoints.newest(pytest.fail)
                assert found is not None
                value = found[0]["x"][0].item()
                assert value in (2.0, 3.0), call
                assert value == 3.0 or said is not None, call
                run.unlog(line)
            assert (folder / "metrics.jsonl").read_bytes() * 2 == (
                saved / "metrics.jsonl"
            ).read_bytes()
            left = [path.name for path in folder.rglob(".*") if path.name != LOCK]
            assert left == [], call
            assert {p.stem for p in (folder / "checkpoints").glob("*.safetensors")} == set(
                run.checkpoints.names
            )
            shutil.rmtree(folder)
