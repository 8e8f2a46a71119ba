from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cclis import files
from cclis.errors import InputError
from cclis.files import (
    atomic_writer,
    read_bytes,
    read_json,
    read_tensors,
    write_atomically,
    write_json,
    write_tensors,
)
from tests.conftest import fuzz, refused_at_once, sparse

# ------------------------------------------------------------------------------------ atomic


def test_content_replaces_what_was_there(tmp_path):
    file = tmp_path / "a.bin"
    write_atomically(file, b"old and longer")
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_nothing_is_to_be_seen_before_the_end(tmp_path):
    path = tmp_path / "a.bin"
    with atomic_writer(path) as file:
        file.write(b"one ")
        file.flush()
        assert not path.exists()
        file.write(b"two")
    assert path.read_bytes() == b"one two"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write_half() -> None:
        with atomic_writer(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_its_name_and_its_name_before_the_end(tmp_path, monkeypatch):
    path, done = tmp_path / "a.bin", []
    sync, replace = os.fsync, os.replace

    def spied_sync(handle: int) -> None:
        done.append(("sync", os.fstat(handle).st_ino))
        if stat.S_ISREG(os.fstat(handle).st_mode):
            assert os.fstat(handle).st_size == 100
        sync(handle)

    def spied_replace(old: str, new: os.PathLike[str]) -> None:
        done.append(("name", os.stat(old).st_ino))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", spied_sync)
    monkeypatch.setattr(os, "replace", spied_replace)
    write_atomically(path, b"x" * 100)
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert done == [("sync", file), ("name", file), ("sync", folder)]


def test_what_the_block_cannot_read_is_not_said_to_be_unwritable(tmp_path):
    def copy_nothing() -> None:
        with atomic_writer(tmp_path / "a.bin") as file:
            file.write((tmp_path / "none").read_bytes())

    with pytest.raises(FileNotFoundError, match="none"):
        copy_nothing()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_way_stays_and_nothing_is_left(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="it is a folder"):
        write_atomically(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "a.bin", b"x")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == mode


# -------------------------------------------------------------------------------------- JSON


def test_json_comes_back(tmp_path):
    value = {"matrix": [[1.5, None], [2, 3]], "name": "Ångström", "ok": True}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_that_others_could_not_read_is_not_written(tmp_path, value):
    file = tmp_path / "a.json"
    write_json(file, 1)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(file, {"loss": [value]})
    assert read_json(file) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b'{"a": 1', b"\xff\xfe\x00", b"{'a': 1}", b"1" * 5000, b"[" * 100_000],
    ids=["empty", "cut", "bytes", "quotes", "long number", "deep"],
)
def test_what_is_no_json_is_named(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot read .*a\.json"):
        read_json(file)


def test_json_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"none\.json.*No such file"):
        read_json(tmp_path / "none.json")
    for path in (tmp_path, tmp_path / "a\0b"):
        with pytest.raises(InputError, match="cannot read"):
            read_json(path)


# ----------------------------------------------------------------------------------- tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def test_tensors_and_their_description_come_back(tmp_path):
    tensors = {str(dtype): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "not finite": torch.tensor([float("nan"), float("-inf")]),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.rand(3)),
    }
    description = {"config": {"epochs": 3, "tasks": [2, 2], "data": None}}
    write_tensors(tmp_path / "a.safetensors", tensors, description)
    found, described = read_tensors(tmp_path / "a.safetensors")
    assert described == description
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.allclose(found[name].double(), tensor.double(), rtol=0, atol=0, equal_nan=True)


def test_tensors_that_share_memory_are_written_apart(tmp_path):
    tied = torch.arange(6.0)
    write_tensors(tmp_path / "a", {"one": tied, "two": tied, "part": tied[2:]}, {})
    found, _ = read_tensors(tmp_path / "a")
    assert torch.equal(found["one"], tied)
    assert torch.equal(found["two"], tied)
    assert torch.equal(found["part"], tied[2:])


def test_no_tensors_are_a_file_too(tmp_path):
    write_tensors(tmp_path / "a", {}, {"x": 1})
    assert read_tensors(tmp_path / "a") == ({}, {"x": 1})


class Trap:
    def __reduce__(self):
        return (os.mkdir, (os.environ["CCLIS_TEST_TRAP"],))


def test_a_pickle_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CCLIS_TEST_TRAP", str(tmp_path / "sprung"))
    for file, write in (("a", pickle.dump), ("b", torch.save)):
        with (tmp_path / file).open("wb") as stream:
            write(Trap(), stream)
        with pytest.raises(InputError, match="not a file that cclis wrote"):
            read_tensors(tmp_path / file)
    assert not (tmp_path / "sprung").exists()


def test_tensors_of_others_are_refused(tmp_path):
    from safetensors.torch import save_file

    for metadata in (None, {"format": "pt"}, {"cclis": "{"}):
        save_file({"a": torch.zeros(2)}, tmp_path / "a", metadata=metadata)
        with pytest.raises(InputError, match="not a file that cclis wrote"):
            read_tensors(tmp_path / "a")


def test_tensors_that_are_not_there(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read_tensors(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a"
    write_tensors(path, {"a": torch.arange(5), "b": torch.zeros(2, 2)}, {"x": 1})
    return path.read_bytes()


def test_a_truncated_file_is_refused_wherever_it_ends(good, tmp_path):
    file = tmp_path / "a"
    for length in range(len(good)):
        file.write_bytes(good[:length])
        with pytest.raises(InputError, match="not a file that cclis wrote"):
            read_tensors(file)


@fuzz
@given(st.binary(max_size=300))
def test_garbage_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match="not a file that cclis wrote"):
        read_tensors(tmp_path / "a")


@pytest.mark.parametrize("place", [0.3, 0.6, 0.99])
def test_tensors_with_other_bits_are_refused(tmp_path, place):
    path = tmp_path / "a.safetensors"
    tensors = {"x": torch.arange(1000), "y": torch.ones((), dtype=torch.bfloat16)}
    write_tensors(path, tensors, {"about": "it"})
    found, description = read_tensors(path)
    assert description == {"about": "it"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        read_tensors(path)


# ------------------------------------------------------------------ what is too large, or no file


def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", [read_bytes, read_json, read_tensors])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (pipe, "pipe: it is not a regular file"),
        (lambda tmp_path: Path("/dev/zero"), "/dev/zero: it is not a regular file"),
        (lambda tmp_path: tmp_path, "Is a directory"),
    ],
    ids=["pipe", "device", "folder"],
)
def test_only_regular_files_are_read(tmp_path, read, make, reason):
    path = make(tmp_path)
    with refused_at_once(f"cannot read .*{reason}"):
        read(path)


@pytest.mark.parametrize("read", [read_bytes, read_json, read_tensors])
def test_a_file_larger_than_the_memory_is_not_read(tmp_path, read):
    with refused_at_once(r"cannot read .*large: .*(GiB are free|too long|damaged, or not)"):
        read(sparse(tmp_path / "large", 1 << 40))


def test_memory_is_what_the_machine_has_free_and_reading_takes(tmp_path, monkeypatch):
    assert 1 << 20 < files.free_memory() < 1 << 60
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    monkeypatch.setattr(files, "free_memory", lambda: 6 * files.JSON_TIMES)
    assert read_json(path) == [1, 2]
    monkeypatch.setattr(files, "free_memory", lambda: 6 * files.JSON_TIMES - 1)
    with pytest.raises(InputError, match=r"cannot read .*a\.json: it takes 0\.0 GiB of memory"):
        read_json(path)


def test_memory_that_runs_out_all_the_same_is_a_sentence(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with (
        pytest.raises(InputError, match=r"cannot read .*a: there is not enough memory"),
        files.open_regular(tmp_path / "a"),
    ):
        raise MemoryError


@pytest.mark.parametrize("size", [1 << 30, 1 << 40])
@pytest.mark.parametrize("length", [0, 2, 200, 9_000_000, 1 << 62])
def test_tensors_are_not_read_where_the_size_is_not_what_the_header_claims(tmp_path, size, length):
    if length == 200:
        header = {"x": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}
        content = json.dumps(header).encode().ljust(200)
    else:
        content = b"{}"
    path = sparse(tmp_path / "a", size, length.to_bytes(8, "little") + content)
    with refused_at_once("not a file that cclis wrote", 50):
        read_tensors(path)
