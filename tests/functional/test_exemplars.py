"""Reservoir, herding and coresets, against loops, against brute force and in numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor

from cclis.errors import InputError
from cclis.functional import coreset
from cclis.functional.coreset import matching_pursuit, weighted_coreset
from cclis.functional.exemplars import herding, reservoir_slots
from cclis.functional.quadratic import solve_nonnegative
from tests.conftest import normal, seeded

SETTINGS = settings(max_examples=80, deadline=None)
UNLIKELY = 1e-4


def sequential_slots(seen: int, capacity: int, draws: list[float]) -> list[int]:
    """Vitter's Algorithm R, one sample after another, then the overruled ones taken out."""
    slots = []
    for n, draw in enumerate(draws, start=seen):
        slot = n if n < capacity else int(draw * (n + 1))
        slots.append(slot if slot < capacity else -1)
    return [-1 if slot in slots[i + 1 :] else slot for i, slot in enumerate(slots)]


def reservoir(stream: int, capacity: int, chunks: list[int], generator: torch.Generator) -> Tensor:
    """The numbers of the samples that a memory holds after a stream came in chunks."""
    memory, seen = torch.full((capacity,), -1), 0
    for count in chunks:
        slots = reservoir_slots(seen, capacity, count, generator=generator)
        taken = slots >= 0
        memory[slots[taken]] = (seen + torch.arange(count))[taken]
        seen += count
    assert seen == stream
    return memory


class TestReservoir:
    @SETTINGS
    @given(st.integers(0, 60), st.integers(0, 25), st.integers(0, 60), st.integers(0, 2**31))
    def test_against_a_loop(self, seen: int, capacity: int, count: int, seed: int) -> None:
        slots = reservoir_slots(seen, capacity, count, generator=seeded(seed))
        draws = torch.rand(count, generator=seeded(seed), dtype=torch.float64).tolist()
        assert slots.dtype == torch.int64
        assert slots.tolist() == sequential_slots(seen, capacity, draws)

    @SETTINGS
    @given(st.integers(0, 60), st.integers(0, 25), st.integers(0, 90), st.integers(0, 2**31))
    def test_no_slot_twice(self, seen: int, capacity: int, count: int, seed: int) -> None:
        slots = reservoir_slots(seen, capacity, count, generator=seeded(seed))
        assert slots.shape == (count,)
        taken = [slot for slot in slots.tolist() if slot >= 0]
        assert len(set(taken)) == len(taken)
        assert all(slot < capacity for slot in taken)

    @SETTINGS
    @given(st.integers(0, 60), st.integers(0, 25), st.integers(0, 9), st.integers(0, 6))
    def test_batches_at_once_are_those_one_by_one(
        self, seen: int, capacity: int, count: int, batches: int
    ) -> None:
        at_once, one_by_one = seeded(seen + count), seeded(seen + count)
        slots = reservoir_slots(seen, capacity, count, generator=at_once, batches=batches)
        for batch, of_batch in enumerate(slots.view(batches, count)):
            before = seen + batch * count
            expected = reservoir_slots(before, capacity, count, generator=one_by_one)
            assert torch.equal(of_batch, expected)
        assert torch.equal(at_once.get_state(), one_by_one.get_state())

    @pytest.mark.parametrize("chunks", [[30], [10, 10, 10], [1] * 30, [3, 0, 20, 7]])
    def test_every_sample_is_kept_alike(self, chunks: list[int]) -> None:
        streams, kept, generator = 500, torch.zeros(30), seeded(sum(chunks) + len(chunks))
        for _ in range(streams):
            kept[reservoir(30, 6, chunks, generator)] += 1
        # Each stream keeps just 6, so the counts vary in 29 directions, by 30/29 of one's variance.
        expected = streams * 6 / 30
        spread = ((kept - expected) ** 2 / (expected * (1 - 6 / 30))).sum().item() * 29 / 30
        assert stats.chi2.sf(spread, 29) > UNLIKELY
        assert stats.chi2.cdf(spread, 29) > UNLIKELY

    @pytest.mark.parametrize("chunks", [[6], [2, 2, 2], [1] * 6, [4, 2]])
    def test_every_set_is_kept_alike(self, chunks: list[int]) -> None:
        seen = dict.fromkeys(itertools.combinations(range(6), 3), 0)
        generator = seeded(len(chunks))
        for _ in range(2000):
            seen[tuple(sorted(reservoir(6, 3, chunks, generator).tolist()))] += 1
        assert stats.chisquare(list(seen.values())).pvalue > UNLIKELY

    def test_a_late_sample_enters_with_the_share_of_the_memory(self) -> None:
        # With one sample a call nothing is overruled.
        generator = seeded(3)
        entered = sum(
            reservoir_slots(999, 50, 1, generator=generator).item() >= 0 for _ in range(10_000)
        )
        assert abs(entered - 500) <= 5 * math.sqrt(10_000 * 0.05 * 0.95)

    def test_the_first_ones_fill_the_memory(self) -> None:
        assert reservoir_slots(0, 5, 5, generator=seeded(0)).tolist() == [0, 1, 2, 3, 4]
        assert reservoir_slots(2, 5, 3, generator=seeded(0)).tolist() == [2, 3, 4]

    def test_a_memory_of_nothing(self) -> None:
        assert reservoir_slots(3, 0, 4, generator=seeded(0)).tolist() == [-1] * 4

    def test_nothing_comes(self) -> None:
        slots = reservoir_slots(3, 2, 0, generator=seeded(0))
        assert slots.shape == (0,)
        assert slots.dtype == torch.int64

    def test_same_seed_same_slots(self) -> None:
        first = reservoir_slots(100, 50, 40, generator=seeded(5))
        assert torch.equal(first, reservoir_slots(100, 50, 40, generator=seeded(5)))
        assert not torch.equal(first, reservoir_slots(100, 50, 40, generator=seeded(6)))

    @pytest.mark.parametrize("arguments", [(-1, 2, 3), (1, -2, 3), (1, 2, -3)])
    def test_negative_numbers(self, arguments: tuple[int, int, int]) -> None:
        with pytest.raises(InputError, match="negative"):
            reservoir_slots(*arguments, generator=seeded(0))

    def test_a_negative_number_of_batches(self) -> None:
        with pytest.raises(InputError, match="negative"):
            reservoir_slots(1, 2, 3, generator=seeded(0), batches=-1)


def distances(features: Tensor, chosen: list[int]) -> dict[int, float]:
    """iCaRL, Algorithm 4: how far from the class mean each sample would bring the mean of all."""
    unit = [(row / row.norm()).tolist() for row in features.double()]
    mean = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    found = {}
    for candidate in set(range(len(unit))) - set(chosen):
        members = [unit[i] for i in [*chosen, candidate]]
        centre = [sum(column) / len(members) for column in zip(*members, strict=True)]
        found[candidate] = math.dist(centre, mean)
    return found


class TestHerding:
    @SETTINGS
    @given(st.integers(1, 14), st.integers(2, 6), st.integers(0, 18), st.integers(0, 2**31))
    def test_against_brute_force(self, samples: int, width: int, count: int, seed: int) -> None:
        features = normal(samples, width, seed=seed)
        order = herding(features, count).tolist()
        assert len(order) == min(count, samples)
        for k, index in enumerate(order):
            # Of two samples both are as near, so the choice itself may differ.
            found = distances(features, order[:k])
            assert found[index] <= min(found.values()) + 1e-12

    @SETTINGS
    @given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**31))
    def test_properties(self, samples: int, few: int, more: int, seed: int) -> None:
        features = normal(samples, 5, seed=seed).float()
        few, more = sorted((few, more))
        order = herding(features, more)
        assert order.dtype == torch.int64
        assert order.shape == (min(more, samples),)
        assert len(set(order.tolist())) == len(order)
        assert torch.equal(herding(features, few), order[:few])

    def test_samples_that_are_nearly_the_same_are_told_apart(self) -> None:
        # In 32 bits their distances from the mean are rounding.
        features = (1 + 1e-5 * normal(300, 64, seed=4)).float()
        assert torch.equal(herding(features, 60), herding(features.double(), 60))

    def test_the_length_of_features_does_not_matter(self) -> None:
        features = normal(40, 8, seed=1)
        lengths = torch.rand(40, 1, generator=seeded(2), dtype=torch.float64) + 0.1
        assert torch.equal(herding(features, 20), herding(features * lengths, 20))

    def test_the_mean_is_met_better_than_by_chance(self) -> None:
        features = torch.nn.functional.normalize(normal(500, 32, seed=1) + 0.3)
        mean = features.mean(dim=0)
        chosen = (features[herding(features, 20)].mean(dim=0) - mean).norm()
        drawn = [
            (features[torch.randperm(500, generator=seeded(seed))[:20]].mean(dim=0) - mean).norm()
            for seed in range(100)
        ]
        assert chosen < min(drawn) / 2

    def test_a_feature_of_zeros(self) -> None:
        features = torch.tensor([[1.0, 0.0], [1.0, 6.0], [0.0, 0.0]])
        # The mean is about (0.39, 0.33), nearer to zeros than to a unit vector.
        assert herding(features, 3)[0] == 2
        # That of (1, 0), (1, 1) and zeros is (0.57, 0.24), nearer to the first: 0.49 against 0.61.
        assert herding(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), 3)[0] != 2
        assert sorted(herding(features, 9).tolist()) == [0, 1, 2]

    @pytest.mark.parametrize("count", [0, 5])
    def test_nothing_to_choose(self, count: int) -> None:
        order = herding(torch.zeros(0 if count else 4, 3), count)
        assert order.shape == (0,)
        assert order.dtype == torch.int64

    def test_bad_input(self) -> None:
        with pytest.raises(InputError, match="two dimensions"):
            herding(torch.zeros(4), 2)
        with pytest.raises(InputError, match="-1"):
            herding(torch.zeros(4, 2), -1)
        with pytest.raises(InputError, match="diverged"):
            herding(torch.tensor([[0.0, math.nan]]), 1)


def cost(
    gradients: Tensor, target: Tensor, indices: Tensor, weights: Tensor, ridge: float
) -> float:
    residual = target - weights @ gradients[indices]
    return (residual.square().sum() + ridge * weights.square().sum()).item()


def dense_pursuit(gradients: Tensor, target: Tensor, count: int, ridge: float) -> dict[int, float]:
    """The same pursuit by a dense solver of the bounded problem, fitted anew in every round."""
    weights: dict[int, float] = {}
    while len(weights) < count:
        fit = sum((w * gradients[i] for i, w in weights.items()), torch.zeros_like(target))
        agreement = gradients @ (target - fit)
        agreement[list(weights)] = -math.inf
        best = int(agreement.argmax())
        if agreement[best] <= 1e-6 * gradients[best].norm() * target.norm():
            break
        tried = [*weights, best]
        stacked = torch.cat([gradients[tried].T, math.sqrt(ridge) * torch.eye(len(tried)).double()])
        goal = torch.cat([target, torch.zeros(len(tried), dtype=torch.float64)])
        found = optimize.lsq_linear(
            stacked.numpy(), goal.numpy(), bounds=(0, math.inf), method="bvls", tol=1e-14
        ).x
        weights = {i: w for i, w in zip(tried, found, strict=True) if w > 1e-12}
    return weights


@st.composite
def pursuits(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, float]:
    """Gradients that partly agree, a target near their sum, a count and a ridge."""
    rows, width = draw(st.integers(1, 25)), draw(st.integers(1, 12))
    seed, shared = draw(st.integers(0, 2**31)), draw(st.floats(0, 2))
    gradients = normal(rows, width, seed=seed) + shared * normal(1, width, seed=seed + 1)
    target = gradients.sum(dim=0) + normal(width, seed=seed + 2)
    ridge = draw(st.sampled_from([0.0, 0.01, 0.5, 10.0]))
    return gradients, target, draw(st.integers(0, 30)), ridge


class TestMatchingPursuit:
    @SETTINGS
    @given(pursuits())
    def test_properties(self, case: tuple[Tensor, Tensor, int, float]) -> None:
        gradients, target, count, ridge = case
        indices, weights = matching_pursuit(gradients, target, count, ridge=ridge)
        assert indices.dtype == torch.int64
        assert weights.dtype == torch.float64
        assert indices.shape == weights.shape
        assert len(indices) <= min(count, len(gradients))
        assert len(set(indices.tolist())) == len(indices)
        assert (weights > 0).all()

    @SETTINGS
    @given(pursuits())
    def test_the_cost_never_grows(self, case: tuple[Tensor, Tensor, int, float]) -> None:
        gradients, target, count, ridge = case
        costs = [
            cost(gradients, target, *matching_pursuit(gradients, target, k, ridge=ridge), ridge)
            for k in range(count + 1)
        ]
        assert costs[0] == pytest.approx(target.square().sum().item())
        assert all(b <= a + 1e-9 * costs[0] for a, b in itertools.pairwise(costs))

    @SETTINGS
    @given(pursuits())
    def test_against_a_dense_solver(self, case: tuple[Tensor, Tensor, int, float]) -> None:
        gradients, target, count, ridge = case
        indices, weights = matching_pursuit(gradients, target, count, ridge=ridge)
        expected = dense_pursuit(gradients, target, min(count, len(gradients)), ridge)
        if set(indices.tolist()) == set(expected):
            for i, w in zip(indices.tolist(), weights.tolist(), strict=True):
                assert w == pytest.approx(expected[i], rel=1e-4, abs=1e-6)
        # Where rounding decides which row comes next, both are as good.
        found = torch.tensor(list(expected.values()), dtype=torch.float64)
        reached = cost(gradients, target, torch.tensor(list(expected)).long(), found, ridge)
        own = cost(gradients, target, indices, weights, ridge)
        assert own == pytest.approx(reached, rel=1e-5, abs=1e-9 * target.square().sum().item())

    @SETTINGS
    @given(pursuits())
    def test_at_the_end_no_row_agrees_with_the_residual(
        self, case: tuple[Tensor, Tensor, int, float]
    ) -> None:
        gradients, target, _, ridge = case
        indices, weights = matching_pursuit(gradients, target, 1000, ridge=ridge)
        left = gradients @ (target - weights @ gradients[indices])
        scale = gradients.norm(dim=1) * target.norm()
        # The optimality of the whole problem: the slope of every weight, those not picked too.
        assert ((left[indices] - ridge * weights).abs() <= 1e-5 * scale[indices]).all()
        others = torch.ones(len(gradients), dtype=torch.bool)
        others[indices] = False
        assert (left[others] <= 1e-5 * scale[others]).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_sparse_combination_is_found(self, dtype: torch.dtype) -> None:
        gradients = normal(200, 1000, seed=1).to(dtype)
        members = torch.tensor([3, 150, 77, 12, 199])
        parts = torch.tensor([2.0, 0.5, 1.0, 3.0, 0.25], dtype=dtype)
        target = parts @ gradients[members]
        indices, weights = matching_pursuit(gradients, target, 50, ridge=0.0)
        assert weights.dtype == dtype
        found = dict(zip(indices.tolist(), weights.tolist(), strict=True))
        for member, part in zip(members.tolist(), parts.tolist(), strict=True):
            assert found.pop(member) == pytest.approx(part, rel=1e-4)
        assert len(found) == 0

    def test_rows_that_are_nearly_the_same_are_told_apart(self) -> None:
        # In 32 bits which of them agrees most with what is left is rounding.
        rows = (1 + 2e-6 * normal(60, 40, seed=5)).float()
        target = rows.double().sum(dim=0).float()
        found = matching_pursuit(rows, target, 8, ridge=1e-6)
        expected = matching_pursuit(rows.double(), target.double(), 8, ridge=1e-6)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-6, atol=0)

    def test_one_row_in_closed_form(self) -> None:
        gradients, target = torch.tensor([[3.0, 4.0]]), torch.tensor([6.0, 0.0])
        indices, weights = matching_pursuit(gradients, target, 1, ridge=5.0)
        assert indices.tolist() == [0]
        assert weights.item() == pytest.approx(18 / (25 + 5))

    def test_a_row_that_is_no_longer_needed_gives_way(self) -> None:
        # The long row is picked first, and the other two together make it useless.
        gradients = torch.tensor([[2.0, 2.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        target = torch.tensor([3.0, 3.0, -1.0])
        assert matching_pursuit(gradients, target, 1, ridge=0.0)[0].tolist() == [0]
        indices, weights = matching_pursuit(gradients, target, 3, ridge=0.0)
        assert sorted(indices.tolist()) == [1, 2]
        assert weights.tolist() == pytest.approx([3.0, 3.0])

    def test_rows_that_are_the_same(self) -> None:
        row = normal(20, seed=3)
        gradients = torch.stack([row] * 6)
        indices, weights = matching_pursuit(gradients, 6 * row, 6, ridge=0.0)
        assert len(indices) == 1
        assert weights.item() == pytest.approx(6)
        indices, weights = matching_pursuit(gradients, 6 * row, 6, ridge=5.0)
        assert len(indices) == 6
        expected = 6 * row.square().sum().item() / (6 * row.square().sum().item() + 5)
        assert weights.tolist() == pytest.approx([expected] * 6)

    @pytest.mark.parametrize("ridge", [0.0, 1.0])
    def test_nothing_to_pick(self, ridge: float) -> None:
        gradients = normal(5, 4, seed=1).abs()
        for rows, target, count in [
            (gradients, torch.ones(4).double(), 0),
            (gradients[:0], torch.ones(4).double(), 3),
            (gradients, torch.zeros(4).double(), 3),
            (gradients, -torch.ones(4).double(), 3),
            (torch.zeros(5, 4).double(), torch.ones(4).double(), 3),
        ]:
            indices, weights = matching_pursuit(rows, target, count, ridge=ridge)
            assert indices.shape == weights.shape == (0,)
            assert indices.dtype == torch.int64

    def test_the_scale_does_not_matter(self) -> None:
        gradients, target = normal(30, 12, seed=1), normal(30, 12, seed=1).sum(dim=0)
        indices, weights = matching_pursuit(gradients, target, 10, ridge=0.0)
        tiny, same = matching_pursuit(gradients * 1e-9, target * 1e-9, 10, ridge=0.0)
        assert torch.equal(indices, tiny)
        torch.testing.assert_close(same, weights)

    def test_every_pick_takes_one_fit_of_those_picked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[int] = []

        def counted(gram: np.ndarray, linear: np.ndarray) -> np.ndarray:
            sizes.append(len(linear))
            return solve_nonnegative(gram, linear)

        monkeypatch.setattr(coreset, "solve_nonnegative", counted)
        # So many dimensions that none is put back.
        gradients = torch.randn(250, 1280, generator=seeded(1))
        indices, _ = matching_pursuit(gradients, gradients.sum(dim=0), 50, ridge=0.5)
        assert len(indices) == 50
        assert sizes == list(range(1, 51))

    def test_bad_input(self) -> None:
        gradients, target = torch.ones(3, 2), torch.ones(2)
        for rows, goal in [(gradients, torch.ones(3)), (target, target), (gradients, gradients)]:
            with pytest.raises(InputError, match="must be"):
                matching_pursuit(rows, goal, 2, ridge=0.0)
        for count, ridge in [(-1, 0.0), (1, -0.5), (1, math.nan)]:
            with pytest.raises(InputError, match="negative"):
                matching_pursuit(gradients, target, count, ridge=ridge)
        with pytest.raises(InputError, match="target hold"):
            matching_pursuit(gradients, target / 0, 2, ridge=0.0)


class TestWeightedCoreset:
    @pytest.mark.parametrize("quota", [1, 3, 4, 5])
    def test_weights_of_a_coreset_are_those_of_the_ridge_scaled_to_what_all_weighed(
        self,
        quota: int,
    ) -> None:
        # Orthogonal: min |t - Σ w g|² + λ|w|² has w = b |g|² / (|g|² + λ), b the weights before.
        norms, before = torch.tensor([1.0, 2.0, 0.1, 0.5]), torch.tensor([1.0, 2.0, 1.0, 4.0])
        chosen, weight = weighted_coreset(torch.diag(norms), before, quota, ridge=0.3)
        assert chosen.tolist() == [1, 0, 3, 2][:quota]
        fitted = (before * norms**2 / (norms**2 + 0.3))[chosen]
        torch.testing.assert_close(weight, fitted * 8 / fitted.sum())

    def test_what_was_got_wrong_does_not_say_where_to(self) -> None:
        right, wrong = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], [[-1.0, 0.0]] * 6
        before = torch.tensor([1.0] * 4 + [0.0] * 6)
        chosen, weight = weighted_coreset(torch.tensor(right + wrong), before, 2, ridge=0.5)
        assert sorted(row // 2 for row in chosen.tolist()) == [0, 1]
        assert weight.tolist() == pytest.approx([5, 5])

    def test_where_a_few_suffice_others_fill_the_room_with_the_weights_they_had(self) -> None:
        # The second row is against the sum of all, 3.9, of which the ridge of 0.5 leaves 2.6.
        gradients = torch.tensor([[1.0, 0.0], [-0.05, 0.0], [1.0, 0.0]])
        for quota, fitted in ((1, [2.6]), (2, [2.6, 2]), (3, [2.6, 2, 1])):
            before = torch.tensor([4.0, 2.0, 0.0])
            chosen, weight = weighted_coreset(gradients, before, quota, ridge=0.5)
            assert chosen.tolist() == [0, 1, 2][:quota]
            assert weight.tolist() == pytest.approx([7 * w / sum(fitted) for w in fitted])

    @pytest.mark.parametrize("rows", [0, 4])
    def test_where_there_is_no_room_nothing_is_kept(self, rows: int) -> None:
        chosen, weight = weighted_coreset(torch.rand(rows, 2), torch.ones(rows), 0, ridge=0.5)
        assert len(chosen) == len(weight) == 0

    def test_gradients_that_have_all_but_vanished_give_weights(self) -> None:
        _, weight = weighted_coreset(torch.full((4, 2), 1e-20), torch.ones(4), 2, ridge=0.5)
        assert weight.tolist() == pytest.approx([2, 2], rel=1e-3)

    def test_what_weighs_nothing_may_lie_anywhere(self) -> None:
        gradients, before = normal(9, 4, seed=2), torch.arange(9).double() % 3
        order = torch.tensor([1, 2, 4, 5, 7, 8, 0, 3, 6])
        for count in (2, 5, 7, 9):
            chosen, weight = weighted_coreset(gradients, before, count, ridge=0.5)
            sorted_, same = weighted_coreset(gradients[order], before[order], count, ridge=0.5)
            assert torch.equal(chosen, order[sorted_])
            torch.testing.assert_close(weight, same)
            # They are kept only where the six others leave room.
            assert int((before[chosen] == 0).sum()) == max(0, count - 6)

    @pytest.mark.parametrize("before", [torch.ones(3), torch.ones(4, 1), -torch.ones(4)])
    def test_weights_that_cannot_be(self, before: Tensor) -> None:
        with pytest.raises(InputError, match="weights must not be negative, one for each of 4"):
            weighted_coreset(torch.ones(4, 2), before, 2, ridge=0.5)
