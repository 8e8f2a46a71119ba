from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclis.engine.schedule import FLOOR, Schedule


def reference(step: int, epochs: int, steps: int, warmup: int, rate: float, start: float) -> float:
    """The learning rate, absolute, in the form in which SupCon's scripts compute it."""
    least = rate * 0.1**3

    def annealed(epoch: float) -> float:
        return least + (rate - least) * (1 + math.cos(math.pi * epoch / epochs)) / 2

    if step < warmup * steps:
        share = step / (warmup * steps)
        return start + share * (annealed(warmup) - start)
    return annealed(step / steps)


@pytest.mark.parametrize("epochs", [500, 100])
@pytest.mark.parametrize(
    ("rate", "start"), [(1.0, 0.01), (0.01, 0.1)], ids=["network", "prototypes"]
)
def test_the_papers_epochs_against_an_absolute_formula(epochs, rate, start):
    schedule = Schedule(epochs, steps=20, warmup_epochs=10)
    for step in range(epochs * 20):
        expected = reference(step, epochs, 20, 10, rate, start * rate)
        assert rate * schedule.factor(step, start) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("start", [0.01, 0.1])
def test_the_warmup_rises_from_its_start_to_the_cosine(start):
    schedule = Schedule(epochs=100, steps=7, warmup_epochs=10)
    factors = [schedule.factor(step, start) for step in range(71)]
    assert factors[0] == start
    rises = [after - before for before, after in pairwise(factors)]
    assert rises == pytest.approx([rises[0]] * 70)
    assert rises[0] > 0
    assert factors[-1] == pytest.approx(FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi / 10)) / 2)


def test_after_the_warmup_it_only_falls_to_a_thousandth():
    schedule = Schedule(epochs=100, steps=7, warmup_epochs=10)
    factors = [schedule.factor(step, 0.01) for step in range(70, 700)]
    assert all(after < before for before, after in pairwise(factors))
    assert factors[-1] == pytest.approx(0.001, rel=0.01)


def test_where_the_warmup_starts_does_not_matter_once_it_is_over():
    schedule = Schedule(epochs=20, steps=3, warmup_epochs=4)
    assert schedule.factor(11, 0.01) != schedule.factor(11, 0.1)
    assert schedule.factor(12, 0.01) == schedule.factor(12, 0.1)


def test_a_short_task_warms_up_for_a_fifth_of_it():
    asked, capped = Schedule(20, 5, warmup_epochs=10), Schedule(20, 5, warmup_epochs=4)
    assert [asked.factor(s, 0.01) for s in range(100)] == [
        capped.factor(s, 0.01) for s in range(100)
    ]


def test_without_a_warmup_it_starts_at_the_full_rate():
    assert Schedule(10, 5, warmup_epochs=0).factor(0, 0.01) == 1


@given(st.integers(1, 500), st.integers(1, 50), st.integers(0, 50), st.floats(0.001, 1), st.data())
def test_the_factor_never_leaves_zero_to_one(epochs, steps, warmup, start, data):
    step = data.draw(st.integers(0, epochs * steps - 1))
    factor = Schedule(epochs, steps, warmup).factor(step, start)
    assert 0 < factor <= 1
