"""Small quadratic programs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def solve_nonnegative(gram: Array, linear: Array) -> Array:
    """Minimise w' gram w / 2 - linear' w subject to w ≥ 0.

    Computed in numpy: torch wakes its thread pool for the smallest factorisation, which takes
    milliseconds if other processes keep the cores busy.

    Args:
        gram: A positive definite matrix, (k, k).
        linear: (k,).

    Returns:
        w, (k,).

    >>> solve_nonnegative(np.eye(2), np.array([1.0, -1.0]))
    array([1., 0.])
    """
    from scipy.linalg import solve_triangular  # type: ignore[import-untyped]
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    factor = np.linalg.cholesky(gram)
    weights: Array = nnls(factor.T, solve_triangular(factor, linear, lower=True))[0]
    return weights
