"""Small quadratic programs, against every set of active constraints."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cclis.functional.quadratic import Array, solve_nonnegative


def brute_force(gram: Array, linear: Array) -> Array:
    """The best of all minima with some variables held at zero that are nowhere negative."""
    names = range(len(linear))
    best, lowest = np.zeros(len(linear)), 0.0
    for free in map(list, chain.from_iterable(combinations(names, k) for k in range(1, 5))):
        found = np.zeros(len(linear))
        found[free] = np.linalg.solve(gram[np.ix_(free, free)], linear[free])
        cost = found @ gram @ found / 2 - linear @ found
        if (found >= 0).all() and cost < lowest:
            best, lowest = found, cost
    return best


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 10_000))
def test_it_finds_the_minimum(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 6))
    gram, linear = rows @ rows.T + 0.1 * np.eye(count), rng.normal(size=count)
    found = solve_nonnegative(gram, linear)
    assert (found >= 0).all()
    np.testing.assert_allclose(found, brute_force(gram, linear), atol=1e-8)
