"""Small quadratic programs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def solve_nonnegative(gram: Array, linear: Array) -> Array:
    """The w ≥ 0, (k,), that minimises w' gram w / 2 - linear' w, with `gram` positive definite.

    In numpy: torch wakes its threads for the smallest factorisation, which takes milliseconds where
    other processes keep the cores busy.
    """
    from scipy.linalg import solve_triangular  # type: ignore[import-untyped]
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    factor = np.linalg.cholesky(gram)
    weights: Array = nnls(factor.T, solve_triangular(factor, linear, lower=True))[0]
    return weights
