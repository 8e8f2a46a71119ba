from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat

import pytest

from cclis.engine.records import Epoch
from cclis.errors import InputError
from cclis.methods import make_config
from cclis.runs.directory import Run
from tests.conftest import QUICK, refused_at_once, sparse
from tests.report.made import result

EPOCH = Epoch(0, 0, 3, 1.5, {"loss": 1.5}, 0.1, 9.0)


def config(**settings):
    return make_config("cclis", {**QUICK, **settings})


def test_the_same_name_twice_makes_two_directories(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third = (Run.create(config(seed=7)) for _ in range(3))
    assert str(first.path) == "runs/split-digits-cclis-200-seed7"
    assert len({first.path, second.path, third.path}) == 3
    assert Run.open(second.path).config == config(seed=7)


def test_an_output_with_anything_in_it_is_refused(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    Run.create(config(output=str(tmp_path / "there")))
    with pytest.raises(InputError, match="exists already"):
        Run.create(config(output=str(tmp_path / "there")))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        Run.create(config(output=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        Run.create(config(output=str(tmp_path / "file" / "run")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="cannot"):
        Run.create(config(output=str(tmp_path / "locked" / "run")))


def test_what_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no config\.yaml"):
        Run.open(tmp_path)
    (tmp_path / "config.yaml").write_text("epochs: 3\n")
    with pytest.raises(InputError, match="not a run's config"):
        _ = Run.open(tmp_path).config
    with pytest.raises(InputError, match="did not end"):
        _ = Run.open(tmp_path).result


def test_logs_and_results_are_read_back(tmp_path) -> None:
    run = Run.create(config(output=str(tmp_path / "run")))
    epochs = [Epoch(task, 0, 3, 1.5 - task, {"loss": 1.5 - task}, 0.1, 9.0) for task in (0, 1)]
    for epoch in epochs:
        run.log(epoch)
    assert run.records == epochs
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.5, 0.5]
    run.unlog(len(lines[0]) + 1)
    assert (run.path / "metrics.jsonl").read_text().splitlines() == lines[:1]
    run.unlog(10**6)
    assert run.logged == len(lines[0]) + 1
    run.save_result(result())
    assert run.result == result()


def test_what_a_run_leaves_that_was_killed_as_it_began_may_be_begun_again(tmp_path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    run = Run.create(config(output=str(tmp_path / "run")))
    assert run.config.output == str(tmp_path / "run")
    (run.path / ".result.json.abc").write_text("half")
    (run.path / ".mine").write_text("mine")
    run.clean()
    assert {path.name for path in run.path.iterdir()} == {
        *(".lock", ".mine", "checkpoints", "config.yaml"),
    }


def test_a_run_without_its_lock_file_is_still_locked(tmp_path) -> None:
    run = Run.create(config(output=str(tmp_path / "run")))
    with run.alone():
        (run.path / ".lock").unlink()
        for _ in range(2):
            with (
                pytest.raises(InputError, match="another process is working on"),
                Run.open(run.path).alone(),
            ):
                pass
        run.log(EPOCH)
    with Run.open(run.path).alone():
        pass
    assert len(run.records) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS])
def test_where_folders_cannot_be_locked_the_file_is(tmp_path, monkeypatch, number) -> None:
    run, real = Run.create(config(output=str(tmp_path / "run"))), fcntl.flock

    def flock(handle: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run.alone():
        run.log(EPOCH)
        with pytest.raises(InputError, match="another process"), Run.open(run.path).alone():
            pass


def test_a_run_does_not_write_into_a_folder_that_took_its_place(tmp_path) -> None:
    run = Run.create(config(output=str(tmp_path / "run")))
    with run.alone():
        run.log(EPOCH)
        shutil.rmtree(run.path)
        for write in (lambda: run.log(EPOCH), run.sync_log):
            with pytest.raises(InputError, match=r"cannot write into .*run: No such file"):
                write()
        another = Run.create(config(output=str(run.path)))
        with another.alone():
            another.log(EPOCH)
            for write in (lambda: run.log(EPOCH), run.sync_log):
                with pytest.raises(InputError, match=r"removed or moved .* took its place"):
                    write()
    assert len(another.records) == 1


def test_a_lock_that_cannot_be_taken_is_a_sentence(tmp_path) -> None:
    run = Run.create(config(output=str(tmp_path / "run")))
    (run.path / ".lock").unlink()
    (run.path / ".lock").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*\.lock"), run.alone():
        pass


@pytest.mark.parametrize("size", [1 << 30, 1 << 40])
def test_records_and_analyses_of_any_size_are_refused(tmp_path, size) -> None:
    run = Run.create(config(output=str(tmp_path / "run")))
    sparse(run.path / "metrics.jsonl", size, b'{"kind": "epoch"}\n')
    with refused_at_once(r"metrics\.jsonl: it is too long"):
        _ = run.records
    sparse(run.path / "result.json", size)
    with refused_at_once(r"result\.json: it is too long"):
        _ = run.result
    sparse(run.path / "analysis.safetensors", size)
    with refused_at_once(r"analysis\.safetensors: damaged"):
        _ = run.analysis
