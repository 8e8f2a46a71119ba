"""Metrics of an accuracy matrix.

Row t, column k of the matrix is the accuracy on task k after learning task t. Entries with k > t
are NaN, or None as JSON writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclis.errors import InputError

Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]


def average_accuracy(matrix: Matrix) -> float:
    """Mean accuracy over all tasks after the last one (ACC), of a matrix (T, T).

    >>> average_accuracy([[90.0, None], [70.0, 80.0]])
    75.0
    """
    return float(_square(matrix)[-1].mean())


def forgetting(matrix: Matrix) -> list[float]:
    """Forgetting of every task k but the last, of a matrix (T, T) (Chaudhry et al., 2018).

    f_k = max_{t < T-1} a_tk - a_{T-1,k}: the best accuracy before the last task minus the final
    one. Negative if the task improved.

    >>> forgetting([[90.0, None], [70.0, 80.0]])
    [20.0]
    """
    a = _square(matrix)
    return [float(a[k:-1, k].max() - a[-1, k]) for k in range(len(a) - 1)]


def average_forgetting(matrix: Matrix) -> float:
    """Mean of `forgetting`; 0 for a single task.

    >>> average_forgetting([[90.0, None], [70.0, 80.0]])
    20.0
    """
    return float(np.mean(forgetting(matrix) or [0.0]))


def backward_transfer(matrix: Matrix) -> float:
    """Backward transfer (BWT), of a matrix (T, T) (Lopez-Paz & Ranzato, 2017); 0 for a single task.

    The mean over all tasks k but the last of a_{T-1,k} - a_kk: the final accuracy minus the one
    directly after learning the task.

    >>> backward_transfer([[90.0, None], [70.0, 80.0]])
    -20.0
    """
    a = _square(matrix)
    if len(a) == 1:
        return 0.0
    return float(np.mean([a[-1, k] - a[k, k] for k in range(len(a) - 1)]))


def _square(matrix: Matrix) -> NDArray[np.float64]:
    try:
        a = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"an accuracy matrix must be square and numeric: {error}") from None
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.size == 0:
        raise InputError(f"an accuracy matrix must be square, but has shape {a.shape}")
    if np.isnan(a[np.tril_indices(len(a))]).any():
        raise InputError("an accuracy matrix must be complete on and below its diagonal")
    return a
