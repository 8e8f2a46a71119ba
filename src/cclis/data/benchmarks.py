"""Streams of tasks. Only this module knows which class belongs to which task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cclis.data.download import default_root
from cclis.data.images import ImageSet
from cclis.data.readers import (
    Dataset,
    Split,
    read_cifar10,
    read_cifar100,
    read_digits,
    read_image_folder,
    read_npz,
    read_tiny_imagenet,
)
from cclis.errors import InputError, os_errors, unknown
from cclis.progress import QUIET, Progress
from cclis.settings import StreamOptions

Reader = Callable[[Path, StreamOptions, Progress], Dataset]


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Attributes:
        index: Its position in the stream, from 0.
        classes: Its classes, as indices in order of arrival.
        names: Names of these classes.
        train: Training samples.
        test: Test samples.
    """

    index: int
    classes: tuple[int, ...]
    names: tuple[str, ...]
    train: ImageSet
    test: ImageSet


class Benchmark:
    """A stream of tasks with disjoint classes.

    Tasks are read when they are asked for, so that only one has to be in memory.

    Args:
        name: Name of the benchmark.
        dataset: All images.
        sizes: Number of classes of each task; remaining classes are not used.
        order: The dataset's classes in order of arrival.
        limit: Maximum number of samples per class and split; None for no limit.
    """

    def __init__(
        self,
        name: str,
        dataset: Dataset,
        sizes: Sequence[int],
        order: Sequence[int],
        limit: int | None = None,
    ):
        if sum(sizes) > len(order):
            raise InputError(
                f"tasks of {list(sizes)} classes need {sum(sizes)} classes, but {name} has "
                f"{len(order)}"
            )
        self.name = name
        self.task_sizes = tuple(sizes)
        self._dataset, self._order, self._limit = dataset, tuple(order[: sum(sizes)]), limit
        self.class_names = tuple(dataset.class_names[c] for c in self._order)
        counts = np.bincount(dataset.train.labels, minlength=len(dataset.class_names))
        if limit is not None:
            counts = counts.clip(max=limit)
        for c in self._order:
            if not counts[c]:
                raise InputError(
                    f"class '{dataset.class_names[c]}' of {name} has no training images"
                )
        for index in range(len(self)):
            task_classes = [self._order[c] for c in self._classes_of(index)]
            if counts[task_classes].sum() < 2:
                raise InputError(
                    f"task {index + 1} of {name} has one training image; it needs at least two"
                )
            if not np.isin(dataset.test.labels, task_classes).any():
                raise InputError(f"task {index + 1} of {name} has no test images")

    @property
    def classes(self) -> int:
        """Number of classes of all tasks."""
        return len(self._order)

    @property
    def left_out(self) -> int:
        """Number of classes of the dataset that are in no task."""
        return len(self._dataset.class_names) - self.classes

    @property
    def samples(self) -> int:
        """Number of training samples of the dataset."""
        return len(self._dataset.train.labels)

    @property
    def digest(self) -> str:
        """Checksum of all labels and of up to 4096 evenly spaced images of each split."""
        digest = hashlib.sha256()
        for split in (self._dataset.train, self._dataset.test):
            digest.update(np.ascontiguousarray(split.labels).tobytes())
            for index in np.unique(np.linspace(0, len(split.labels) - 1, 4096).astype(int)):
                row = index if split.rows is None else split.rows[index]
                digest.update(np.ascontiguousarray(split.images[row]).tobytes())
        return digest.hexdigest()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images."""
        height, width, channels = self._dataset.train.images.shape[1:]
        return int(height), int(width), int(channels)

    def __len__(self) -> int:
        return len(self.task_sizes)

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has tasks 0 to {len(self) - 1}, not {index}")
        classes = self._classes_of(index)
        return Task(
            index,
            classes,
            tuple(self.class_names[c] for c in classes),
            self._subset(self._dataset.train, classes),
            self._subset(self._dataset.test, classes),
        )

    def _classes_of(self, index: int) -> tuple[int, ...]:
        first = sum(self.task_sizes[:index])
        return tuple(range(first, first + self.task_sizes[index]))

    def _subset(self, split: Split, classes: Sequence[int]) -> ImageSet:
        arrival = np.full(len(self._dataset.class_names), -1, dtype=np.int64)
        arrival[[self._order[c] for c in classes]] = classes
        chosen = np.flatnonzero(arrival[split.labels] >= 0)
        if self._limit is not None:
            chosen = _first_of_each_class(chosen, split.labels[chosen], self._limit)
        subset = split.subset(chosen)
        return ImageSet(subset.images, torch.from_numpy(arrival)[subset.labels])


def held_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Split the training set into a training and a validation set; the test split is dropped.

    Args:
        dataset: All images.
        share: Share of each class to validate on: at least one sample, and never all.
        seed: Seed of the random selection.

    Returns:
        A dataset with the validation set as its test split.
    """
    labels = dataset.train.labels
    rng = np.random.default_rng([seed, len(labels)])
    held = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        if len(of_class) < 2:
            name = dataset.class_names[label]
            raise InputError(
                f"class '{name}' has only one training image; validation needs at least two"
            )
        count = min(max(1, round(share * len(of_class))), len(of_class) - 1)
        held[rng.choice(of_class, count, replace=False)] = True
    return Dataset(dataset.train.part(~held), dataset.train.part(held), dataset.class_names)


def _first_of_each_class(chosen: np.ndarray, labels: np.ndarray, limit: int) -> np.ndarray:
    first = [chosen[labels == label][:limit] for label in np.unique(labels)]
    return np.sort(np.concatenate([chosen[:0], *first]))


@dataclass(frozen=True)
class Spec:
    """How a benchmark is read and split.

    Attributes:
        about: Description in one line.
        read: Function that reads it from a folder.
        sizes: Number of classes of each task; None if the data decide.
    """

    about: str
    read: Reader
    sizes: tuple[int, ...] | None = None


BENCHMARKS: dict[str, Spec] = {
    "split-digits": Spec(
        "8×8 handwritten digits of scikit-learn; no download",
        lambda root, options, progress: read_digits(),
        (2,) * 5,
    ),
    "seq-cifar10": Spec(
        "CIFAR-10, 32×32 colour",
        lambda root, options, progress: read_cifar10(root),
        (2,) * 5,
    ),
    "seq-cifar100": Spec(
        "CIFAR-100, 32×32 colour",
        lambda root, options, progress: read_cifar100(root),
        (20,) * 5,
    ),
    "seq-tinyimagenet": Spec(
        "Tiny-ImageNet, 64×64 colour; its validation split is the test split",
        lambda root, options, progress: read_tiny_imagenet(root, progress),
        (20,) * 10,
    ),
    "image-folder": Spec(
        "your images: --data FOLDER with train/CLASS/*.png and test/CLASS/*.png",
        lambda root, options, progress: read_image_folder(
            root, options.image_size, progress, skip_corrupt=options.skip_corrupt
        ),
    ),
    "npz": Spec(
        "your arrays: --data FILE.npz with x_train, y_train, x_test, y_test",
        lambda root, options, progress: read_npz(root),
    ),
}


@os_errors()
def load_benchmark(
    name: str,
    root: str | Path | None = None,
    *,
    tasks: int | list[int] | None = None,
    class_order: int | None = None,
    image_size: int | None = None,
    skip_corrupt: bool = False,
    limit: int | None = None,
    validation: float | None = None,
    seed: int = 0,
    progress: Progress = QUIET,
) -> Benchmark:
    """Load a benchmark by name.

    Args:
        name: One of BENCHMARKS.
        root: Folder of the datasets, or the folder or file of your own data.
        tasks: Number of tasks, or the number of classes of each task.
        class_order: Seed of a random order of the classes; None keeps the dataset's order.
        image_size: Height and width to resize images to (image-folder only).
        skip_corrupt: Skip images that cannot be read (image-folder only).
        limit: Maximum number of samples per class and split.
        validation: Share of each class's training samples to test on, instead of the test split.
        seed: Seed that selects the validation samples.
        progress: Where to show progress.

    >>> [task.names for task in load_benchmark("split-digits")][0]
    ('0', '1')
    """
    if name not in BENCHMARKS:
        raise unknown("benchmark", name, BENCHMARKS)
    spec = BENCHMARKS[name]
    refuse_without_data(name, root)
    for setting, given in (("image_size", image_size is not None), ("skip_corrupt", skip_corrupt)):
        if given and name != "image-folder":
            raise InputError(f"{setting} is for image-folder only, not for {name}")
    options = StreamOptions(
        tasks=tasks,
        class_order=class_order,
        image_size=image_size,
        skip_corrupt=skip_corrupt,
        limit=limit,
        validation=validation,
    )
    if spec.sizes is not None:
        # Refused before images are read, which may take minutes.
        _task_sizes(tasks, spec.sizes, sum(spec.sizes))
    dataset = spec.read(Path(root) if root is not None else default_root(), options, progress)
    if validation is not None:
        dataset = held_out(dataset, validation, seed)
    order = np.arange(len(dataset.class_names))
    if class_order is not None:
        order = np.random.default_rng(class_order).permutation(order)
    sizes = _task_sizes(tasks, spec.sizes, len(order))
    return Benchmark(name, dataset, sizes, order.tolist(), limit)


def refuse_without_data(name: str, root: str | Path | None) -> None:
    """Raise InputError if a benchmark of your own data is used without its location."""
    spec = BENCHMARKS[name]
    if root is None and spec.sizes is None:
        raise InputError(f"{name} needs --data: {spec.about}")


def _task_sizes(
    tasks: int | list[int] | None, default: tuple[int, ...] | None, classes: int
) -> tuple[int, ...]:
    if tasks is None and default is not None:
        return default
    if tasks is None:
        # Own data: two classes per task; if their number is odd, three in the first.
        tasks = max(1, classes // 2)
    if isinstance(tasks, int):
        if not 1 <= tasks <= classes:
            raise InputError(f"{classes} classes cannot be split into {tasks} tasks")
        share, rest = divmod(classes, tasks)
        return tuple(share + (index < rest) for index in range(tasks))
    if sum(tasks) > classes:
        raise InputError(f"tasks of {tasks} classes need more than the {classes} here")
    return tuple(tasks)
