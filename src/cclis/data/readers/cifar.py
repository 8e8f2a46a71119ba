"""CIFAR-10 and CIFAR-100, in their binary and their python format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cclis.data.readers.cifar_pickle import array_of, unpickle
from cclis.data.readers.dataset import Dataset, Int64, Split, Uint8
from cclis.data.readers.text import lines, read_bytes, text
from cclis.errors import InputError

PIXELS = 3 * 32 * 32

_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
bowl boy bridge bus butterfly camel can castle caterpillar cattle
chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
plain plate poppy porcupine possum rabbit raccoon ray road rocket
rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class CifarLayout:
    """Files of a CIFAR dataset, in the binary and the python format.

    Attributes:
        title: Name of the dataset.
        benchmark: Name of the benchmark.
        binary_folder: Folder of the binary format.
        python_folder: Folder of the python format.
        train: Training files, without .bin, and the number of images in each.
        test: Test files, likewise.
        label_bytes: Bytes before the pixels of a binary record; the last one is the label.
        label_key: Key of the labels in the python format.
        binary_names: File of the class names in the binary format.
        python_names: The same in the python format.
        names_key: Key of the class names in that file.
        class_names: Class names, used if the file is missing.
    """

    title: str
    benchmark: str
    binary_folder: str
    python_folder: str
    train: Mapping[str, int]
    test: Mapping[str, int]
    label_bytes: int
    label_key: str
    binary_names: str
    python_names: str
    names_key: str
    class_names: tuple[str, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of one image with its labels in the binary format."""
        return self.label_bytes + PIXELS

    def find(self, root: Path) -> tuple[Path, bool] | None:
        """The folder of the dataset, and whether it has the binary format; None if missing."""
        first = next(iter(self.train))
        for name, file, binary in (
            (self.binary_folder, f"{first}.bin", True),
            (self.python_folder, first, False),
        ):
            if (root / name).is_dir():
                return root / name, binary
            if (root.name == name and root.is_dir()) or (root / file).is_file():
                return root, binary
        return None


CIFAR10 = CifarLayout(
    title="CIFAR-10",
    benchmark="seq-cifar10",
    binary_folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    train={f"data_batch_{i}": 10_000 for i in range(1, 6)},
    test={"test_batch": 10_000},
    label_bytes=1,
    label_key="labels",
    binary_names="batches.meta.txt",
    python_names="batches.meta",
    names_key="label_names",
    class_names=tuple(_CIFAR10_NAMES.split()),
)
CIFAR100 = CifarLayout(
    title="CIFAR-100",
    benchmark="seq-cifar100",
    binary_folder="cifar-100-binary",
    python_folder="cifar-100-python",
    train={"train": 50_000},
    test={"test": 10_000},
    label_bytes=2,
    label_key="fine_labels",
    binary_names="fine_label_names.txt",
    python_names="meta",
    names_key="fine_label_names",
    class_names=tuple(_CIFAR100_NAMES.split()),
)


def read_cifar10(root: Path) -> Dataset:
    """Read CIFAR-10 from `root`/cifar-10-batches-bin, `root`/cifar-10-batches-py, or `root`."""
    return _read_cifar(root, CIFAR10)


def read_cifar100(root: Path) -> Dataset:
    """Read CIFAR-100 (fine labels) from `root`/cifar-100-binary, `root`/cifar-100-python, or
    `root`."""
    return _read_cifar(root, CIFAR100)


def _read_cifar(root: Path, layout: CifarLayout) -> Dataset:
    located = layout.find(root)
    if located is None:
        raise InputError(
            f"no {layout.title} in {root}: expected {root / layout.binary_folder}/ or "
            f"{root / layout.python_folder}/; run `cclis data {layout.benchmark} --download`, "
            "or put the files there"
        )
    folder, binary = located
    read, read_names = (
        (_read_binary_batch, _read_binary_names)
        if binary
        else (_read_python_batch, _read_python_names)
    )
    return Dataset(
        train=_join([read(folder, *file, layout) for file in layout.train.items()]),
        test=_join([read(folder, *file, layout) for file in layout.test.items()]),
        class_names=read_names(folder, layout),
    )


def _join(batches: Sequence[tuple[Uint8, Int64]]) -> Split:
    """Join batches of flat pixels (red, green and blue planes, row by row) to one split."""
    labels = np.concatenate([labels for _, labels in batches])
    images = np.empty((len(labels), 32, 32, 3), dtype=np.uint8)
    start = 0
    for pixels, _ in batches:
        stop = start + len(pixels)
        images[start:stop] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        start = stop
    return Split(images, labels)


def _read_binary_batch(
    folder: Path, name: str, records: int, layout: CifarLayout
) -> tuple[Uint8, Int64]:
    file = folder / f"{name}.bin"
    expected = records * layout.record_bytes
    size = file.stat().st_size if file.is_file() else expected
    if size != expected:
        problem = "truncated" if size < expected else f"not a {layout.title} file"
        raise InputError(
            f"{file} has {size} bytes, but should have {expected}: it is {problem}; "
            "download it again"
        )
    raw = np.frombuffer(read_bytes(file), dtype=np.uint8).reshape(records, layout.record_bytes)
    labels = raw[:, layout.label_bytes - 1].astype(np.int64)
    _check_labels(file, int(labels.max()), layout)
    return raw[:, layout.label_bytes :], labels


def _check_labels(file: Path, highest: int, layout: CifarLayout) -> None:
    classes = len(layout.class_names)
    if highest >= classes:
        raise InputError(
            f"{file} contains the label {highest}, but {layout.title} labels end at {classes - 1}: "
            "it is damaged; download it again"
        )


def _read_binary_names(folder: Path, layout: CifarLayout) -> tuple[str, ...]:
    file = folder / layout.binary_names
    names = tuple(lines(file)) if file.is_file() else ()
    return names if len(names) == len(layout.class_names) else layout.class_names


def _read_python_batch(
    folder: Path, name: str, _records: int, layout: CifarLayout
) -> tuple[Uint8, Int64]:
    file = folder / name
    content = unpickle(file)
    pixels = array_of(content.get("data"))
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
        raise InputError(
            f"{file} is not a {layout.title} file: its 'data' should be an array of bytes with "
            f"{PIXELS} columns; download it again"
        )
    labels = content.get(layout.label_key)
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(type(label) is int and label >= 0 for label in labels)
    ):
        raise InputError(
            f"{file} is not a {layout.title} file: its '{layout.label_key}' should be a list of "
            f"{len(pixels)} labels; download it again"
        )
    _check_labels(file, max(labels), layout)
    return pixels, np.array(labels, dtype=np.int64)


def _read_python_names(folder: Path, layout: CifarLayout) -> tuple[str, ...]:
    file = folder / layout.python_names
    if not file.is_file():
        return layout.class_names
    names = unpickle(file).get(layout.names_key)
    if (
        not isinstance(names, list)
        or len(names) != len(layout.class_names)
        or not all(isinstance(name, bytes | str) for name in names)
    ):
        raise InputError(
            f"{file} is not a {layout.title} file: its '{layout.names_key}' should be a list of "
            f"{len(layout.class_names)} names; download it again, or delete this one file"
        )
    return tuple(text(name) for name in names)
