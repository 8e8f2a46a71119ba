"""Images with their labels, and the conversion of users' images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cclis.errors import InputError, as_input_errors

BLOCK = 256
"""Floating-point images that are converted at once."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and their classes.

    Attributes:
        images: uint8, (N, H, W, C) with one or three channels. May be on the host while the labels
            are on a GPU.
        labels: Classes as indices in order of arrival, int64 (N,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
            raise InputError(
                "images must be uint8 of shape (N, H, W, 1 or 3), "
                f"not {images.dtype} of shape {tuple(images.shape)}"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise InputError(
                f"labels must be one int64 per image: {len(images)} images, but labels are "
                f"{labels.dtype} of shape {tuple(labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> ImageSet:
        image_index = index.to(self.images.device) if isinstance(index, Tensor) else index
        return ImageSet(self.images[image_index], self.labels[index])

    def to(
        self, device: torch.device | str, *, images: torch.device | str | None = None
    ) -> ImageSet:
        """Move the set to `device`, and its images to the device `images` if given."""
        return ImageSet(self.images.to(images or device), self.labels.to(device))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        height, width, channels = self.images.shape[1:]
        return int(height), int(width), int(channels)

    @staticmethod
    def concatenate(*sets: ImageSet) -> ImageSet:
        """Concatenate sets; the images move to the device of the last one's."""
        shapes = {s.shape for s in sets}
        if len(shapes) > 1:
            listed = " and ".join(str(s) for s in sorted(shapes))
            raise InputError(f"images of different sizes (height, width, channels): {listed}")
        device = sets[-1].images.device
        images = torch.cat([s.images.to(device) for s in sets])
        return ImageSet(images, torch.cat([s.labels for s in sets]))


def as_uint8_images(images: Any) -> Tensor:
    """Check a user's images and convert them to uint8 (N, H, W, C).

    Args:
        images: An array, tensor or sequence of equally sized images: (N, H, W), (N, H, W, C) or
            (N, C, H, W) with one or three channels; uint8, or floating point within [0, 1].
    """
    array = _as_array(images)
    if array.ndim == 3 and array.shape[-1] == 3:
        raise InputError(
            f"an array of shape {array.shape} looks like a single colour image; add a first axis: "
            "images[None]"
        )
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or 0 in array.shape:
        raise InputError(
            "images must be a non-empty (N, H, W), (N, H, W, C) or (N, C, H, W) array, "
            f"not one of shape {array.shape}"
        )
    if array.shape[-1] not in (1, 3):
        if array.shape[1] not in (1, 3):
            raise InputError(
                f"images must have one or three channels, first or last; shape is {array.shape}"
            )
        array = array.transpose(0, 2, 3, 1)
    if np.issubdtype(array.dtype, np.floating):
        # min and max detect NaN and infinity without a mask of the images' size.
        low, high = float(array.min()), float(array.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise InputError("images contain NaN or infinite values")
        if low < 0 or high > 1:
            raise InputError(
                f"floating-point images must be within [0, 1]; these range from {low:g} to "
                f"{high:g}. Scale them, or pass uint8"
            )
        pixels = np.empty(array.shape, np.uint8)
        # One block after another, because these numbers take eight times the memory of the pixels.
        for start in range(0, len(array), BLOCK):
            pixels[start : start + BLOCK] = np.rint(array[start : start + BLOCK] * 255)
        return torch.from_numpy(pixels)
    if array.dtype != np.uint8:
        raise InputError(f"images must be uint8 or floating point, not {array.dtype}")
    # Copied, so that later changes to the caller's array have no effect.
    return torch.from_numpy(np.array(array, order="C"))


def as_array(given: Any, what: str) -> NDArray[Any]:
    """Convert an array, tensor or sequence to an array; errors name it `what`."""
    with as_input_errors(f"{what} must be an array, a dense tensor or a sequence"):
        return given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)


def _as_array(images: Any) -> NDArray[Any]:
    if isinstance(images, Tensor) and images.is_floating_point():
        images = images.float()  # numpy has no bfloat16
    if not isinstance(images, np.ndarray) and isinstance(images, Sequence):
        shapes = sorted({as_array(image, "an image").shape for image in images})
        if len(shapes) > 1:
            raise InputError(
                f"images of different sizes: {shapes[0]} and {shapes[1]}; resize them first"
            )
    return as_array(images, "images")
