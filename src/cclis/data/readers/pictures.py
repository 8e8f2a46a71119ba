"""Image files: found, looked at, decoded, many at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps

from cclis.data.readers.dataset import Int64, Uint8
from cclis.data.readers.text import first_line
from cclis.errors import InputError
from cclis.progress import Progress

T = TypeVar("T")

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}

LARGEST = 80_000_000
"""Pixels of the largest image that is decoded; a small file may claim any number."""
Files = list[tuple[Path, int]]
"""Image files and their classes."""


def images_in(folder: Path) -> list[Path]:
    """The images directly in `folder`, by name; none where there is no such folder."""
    names = os.listdir(folder) if folder.is_dir() else []
    return [
        folder / name
        for name in sorted(names)
        if os.path.splitext(name)[1].lower() in _SUFFIXES and not name.startswith(".")
    ]


def labels_of(files: Files) -> Int64:
    """The classes alone."""
    return np.array([label for _, label in files], dtype=np.int64)


def header(path: Path) -> tuple[tuple[int, int], str]:
    """Width and height, and Pillow's mode, without decoding the image."""
    with _opened(path) as image:
        return image.size, image.mode


def decode(path: Path, mode: str, image_size: int | None = None) -> Uint8:
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
        # Whatever else has the name of an image, such as a pipe, could be waited for forever.
        if not path.is_file():
            raise InputError(f"{path} is missing, or no regular file; replace or remove it")
        with Image.open(path) as image:
            if image.width * image.height > LARGEST:
                raise InputError(
                    f"{path} claims {image.width}×{image.height} pixels; scale it down first"
                )
            yield image
    except InputError:
        raise
    # Pillow's decoders raise nearly every type of exception on damaged files.
    except Exception as error:
        raise InputError(
            f"cannot read {path} as an image ({first_line(error)}); replace or remove it"
        ) from error


def in_parallel(
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
