"""Your own images, with one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cclis.data.readers.dataset import Dataset, Split
from cclis.data.readers.pictures import Files, decode, header, images_in, in_parallel, labels_of
from cclis.data.readers.text import text
from cclis.errors import InputError
from cclis.progress import QUIET, Progress


def read_image_folder(
    root: Path,
    image_size: int | None = None,
    progress: Progress = QUIET,
    *,
    skip_corrupt: bool = False,
) -> Dataset:
    """Read images from `root`/train/CLASS/IMAGE and `root`/test/CLASS/IMAGE (or val).

    Args:
        root: The folder that contains train and test.
        image_size: Height and width to resize all images to. The shorter side is scaled, and the
            longer one is cropped around its centre. None requires images of equal size.
        progress: Where to show progress.
        skip_corrupt: Skip files that cannot be read as images, and list them.
    """
    if image_size is not None and image_size < 1:
        raise InputError(f"image_size must be at least 1, not {image_size}")
    train = root / "train"
    test = next((root / name for name in ("test", "val") if (root / name).is_dir()), root / "test")
    for folder in (train, test):
        if not folder.is_dir():
            raise InputError(f"no folder {folder}: expected {folder}/CLASS/IMAGE files")
    names = _folders_in(train)
    files = {"train": _files_in(train, names), "test": _files_in(test, names)}
    if skip_corrupt:
        files = {split: _readable(listed, names, progress) for split, listed in files.items()}
    paths = [path for listed in files.values() for path, _ in listed]
    mode = _common_mode(paths, image_size, progress)

    def read(split: str) -> Split:
        parts = in_parallel(
            lambda path: decode(path, mode, image_size),
            [path for path, _ in files[split]],
            f"reading {split} images",
            progress,
        )
        return Split(np.concatenate([np.stack(part) for part in parts]), labels_of(files[split]))

    return Dataset(read("train"), read("test"), tuple(text(name) for name in names))


def _folders_in(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise InputError(f"no class folders in {folder}: expected {folder}/CLASS/IMAGE files")
    return names


def _files_in(folder: Path, names: Sequence[str]) -> Files:
    present = set(_folders_in(folder))
    unknown = sorted(present - set(names))
    if unknown:
        raise InputError(
            f"{folder} contains the class '{unknown[0]}', but {folder.with_name('train')} does "
            "not; every class needs training images"
        )
    files: Files = []
    for label, name in enumerate(names):
        if name in present:
            paths = images_in(folder / name)
            if not paths:
                raise InputError(f"no images in {folder / name}: add some, or remove the folder")
            files += [(path, label) for path in paths]
    return files


def _readable(files: Files, names: Sequence[str], progress: Progress) -> Files:
    def can_read(path: Path) -> bool:
        try:
            decode(path, "RGB")
        except InputError:
            return False
        return True

    parts = in_parallel(can_read, [path for path, _ in files], "checking images", progress)
    readable = [ok for part in parts for ok in part]
    skipped = [path for (path, _), ok in zip(files, readable, strict=True) if not ok]
    if skipped:
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        listed = ", ".join(text(path) for path in skipped[:3])
        progress.say(
            f"skipped {len(skipped)} of {len(files)} images that cannot be read: {listed}{more}"
        )
    remaining = [file for file, ok in zip(files, readable, strict=True) if ok]
    lost = sorted({label for _, label in files} - {label for _, label in remaining})
    if lost:
        raise InputError(f"no image of the class '{names[lost[0]]}' can be read")
    return remaining


def _common_mode(paths: Sequence[Path], image_size: int | None, progress: Progress) -> str:
    """L if all images are grayscale, else RGB; without `image_size`, sizes must agree."""
    gray = True
    first: tuple[int, int] | None = None
    headers = in_parallel(header, paths, "reading image sizes", progress)
    for path, (size, mode) in zip(paths, (h for part in headers for h in part), strict=True):
        gray = gray and (mode in {"1", "L", "LA"} or mode.startswith("I"))
        first = first or size
        if image_size is None and size != first:
            raise InputError(
                f"images of different sizes: {paths[0]} is {first[0]}×{first[1]}, {path} is "
                f"{size[0]}×{size[1]} (width×height); pass `--image_size N` to resize all to N×N"
            )
    return "L" if gray else "RGB"
