from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import threading
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cclis.data import readers
from cclis.data.download import check
from cclis.data.images import ImageSet
from cclis.data.readers import (
    Split,
    read_cifar10,
    read_cifar100,
    read_digits,
    read_image_folder,
    read_npz,
    read_tiny_imagenet,
    tiny_imagenet,
)
from cclis.errors import InputError
from cclis.progress import Progress
from tests.conftest import at_once, fuzz, refused_at_once, sparse

# -------------------------------------------------------------------------------------- Split


@pytest.mark.parametrize("chosen", [np.array([True, False, True, False]), np.array([0, 2])])
def test_subset_copies_what_a_mask_or_indices_choose(chosen):
    images = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
    images.flags.writeable = False
    split = Split(images, np.array([5, 6, 7, 8]))

    subset = split.subset(chosen)

    assert isinstance(subset, ImageSet)
    assert torch.equal(subset.images, torch.from_numpy(images[[0, 2]]))
    assert subset.labels.tolist() == [5, 7]
    assert subset.images.is_contiguous()
    subset.images.zero_()
    assert images[2].any()


def test_subset_rejects_a_mask_of_another_length():
    split = Split(np.zeros((4, 2, 2, 1), np.uint8), np.zeros(4, np.int64))
    with pytest.raises(IndexError):
        split.subset(np.array([True, False]))


# ------------------------------------------------------------------------------------- digits


def test_digits_hold_out_the_last_fifth_of_every_class():
    from sklearn.datasets import load_digits

    raw = load_digits()
    digits = read_digits()

    assert len(digits.train) + len(digits.test) == 1797
    assert digits.class_names == tuple("0123456789")
    assert digits.train.images.shape[1:] == (8, 8, 1)
    assert digits.train.images.dtype == np.uint8
    assert (digits.train.images.min(), digits.train.images.max()) == (0, 255)
    for digit in range(10):
        mine = raw.images[raw.target == digit]
        held_out = digits.test.images[digits.test.labels == digit]
        assert len(held_out) == len(mine) // 5
        expected = np.rint(mine[-len(held_out) :] * 255 / 16)
        assert np.array_equal(held_out[..., 0], expected)


# -------------------------------------------------------------------------------------- CIFAR


def records(count: int, label_bytes: int, classes: int) -> np.ndarray:
    """Full-size records of a cheap pattern in which no two planes or rows are alike."""
    width = label_bytes + 3072
    raw = np.resize(np.arange(251, dtype=np.uint8), count * width).reshape(count, width)
    for column in range(label_bytes):
        raw[:, column] = (np.arange(count) * (column + 3)) % classes
    return raw


def link_all(source: Path, target: Path) -> Path:
    """A folder of hard links: a copy of large files that costs nothing."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        os.link(file, target / file.name)
    return target


def replace(file: Path, content: bytes) -> None:
    file.unlink()  # the link only, not the file that other tests share
    file.write_bytes(content)


@pytest.fixture(scope="module")
def cifar10_batches():
    return {
        name: np.roll(records(10_000, 1, 10), shift, axis=0)
        for shift, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"])
    }


@pytest.fixture(scope="module")
def cifar10_root(tmp_path_factory, cifar10_batches):
    root = tmp_path_factory.mktemp("cifar10")
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name, batch in cifar10_batches.items():
        (folder / f"{name}.bin").write_bytes(batch.tobytes())
    return root


@pytest.fixture(scope="module")
def cifar10(cifar10_root):
    return read_cifar10(cifar10_root)


@pytest.fixture(scope="module")
def cifar10_python_root(tmp_path_factory, cifar10_batches):
    root = tmp_path_factory.mktemp("cifar10_python")
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for number, (name, batch) in enumerate(cifar10_batches.items()):
        # Keys are bytes in one half of the files, and one array is in Fortran order.
        data = np.asfortranarray(batch[:, 1:]) if number == 1 else batch[:, 1:].copy()
        content = {"data": data, "labels": batch[:, 0].tolist(), "filenames": ["a.png"]}
        if number % 2:
            content = {key.encode(): value for key, value in content.items()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = [f"class {i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    return root


def test_cifar10_pixels_against_a_naive_loop(cifar10, cifar10_batches):
    assert cifar10.train.images.shape == (50_000, 32, 32, 3)
    assert cifar10.test.images.shape == (10_000, 32, 32, 3)
    for index in (0, 10_000, 23_456, 49_999):
        record = cifar10_batches[f"data_batch_{index // 10_000 + 1}"][index % 10_000]
        assert cifar10.train.labels[index] == record[0]
        for row in range(32):
            for column in range(32):
                for channel in range(3):
                    expected = record[1 + channel * 1024 + row * 32 + column]
                    assert cifar10.train.images[index, row, column, channel] == expected
    assert np.array_equal(cifar10.test.labels, cifar10_batches["test_batch"][:, 0])


def test_cifar10_falls_back_to_the_standard_names(cifar10):
    assert cifar10.class_names[:3] == ("airplane", "automobile", "bird")
    assert len(cifar10.class_names) == 10


def test_cifar10_takes_names_from_its_folder_and_may_be_given_the_folder(cifar10_root, tmp_path):
    folder = link_all(cifar10_root / "cifar-10-batches-bin", tmp_path / "renamed")
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    assert read_cifar10(folder).class_names == tuple("abcdefghij")


def test_python_layout_equals_binary_layout(cifar10, cifar10_python_root):
    python = read_cifar10(cifar10_python_root)
    for split in ("train", "test"):
        ours, theirs = getattr(python, split), getattr(cifar10, split)
        assert np.array_equal(ours.images, theirs.images)
        assert np.array_equal(ours.labels, theirs.labels)
    assert python.class_names == tuple(f"class {i}" for i in range(10))


def test_binary_layout_is_preferred(tmp_path):
    for layout in (readers.CIFAR10, readers.CIFAR100):
        (tmp_path / layout.python_folder).mkdir()
        assert layout.find(tmp_path) == (tmp_path / layout.python_folder, False)
        (tmp_path / layout.binary_folder).mkdir()
        assert layout.find(tmp_path) == (tmp_path / layout.binary_folder, True)


def test_cifar100_uses_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    train, test = records(50_000, 2, 100), records(10_000, 2, 100)
    (folder / "train.bin").write_bytes(train.tobytes())
    (folder / "test.bin").write_bytes(test.tobytes())

    cifar = read_cifar100(tmp_path)

    assert np.array_equal(cifar.train.labels, train[:, 1])
    assert cifar.train.images[7, 0, 1].tolist() == train[7, [3, 1027, 2051]].tolist()
    assert len(cifar.class_names) == len(set(cifar.class_names)) == 100
    assert list(cifar.class_names) == sorted(cifar.class_names)
    assert (cifar.class_names[0], cifar.class_names[-1]) == ("apple", "worm")


def test_cifar100_python_layout(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    data = records(200, 2, 100)
    for name in ("train", "test"):
        content = {
            b"data": data[:, 2:].copy(),
            b"fine_labels": data[:, 1].tolist(),
            b"coarse_labels": data[:, 0].tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    cifar = read_cifar100(folder)
    assert np.array_equal(cifar.test.labels, data[:, 1])
    assert cifar.train.images[7, 0, 1].tolist() == data[7, [3, 1027, 2051]].tolist()


def test_missing_cifar_says_where_it_looked_and_what_to_run(tmp_path):
    with pytest.raises(InputError) as error:
        read_cifar10(tmp_path)
    for part in ("no CIFAR-10 in", str(tmp_path / "cifar-10-batches-bin"), "--download"):
        assert part in str(error.value)


def test_truncated_missing_and_mislabelled_files_are_named(cifar10_root, tmp_path):
    folder = link_all(cifar10_root / "cifar-10-batches-bin", tmp_path / "cifar-10-batches-bin")
    file = folder / "data_batch_3.bin"

    replace(file, b"x" * 1234)
    with pytest.raises(InputError, match=r"batch_3.bin has 1234 bytes, .* 30730000: .* truncated"):
        read_cifar10(tmp_path)

    bad = records(10_000, 1, 10)
    bad[77, 0] = 12
    replace(file, bad.tobytes())
    with pytest.raises(InputError, match=r"batch_3.bin contains the label 12, .* end at 9"):
        read_cifar10(tmp_path)

    replace(file, bad.tobytes() + b"x")
    with pytest.raises(InputError, match="not a CIFAR-10 file"):
        read_cifar10(tmp_path)

    file.unlink()
    with pytest.raises(InputError, match=r"batch_3.bin is missing"):
        read_cifar10(tmp_path)


class Harmful:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def python_folder(tmp_path: Path, first: bytes) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    (folder / "data_batch_1").write_bytes(first)
    return tmp_path


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_harmful_pickle_is_refused_and_nothing_runs(tmp_path, protocol):
    canary = tmp_path / "canary"
    root = python_folder(tmp_path, pickle.dumps({"data": Harmful(canary)}, protocol=protocol))
    with pytest.raises(InputError, match=r"data_batch_1 .* would load \w+\.mkdir, .* refused"):
        read_cifar10(root)
    assert not canary.exists()


GOOD = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}


@pytest.mark.parametrize(
    "content",
    [
        GOOD | {"labels": [0, 10]},
        GOOD | {"labels": [0, -1]},
        GOOD | {"labels": [0, 10**30]},
        GOOD | {"labels": [0]},
        GOOD | {"labels": [0, "1"]},
        GOOD | {"labels": None},
        GOOD | {"data": np.zeros((2, 3072), np.int8)},
        GOOD | {"data": np.zeros((2, 3072), object)},
        GOOD | {"data": np.zeros((2, 3073), np.uint8)},
        GOOD | {"data": np.zeros((0, 3072), np.uint8), "labels": []},
        GOOD | {"data": b"pixels"},
        {},
        [GOOD],
    ],
)
def test_pickles_of_other_things_are_refused(tmp_path, content):
    root = python_folder(tmp_path, pickle.dumps(content, protocol=2))
    with pytest.raises(InputError, match="data_batch_1"):
        read_cifar10(root)


@fuzz
@given(st.binary(max_size=200))
def test_random_bytes_are_no_cifar(tmp_path, content):
    with pytest.raises(InputError, match="data_batch_1"):
        read_cifar10(python_folder(tmp_path, content))


@fuzz
@given(st.data())
def test_damaged_pickles_raise_only_input_errors(tmp_path, data):
    content = bytearray(pickle.dumps({b"data": GOOD["data"][:, :8], b"labels": [0]}, protocol=2))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    with pytest.raises(InputError, match="data_batch_1"):
        read_cifar10(python_folder(tmp_path, bytes(content[:cut])))


def test_a_huge_memo_index_takes_no_memory(tmp_path):
    root = python_folder(tmp_path, b"\x80\x02Nr\xff\xff\xff\xff.")
    with pytest.raises(InputError, match="memo index"):
        read_cifar10(root)


PAIR = b"q\x00h\x00\x86"  # memoise what is there, take it again, and make a tuple of both


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (b")" + PAIR * 25, "is reused"),
        (b")" + b"2\x86" * 25, "is reused"),
        (b")" + (b"Nb" + PAIR) * 25, "is reused"),
        (b")" + (b"(e" + PAIR) * 25, "is reused"),
        (b"U\x00q\x00)" + PAIR * 25, "is reused"),
        (b")" + b"\x85" * 2000, "too many tuples"),
        (b"\x8a\x09" + b"\xff" * 7 + b"\x1f\x00", "number is too large"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00idna\x86R", "encoding idna"),
    ],
    ids=["memo", "dup", "build", "appends", "overwritten", "deep", "one hash", "encoding"],
)
def test_pickles_that_would_take_forever_are_refused(tmp_path, keys, message):
    root = python_folder(tmp_path, b"\x80\x02}" + keys + b"Ns.")
    with pytest.raises(InputError, match=f"data_batch_1 .*{message}"):
        read_cifar10(root)


def test_a_text_that_is_encoded_many_times_takes_memory_once(tmp_path):
    long = b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\x01"
    named = b"c_codecs\nencode\nq\x00" + long + b"X\x06\x00\x00\x00latin1q\x02"
    root = python_folder(tmp_path, b"\x80\x02](" + named + b"h\x00h\x01h\x02\x86R" * 200 + b"e.")
    tracemalloc.start()
    with pytest.raises(InputError, match="data_batch_1"):
        read_cifar10(root)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


def test_real_cifar10(real_cifar):
    cifar = read_cifar10(real_cifar)
    assert cifar.train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog truck truck deer automobile
    assert np.bincount(cifar.train.labels).tolist() == [5000] * 10
    assert np.bincount(cifar.test.labels).tolist() == [1000] * 10
    mean = cifar.train.images.mean(axis=(0, 1, 2)) / 255
    assert np.allclose(mean, [0.4914, 0.4822, 0.4465], atol=1e-4)
    assert check("seq-cifar10", real_cifar, thorough=True).present


def test_real_cifar100(real_cifar):
    cifar = read_cifar100(real_cifar)
    assert cifar.class_names[cifar.train.labels[0]] == "cattle"
    assert np.bincount(cifar.train.labels).tolist() == [500] * 100
    mean = cifar.train.images.mean(axis=(0, 1, 2)) / 255
    assert np.allclose(mean, [0.5071, 0.4865, 0.4409], atol=1e-4)
    assert check("seq-cifar100", real_cifar, thorough=True).present


# ------------------------------------------------------------------------------ Tiny-ImageNet

IDS = ["n03", "n01", "n02"]


def save(path: Path, colour, size=(64, 64), mode="RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def tiny(tmp_path):
    """Three classes, told apart by their brightness; one image is grey."""
    folder = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(IDS):
        for i in range(2):
            grey = (label, i) == (1, 0)
            colour = 50 * label if grey else (50 * label, 0, 200)
            save(
                folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG",
                colour,
                mode="L" if grey else "RGB",
            )
    lines = []
    for i, wnid in enumerate(IDS):
        colour = (50 * i, 0, 200)
        save(folder / "val" / "images" / f"val_{i}.JPEG", colour)
        lines.insert(0, f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(IDS) + "\n")
    (folder / "words.txt").write_text("n01\tcrane, bird\nn02\tcrane\nn03\tcat, felid\n")
    return tmp_path


def test_tiny_imagenet_is_read_in_the_order_of_its_list_of_ids(tiny):
    data = read_tiny_imagenet(tiny)
    assert sorted(IDS) != IDS
    assert data.class_names == ("cat", "crane (n01)", "crane (n02)")
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.labels.tolist() == [2, 1, 0]
    assert data.train.images.shape == (6, 64, 64, 3)
    red = data.train.images[..., 0].mean(axis=(1, 2))
    assert np.allclose(red, [0, 0, 50, 50, 100, 100], atol=4)
    assert np.allclose(data.test.images[..., 0].mean(axis=(1, 2)), [100, 50, 0], atol=4)
    assert np.allclose(data.train.images[2], 50, atol=2)  # the grey one, in all three channels


def test_tiny_imagenet_is_decoded_once(tiny):
    first = read_tiny_imagenet(tiny)
    for file in tiny.glob("tiny-imagenet-200/**/*.JPEG"):
        file.unlink()
    second = read_tiny_imagenet(tiny / "tiny-imagenet-200")
    assert isinstance(second.train.images, np.memmap)
    assert np.array_equal(first.train.images, second.train.images)
    assert np.array_equal(first.test.labels, second.test.labels)
    assert second.train.subset(np.array([1])).images.shape == (1, 64, 64, 3)


def test_tiny_imagenet_is_decoded_anew_when_files_are_added(tiny):
    read_tiny_imagenet(tiny)
    save(tiny / "tiny-imagenet-200" / "train" / "n01" / "images" / "n01_2.JPEG", (0, 0, 0))
    assert len(read_tiny_imagenet(tiny).train) == 7


def damage_manifest(cache: Path) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps(manifest | {"train": 5}))


def damage_json(cache: Path) -> None:
    (cache / "manifest.json").write_text("{")


def damage_array(cache: Path) -> None:
    os.truncate(cache / "train_images.npy", 1000)


def damage_labels(cache: Path) -> None:
    np.save(cache / "test_labels.npy", np.array([0, 1, 3]))


def interrupt(cache: Path) -> None:
    (cache / "manifest.json").unlink()


def nest_manifest(cache: Path) -> None:
    (cache / "manifest.json").write_text("[" * 200_000)


def widen_labels(cache: Path) -> None:
    np.save(cache / "train_labels.npy", np.zeros((6, 2), np.int64))


def pipe_for_labels(cache: Path) -> None:
    (cache / "test_labels.npy").unlink()
    os.mkfifo(cache / "test_labels.npy")


def kill(cache: Path) -> None:
    """Leave what a process leaves that is killed while it writes."""
    for name in ("train_labels.npy", "train_images.npy", "manifest.json"):
        (cache / name).rename(cache / f".{name}.a1b2c3")


@pytest.mark.parametrize(
    "damage",
    [
        damage_manifest,
        damage_json,
        damage_array,
        damage_labels,
        interrupt,
        nest_manifest,
        widen_labels,
        pipe_for_labels,
        kill,
    ],
)
def test_a_damaged_cache_is_rebuilt(tiny, damage):
    expected = read_tiny_imagenet(tiny)
    images, labels = np.array(expected.train.images), np.array(expected.test.labels)
    cache = tiny / "tiny-imagenet-200" / readers.TINY_CACHE
    damage(cache)
    with at_once():
        again = read_tiny_imagenet(tiny)
    assert np.array_equal(again.train.images, images)
    assert np.array_equal(again.test.labels, labels)
    assert again.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert sorted(file.name for file in cache.iterdir()) == [
        "manifest.json",
        "test_images.npy",
        "test_labels.npy",
        "train_images.npy",
        "train_labels.npy",
    ]


def test_tiny_imagenet_that_cannot_be_written_to_is_read_into_memory(tiny):
    # A file where the cache should be: unlike permissions, it stops the superuser too.
    (tiny / "tiny-imagenet-200" / readers.TINY_CACHE).write_text("")
    data = read_tiny_imagenet(tiny)
    assert data.train.images.shape == (6, 64, 64, 3)
    assert not isinstance(data.train.images, np.memmap)


def test_tiny_imagenet_on_a_full_disk_is_read_into_memory(tiny, monkeypatch):
    def full(path):
        raise InputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(tiny_imagenet, "atomic_writer", full)
    assert read_tiny_imagenet(tiny).train.images.shape == (6, 64, 64, 3)


def test_two_that_decode_tiny_imagenet_at_once_decode_it_once(tiny, monkeypatch):
    decoding, waiting, wrote = threading.Event(), threading.Event(), []
    write = tiny_imagenet._write_cache

    def slow(*arguments):
        wrote.append(arguments)
        decoding.set()
        assert waiting.wait(10)
        write(*arguments)

    progress = Progress(quiet=True)
    progress.say = lambda said: waiting.set() if "waiting for it" in said else None
    monkeypatch.setattr(tiny_imagenet, "_write_cache", slow)
    other = threading.Thread(target=read_tiny_imagenet, args=(tiny,))
    other.start()
    assert decoding.wait(10)
    second = read_tiny_imagenet(tiny, progress)
    other.join()
    assert isinstance(second.train.images, np.memmap)
    assert len(wrote) == 1


def test_a_corrupt_jpeg_is_named_and_leaves_no_cache(tiny):
    folder = tiny / "tiny-imagenet-200"
    file = folder / "train" / "n02" / "images" / "n02_1.JPEG"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(InputError, match=r"n02_1\.JPEG"):
        read_tiny_imagenet(tiny)
    assert not list((folder / readers.TINY_CACHE).glob("*images.npy*"))


def test_tiny_imagenet_problems_are_sentences(tiny, tmp_path_factory):
    folder = tiny / "tiny-imagenet-200"
    with pytest.raises(InputError, match=r"no Tiny-ImageNet in .*--download"):
        read_tiny_imagenet(tmp_path_factory.mktemp("empty"))

    save(folder / "val" / "images" / "val_1.JPEG", 0, size=(32, 64), mode="L")
    with pytest.raises(InputError, match=r"val_1.JPEG is 32×64, but .* is 64×64"):
        read_tiny_imagenet(tiny)

    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\n")
    with pytest.raises(InputError, match=r"line 1 of .*val_annotations.txt"):
        read_tiny_imagenet(tiny)

    (folder / "wnids.txt").write_text("n01\nn04\n")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\n")
    with pytest.raises(InputError, match=r"no images in .*n04"):
        read_tiny_imagenet(tiny)


# ------------------------------------------------------------------------------ image folders


@pytest.fixture
def folder(tmp_path):
    for split, value in (("train", 10), ("test", 20)):
        for name, suffix in (("cat", "png"), ("ant", "bmp")):
            save(tmp_path / split / name / f"1.{suffix}", (value, 0, 0), size=(12, 8))
    return tmp_path


def test_image_folder(folder):
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    (folder / "train" / "cat" / "._1.png").write_text("left by a Mac")
    data = read_image_folder(folder)
    assert data.class_names == ("ant", "cat")
    assert data.train.images.shape == (2, 8, 12, 3)
    assert data.train.labels.tolist() == [0, 1]
    assert data.train.images[0, 0, 0].tolist() == [10, 0, 0]
    assert data.test.images[1, 0, 0].tolist() == [20, 0, 0]


def test_image_folder_takes_val_for_test(folder):
    (folder / "test").rename(folder / "val")
    assert len(read_image_folder(folder).test) == 2


def test_image_folder_is_grey_only_if_every_image_is(folder):
    for file in folder.glob("*/*/*"):
        Image.new("L", (12, 8), 77).save(file)
    deep = np.full((8, 12), 65535, np.uint16)
    Image.fromarray(deep).save(folder / "train" / "cat" / "1.png")
    Image.new("1", (12, 8), 1).save(folder / "test" / "cat" / "1.png")
    grey = read_image_folder(folder)
    assert grey.train.images.shape == (2, 8, 12, 1)
    assert grey.train.images[:, 0, 0, 0].tolist() == [77, 255]
    assert grey.test.images[:, 0, 0, 0].tolist() == [77, 255]

    save(folder / "test" / "cat" / "2.png", (1, 2, 3), size=(12, 8))
    colour = read_image_folder(folder)
    assert colour.train.images[1, 0, 0].tolist() == [255, 255, 255]
    assert colour.test.images[2, 0, 0].tolist() == [1, 2, 3]


def test_image_folder_of_different_sizes(folder):
    save(folder / "test" / "cat" / "2.png", (9, 9, 9), size=(30, 31))
    with pytest.raises(InputError) as error:
        read_image_folder(folder)
    for part in ("1.bmp is 12×8", "2.png is 30×31", "--image_size N"):
        assert part in str(error.value)
    data = read_image_folder(folder, image_size=5)
    assert data.test.images.shape == (3, 5, 5, 3)


def test_image_size_scales_the_shorter_side_and_crops_the_middle(folder):
    wide = Image.new("RGB", (24, 8), "red")
    wide.paste("blue", (8, 0, 16, 8))  # the middle third
    wide.save(folder / "train" / "cat" / "1.png")
    image = read_image_folder(folder, image_size=4).train.images[1]
    assert image.shape == (4, 4, 3)
    assert (image[:, 1:3] == [0, 0, 255]).all()
    assert image[..., 2].mean() > 230


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "train" / "cat" / "1.png").write_bytes(b"\x89PNG?"), r"cat/1\.png"),
        (lambda root: (root / "train" / "cat" / "1.png").unlink(), "no images in .*cat"),
        (lambda root: (root / "test" / "cat" / "1.png").unlink(), "no images in .*cat"),
        (lambda root: (root / "train").rename(root / "trian"), "no folder .*train"),
        (lambda root: (root / "test").rename(root / "tset"), "no folder .*test"),
        (lambda root: save(root / "test" / "dog" / "1.png", 0), "contains the class 'dog'"),
        (lambda root: save(root / "test" / "cat" / "f.tif", 0, (12, 8), "F"), "floating-point"),
        (lambda root: save(root / "test" / "cat" / "i.tif", -1, (12, 8), "I"), "32-bit"),
    ],
)
def test_image_folder_problems_are_sentences(folder, spoil, message):
    spoil(folder)
    with pytest.raises(InputError, match=message):
        read_image_folder(folder)


def test_only_regular_files_are_images(folder):
    os.mkfifo(folder / "train" / "cat" / "0.png")
    with pytest.raises(InputError, match=r"cat/0\.png is missing or not a regular file"):
        read_image_folder(folder)
    assert len(read_image_folder(folder, skip_corrupt=True).train) == 2


def test_names_that_are_no_utf8_are_escaped(folder):
    for split in ("train", "test"):
        os.rename(folder / split / "cat", os.fsencode(folder / split) + b"/caf\xe9")
    (folder / "train" / os.fsdecode(b"caf\xe9") / "2.png").write_bytes(b"no image")
    said = []
    progress = Progress(quiet=True)
    progress.say = said.append
    found = read_image_folder(folder, None, progress, skip_corrupt=True)
    assert found.class_names == ("ant", r"caf\udce9")
    assert said[0].encode()


def test_image_folder_truncated_image_is_named(folder):
    file = folder / "test" / "cat" / "1.png"
    Image.effect_noise((12, 8), 90).convert("RGB").save(file)
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(InputError, match=r"test/cat/1\.png"):
        read_image_folder(folder)


def test_image_folder_without_classes(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(InputError, match=r"no class folders in .*train"):
        read_image_folder(tmp_path)
    with pytest.raises(InputError, match="image_size must be at least 1"):
        read_image_folder(tmp_path, image_size=0)


# ---------------------------------------------------------------------------------------- npz

ARRAYS = {
    "x_train": np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3),
    "y_train": np.array([7, 3, 7]),
    "x_test": np.zeros((1, 4, 5, 3), np.uint8),
    "y_test": np.array([7]),
}


def npz(tmp_path: Path, **changes) -> Path:
    arrays = {key: value for key, value in (ARRAYS | changes).items() if value is not None}
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path / "data.npz"


def test_npz_maps_labels_to_classes(tmp_path):
    data = read_npz(npz(tmp_path))
    assert np.array_equal(data.train.images, ARRAYS["x_train"])
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.test.labels.tolist() == [1]
    assert data.train.labels.dtype == np.int64
    assert data.class_names == ("3", "7")
    assert data.train.subset(np.array([True, False, True])).labels.tolist() == [1, 1]


def test_npz_in_a_folder_with_texts_floats_and_channels_first(tmp_path):
    npz(
        tmp_path,
        x_train=np.moveaxis(ARRAYS["x_train"] / np.float32(255), -1, 1),
        y_train=np.array(["cat", "ant", "cat"]),
        y_test=np.array([b"ant"]),
    )
    data = read_npz(tmp_path)
    assert np.array_equal(data.train.images, ARRAYS["x_train"])
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.test.labels.tolist() == [0]
    assert data.class_names == ("ant", "cat")


def test_npz_class_names(tmp_path):
    names = np.array(["ant", "bee", "cat"])
    labels = {"y_train": np.array([2, 0, 2], np.uint8), "y_test": np.array([2], np.int16)}
    assert read_npz(npz(tmp_path, class_names=names, **labels)).class_names == ("ant", "cat")
    with pytest.raises(InputError, match="class_names contains 3 names, but labels range"):
        read_npz(npz(tmp_path, class_names=names))
    with pytest.raises(InputError, match="class_names should be a list of strings"):
        read_npz(npz(tmp_path, class_names=np.arange(9)))


@pytest.mark.parametrize(
    "changes",
    [
        {"y_train": np.array(["b", "\ud800", "b"]), "y_test": np.array(["b"])},
        {
            "y_train": np.array([1, 0, 1]),
            "y_test": np.array([1]),
            "class_names": np.array(["\ud800", "b"]),
        },
    ],
    ids=["labels", "class_names"],
)
def test_npz_texts_that_are_no_utf8_are_escaped(tmp_path, changes):
    assert set(read_npz(npz(tmp_path, **changes)).class_names) == {"b", r"\ud800"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "no array 'y_test'"),
        ({"x_train": np.zeros((3, 4, 5, 3), np.int32)}, "x_train: images must be uint8"),
        ({"x_train": np.full((3, 4, 5, 3), 2.0)}, "x_train: floating-point images"),
        ({"x_train": np.zeros((3, 4, 5, 3), object)}, "cannot read .*data.npz"),
        ({"x_test": np.zeros((1, 4, 6, 3), np.uint8)}, "they must be equal"),
        ({"y_train": np.array([1.0, 2.0, 1.0])}, "integers or strings"),
        ({"y_train": np.array([1, 2])}, "one label for each of the 3 images"),
        ({"y_train": np.array([[7], [3], [7]])}, "one label for each of the 3 images"),
        ({"y_test": np.array([4])}, "y_test contains the class 4"),
        ({"y_test": np.array(["7"])}, "both be integers, or both strings"),
        ({"y_train": np.array([1, 2, 2**64 - 1], np.uint64)}, "too large"),
        ({"y_train": np.full(3, 0x110000, np.uint32).view("U1")}, "cannot read .*data.npz"),
    ],
)
def test_npz_problems_are_sentences(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read_npz(npz(tmp_path, **changes))


def test_npz_that_is_none(tmp_path):
    with pytest.raises(InputError, match="no file"):
        read_npz(tmp_path / "absent.npz")
    with pytest.raises(InputError, match=r"contains 0 \.npz files"):
        read_npz(tmp_path)
    np.save(tmp_path / "single.npy", ARRAYS["x_train"])
    with pytest.raises(InputError, match=r"single.npy is not a \.npz file"):
        read_npz(tmp_path / "single.npy")


@fuzz
@given(st.data())
def test_damaged_npz_raises_only_input_errors(tmp_path, data):
    content = bytearray(npz(tmp_path).read_bytes())
    if data.draw(st.booleans()):
        content = bytearray(data.draw(st.binary(max_size=300)))
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "damaged.npz"
    file.write_bytes(content)
    with contextlib.suppress(InputError):  # a changed pixel does no harm
        read_npz(file)


def test_corrupt_images_are_left_out_only_on_request(folder):
    bad = next((folder / "train").glob("*/*.png"))
    for name in "xyz":
        shutil.copy(bad, bad.with_name(f"{name}.png"))
    whole = read_image_folder(folder)
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(InputError, match="cannot read"):
        read_image_folder(folder)
    said = []
    progress = Progress(quiet=True)
    progress.say = said.append
    found = read_image_folder(folder, None, progress, skip_corrupt=True)
    assert len(found.train.labels) == len(whole.train.labels) - 1
    assert len(said) == 1
    assert f"skipped 1 of {len(whole.train.labels)} images that cannot be read: {bad}" in said[0]
    for path in bad.parent.iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match=f"no image of the class '{bad.parent.name}'"):
        read_image_folder(folder, skip_corrupt=True)


@fuzz
@given(st.data())
def test_damaged_images_raise_only_input_errors(tmp_path, data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"]))
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    content = bytearray(buffer.getvalue())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    for _ in range(data.draw(st.integers(0, 6)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    for split in ("train", "test"):
        (tmp_path / split / "class").mkdir(parents=True, exist_ok=True)
        (tmp_path / split / "class" / f"a.{kind.lower()}").write_bytes(bytes(content))
    with contextlib.suppress(InputError):
        read_image_folder(tmp_path, image_size=8)
    shutil.rmtree(tmp_path / "train")
    shutil.rmtree(tmp_path / "test")


def test_an_image_that_claims_a_huge_size_is_refused_before_it_is_decoded(folder):
    image = next((folder / "train").glob("*/*.png"))
    content = bytearray(image.read_bytes())
    content[16:24] = (12_000).to_bytes(4, "big") * 2  # width and height in the header
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    image.write_bytes(bytes(content))
    with pytest.raises(InputError, match="is too large: 12000×12000 pixels"):
        read_image_folder(folder, image_size=8)


# ------------------------------------------------------------------------------------ any size


def deflated(path: Path, megabytes: int) -> Path:
    """A .npz file with images of so many MB, all zero, in a thousandth of that."""
    header = io.BytesIO()
    shape = (megabytes << 10, 32, 32, 1)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(header.getvalue()) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    content = first + block * megabytes + packer.flush()
    size = len(header.getvalue()) + (megabytes << 20)
    np.savez(path, **{key: value for key, value in ARRAYS.items() if key != "x_train"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", content)
        entry = archive.getinfo("x_train.npy")
        where = entry.header_offset
    data = bytearray(path.read_bytes())
    for start, method in ((where, 8), (data.rindex(b"PK\1\2"), 10)):
        data[start + method : start + method + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        data[start + method + 14 : start + method + 18] = struct.pack("<L", size)
    path.write_bytes(data)
    return path


def test_an_npz_that_would_grow_beyond_measure_is_refused(tmp_path):
    path = deflated(tmp_path / "bomb.npz", 1100)
    assert path.stat().st_size < 2 << 20
    with refused_at_once(r"bomb\.npz would expand from [\d,]+ to 1,153,43\d,\d+ bytes"):
        read_npz(path)


def test_an_npz_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    path = npz(tmp_path, x_train=np.zeros((3, 400, 500, 3), np.uint8))
    monkeypatch.setattr("cclis.files.free_memory", lambda: 3 << 20)
    with refused_at_once(r"data\.npz: it takes 0\.0 GiB of memory", 2):
        read_npz(path)


def test_an_npz_whose_arrays_claim_more_than_is_there_is_refused(tmp_path):
    def header(descr: str, *shape: int) -> bytes:
        content = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            content, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        return content.getvalue()

    for number, claimed in enumerate((header("<i8", 10**12), header("<U0", 10**15))):
        file = tmp_path / f"{number}.npz"
        with zipfile.ZipFile(file, "w") as archive:
            for key in ARRAYS:
                archive.writestr(f"{key}.npy", claimed)
        with refused_at_once(r"claims [\d,]+ bytes, and has 128"):
            read_npz(file)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_npz_that_numpy_would_not_write_is_refused(tmp_path, method):
    file = npz(tmp_path)
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(tmp_path / "b", "w", method) as target:
        for key in ARRAYS:
            target.writestr(f"{key}.npy", source.read(f"{key}.npy"))
    with pytest.raises(InputError, match="compressed in another way than numpy does"):
        read_npz(tmp_path / "b")


def test_an_npz_with_an_index_of_any_size_is_refused(tmp_path):
    size = 1 << 30
    path = sparse(tmp_path / "index.npz", size, b"PK\3\4")
    with path.open("ab") as file:
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, size, 0, 0))
    with refused_at_once(r"index\.npz"):
        read_npz(path)


@pytest.mark.parametrize("size", [1 << 30, 1 << 40])
def test_data_files_of_any_size_are_refused(tiny, folder, cifar10_root, size):
    root = folder / "cifar-10-batches-bin"
    link_all(cifar10_root / "cifar-10-batches-bin", root)
    replace(root / "data_batch_1.bin", b"")
    sparse(root / "data_batch_1.bin", size)
    with refused_at_once("not a CIFAR-10 file"):
        read_cifar10(folder)
    (folder / "python").mkdir()
    python = python_folder(folder / "python", b"")
    sparse(python / "cifar-10-batches-py" / "data_batch_1", size)
    with refused_at_once("data_batch_1: it is too long"):
        read_cifar10(python)
    sparse(tiny / "tiny-imagenet-200" / "words.txt", size)
    with refused_at_once(r"words\.txt: it is too long"):
        read_tiny_imagenet(tiny)
    image = next((folder / "train").glob("*/*.png"))
    sparse(image, size)
    with refused_at_once(r"png has more than [\d,]+ bytes"):
        read_image_folder(folder)
