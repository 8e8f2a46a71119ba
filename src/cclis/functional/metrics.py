"""Numbers that sum up an accuracy matrix. Pure functions.

A matrix holds in row t and column k the accuracy on task k after learning task t; entries with
k > t are NaN (or None, as JSON writes it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclis.errors import InputError

Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]

SCENARIOS = ("class_il", "task_il")
"""Among all classes, and among those of a sample's task."""


def average_accuracy(matrix: Matrix) -> float:
    """Mean accuracy over all tasks after the last one: ACC."""
    return float(_square(matrix)[-1].mean())


def forgetting(matrix: Matrix) -> list[float]:
    """For every task but the last: the best accuracy before the last task minus the final one.

    Chaudhry et al. (2018). Negative where a task improved.
    """
    a = _square(matrix)
    return [float(a[k:-1, k].max() - a[-1, k]) for k in range(len(a) - 1)]


def average_forgetting(matrix: Matrix) -> float:
    """Mean of `forgetting`; 0 with a single task."""
    return float(np.mean(forgetting(matrix) or [0.0]))


def backward_transfer(matrix: Matrix) -> float:
    """Mean over old tasks of the final accuracy minus the one just after learning the task: BWT.

    Lopez-Paz & Ranzato (2017). 0 with a single task.
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
