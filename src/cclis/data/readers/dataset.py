"""What every reader gives: labelled images that stay where they are until asked for."""

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
    """Labelled images that stay where they are until `subset` asks for them.

    Attributes:
        images: (N, H, W, C); may be a read-only memory map.
        labels: (N,): indices into the class names.
        rows: (N,): where among the images those of the labels lie; None where they are all.
    """

    images: Uint8
    labels: Int64
    rows: Int64 | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> ImageSet:
        """A copy of the images that a mask over all of them, or their indices, choose."""
        labels = self.labels[chosen]
        images = np.take(self.images, self._rows(chosen), axis=0)
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels))

    def part(self, chosen: NDArray[np.bool_]) -> Split:
        """Those that a mask chooses; the images stay where they are."""
        return Split(self.images, self.labels[chosen], self._rows(chosen))

    def _rows(self, chosen: NDArray[np.bool_] | NDArray[np.integer[Any]]) -> Int64:
        where = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        return (where if self.rows is None else self.rows[where]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A whole labelled image collection."""

    train: Split
    test: Split
    class_names: tuple[str, ...]
