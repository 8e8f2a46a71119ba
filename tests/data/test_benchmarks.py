from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import cclis
from cclis.data.benchmarks import BENCHMARKS, Benchmark, load_benchmark
from cclis.data.images import ImageSet
from cclis.data.readers import Dataset, Split, read_digits
from cclis.errors import InputError


def split(labels: list[int], kind: type[Split] = Split) -> Split:
    """Every image is filled with its class."""
    array = np.array(labels, dtype=np.int64)
    images = np.broadcast_to(array.astype(np.uint8)[:, None, None, None], (len(array), 2, 3, 1))
    return kind(images.copy(), array)


def stream(sizes: list[int], order: list[int], limit: int | None = None, **splits: Split):
    parts = {"train": split([0, 1, 2, 3] * 3), "test": split([3, 2, 1, 0] * 2), **splits}
    names = ("ant", "bee", "cat", "dog")
    return Benchmark("animals", Dataset(class_names=names, **parts), sizes, order, limit)


def contents(images: ImageSet) -> list[int]:
    """The dataset's class of every image."""
    return images.images[:, 0, 0, 0].tolist()


# ------------------------------------------------------------------------------------ digits


def test_split_digits_is_five_tasks_of_two_classes():
    benchmark = cclis.load_benchmark("split-digits")
    assert (len(benchmark), benchmark.classes, benchmark.image_shape) == (5, 10, (8, 8, 1))
    assert benchmark.task_sizes == (2,) * 5
    assert benchmark.class_names == tuple("0123456789")
    tasks = list(benchmark)
    assert [task.index for task in tasks] == [0, 1, 2, 3, 4]
    assert [task.classes for task in tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert [task.names for task in tasks] == [
        ("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"), ("8", "9"),
    ]  # fmt: skip
    for task in tasks:
        for samples in (task.train, task.test):
            assert set(samples.labels.tolist()) == set(task.classes)
    digits = read_digits()
    assert sum(len(task.train) for task in tasks) == len(digits.train)
    assert sum(len(task.test) for task in tasks) == len(digits.test)


def test_a_task_holds_the_images_of_its_classes():
    digits, task = read_digits(), load_benchmark("split-digits")[2]
    of_task = np.isin(digits.train.labels, (4, 5))
    assert np.array_equal(task.train.images.numpy(), digits.train.images[of_task])
    assert np.array_equal(task.train.labels.numpy(), digits.train.labels[of_task])


# ------------------------------------------------------------------------------ class order


def test_classes_arrive_in_the_order_asked_for():
    benchmark = stream([1, 3], [2, 0, 3, 1])
    assert benchmark.class_names == ("cat", "ant", "dog", "bee")
    first, second = benchmark
    assert (first.names, contents(first.train), first.train.labels.tolist()) == (
        ("cat",), [2] * 3, [0] * 3,
    )  # fmt: skip
    assert second.names == ("ant", "dog", "bee")
    # Images of the dataset's classes 0, 3, 1 carry the labels 1, 2, 3.
    assert contents(second.test) == [3, 1, 0] * 2
    assert second.test.labels.tolist() == [2, 3, 1] * 2


def test_class_order_is_a_seed_and_names_stay_with_their_images():
    plain = load_benchmark("split-digits")
    one, again, other = (load_benchmark("split-digits", class_order=seed) for seed in (1, 1, 2))
    assert one.class_names == again.class_names
    assert len({plain.class_names, one.class_names, other.class_names}) == 3
    assert sorted(one.class_names) == sorted(plain.class_names)

    def by_name(benchmark: Benchmark) -> dict[str, torch.Tensor]:
        return {
            name: task.train.images[task.train.labels == label]
            for task in benchmark
            for label, name in zip(task.classes, task.names, strict=True)
        }

    expected, found = by_name(plain), by_name(one)
    assert all(torch.equal(found[name], images) for name, images in expected.items())


# -------------------------------------------------------------------------------- task sizes


@pytest.mark.parametrize(
    ("tasks", "sizes"),
    [
        ([3, 5, 2], (3, 5, 2)),
        (3, (4, 3, 3)),
        (1, (10,)),
        (10, (1,) * 10),
        ([2, 2], (2, 2)),
    ],
)
def test_tasks_are_a_number_or_the_size_of_each(tasks, sizes):
    benchmark = load_benchmark("split-digits", tasks=tasks)
    assert benchmark.task_sizes == sizes
    assert benchmark.classes == sum(sizes)
    assert benchmark.class_names == tuple("0123456789")[: sum(sizes)]
    seen = [label for task in benchmark for label in task.train.labels.unique().tolist()]
    assert seen == list(range(sum(sizes)))


@pytest.mark.parametrize("tasks", [11, [6, 5], 0, [], [3, 0], [4, -1]])
def test_tasks_that_cannot_be_made_are_refused(tasks):
    with pytest.raises(InputError):
        load_benchmark("split-digits", tasks=tasks)


# ------------------------------------------------------------------------------------- limit


def test_limit_takes_the_first_of_each_class_of_each_split():
    unlimited, limited = load_benchmark("split-digits"), load_benchmark("split-digits", limit=5)
    for whole, part in zip(unlimited, limited, strict=True):
        for all_of_it, kept in ((whole.train, part.train), (whole.test, part.test)):
            for label in whole.classes:
                expected = all_of_it.images[all_of_it.labels == label][:5]
                assert torch.equal(kept.images[kept.labels == label], expected)


def test_a_limit_beyond_what_there_is_changes_nothing():
    whole, limited = stream([4], [0, 1, 2, 3])[0], stream([4], [0, 1, 2, 3], limit=99)[0]
    assert torch.equal(limited.train.labels, whole.train.labels)


@pytest.mark.parametrize("limit", [None, 2])
def test_a_class_may_lack_test_images_but_a_task_may_not(limit):
    first, second = stream([2, 2], [0, 1, 2, 3], limit, test=split([0, 1, 3]))
    assert (len(first.test), len(second.test)) == (2, 1)
    with pytest.raises(InputError, match=r"task 2 of .* has no test images"):
        stream([2, 2], [0, 1, 2, 3], limit, test=split([0, 1]))


@pytest.mark.parametrize(
    ("limit", "labels"), [(None, [0, 1, 2, 3, 0]), (1, [0, 1, 2, 3] * 2)], ids=["last", "limit"]
)
def test_a_task_of_one_training_image_is_named_at_once(limit, labels):
    with pytest.raises(InputError, match="task 2 of animals has one training image"):
        stream([3, 1], [0, 1, 2, 3], limit, train=split(labels))


@pytest.mark.parametrize(
    "setting", [{"limit": 0}, {"limit": -3}, {"class_order": -1}, {"image_size": 0}]
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        load_benchmark("split-digits", **setting)


# --------------------------------------------------------------------------------- iteration


class Counted(Split):
    reads = 0

    def subset(self, chosen):
        Counted.reads += 1
        return super().subset(chosen)


def test_tasks_are_read_when_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(Counted, "reads", 0)
    benchmark = stream([1] * 4, [0, 1, 2, 3], train=split([0, 1, 2, 3] * 2, Counted))
    tasks = iter(benchmark)
    assert Counted.reads == 0
    next(tasks)
    assert Counted.reads == 1
    next(tasks)
    assert Counted.reads == 2


def test_what_is_done_to_a_task_does_not_reach_the_next_read():
    benchmark = load_benchmark("split-digits")
    before, after = benchmark[1], benchmark[1]
    before.train.images.zero_()
    before.train.labels.fill_(-1)
    assert torch.equal(after.train.images, benchmark[1].train.images)
    assert torch.equal(after.train.labels, benchmark[1].train.labels)
    assert benchmark[1].train.images.any()


@pytest.mark.parametrize("index", [-1, 5])
def test_a_task_that_is_not_there(index):
    with pytest.raises(IndexError, match=f"tasks 0 to 4, not {index}"):
        load_benchmark("split-digits")[index]


# ------------------------------------------------------------------------------ names, own data


def test_an_unknown_name_brings_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'seq-cifar10'"):
        load_benchmark("seq-cifar01")


@pytest.mark.parametrize("name", ["image-folder", "npz"])
def test_own_data_has_to_be_named(name):
    with pytest.raises(InputError, match=f"{name} needs --data"):
        load_benchmark(name)


@pytest.mark.parametrize("name", ["seq-cifar10", "seq-cifar100", "seq-tinyimagenet"])
def test_published_benchmarks_say_how_to_get_them(name, tmp_path):
    with pytest.raises(InputError, match=f"cclis data {name} --download"):
        load_benchmark(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "tasks", "classes"),
    [("seq-cifar10", 5, 10), ("seq-cifar100", 5, 100), ("seq-tinyimagenet", 10, 200)],
)
def test_published_benchmarks_are_split_as_in_the_paper(name, tasks, classes):
    sizes = BENCHMARKS[name].sizes
    assert sizes is not None
    assert (len(sizes), sum(sizes), len(set(sizes))) == (tasks, classes, 1)


def write_npz(path: Path, labels: list[int]) -> Path:
    values = np.array(labels)
    images = np.repeat(values.astype(np.uint8), 16).reshape(-1, 4, 4)
    np.savez(path, x_train=images, y_train=values, x_test=images[::-1], y_test=values[::-1])
    return path


def test_own_arrays_come_two_classes_a_task(tmp_path):
    benchmark = load_benchmark("npz", write_npz(tmp_path / "own.npz", [9, 20, 30, 7, 9]))
    assert benchmark.task_sizes == (2, 2)
    assert benchmark.class_names == ("7", "9", "20", "30")
    assert benchmark.image_shape == (4, 4, 1)
    first, second = benchmark
    assert (contents(first.train), first.train.labels.tolist()) == ([9, 7, 9], [1, 0, 1])
    assert (contents(second.test), second.test.labels.tolist()) == ([30, 20], [3, 2])


@pytest.mark.parametrize(("classes", "sizes"), [(1, (1,)), (3, (3,)), (5, (3, 2)), (7, (3, 2, 2))])
def test_an_odd_number_of_own_classes_is_used_up(tmp_path, classes, sizes):
    path = write_npz(tmp_path / "own.npz", [*range(classes)] * 2)
    assert load_benchmark("npz", str(path)).task_sizes == sizes


def test_own_images_come_in_folders(tmp_path):
    for kind in ("train", "test"):
        for value, name in enumerate(("cow", "ape", "bat", "dog")):
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            Image.new("RGB", (6, 4), (value, 0, 0)).save(folder / "a.png")
    benchmark = load_benchmark("image-folder", tmp_path)
    assert benchmark.class_names == ("ape", "bat", "cow", "dog")
    assert benchmark.task_sizes == (2, 2)
    assert benchmark.image_shape == (4, 6, 3)
    assert contents(benchmark[1].train) == [0, 3]
    assert benchmark[1].test.labels.tolist() == [2, 3]
    assert load_benchmark("image-folder", tmp_path, image_size=2).image_shape == (2, 2, 3)


def test_a_class_without_training_images_is_named():
    images = np.zeros((4, 8, 8, 1), dtype=np.uint8)
    split = Split(images, np.array([0, 0, 2, 2]))
    with pytest.raises(InputError, match="class 'b' of own has no training images"):
        Benchmark("own", Dataset(split, split, ("a", "b", "c")), [3], [0, 1, 2])
