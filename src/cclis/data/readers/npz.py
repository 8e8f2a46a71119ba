"""Your own arrays, in a numpy .npz file."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclis.data.images import as_uint8_images
from cclis.data.readers.dataset import Dataset, Split, Uint8
from cclis.data.readers.text import first_line, text
from cclis.errors import InputError
from cclis.files import check_memory, open_regular

BLOCK = 1 << 20
"""Bytes that are read at once."""
MAX_EXPANSION = 200
"""Largest ratio of unpacked to packed size."""
MAX_SUDDEN = 1 << 30
"""Bytes up to which any ratio is allowed: few images may well be blank."""
TEXT_TIMES = 20
"""Text takes so many times its bytes in memory once each value is an object."""
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path: Path) -> Dataset:
    """Read the arrays x_train, y_train, x_test, y_test, and optionally class_names, of a .npz file.

    Images are uint8, or floating point within [0, 1], with one or three channels, first or last.
    Labels are integers or strings. Classes are in the order of the sorted labels of y_train.

    Args:
        path: The file, or a folder that contains exactly one .npz file.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix == ".npz")
        if len(files) != 1:
            raise InputError(
                f"{path} contains {len(files)} .npz files instead of one; give the path of the file"
            )
        path = files[0]
    arrays = _load(path)
    images, labels = {}, {}
    for split in ("train", "test"):
        images[split] = _images(path, f"x_{split}", arrays)
        labels[split] = _labels(path, f"y_{split}", arrays, len(images[split]))
    shapes = {split: array.shape[1:] for split, array in images.items()}
    if shapes["train"] != shapes["test"]:
        raise InputError(
            f"{path}: images of x_train are {shapes['train']}, but those of x_test are "
            f"{shapes['test']} (height, width, channels); they must be equal"
        )
    if labels["train"].dtype.kind != labels["test"].dtype.kind:
        raise InputError(f"{path}: y_train and y_test must both be integers, or both strings")
    classes = np.unique(labels["train"])
    unknown = np.setdiff1d(labels["test"], classes)
    if len(unknown):
        raise InputError(
            f"{path}: y_test contains the class {unknown[0]}, but y_train does not; "
            "every class needs training images"
        )
    splits = {
        split: Split(images[split], np.searchsorted(classes, labels[split]).astype(np.int64))
        for split in images
    }
    names = _names(path, arrays.get("class_names"), classes)
    return Dataset(splits["train"], splits["test"], names)


def _load(path: Path) -> dict[str, NDArray[Any]]:
    keys = ("x_train", "y_train", "x_test", "y_test")
    if not path.is_file():
        raise InputError(f"no file {path}: expected a .npz file with {', '.join(keys)}")
    with open_regular(path) as opened:
        file = _Blocks(opened.raw)
        try:
            if not zipfile.is_zipfile(file):
                raise InputError(f"{path} is not a .npz file; write one with numpy.savez")
            with zipfile.ZipFile(file) as archive:
                members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
                missing = [key for key in keys if key not in members]
                if missing:
                    raise InputError(
                        f"{path} has no array '{missing[0]}': expected {', '.join(keys)}; "
                        f"it contains {', '.join(members) or 'nothing'}"
                    )
                chosen = [key for key in (*keys, "class_names") if key in members]
                _refuse_bomb(path, archive, [members[key] for key in chosen])
                arrays = {key: _array(archive, members[key]) for key in chosen}
            for array in arrays.values():
                if array.dtype.kind == "U":
                    array.tolist()  # raises if a value is not a Unicode character
            return arrays
        except InputError:
            raise
        # Damaged archives can raise almost any exception.
        except Exception as error:
            raise InputError(
                f"cannot read {path} as a .npz file ({first_line(error)}); "
                "write it again with numpy.savez"
            ) from error


class _Blocks(io.BufferedReader):
    """A file that is read in small blocks, because an archive may claim an index of any size."""

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes."""
        size = BLOCK + 1 if size is None or size < 0 else min(size, BLOCK + 1)
        content = super().read(size)
        if len(content) > BLOCK:
            raise ValueError(f"an entry of more than {BLOCK:,} bytes")
        return content


def _refuse_bomb(path: Path, archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse arrays that are cut, or that would take more memory than there is or is usual."""
    packed = unpacked = needed = 0
    for member in members:
        size, dtype = _claimed(archive, member)
        packed, unpacked = packed + member.compress_size, unpacked + size
        needed += size * (TEXT_TIMES if dtype.kind in "SU" else 2)
    if unpacked > max(MAX_EXPANSION * packed, MAX_SUDDEN):
        raise InputError(
            f"{path} would expand from {packed:,} to {unpacked:,} bytes, which images do not; if "
            "they are right, write them with numpy.savez, not compressed"
        )
    check_memory(path, needed)


def _claimed(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[int, np.dtype[Any]]:
    """How many bytes an array claims to have, and of which type; no more than are there."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed in another way than numpy does")
    with archive.open(member) as file:
        shape, _, dtype = HEADERS[np.lib.format.read_magic(file)](file)
    # Text of no length has no bytes either, however much of it there is.
    claimed = math.prod(shape) * max(dtype.itemsize, 1)
    if claimed > member.file_size:
        raise ValueError(
            f"{member.filename} claims {claimed:,} bytes, and has {member.file_size:,}"
        )
    return claimed, dtype


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _images(path: Path, key: str, arrays: Mapping[str, NDArray[Any]]) -> Uint8:
    try:
        images: Uint8 = as_uint8_images(arrays[key]).numpy()
    except InputError as error:
        raise InputError(f"{path}: {key}: {error}") from None
    return images


def _labels(
    path: Path, key: str, arrays: Mapping[str, NDArray[Any]], expected: int
) -> NDArray[Any]:
    labels = arrays[key]
    if labels.ndim != 1 or len(labels) != expected:
        raise InputError(
            f"{path}: {key} should have one label for each of the {expected} images, "
            f"but has shape {labels.shape}"
        )
    if labels.dtype.kind not in "iuSU":
        raise InputError(f"{path}: {key} should contain integers or strings, not {labels.dtype}")
    if labels.dtype.kind == "S":
        return np.char.decode(labels, "latin1")
    if labels.dtype.kind == "u":
        if labels.max() > np.iinfo(np.int64).max:
            raise InputError(f"{path}: {key} contains {labels.max()}, too large for a label")
        return labels.astype(np.int64)
    return labels


def _names(path: Path, names: NDArray[Any] | None, classes: NDArray[Any]) -> tuple[str, ...]:
    if names is None or classes.dtype.kind == "U":
        return tuple(text(label) for label in classes)
    if names.ndim != 1 or names.dtype.kind not in "SU":
        raise InputError(f"{path}: class_names should be a list of strings, not {names.dtype}")
    if classes[0] < 0 or classes[-1] >= len(names):
        raise InputError(
            f"{path}: class_names contains {len(names)} names, but labels range from {classes[0]} "
            f"to {classes[-1]}; a label must be the index of its name"
        )
    return tuple(text(name) for name in names[classes].tolist())
