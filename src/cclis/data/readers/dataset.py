"""The result of every reader: labelled images that are loaded on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cclis.data.images import ImageSet

Uint8 = NDArray[np.uint8]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images; `subset` loads some of them.

    Attributes:
        images: uint8, (M, H, W, C); may be a read-only memory map.
        labels: Indices into the class names, int64 (N,).
        rows: Index of each label's image, int64 (N,); None if images and labels match one to one.
    """

    images: Uint8
    labels: Int64
    rows: Int64 | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> ImageSet:
        """Load the images that a mask or indices select."""
        labels = self.labels[chosen]
        images = np.take(self.images, self._rows(chosen), axis=0)
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels))

    def part(self, chosen: NDArray[np.bool_]) -> Split:
        """The part that a mask selects, without loading images."""
        return Split(self.images, self.labels[chosen], self._rows(chosen))

    def _rows(self, chosen: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> Int64:
        where = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        return (where if self.rows is None else self.rows[where]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test split of a dataset, with its class names."""

    train: Split
    test: Split
    class_names: tuple[str, ...]
