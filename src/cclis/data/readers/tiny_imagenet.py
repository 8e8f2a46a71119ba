"""Tiny-ImageNet: the unpacked archive, and a cache of decoded images beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclis.data.locks import locked
from cclis.data.readers.dataset import Dataset, Split, Uint8
from cclis.data.readers.pictures import Files, decode, images_in, in_parallel, labels_of
from cclis.data.readers.text import lines
from cclis.errors import InputError
from cclis.files import atomic_writer, check_memory, open_regular, read_json, write_json
from cclis.progress import QUIET, Progress

TINY_IMAGENET = "tiny-imagenet-200"
TINY_CACHE = "cclis-cache-v1"
ARRAYS = ("images", "labels")


def find_tiny_imagenet(root: Path) -> Path | None:
    """The folder `root`/tiny-imagenet-200, or `root` if that is the folder; None if missing."""
    if (root / TINY_IMAGENET).is_dir():
        return root / TINY_IMAGENET
    return root if (root / "wnids.txt").is_file() else None


def read_tiny_imagenet(root: Path, progress: Progress = QUIET) -> Dataset:
    """Read Tiny-ImageNet from `root`/tiny-imagenet-200 or `root`; its validation split is the test.

    Classes are in the order of wnids.txt, as in published benchmarks (Buzzega et al., 2020). If
    they were sorted by id, similar classes would share a task. The images are decoded once into a
    cache beside them, which is memory-mapped from then on. If the folder is not writable, they are
    decoded into memory every time.
    """
    folder = find_tiny_imagenet(root)
    if folder is None:
        raise InputError(
            f"no Tiny-ImageNet in {root}: expected {root / TINY_IMAGENET}/; run `cclis data "
            "seq-tinyimagenet --download`, or put the folder there"
        )
    ids = list(dict.fromkeys(lines(folder / "wnids.txt")))
    if not ids:
        raise InputError(f"{folder / 'wnids.txt'} names no class; unpack the archive again")
    files = {"train": _train_files(folder, ids), "test": _test_files(folder, ids)}
    cache = folder / TINY_CACHE
    splits = _open_cache(cache, ids, files)
    if splits is None:
        present = {label for _, label in files["train"]}
        for label, wnid in enumerate(ids):
            if label not in present:
                raise InputError(
                    f"no images in {folder / 'train' / wnid / 'images'}; unpack the archive again"
                )
        # The disk may be read-only or full. What is wrong with an image is said below again.
        lock = locked(folder / f".{TINY_CACHE}.lock", f"decoding {folder}", progress)
        with suppress(OSError, InputError), lock:
            splits = _open_cache(cache, ids, files)  # another process may have written it
            if splits is None:
                _write_cache(cache, ids, files, progress)
                splits = _open_cache(cache, ids, files)
    if splits is None:
        splits = {
            split: Split(np.concatenate(list(_images(listed, progress))), labels_of(listed))
            for split, listed in files.items()
        }
    return Dataset(splits["train"], splits["test"], _names(folder, ids))


def _train_files(folder: Path, ids: Sequence[str]) -> Files:
    return [
        (path, label)
        for label, wnid in enumerate(ids)
        for path in images_in(folder / "train" / wnid / "images")
    ]


def _test_files(folder: Path, ids: Sequence[str]) -> Files:
    index = {wnid: label for label, wnid in enumerate(ids)}
    annotations = folder / "val" / "val_annotations.txt"
    files = []
    for number, line in enumerate(lines(annotations), start=1):
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


def _names(folder: Path, ids: Sequence[str]) -> tuple[str, ...]:
    """First name of every class; with its id if two classes have the same name."""
    file = folder / "words.txt"
    words = (
        dict(line.split("\t", 1) for line in lines(file) if "\t" in line) if file.is_file() else {}
    )
    names = [words.get(wnid, wnid).split(",")[0].strip() for wnid in ids]
    count = Counter(names)
    return tuple(
        name if count[name] == 1 else f"{name} ({wnid})"
        for name, wnid in zip(names, ids, strict=True)
    )


def _images(files: Files, progress: Progress) -> Iterator[Uint8]:
    paths = [path for path, _ in files]
    shape = decode(paths[0], "RGB").shape

    def decode_checked(path: Path) -> Uint8:
        image = decode(path, "RGB")
        if image.shape != shape:
            raise InputError(
                f"{path} is {_size(image.shape)}, but {paths[0]} is {_size(shape)}; "
                "unpack the archive again"
            )
        return image

    for images in in_parallel(decode_checked, paths, "decoding Tiny-ImageNet", progress):
        yield np.stack(images)


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}×{shape[0]}"


def _open_cache(
    cache: Path, ids: Sequence[str], files: Mapping[str, Files]
) -> dict[str, Split] | None:
    """Open the cached splits; None if they are missing, incomplete, or of other images."""
    try:
        manifest = read_json(cache / "manifest.json")
        if manifest["classes"] != list(ids):
            return None
        splits = {}
        for split, listed in files.items():
            images, labels = (_mapped(cache / f"{split}_{what}.npy") for what in ARRAYS)
            if (
                not labels.shape == images.shape[:1] == (manifest[split],)
                # The image files may be deleted to save space once they are decoded.
                or len(listed) not in (0, len(labels))
                or (images.dtype.str, images.ndim, images.shape[-1]) != ("|u1", 4, 3)
                or labels.dtype != np.int64
                or not 0 <= labels.min() <= labels.max() < len(ids)
            ):
                return None
            check_memory(cache, labels.nbytes)
            splits[split] = Split(images, np.array(labels))
    except (OSError, ValueError, LookupError, TypeError, EOFError, RecursionError, MemoryError):
        return None
    return splits


def _mapped(path: Path) -> NDArray[Any]:
    with open_regular(path):  # a pipe would wait
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _write_cache(
    cache: Path, ids: Sequence[str], files: Mapping[str, Files], progress: Progress
) -> None:
    cache.mkdir(exist_ok=True)
    manifest = cache / "manifest.json"
    manifest.unlink(missing_ok=True)
    for name in ("manifest.json", *(f"{split}_{what}.npy" for split in files for what in ARRAYS)):
        for leftover in cache.glob(f".{name}.*"):  # of a process that was killed
            leftover.unlink()
    for split, listed in files.items():
        with atomic_writer(cache / f"{split}_labels.npy") as file:
            np.save(file, labels_of(listed), allow_pickle=False)
        # Not through a memory map: a full disk would then be a SIGBUS instead of an OSError.
        with atomic_writer(cache / f"{split}_images.npy") as file:
            for number, images in enumerate(_images(listed, progress)):
                if number == 0:
                    shape = (len(listed), *images.shape[1:])
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(images.tobytes())
    counts = {split: len(listed) for split, listed in files.items()}
    write_json(manifest, {**counts, "classes": list(ids)})
