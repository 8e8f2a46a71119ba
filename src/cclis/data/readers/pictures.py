"""Finding and decoding image files, in parallel."""

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

MAX_PIXELS = 80_000_000
"""Pixels of the largest image that is decoded, because a small file may claim any size."""
MAX_BYTES = 8 * MAX_PIXELS
"""Size of the largest image file that is opened."""
Files = list[tuple[Path, int]]
"""Image files with their classes."""


def images_in(folder: Path) -> list[Path]:
    """Image files directly in `folder`, sorted by name; none if the folder does not exist."""
    names = os.listdir(folder) if folder.is_dir() else []
    return [
        folder / name
        for name in sorted(names)
        if os.path.splitext(name)[1].lower() in _SUFFIXES and not name.startswith(".")
    ]


def labels_of(files: Files) -> Int64:
    """Classes of the files, (N,)."""
    return np.array([label for _, label in files], dtype=np.int64)


def header(path: Path) -> tuple[tuple[int, int], str]:
    """Size (width, height) and Pillow mode of an image, without decoding it."""
    with _opened(path) as image:
        return image.size, image.mode


def decode(path: Path, mode: str, image_size: int | None = None) -> Uint8:
    """Decode an image as (H, W, C), converted to Pillow's mode L or RGB."""
    with _opened(path) as image:
        pixels: Image.Image = image
        if image.mode == "F":
            raise InputError(f"{path} has floating-point pixels; save it with 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits; convert() would clip at 255
            wide = np.asarray(image)
            if wide.min() < 0 or wide.max() > 65535:
                raise InputError(f"{path} has 32-bit pixels; save it with 8 or 16 bits")
            pixels = Image.fromarray(np.rint(wide / 257).astype(np.uint8))
        pixels = pixels.convert(mode)
        if image_size is not None:
            pixels = ImageOps.fit(pixels, (image_size, image_size), Image.Resampling.BILINEAR)
        array = np.asarray(pixels)
        return array.reshape(*array.shape[:2], -1)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        # Opening something else, such as a pipe, could block forever.
        if not path.is_file():
            raise InputError(f"{path} is missing or not a regular file; replace or remove it")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} has more than {MAX_BYTES:,} bytes; scale it down first")
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise InputError(
                    f"{path} is too large: {image.width}×{image.height} pixels; scale it down first"
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
    group_size: int = 64,
) -> Iterator[list[T]]:
    """Apply `work` to all paths in threads; yield the results in order, in groups."""
    groups = [paths[start : start + group_size] for start in range(0, len(paths), group_size)]
    # Threads are enough: Pillow releases the GIL while it decodes.
    with (
        progress.bar(description, total=len(paths)) as bar,
        ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
    ):
        for results in pool.map(lambda group: [work(path) for path in group], groups):
            yield results
            bar.advance(len(results))
