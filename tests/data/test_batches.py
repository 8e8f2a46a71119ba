from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cclis.data.batches import Mix, draw_replay, epoch_indices, fixed_mix, proportional_mix
from cclis.errors import InputError

SIZES = st.integers(1, 5000)
MEMORIES = st.integers(0, 2000)
BATCHES = st.integers(1, 600)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------- mix


@pytest.mark.parametrize(
    ("task", "memory", "batch_size", "expected"),
    [
        (9800, 200, 500, Mix(490, 10, 20)),
        (5000, 500, 512, Mix(465, 47, 11)),  # 512 · 500 / 5500 = 46.5…
        (300, 100, 64, Mix(48, 16, 7)),
        (10_000, 1, 64, Mix(63, 1, 159)),  # rounds to nothing, but a memory is there to be used
        (1, 10_000, 64, Mix(1, 63, 157)),  # rounds to everything, but a task is to be learned
        (10, 5, 512, Mix(10, 5, 1)),  # fewer than a batch
        (100, 0, 32, Mix(32, 0, 4)),
    ],
)
def test_replay_is_in_proportion(task, memory, batch_size, expected):
    assert proportional_mix(task, memory, batch_size) == expected


@given(SIZES, MEMORIES, BATCHES)
def test_a_mix_fills_the_batch_with_the_nearest_share(task, memory, batch_size):
    how = proportional_mix(task, memory, batch_size)
    assert how.task + how.replay == how.batch == min(batch_size, task + memory)
    assert how.task >= 1
    passes = (Fraction(task + memory, how.batch), Fraction(task, how.task))
    assert how.steps - 1 < max(passes) <= how.steps
    exact = Fraction(how.batch * memory, task + memory)
    if 1 <= how.replay < how.batch - 1:
        assert exact <= 1 or abs(how.replay - exact) <= Fraction(1, 2)
    if how.replay == 0:
        assert memory == 0 or how.batch == 1


@given(SIZES, st.integers(1, 2000), st.integers(2, 600), st.floats(0.01, 1))
def test_a_replay_share_is_kept_whatever_the_sizes(task, memory, batch_size, share):
    how = proportional_mix(task, memory, batch_size, share)
    wanted = how.batch * share
    assert 1 <= how.replay <= how.batch - 1
    assert how.replay in (1, how.batch - 1) or abs(how.replay - wanted) <= 0.5


def test_a_replay_share_of_nothing_replays_nothing():
    assert proportional_mix(100, 50, 30, 0.0) == Mix(30, 0, 5)


def test_a_task_without_samples_is_refused():
    with pytest.raises(InputError, match="at least one sample"):
        proportional_mix(0, 10, 4)


# -------------------------------------------------------------------------------------- epoch


@given(st.integers(1, 300), st.integers(0, 100), st.integers(1, 80), st.integers(0, 9))
def test_an_epoch_passes_through_each_kind_evenly(task, memory, batch_size, seed):
    how = proportional_mix(task, memory, batch_size)
    batches = list(zip(*epoch_indices(task, memory, how, generator(seed)), strict=True))

    assert [(len(t), len(m)) for t, m in batches] == [(how.task, how.replay)] * how.steps
    for indices, size in (
        (torch.cat([t for t, _ in batches]), task),
        (torch.cat([m for _, m in batches]), memory),
    ):
        assert indices.dtype == torch.int64
        counts = torch.bincount(indices, minlength=size)
        assert len(counts) == size
        if size:
            assert counts.max() - counts.min() <= 1
            assert counts.min() >= 1 or len(indices) < size


def test_every_sample_of_the_task_comes_up_where_there_are_steps_enough():
    how = Mix(task=7, replay=3, steps=5)
    chosen = epoch_indices(30, 10, how, generator())[0].flatten()
    assert set(chosen.tolist()) == set(range(30))


def test_the_seed_decides_the_order():
    how = proportional_mix(100, 20, 16)

    def order(source: torch.Generator) -> list[int]:
        return [rows.tolist() for rows in epoch_indices(100, 20, how, source)]

    assert order(generator(1)) == order(generator(1))
    assert order(generator(1)) != order(generator(2))
    ongoing = generator(1)
    assert order(ongoing) != order(ongoing)


def test_wrapping_around_takes_a_new_order():
    how = Mix(task=50, replay=0, steps=2)
    first, second = epoch_indices(50, 0, how, generator())[0]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert first.tolist() != second.tolist()


def test_without_a_memory_nothing_is_replayed():
    chosen, replayed = epoch_indices(10, 0, proportional_mix(10, 0, 4), generator())
    assert chosen.shape == (3, 4)
    assert (replayed.shape, replayed.dtype) == ((3, 0), torch.int64)


# ------------------------------------------------------------------------------------- beside


def test_a_mix_beside_a_stream_passes_through_the_task_once():
    assert fixed_mix(100, 32, 64) == Mix(32, 64, 4)
    assert fixed_mix(10, 32, 5) == Mix(10, 5, 1)
    with pytest.raises(InputError, match="at least one sample"):
        fixed_mix(0, 32, 5)


@given(
    st.integers(0, 60), st.integers(0, 40), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3)
)
def test_only_what_is_kept_by_then_is_drawn_and_none_twice(seen, capacity, task, each, replays):
    how = Mix(task, each * replays, 5)
    kept = [min(capacity, seen + step * task) for step in range(5)]
    rows = draw_replay(torch.tensor(kept), capacity, how, replays, generator())
    assert rows.shape == (5, each * replays)
    for count, row in zip(kept, rows, strict=True):
        for part in row.view(replays, each).tolist():
            assert all(0 <= index < max(1, count) for index in part)
            assert len(set(part)) == min(each, max(1, count))


def test_every_kept_sample_is_drawn_as_often():
    how = Mix(4, 10, 4000)
    kept = torch.full((4000,), 20)
    counts = draw_replay(kept, 20, how, 2, generator()).flatten().bincount(minlength=20)
    # 2000 each; a deviation of 150 is beyond four standard deviations.
    assert int((counts - 2000).abs().max()) < 150
