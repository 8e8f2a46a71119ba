"""Image collections as they lie on disk: CIFAR, Tiny-ImageNet, digits, image folders, npz."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from cclis.data.images import ImageSet, as_uint8_images
from cclis.errors import InputError
from cclis.progress import QUIET, Progress

Uint8 = NDArray[np.uint8]
Int64 = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images that stay where they are until `subset` asks for them.

    Attributes:
        images: (N, H, W, C); may be a read-only memory map.
        labels: (N,): indices into the class names.
    """

    images: Uint8
    labels: Int64

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> ImageSet:
        """A copy of the images that a mask over all of them, or their indices, choose."""
        labels = self.labels[chosen]
        where = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        images = np.take(self.images, where, axis=0)
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A whole labelled image collection."""

    train: Split
    test: Split
    class_names: tuple[str, ...]


# ------------------------------------------------------------------------------------- digits


def read_digits() -> Dataset:
    """The 1,797 handwritten digits (8×8, grey) that come with scikit-learn.

    The last fifth of every class, in the order of the collection, is the test split.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        where = np.flatnonzero(labels == digit)
        test[where[len(where) - len(where) // 5 :]] = True
    return Dataset(
        train=Split(images[~test], labels[~test]),
        test=Split(images[test], labels[test]),
        class_names=tuple(str(digit) for digit in range(10)),
    )


# -------------------------------------------------------------------------------------- CIFAR

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
    """What a CIFAR collection looks like on disk, in its binary and in its python layout."""

    title: str
    benchmark: str
    binary_folder: str
    python_folder: str
    train: Mapping[str, int]
    """Files (without .bin) and the images each holds."""
    test: Mapping[str, int]
    label_bytes: int
    """Bytes before the pixels of a binary record; the last of them is the label used."""
    label_key: str
    """Where the python layout holds the label used."""
    binary_names: str
    python_names: str
    names_key: str
    class_names: tuple[str, ...]

    @property
    def record_bytes(self) -> int:
        """Length of one image with its labels in the binary layout."""
        return self.label_bytes + PIXELS

    def find(self, root: Path) -> tuple[Path, bool] | None:
        """The folder that holds the collection, and whether its layout is the binary one."""
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
    """CIFAR-10 from `root`/cifar-10-batches-bin, `root`/cifar-10-batches-py, or `root` itself."""
    return _read_cifar(root, CIFAR10)


def read_cifar100(root: Path) -> Dataset:
    """CIFAR-100, fine labels, from `root`/cifar-100-binary, `root`/cifar-100-python or `root`."""
    return _read_cifar(root, CIFAR100)


def _read_cifar(root: Path, layout: CifarLayout) -> Dataset:
    found = layout.find(root)
    if found is None:
        raise InputError(
            f"no {layout.title} in {root}: expected {root / layout.binary_folder}/ or "
            f"{root / layout.python_folder}/; run `cclis data {layout.benchmark} --download`, "
            "or put the files there"
        )
    folder, binary = found
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
    """One split of batches of flat pixels: planes of red, green, blue, each in rows."""
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
    raw = np.frombuffer(_read_bytes(file), dtype=np.uint8)
    expected = records * layout.record_bytes
    if len(raw) != expected:
        problem = "truncated" if len(raw) < expected else f"not a {layout.title} file"
        raise InputError(
            f"{file} is {len(raw)} bytes, but should be {expected}: it is {problem}; "
            "download it again"
        )
    raw = raw.reshape(records, layout.record_bytes)
    labels = raw[:, layout.label_bytes - 1].astype(np.int64)
    _check_labels(file, int(labels.max()), layout)
    return raw[:, layout.label_bytes :], labels


def _check_labels(file: Path, highest: int, layout: CifarLayout) -> None:
    classes = len(layout.class_names)
    if highest >= classes:
        raise InputError(
            f"{file} holds the label {highest}, but {layout.title} labels end at {classes - 1}: "
            "it is damaged; download it again"
        )


def _read_binary_names(folder: Path, layout: CifarLayout) -> tuple[str, ...]:
    file = folder / layout.binary_names
    names = tuple(_lines(file)) if file.is_file() else ()
    return names if len(names) == len(layout.class_names) else layout.class_names


def _read_python_batch(
    folder: Path, name: str, _records: int, layout: CifarLayout
) -> tuple[Uint8, Int64]:
    file = folder / name
    content = _unpickle(file)
    pixels = _pickled_array(content.get("data"))
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
    names = _unpickle(file).get(layout.names_key)
    if (
        not isinstance(names, list)
        or len(names) != len(layout.class_names)
        or not all(isinstance(name, bytes | str) for name in names)
    ):
        raise InputError(
            f"{file} is not a {layout.title} file: its '{layout.names_key}' should be a list of "
            f"{len(layout.class_names)} names; download it again, or delete this one file"
        )
    return tuple(_text(name) for name in names)


class _Recorded:
    """Stands in for every numpy constructor a pickle names: it notes the call, and does nothing."""

    args: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _CifarUnpickler(pickle.Unpickler):
    """Loads plain containers and the record of an array; runs nothing that a file names."""

    admitted: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _Recorded,
        ("numpy._core.multiarray", "_reconstruct"): _Recorded,
        ("numpy", "ndarray"): _Recorded,
        ("numpy", "dtype"): _Recorded,
        # Python 3 writes bytes under protocol 2 as the encoding of a text.
        ("_codecs", "encode"): str.encode,
    }

    def __init__(self, file: Path, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        """The harmless stand-in for a name the files are known to hold; all else is refused."""
        if (module, name) not in self.admitted:
            raise InputError(
                f"{self.file} is not a CIFAR file: it wants to load {module}.{name}, "
                "which is refused; delete it and download the collection again"
            )
        return self.admitted[module, name]


def _unpickle(file: Path) -> dict[str, Any]:
    data = _read_bytes(file)
    try:
        # The unpickler allocates as many memo slots as the highest index asks for, so one
        # damaged byte could take all memory.
        for opcode, argument, _ in pickletools.genops(data):
            if "PUT" in opcode.name and (argument or 0) > len(data):
                raise pickle.UnpicklingError(f"memo index {argument}")
        content = _CifarUnpickler(file, data).load()
        return {_text(key): value for key, value in content.items()}
    except InputError:
        raise
    # Damaged pickles raise nearly every type of exception.
    except Exception as error:
        raise InputError(
            f"{file} is not a CIFAR file, or is damaged ({_first_line(error)}); download it again"
        ) from error


def _pickled_array(value: Any) -> Uint8 | None:
    """The array of bytes that `value` is the record of, if it is one."""
    try:
        shape, dtype, fortran, raw = value.state[-4:]
        if dtype.args[0] not in ("u1", b"u1"):
            return None
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        return None


# ------------------------------------------------------------------------------ Tiny-ImageNet

TINY_IMAGENET = "tiny-imagenet-200"
TINY_CACHE = "cclis-cache-v1"


def find_tiny_imagenet(root: Path) -> Path | None:
    """The tiny-imagenet-200 folder in `root`, or `root` itself where it is that folder."""
    if (root / TINY_IMAGENET).is_dir():
        return root / TINY_IMAGENET
    return root if (root / "wnids.txt").is_file() else None


def read_tiny_imagenet(root: Path, progress: Progress = QUIET) -> Dataset:
    """Tiny-ImageNet from `root`/tiny-imagenet-200 or `root`; its validation split is the test.

    Classes are in the order of their sorted WordNet ids. The images are decoded once, into
    arrays beside them, and memory-mapped from then on; where the folder cannot be written to
    they are decoded into memory every time.
    """
    folder = find_tiny_imagenet(root)
    if folder is None:
        raise InputError(
            f"no Tiny-ImageNet in {root}: expected {root / TINY_IMAGENET}/; run `cclis data "
            "seq-tinyimagenet --download`, or put the folder there"
        )
    ids = sorted(set(_lines(folder / "wnids.txt")))
    if not ids:
        raise InputError(f"{folder / 'wnids.txt'} names no class; unpack the archive again")
    files = {"train": _tiny_train_files(folder, ids), "test": _tiny_test_files(folder, ids)}
    cache = folder / TINY_CACHE
    splits = _open_cache(cache, ids, files)
    if splits is None:
        seen = {label for _, label in files["train"]}
        for label, wnid in enumerate(ids):
            if label not in seen:
                raise InputError(
                    f"no images in {folder / 'train' / wnid / 'images'}; unpack the archive again"
                )
        try:
            _write_cache(cache, ids, files, progress)
            splits = _open_cache(cache, ids, files)
        except OSError:  # a read-only or a full disk
            splits = None
    if splits is None:
        splits = {
            split: Split(np.concatenate(list(_tiny_images(listed, progress))), _labels(listed))
            for split, listed in files.items()
        }
    return Dataset(splits["train"], splits["test"], _tiny_names(folder, ids))


Files = list[tuple[Path, int]]
"""Image files and their classes."""


def _tiny_train_files(folder: Path, ids: Sequence[str]) -> Files:
    return [
        (path, label)
        for label, wnid in enumerate(ids)
        for path in _images_in(folder / "train" / wnid / "images")
    ]


def _tiny_test_files(folder: Path, ids: Sequence[str]) -> Files:
    index = {wnid: label for label, wnid in enumerate(ids)}
    annotations = folder / "val" / "val_annotations.txt"
    files = []
    for number, line in enumerate(_lines(annotations), start=1):
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in index:
            raise InputError(
                f"line {number} of {annotations} should be an image and a class of wnids.txt, "
                f"not '{line[:80]}'; unpack the archive again"
            )
        files.append((folder / "val" / "images" / name, index[wnid]))
    if not files:
        raise InputError(f"{annotations} names no images; unpack the archive again")
    return files


def _tiny_names(folder: Path, ids: Sequence[str]) -> tuple[str, ...]:
    """The first of a class's names; with its id where two classes share it."""
    file = folder / "words.txt"
    words = (
        dict(line.split("\t", 1) for line in _lines(file) if "\t" in line) if file.is_file() else {}
    )
    names = [words.get(wnid, wnid).split(",")[0].strip() for wnid in ids]
    count = Counter(names)
    return tuple(
        name if count[name] == 1 else f"{name} ({wnid})"
        for name, wnid in zip(names, ids, strict=True)
    )


def _tiny_images(files: Files, progress: Progress) -> Iterator[Uint8]:
    paths = [path for path, _ in files]
    shape = _decode(paths[0], "RGB").shape

    def decode(path: Path) -> Uint8:
        image = _decode(path, "RGB")
        if image.shape != shape:
            raise InputError(
                f"{path} is {_size(image.shape)}, but {paths[0]} is {_size(shape)}; "
                "unpack the archive again"
            )
        return image

    for images in _in_parallel(decode, paths, "decoding Tiny-ImageNet", progress):
        yield np.stack(images)


def _labels(files: Files) -> Int64:
    return np.array([label for _, label in files], dtype=np.int64)


def _open_cache(
    cache: Path, ids: Sequence[str], files: Mapping[str, Files]
) -> dict[str, Split] | None:
    """The decoded splits, or None where they are absent, incomplete, or of other images."""
    try:
        manifest = json.loads((cache / "manifest.json").read_text())
        if manifest["classes"] != list(ids):
            return None
        splits = {}
        for split, listed in files.items():
            images = np.load(cache / f"{split}_images.npy", mmap_mode="r", allow_pickle=False)
            labels = np.load(cache / f"{split}_labels.npy", allow_pickle=False)
            if (
                not len(labels) == len(images) == manifest[split]
                # Once decoded, the files themselves may be deleted to save space.
                or len(listed) not in (0, len(labels))
                or (images.dtype, images.ndim, images.shape[-1]) != (np.uint8, 4, 3)
                or labels.dtype != np.int64
                or not 0 <= labels.min() <= labels.max() < len(ids)
            ):
                return None
            splits[split] = Split(images, labels)
    except (OSError, ValueError, LookupError, TypeError, EOFError):
        return None
    return splits


def _write_cache(
    cache: Path, ids: Sequence[str], files: Mapping[str, Files], progress: Progress
) -> None:
    cache.mkdir(exist_ok=True)
    manifest = cache / "manifest.json"
    manifest.unlink(missing_ok=True)
    for split, listed in files.items():
        with _appearing(cache / f"{split}_labels.npy") as file:
            np.save(file, _labels(listed), allow_pickle=False)
        # Written in pieces, for a full disk to be an OSError; through a map it is a SIGBUS.
        with _appearing(cache / f"{split}_images.npy") as file:
            for number, images in enumerate(_tiny_images(listed, progress)):
                if number == 0:
                    shape = (len(listed), *images.shape[1:])
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(images.tobytes())
    counts = {split: len(listed) for split, listed in files.items()}
    with _appearing(manifest) as file:
        file.write(json.dumps({**counts, "classes": list(ids)}).encode())


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears at `path` only once it is complete."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------ image folders

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def read_image_folder(
    root: Path, image_size: int | None = None, progress: Progress = QUIET
) -> Dataset:
    """Images in folders: `root`/train/CLASS/IMAGE and `root`/test/CLASS/IMAGE (or val).

    Args:
        root: The folder that holds train and test.
        image_size: Bring every image to this height and width: the shorter side is scaled to it,
            the longer one cropped in its middle. Without it, all must have one size already.
        progress: Where to show how far it is.
    """
    if image_size is not None and image_size < 1:
        raise InputError(f"image_size must be at least 1, not {image_size}")
    train = root / "train"
    test = next((root / name for name in ("test", "val") if (root / name).is_dir()), root / "test")
    for folder in (train, test):
        if not folder.is_dir():
            raise InputError(f"no folder {folder}: expected {folder}/CLASS/IMAGE files")
    names = _folders_in(train)
    strangers = sorted(set(_folders_in(test)) - set(names))
    if strangers:
        raise InputError(
            f"{test} holds the class '{strangers[0]}', which {train} does not; "
            "every class needs training images"
        )
    files = {
        split: [
            (path, label)
            for label, name in enumerate(names)
            if name in _folders_in(folder)
            for path in _images_in(folder / name, needed=True)
        ]
        for split, folder in (("train", train), ("test", test))
    }
    paths = [path for listed in files.values() for path, _ in listed]
    mode = _common_mode(paths, image_size, progress)

    def decode(path: Path) -> Uint8:
        return _decode(path, mode, image_size)

    def read(split: str) -> Split:
        parts = _in_parallel(
            decode, [path for path, _ in files[split]], f"reading {split} images", progress
        )
        return Split(np.concatenate([np.stack(part) for part in parts]), _labels(files[split]))

    return Dataset(read("train"), read("test"), tuple(names))


def _folders_in(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise InputError(f"no class folders in {folder}: expected {folder}/CLASS/IMAGE files")
    return names


def _images_in(folder: Path, *, needed: bool = False) -> list[Path]:
    """The images directly in `folder`, by name."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [
        folder / name
        for name in sorted(names)
        if os.path.splitext(name)[1].lower() in _SUFFIXES and not name.startswith(".")
    ]
    if needed and not found:
        raise InputError(f"no images in {folder}: put some there, or remove the folder")
    return found


def _common_mode(paths: Sequence[Path], image_size: int | None, progress: Progress) -> str:
    """L where every image is grey, else RGB; sizes must agree unless there is an `image_size`."""
    grey = True
    first: tuple[int, int] | None = None
    headers = _in_parallel(_header, paths, "looking at images", progress)
    for path, (size, mode) in zip(paths, (h for part in headers for h in part), strict=True):
        grey = grey and (mode in {"1", "L", "LA"} or mode.startswith("I"))
        first = first or size
        if image_size is None and size != first:
            raise InputError(
                f"images of different sizes: {paths[0]} is {first[0]}×{first[1]}, {path} is "
                f"{size[0]}×{size[1]} (width×height); pass `--image_size N` to bring all to N×N"
            )
    return "L" if grey else "RGB"


def _header(path: Path) -> tuple[tuple[int, int], str]:
    with _opened(path) as image:
        return image.size, image.mode


def _decode(path: Path, mode: str, image_size: int | None = None) -> Uint8:
    """The image as (H, W, C) in Pillow's `mode` L or RGB."""
    with _opened(path) as image:
        pixels: Image.Image = image
        if image.mode == "F":
            raise InputError(f"{path} holds floating-point pixels; save it with 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits, which convert() would clip to 255
            deep = np.asarray(image)
            if deep.min() < 0 or deep.max() > 65535:
                raise InputError(f"{path} holds 32-bit pixels; save it with 8 or 16 bits")
            pixels = Image.fromarray(np.rint(deep / 257).astype(np.uint8))
        pixels = pixels.convert(mode)
        if image_size is not None:
            pixels = ImageOps.fit(pixels, (image_size, image_size), Image.Resampling.BILINEAR)
        array = np.asarray(pixels)
        return array.reshape(*array.shape[:2], -1)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except InputError:
        raise
    # Pillow's decoders raise nearly every type of exception on damaged files.
    except Exception as error:
        raise InputError(
            f"cannot read {path} as an image ({_first_line(error)}); replace or remove it"
        ) from error


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}×{shape[0]}"


def _in_parallel(
    work: Callable[[Path], T],
    paths: Sequence[Path],
    description: str,
    progress: Progress,
    at_once: int = 64,
) -> Iterator[list[T]]:
    """`work` done on every path, in order, a list of `at_once` results at a time."""
    groups = [paths[start : start + at_once] for start in range(0, len(paths), at_once)]
    # Threads suffice: Pillow lets go of the interpreter lock while it decodes.
    with (
        progress.bar(description, total=len(paths)) as bar,
        ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
    ):
        for results in pool.map(lambda group: [work(path) for path in group], groups):
            yield results
            bar.advance(len(results))


# ---------------------------------------------------------------------------------------- npz


def read_npz(path: Path) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test, and perhaps class_names, of a numpy .npz file.

    Images are uint8, or floating point within [0, 1], with one or three channels, first or last.
    Labels are integers or texts; classes are in the order of the sorted labels of y_train.

    Args:
        path: The file, or a folder that holds exactly one .npz file.
    """
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise InputError(
                f"{path} holds {len(found)} .npz files, and should hold one; name the file itself"
            )
        path = found[0]
    arrays = _load_npz(path)
    images, labels = {}, {}
    for split in ("train", "test"):
        images[split] = _npz_images(path, f"x_{split}", arrays)
        labels[split] = _npz_labels(path, f"y_{split}", arrays, len(images[split]))
    shapes = {split: array.shape[1:] for split, array in images.items()}
    if shapes["train"] != shapes["test"]:
        raise InputError(
            f"{path}: images of x_train are {shapes['train']}, but those of x_test "
            f"{shapes['test']} (height, width, channels); they must agree"
        )
    if labels["train"].dtype.kind != labels["test"].dtype.kind:
        raise InputError(f"{path}: y_train and y_test must both be integers, or both texts")
    classes = np.unique(labels["train"])
    strangers = np.setdiff1d(labels["test"], classes)
    if len(strangers):
        raise InputError(
            f"{path}: y_test holds the class {strangers[0]}, which y_train does not; "
            "every class needs training images"
        )
    splits = {
        split: Split(images[split], np.searchsorted(classes, labels[split]).astype(np.int64))
        for split in images
    }
    names = _npz_names(path, arrays.get("class_names"), classes)
    return Dataset(splits["train"], splits["test"], names)


def _load_npz(path: Path) -> dict[str, NDArray[Any]]:
    keys = ("x_train", "y_train", "x_test", "y_test")
    if not path.is_file():
        raise InputError(f"no file {path}: expected a .npz file with {', '.join(keys)}")
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not a .npz file; write one with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in keys if key not in file]
            if missing:
                raise InputError(
                    f"{path} has no array '{missing[0]}': expected {', '.join(keys)}; "
                    f"it holds {', '.join(file.files) or 'nothing'}"
                )
            # A member that is no array at all comes out as bytes.
            return {key: np.asarray(file[key]) for key in (*keys, "class_names") if key in file}
    except InputError:
        raise
    # Damaged archives raise nearly every type of exception.
    except Exception as error:
        raise InputError(
            f"cannot read {path} as a .npz file ({_first_line(error)}); "
            "write it anew with numpy.savez"
        ) from error


def _npz_images(path: Path, key: str, arrays: Mapping[str, NDArray[Any]]) -> Uint8:
    try:
        images: Uint8 = as_uint8_images(arrays[key]).numpy()
    except InputError as error:
        raise InputError(f"{path}: {key}: {error}") from None
    return images


def _npz_labels(
    path: Path, key: str, arrays: Mapping[str, NDArray[Any]], expected: int
) -> NDArray[Any]:
    labels = arrays[key]
    if labels.ndim != 1 or len(labels) != expected:
        raise InputError(
            f"{path}: {key} should be one label for each of the {expected} images, "
            f"not of shape {labels.shape}"
        )
    if labels.dtype.kind not in "iuSU":
        raise InputError(f"{path}: {key} should hold integers or texts, not {labels.dtype}")
    if labels.dtype.kind == "S":
        return np.char.decode(labels, "latin1")
    if labels.dtype.kind == "u":
        if labels.max() > np.iinfo(np.int64).max:
            raise InputError(f"{path}: {key} holds {labels.max()}, too large for a label")
        return labels.astype(np.int64)
    return labels


def _npz_names(path: Path, names: NDArray[Any] | None, classes: NDArray[Any]) -> tuple[str, ...]:
    if names is None or classes.dtype.kind == "U":
        return tuple(str(label) for label in classes)
    if names.ndim != 1 or names.dtype.kind not in "SU":
        raise InputError(f"{path}: class_names should be a list of texts, not {names.dtype}")
    if classes[0] < 0 or classes[-1] >= len(names):
        raise InputError(
            f"{path}: class_names holds {len(names)} names, but labels reach from {classes[0]} "
            f"to {classes[-1]}; a label is the index of its name"
        )
    return tuple(_text(name) for name in names[classes].tolist())


# ------------------------------------------------------------------------------------- common


def _read_bytes(file: Path) -> bytes:
    if not file.is_file():
        raise InputError(f"{file} is missing; download the collection again, or put it there")
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def _lines(file: Path) -> list[str]:
    """The lines of a text that are not blank."""
    text = _read_bytes(file).decode("utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
