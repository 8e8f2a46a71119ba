"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

import numpy as np

from cclis.data.readers.dataset import Dataset, Split


def read_digits() -> Dataset:
    """Read the 1,797 handwritten digits (8×8, grayscale) that come with scikit-learn.

    The last fifth of every class is the test split.
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
