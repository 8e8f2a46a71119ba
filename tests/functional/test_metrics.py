from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cclis.errors import InputError
from cclis.functional.metrics import average_accuracy, average_forgetting, backward_transfer

Metric = Callable[[Any], float]
METRICS = [average_accuracy, average_forgetting, backward_transfer]

THREE_TASKS = [
    [90.0, None, None],
    [95.0, 80.0, None],
    [60.0, 70.0, 50.0],
]

every_metric = pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.__name__)


def naive_accuracy(a: list[list[float]]) -> float:
    total = 0.0
    for k in range(len(a)):
        total += a[len(a) - 1][k]
    return total / len(a)


def naive_forgetting(a: list[list[float]]) -> float:
    last = len(a) - 1
    total = 0.0
    for k in range(last):
        drops = []
        for t in range(k, last):
            drops.append(a[t][k] - a[last][k])
        total += max(drops)
    return total / last if last else 0.0


def naive_transfer(a: list[list[float]]) -> float:
    last = len(a) - 1
    total = 0.0
    for k in range(last):
        total += a[last][k] - a[k][k]
    return total / last if last else 0.0


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float | None]]:
    tasks = draw(st.integers(1, 7))
    rows: list[list[float | None]] = []
    for t in range(tasks):
        known = draw(st.lists(st.floats(0, 100), min_size=t + 1, max_size=t + 1))
        rows.append([*known, *[None] * (tasks - t - 1)])
    return rows


class TestByHand:
    def test_accuracy(self) -> None:
        assert average_accuracy(THREE_TASKS) == pytest.approx((60 + 70 + 50) / 3)

    def test_forgetting(self) -> None:
        assert average_forgetting(THREE_TASKS) == pytest.approx(((95 - 60) + (80 - 70)) / 2)

    def test_backward_transfer(self) -> None:
        assert backward_transfer(THREE_TASKS) == pytest.approx(((60 - 90) + (70 - 80)) / 2)

    def test_old_tasks_that_improve_are_forgotten_negatively(self) -> None:
        # The best counts up to the task before the last one; with the final row it would be 0.
        better = [[50.0, None], [70.0, 90.0]]
        assert average_forgetting(better) == pytest.approx(-20)
        assert backward_transfer(better) == pytest.approx(20)

    def test_gains_and_losses_average_out(self) -> None:
        mixed = [[50.0, None, None], [55.0, 60.0, None], [65.0, 40.0, 80.0]]
        assert average_forgetting(mixed) == pytest.approx(((55 - 65) + (60 - 40)) / 2)

    def test_forgetting_ignores_what_was_known_before_learning(self) -> None:
        # The accuracy of task 1 in row 0 would be the best one if it counted.
        early = [[50.0, 99.0, 99.0], [50.0, 60.0, 99.0], [50.0, 60.0, 70.0]]
        assert average_forgetting(early) == pytest.approx(0)

    def test_two_tasks_forget_the_opposite_of_their_transfer(self) -> None:
        two = [[98.5, None], [31.25, 97.0]]
        assert average_forgetting(two) == pytest.approx(67.25)
        assert backward_transfer(two) == pytest.approx(-67.25)


class TestSingleTask:
    @pytest.mark.parametrize("value", [0.0, 42.5, 100.0])
    def test_nothing_to_forget(self, value: float) -> None:
        assert average_accuracy([[value]]) == value
        assert average_forgetting([[value]]) == 0.0
        assert backward_transfer([[value]]) == 0.0


class TestAgainstLoops:
    @settings(max_examples=150, deadline=None)
    @given(matrices())
    def test_agree(self, matrix: list[list[float]]) -> None:
        for metric, naive in zip(
            METRICS, [naive_accuracy, naive_forgetting, naive_transfer], strict=True
        ):
            value = metric(matrix)
            assert type(value) is float
            assert value == pytest.approx(naive(matrix), rel=1e-9, abs=1e-9)

    @settings(max_examples=100, deadline=None)
    @given(matrices(), st.floats(0, 100))
    def test_the_upper_triangle_does_not_matter(
        self, matrix: list[list[float | None]], filler: float
    ) -> None:
        def filled(value: float | None) -> list[list[float | None]]:
            return [
                [entry if k <= t else value for k, entry in enumerate(row)]
                for t, row in enumerate(matrix)
            ]

        for metric in METRICS:
            expected = metric(matrix)
            assert metric(filled(math.nan)) == expected
            assert metric(filled(math.inf)) == expected
            assert metric(filled(filler)) == expected
            assert metric(np.array(filled(math.nan), dtype=np.float64)) == expected

    @settings(max_examples=100, deadline=None)
    @given(matrices())
    def test_forgetting_is_at_least_the_negated_transfer(
        self, matrix: list[list[float | None]]
    ) -> None:
        assert average_forgetting(matrix) >= -backward_transfer(matrix) - 1e-9


@every_metric
class TestWhatIsTaken:
    def test_the_matrix_is_left_alone(self, metric: Metric) -> None:
        matrix = np.array([[1.0, np.nan], [0.5, 1.0]])
        before = matrix.copy()
        metric(matrix)
        np.testing.assert_array_equal(matrix, before)

    def test_float32_and_tuples(self, metric: Metric) -> None:
        expected = metric(THREE_TASKS)
        assert metric(np.array(THREE_TASKS, dtype=np.float32)) == pytest.approx(expected)
        assert metric(tuple(tuple(row) for row in THREE_TASKS)) == expected

    @pytest.mark.parametrize(
        "matrix",
        [
            pytest.param([[1.0, 2.0]], id="wide"),
            pytest.param([[1.0], [2.0]], id="tall"),
            pytest.param([1.0, 2.0], id="flat"),
            pytest.param(1.0, id="number"),
            pytest.param(np.ones((2, 2, 2)), id="cube"),
            pytest.param([], id="no rows"),
            pytest.param([[]], id="no columns"),
            pytest.param(np.ones((0, 0)), id="empty"),
            pytest.param([[1.0], [1.0, 2.0]], id="ragged"),
            pytest.param([["good", None], ["bad", "worse"]], id="words"),
        ],
    )
    def test_not_a_square_matrix(self, metric: Metric, matrix: Any) -> None:
        with pytest.raises(InputError, match="square"):
            metric(matrix)

    @pytest.mark.parametrize("hole", [None, math.nan])
    @pytest.mark.parametrize(("t", "k"), [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
    def test_incomplete(self, metric: Metric, t: int, k: int, hole: float | None) -> None:
        matrix: list[list[float | None]] = [list(row) for row in THREE_TASKS]
        matrix[t][k] = hole
        with pytest.raises(InputError, match="complete"):
            metric(matrix)
