"""Checkpoints that are whole, and all the ways in which they may not be."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cclis import files
from cclis.errors import InputError
from cclis.methods import make_config
from cclis.runs import checkpoints
from cclis.runs.checkpoints import FORMAT, Checkpoints
from cclis.runs.directory import Run
from tests.conftest import QUICK, fuzz, refused_at_once, sparse

STATE = ({"x": torch.arange(5), "y": torch.ones(2, 3)}, {"about": "it"})


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """A folder with one checkpoint."""
    found = Checkpoints(tmp_path)
    found.save("task-0", STATE)
    return found


def test_what_was_saved_comes_back(saved: Checkpoints) -> None:
    tensors, description = saved.load("task-0")
    assert torch.equal(tensors["x"], STATE[0]["x"])
    assert torch.equal(tensors["y"], STATE[0]["y"])
    assert description == {"about": "it", "format": FORMAT}


def test_finished_tasks_and_the_newest_two_stay(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path)
    names = [
        *("task-0-step-9", "task-0-step-10", "task-0", "task-1-step-5"),
        *("task-1-step-100", "task-1-step-1000", "task-1", "task-10-step-1"),
    ]
    for name in names:
        found.save(name, STATE)
    assert found.names == ["task-0", "task-1", "task-10-step-1"]
    assert len(list(tmp_path.iterdir())) == 2 * 3 + 1  # and newest.json
    found.save("task-10-step-20", STATE)
    found.save("task-10-step-100", STATE)
    assert found.names == ["task-0", "task-1", "task-10-step-20", "task-10-step-100"]


def test_each_file_is_on_the_disk_before_the_next_and_the_old_goes_last(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 6):
        saved.save(f"task-1-step-{step}", STATE)
    done: list[str] = []

    def spied(name: str, note: Callable[..., str]) -> None:
        real = getattr(os, name)

        def wrapped(*arguments: Any) -> Any:
            done.append(note(*arguments))
            return real(*arguments)

        monkeypatch.setattr(os, name, wrapped)

    spied("fsync", lambda _: "sync")
    spied("replace", lambda _, new: f"+{Path(new).name}")
    spied("unlink", lambda path: f"-{Path(path).name}")
    saved.save("task-1-step-7", STATE)
    names = ("task-1-step-7.safetensors", "task-1-step-7.json", "newest.json")
    assert done == [
        *(event for name in names for event in ("sync", f"+{name}", "sync")),
        *("-task-1-step-5.json", "-task-1-step-5.safetensors"),
    ]


def test_a_kill_between_two_removals_leaves_no_damaged_checkpoint(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 6):
        saved.save(f"task-1-step-{step}", STATE)
    unlink, removed = os.unlink, []

    def killed(path: Any) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            saved.save("task-1-step-7", STATE)
    for name in saved.names:
        saved.load(name)
    assert saved.newest(pytest.fail) is not None
    assert len(list(saved.folder.iterdir())) == 2 * len(saved.names) + 1  # and newest.json


def test_leftovers_of_an_interrupted_save_are_no_checkpoints_and_go(saved: Checkpoints) -> None:
    orphan = saved.folder / "task-1.safetensors"
    orphan.write_bytes((saved.folder / "task-0.safetensors").read_bytes())
    for name in (".task-1.safetensors.abcd", ".newest.json.abcd"):
        (saved.folder / name).write_bytes(b"half")
    mine = {"notes.txt", "best.safetensors", ".gitkeep"}
    for name in mine:
        (saved.folder / name).write_text("mine")
    assert saved.names == ["task-0"]
    assert saved.newest(pytest.fail) is not None
    left = {path.name for path in saved.folder.iterdir()}
    assert left == {"task-0.safetensors", "task-0.json", "newest.json"} | mine


def test_damaged_ones_go_once_an_older_one_was_read_and_not_before(saved: Checkpoints) -> None:
    for name in ("task-1-step-5", "task-1-step-7"):
        saved.save(name, STATE)
    for name in ("task-1-step-5", "task-1-step-7"):
        (saved.folder / f"{name}.safetensors").write_bytes(b"damaged")
    said: list[str] = []
    assert saved.newest(said.append) is not None
    assert len(said) == 2
    assert saved.names == ["task-0"]
    (saved.folder / "task-0.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"no checkpoint in .* can be resumed"):
        saved.newest(said.append)
    assert saved.names == ["task-0"]
    assert (saved.folder / "task-0.safetensors").read_bytes() == b"damaged"


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest(pytest.fail) is None


@pytest.mark.parametrize("made", [FORMAT + 1, FORMAT - 1])
def test_other_versions_are_refused_by_name(
    saved: Checkpoints, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(checkpoints, "FORMAT", made)
        other.setattr("cclis.__version__", "7.8.9")
        saved.save("task-0", STATE)
    content = (saved.folder / "task-0.safetensors").read_bytes()
    for read in (lambda: saved.load("task-0"), lambda: saved.newest(pytest.fail)):
        with pytest.raises(InputError, match=r"written by another cclis \(7\.8\.9\)"):
            read()
    assert (saved.folder / "task-0.safetensors").read_bytes() == content


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_folder_in_place_of_a_file_is_no_checkpoint(saved: Checkpoints, suffix: str) -> None:
    saved.save("task-1", STATE)
    file = saved.folder / f"task-1{suffix}"
    file.unlink()
    file.mkdir()
    said: list[str] = []
    assert saved.newest(said.append) is not None
    assert len(said) == 1
    assert "task-1" in said[0]
    assert file.is_dir()


def test_a_checkpoint_without_a_manifest_was_never_finished(saved: Checkpoints) -> None:
    (saved.folder / "task-0.json").unlink()
    with pytest.raises(InputError, match="missing or was never finished"):
        saved.load("task-0")
    # The state after a task never comes first: an older version without manifests wrote this.
    (saved.folder / "newest.json").unlink()
    with pytest.raises(InputError, match="older cclis"):
        saved.newest(pytest.fail)
    assert (saved.folder / "task-0.safetensors").exists()
    (saved.folder / "task-0.safetensors").rename(saved.folder / "task-0-step-3.safetensors")
    assert saved.newest(pytest.fail) is None
    assert list(saved.folder.iterdir()) == []


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_pickle_in_place_of_tensors_is_refused_and_not_run(saved: Checkpoints, tmp_path) -> None:
    marker = tmp_path / "harmed"
    for content in (pickle.dumps(Harm(marker)), _torch_save({"x": Harm(marker)})):
        (saved.folder / "task-0.safetensors").write_bytes(content)
        # Even one whose manifest was forged to fit.
        manifest = json.loads((saved.folder / "task-0.json").read_text())
        manifest |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (saved.folder / "task-0.json").write_text(json.dumps(manifest))
        with pytest.raises(InputError, match="not a file that cclis wrote"):
            saved.load("task-0")
    assert not marker.exists()


def _torch_save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_every_flipped_bit_and_every_cut_is_noticed(saved: Checkpoints) -> None:
    path = saved.folder / "task-0.safetensors"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(InputError, match="damaged"):
            saved.load("task-0")
        path.write_bytes(content[:place])
        with pytest.raises(InputError, match="damaged"):
            saved.load("task-0")


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MANIFESTS = st.one_of(
    st.binary(max_size=200),
    ANY_JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("format", "cclis", "bytes", "sha256"), ANY_JSON),
    ).map(lambda value: json.dumps(value).encode()),
)


@fuzz
@given(MANIFESTS)
def test_a_manifest_of_anything_is_an_input_error(saved: Checkpoints, content: bytes) -> None:
    (saved.folder / "task-0.json").write_bytes(content)
    with pytest.raises(InputError):
        saved.load("task-0")


@fuzz
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_tensors_of_anything_are_an_input_error(tmp_path, content: bytes, claimed: int) -> None:
    from cclis.files import unpack_tensors

    for given_bytes in (content, claimed.to_bytes(8, "little") + content):
        with pytest.raises(InputError):
            unpack_tensors(given_bytes, "it")


def test_deep_nesting_and_huge_claims_are_refused_in_little_memory(tmp_path: Path) -> None:
    code = f"""
import resource, sys
from pathlib import Path
import torch
from cclis.runs.checkpoints import Checkpoints
from cclis.settings import read_yaml
from cclis.data.readers import read_npz
from cclis.errors import InputError
from cclis.files import read_json, unpack_tensors
root = Path({str(tmp_path)!r})
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def refused(work):
    try:
        work()
    except InputError as error:
        return
    raise SystemExit(f"not refused: {{work}}")
(root / "deep.json").write_text("[" * 200_000)
refused(lambda: read_json(root / "deep.json"))
(root / "deep.yaml").write_text("a: " + "[" * 20_000)
refused(lambda: read_yaml(root / "deep.yaml"))
laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\\n"
for i in range(1, 12):
    laughs += f"a{{i}}: &a{{i}} [" + ", ".join([f"*a{{i - 1}}"] * 10) + "]\\n"
(root / "laughs.yaml").write_text(laughs)
refused(lambda: read_yaml(root / "laughs.yaml"))
header = b'{{"x": {{"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]'
header += b"}}}}"
refused(lambda: unpack_tensors(len(header).to_bytes(8, "little") + header, "it"))
with open(root / "huge.safetensors", "wb") as file:
    file.truncate(10**11)
(root / "huge.json").write_text('{{"format": 2, "cclis": "1", "bytes": 3, "sha256": ""}}')
folder = Checkpoints(root)
(root / "task-0.json").write_text('{{"format": 2, "cclis": "1", "bytes": 3, "sha256": ""}}')
(root / "huge.safetensors").rename(root / "task-0.safetensors")
refused(lambda: folder.load("task-0"))
import io, zipfile, numpy as np
def npy(claimed):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {{"descr": "|u1", "fortran_order": False, "shape": (claimed, 1000, 1000, 3)}}
    )
    return out.getvalue() + b"few"
with zipfile.ZipFile(root / "claims.npz", "w") as archive:
    for name in ("x_train", "y_train", "x_test", "y_test"):
        archive.writestr(name + ".npy", npy(10**9))
refused(lambda: read_npz(root / "claims.npz"))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
assert grown < 200, f"{{grown:.0f}} MB"
"""
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr


@fuzz
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_a_run_directory_of_anything_is_an_input_error_or_a_run(tmp_path, content: bytes) -> None:
    for name in ("config.yaml", "result.json"):
        (tmp_path / name).write_bytes(content)
    run = Run.open(tmp_path)
    with pytest.raises(InputError):
        _ = run.config
    with contextlib.suppress(InputError):
        _ = run.result


@fuzz
@given(st.data())
def test_a_damaged_config_file_is_an_input_error_or_a_config(tmp_path, data) -> None:
    run = Run.create(make_config("cclis", {**QUICK, "output": str(tmp_path / "run")}))
    path = run.path / "config.yaml"
    content = bytearray(path.read_bytes())
    shutil.rmtree(run.path)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "config.yaml").write_bytes(bytes(content))
    with contextlib.suppress(InputError):
        assert Run.open(tmp_path).config.to_dict()


def test_formats_are_written_into_both_files(saved: Checkpoints) -> None:
    manifest = json.loads((saved.folder / "task-0.json").read_text())
    assert manifest["format"] == saved.load("task-0")[1]["format"] == checkpoints.FORMAT
    assert manifest["cclis"]


@pytest.mark.parametrize("size", [1 << 30, 1 << 40])
def test_a_checkpoint_of_any_size_is_refused_unread(saved: Checkpoints, size: int) -> None:
    path, manifest = saved.folder / "task-0.safetensors", saved.folder / "task-0.json"
    sparse(path, size, path.read_bytes())
    with refused_at_once("is damaged: it has not the"):
        saved.load("task-0")
    # Even if the manifest was forged to fit.
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"bytes": size}))
    with refused_at_once("damaged, or not a file that cclis wrote .*it has"):
        saved.load("task-0")


def test_a_checkpoint_is_not_damaged_because_memory_is_short(saved, monkeypatch) -> None:
    saved.save("task-1", (STATE[0] | {"large": torch.zeros(10**5)}, STATE[1]))
    before = sorted(saved.folder.iterdir())
    monkeypatch.setattr(files, "free_memory", lambda: 10**5)
    with pytest.raises(InputError, match=r"task-1\.safetensors: it takes 0\.0 GiB of memory"):
        saved.newest(pytest.fail)
    assert sorted(saved.folder.iterdir()) == before
