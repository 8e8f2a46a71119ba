from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from cclis.errors import InputError
from cclis.functional import sampling
from cclis.functional.sampling import log_scores, normalise, proposal, quotas, select
from tests.experiment.process import SERVER

SETTINGS = settings(max_examples=80, deadline=None)
UNLIKELY = 1e-4


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cosines(classes: int, samples: int, seed: int) -> Tensor:
    return torch.rand(classes, samples, generator=seeded(seed), dtype=torch.float64) * 2 - 1


def unit(rows: int, dimensions: int, seed: int) -> Tensor:
    vectors = torch.randn(rows, dimensions, generator=seeded(seed), dtype=torch.float64)
    return normalize(vectors, dim=1)


def naive_proposal(similarity: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Eq. 12, in loops: the mean target distribution of the other prototypes, within a class."""
    s = (similarity.double() / temperature).tolist()
    y = labels.tolist()
    classes, samples = len(s), len(y)
    partition = [sum(math.exp(s[i][j]) for j in range(samples)) for i in range(classes)]
    mean = []
    for j in range(samples):
        total = 0.0
        for i in range(classes):
            if i != y[j]:
                total += math.exp(s[i][j]) / partition[i]
        mean.append(total / (classes - 1))
    of_class = {m: sum(mean[j] for j in range(samples) if y[j] == m) for m in set(y)}
    return torch.tensor([mean[j] / of_class[y[j]] for j in range(samples)], dtype=torch.float64)


@st.composite
def visible(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    """Cosines, labels (any class may be absent) and a temperature."""
    classes = draw(st.integers(2, 6))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=20))
    similarity = cosines(classes, len(labels), draw(st.integers(0, 2**31)))
    return similarity, torch.tensor(labels), draw(st.floats(0.02, 2.0))


class TestProposal:
    @SETTINGS
    @given(visible())
    def test_against_the_equation(self, case: tuple[Tensor, Tensor, float]) -> None:
        similarity, labels, temperature = case
        g = proposal(similarity, labels, temperature=temperature)
        assert g.dtype == torch.float64
        expected = naive_proposal(similarity, labels, temperature)
        torch.testing.assert_close(g, expected, rtol=1e-6, atol=1e-9)

    @SETTINGS
    @given(visible())
    def test_sums_to_one_within_every_class(self, case: tuple[Tensor, Tensor, float]) -> None:
        similarity, labels, temperature = case
        g = proposal(similarity, labels, temperature=temperature)
        assert (g >= 0).all()
        for m in labels.unique():
            assert g[labels == m].sum().item() == pytest.approx(1, abs=1e-12)

    @SETTINGS
    @given(visible(), st.integers(1, 40))
    def test_chunks_do_not_matter(self, case: tuple[Tensor, Tensor, float], size: int) -> None:
        similarity, labels, temperature = case
        whole = proposal(similarity, labels, temperature=temperature)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "CHUNK_ELEMENTS", size)
            chunked = proposal(similarity, labels, temperature=temperature)
        torch.testing.assert_close(chunked, whole, rtol=1e-10, atol=1e-14)

    @pytest.mark.parametrize("chunk", [1, 35, 2**24])
    def test_embeddings_give_what_similarities_give(
        self, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        embeddings, prototypes = unit(50, 8, seed=1), unit(7, 8, seed=2)
        labels = torch.randint(7, (50,), generator=seeded(3))
        expected = naive_proposal(prototypes @ embeddings.T, labels, 0.3)
        monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", chunk)
        scores = log_scores(embeddings, prototypes, labels, temperature=0.3)
        assert scores.shape == (50,)
        torch.testing.assert_close(normalise(scores, labels), expected, rtol=1e-6, atol=1e-9)
        of_similarity = proposal(prototypes @ embeddings.T, labels, temperature=0.3)
        torch.testing.assert_close(of_similarity, expected, rtol=1e-6, atol=1e-9)

    def test_scores_of_passes_average(self) -> None:
        # The mean over passes of Eq. 12 is a logsumexp of log scores, so they must share a scale.
        labels = torch.tensor([0, 0, 1, 1, 2])
        passes = [cosines(3, 5, seed) for seed in (1, 2)]
        shares = []
        for similarity in passes:
            p = (similarity / 0.5).softmax(dim=1)
            own = torch.nn.functional.one_hot(labels, 3).T.bool()
            shares.append(p.masked_fill(own, 0).sum(dim=0))
        mean = sum(shares)
        expected = torch.stack(
            [mean[j] / mean[labels == labels[j]].sum() for j in range(len(labels))]
        )
        axes = torch.eye(3, dtype=torch.float64)
        scores = [log_scores(s.T, axes, labels, temperature=0.5) for s in passes]
        g = normalise(torch.stack(scores).logsumexp(dim=0), labels)
        torch.testing.assert_close(g, expected, rtol=1e-9, atol=1e-12)

    def test_a_class_of_one_sample(self) -> None:
        labels = torch.tensor([0, 1, 0, 2, 0])
        g = proposal(cosines(3, 5, seed=4), labels, temperature=0.1)
        assert g[1].item() == 1.0
        assert g[3].item() == 1.0
        assert (g[labels == 0] < 1).all()

    def test_one_class_alone_is_uniform(self) -> None:
        labels = torch.zeros(8, dtype=torch.int64)
        g = proposal(cosines(1, 8, seed=5), labels, temperature=0.1)
        assert g.tolist() == [0.125] * 8
        scores = log_scores(unit(8, 4, seed=1), unit(1, 4, seed=2), labels, temperature=0.1)
        assert normalise(scores, labels).tolist() == [0.125] * 8

    def test_equal_similarities_are_uniform(self) -> None:
        labels = torch.tensor([0, 1, 1, 2, 2, 2, 2])
        g = proposal(torch.full((3, 7), 0.4, dtype=torch.float64), labels, temperature=0.1)
        expected = 1 / labels.bincount()[labels].double()
        torch.testing.assert_close(g, expected, rtol=1e-12, atol=0)

    def test_the_own_prototype_does_not_matter(self) -> None:
        labels = torch.tensor([0, 0, 0, 1, 1])
        similarity = cosines(2, 5, seed=6)
        moved = similarity.clone()
        moved[0, :3] = cosines(1, 3, seed=7)[0]
        g = proposal(similarity, labels, temperature=0.5)
        after = proposal(moved, labels, temperature=0.5)
        torch.testing.assert_close(after[:3], g[:3], rtol=1e-12, atol=0)

    def test_other_classes_matter_through_the_partition(self) -> None:
        # Prototype 1 is spent on its own samples; what is left for class 0 is prototype 2's view.
        labels = torch.tensor([0, 0, 1, 2])
        similarity = torch.tensor(
            [[0.0, 0, 0, 0], [0.1, 0.0, 1.0, 0.0], [0.0, 0.1, 0.0, 0.0]], dtype=torch.float64
        )
        g = proposal(similarity, labels, temperature=0.05)
        assert g[1] > g[0]

    @pytest.mark.parametrize("chunk", [64, 2**24])
    def test_float32_at_a_cold_temperature(
        self, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", chunk)
        similarity = cosines(5, 60, seed=8).float()
        similarity[0, 0], similarity[1, 1] = 1.0, -1.0
        labels = torch.randint(5, (60,), generator=seeded(9))
        g = proposal(similarity, labels, temperature=0.01)
        assert g.dtype == torch.float32
        assert g.isfinite().all()
        expected = naive_proposal(similarity, labels, 0.01).float()
        torch.testing.assert_close(g, expected, rtol=1e-3, atol=1e-6)

    def test_scores_beyond_the_range_of_float32_stay_finite(self) -> None:
        # One sample of class 1 takes all of prototype 0; the others' shares underflow as numbers.
        similarity = torch.tensor([[1.0, 1.0, -1.0, -0.995], [1.0, -1.0, 0.0, 0.0]])
        labels = torch.tensor([0, 1, 1, 1])
        g = proposal(similarity, labels, temperature=0.01)
        assert g.isfinite().all()
        assert g[1].item() == pytest.approx(1)
        scores = log_scores(similarity.T, torch.eye(2), labels, temperature=0.01)
        assert scores.isfinite().all()
        assert (scores[3] - scores[2]).item() == pytest.approx(0.5, abs=1e-3)

    def test_a_class_without_samples(self) -> None:
        labels = torch.tensor([0, 3, 0, 3, 3, 1])  # Class 2 is gone, class 4 was never there.
        similarity = cosines(5, 6, seed=10)
        g = proposal(similarity, labels, temperature=0.5)
        expected = naive_proposal(similarity, labels, 0.5)
        torch.testing.assert_close(g, expected, rtol=1e-6, atol=1e-9)

    def test_hard_negatives_are_preferred(self) -> None:
        angles = torch.tensor([0.0, 15.0, 30.0, 45.0, 60.0, 90.0, 100.0]).deg2rad()
        embeddings = torch.stack([angles.cos(), angles.sin()], dim=1)
        labels = torch.tensor([0, 0, 0, 0, 0, 1, 1])
        g = normalise(
            log_scores(embeddings, torch.eye(2), labels, temperature=0.5), labels
        ).tolist()
        assert g[0] < g[1] < g[2] < g[3] < g[4]  # Towards the prototype of class 1.
        assert g[5] > g[6]

    @SETTINGS
    @given(visible(), st.randoms(use_true_random=False))
    def test_order_of_the_samples_does_not_matter(self, case, random) -> None:
        similarity, labels, temperature = case
        order = list(range(len(labels)))
        random.shuffle(order)
        g = proposal(similarity, labels, temperature=temperature)
        shuffled = proposal(similarity[:, order], labels[order], temperature=temperature)
        torch.testing.assert_close(shuffled, g[order], rtol=1e-10, atol=1e-14)


class TestNormalise:
    def test_by_hand(self) -> None:
        scores = torch.tensor([1.0, 3.0, 1.0, 7.0, 4.0], dtype=torch.float64).log()
        g = normalise(scores, torch.tensor([0, 0, 2, 2, 0]))
        expected = torch.tensor([1 / 8, 3 / 8, 1 / 8, 7 / 8, 4 / 8], dtype=torch.float64)
        torch.testing.assert_close(g, expected, rtol=1e-12, atol=0)

    def test_a_constant_added_to_a_class_changes_nothing(self) -> None:
        scores, labels = cosines(1, 6, seed=1)[0] * 5, torch.tensor([0, 1, 0, 1, 1, 0])
        shifted = scores + torch.tensor([-900.0, 2000.0], dtype=torch.float64)[labels]
        torch.testing.assert_close(
            normalise(shifted, labels), normalise(scores, labels), rtol=1e-9, atol=0
        )

    def test_no_samples(self) -> None:
        assert normalise(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)


class LargestResult(TorchDispatchMode):
    """Remembers the most elements any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def peak() -> float:
    """The most memory that this process has used, in MiB; ru_maxrss counts a parent's as well."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def peak_of_a_thousand_classes(found: Any) -> None:
    """Put into `found` how much memory their scores take, in MiB."""
    torch.set_num_threads(2)
    prototypes = unit(1000, 32, seed=0).float()
    embeddings = torch.randn(50_000, 32, generator=seeded(1))
    embeddings /= embeddings.norm(dim=1, keepdim=True)
    labels, few = torch.arange(50_000) % 1000, slice(0, 1000)
    log_scores(embeddings[few], prototypes, labels[few], temperature=0.5)
    before = peak()
    g = normalise(log_scores(embeddings, prototypes, labels, temperature=0.5), labels)
    after = peak()
    assert abs(g.sum().item() - 1000) < 1e-2
    found.put(after - before)


class TestMemoryOfTheScores:
    def test_no_operation_exceeds_a_chunk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        embeddings, prototypes = unit(3000, 4, seed=1), unit(50, 4, seed=2)
        labels = torch.arange(3000) % 50
        monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 15_000)
        with LargestResult() as from_embeddings:
            log_scores(embeddings, prototypes, labels, temperature=0.5)
        similarity = prototypes @ embeddings.T
        with LargestResult() as from_similarity:
            proposal(similarity, labels, temperature=0.5)
        assert from_embeddings.elements == 15_000
        assert from_similarity.elements == 15_000

    @pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
    def test_peak_of_a_thousand_classes(self) -> None:
        # The chunks were seen to need 180 MiB, a single chunk of all 380 MiB.
        found = SERVER.SimpleQueue()
        child = SERVER.Process(target=peak_of_a_thousand_classes, args=(found,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert found.get() < 280


class TestQuotas:
    @SETTINGS
    @given(
        st.lists(st.integers(0, 12), min_size=1, max_size=10),
        st.integers(0, 100),
        st.integers(0, 2**31),
    )
    def test_properties(self, available: list[int], capacity: int, seed: int) -> None:
        shares = quotas(torch.tensor(available), capacity, generator=seeded(seed)).tolist()
        assert len(shares) == len(available)
        assert sum(shares) == min(capacity, sum(available))
        assert all(0 <= share <= has for share, has in zip(shares, available, strict=True))
        unexhausted = [s for s, has in zip(shares, available, strict=True) if s < has]
        if unexhausted:
            assert max(unexhausted) - min(unexhausted) <= 1
            # Nobody holds more than one above what the unexhausted ones hold.
            assert max(shares) - min(unexhausted) <= 1

    def test_even_shares_draw_nothing(self) -> None:
        shares = quotas(torch.tensor([100, 100, 100, 100]), 20)
        assert shares.tolist() == [5, 5, 5, 5]

    def test_what_a_small_class_leaves_goes_to_the_others(self) -> None:
        shares = quotas(torch.tensor([2, 100, 1, 100, 0]), 43)
        assert shares.tolist() == [2, 20, 1, 20, 0]

    def test_what_is_left_is_shared_in_turns(self) -> None:
        shares = quotas(torch.tensor([1, 6, 50]), 30)
        assert shares.tolist() == [1, 6, 23]

    def test_more_capacity_than_samples(self) -> None:
        assert quotas(torch.tensor([3, 0, 5]), 1000).tolist() == [3, 0, 5]

    @pytest.mark.parametrize("available", [[], [0, 0], [4, 2]])
    def test_nothing_to_give(self, available: list[int]) -> None:
        capacity = 0 if sum(available) else 7
        shares = quotas(torch.tensor(available, dtype=torch.int64), capacity)
        assert shares.tolist() == [0] * len(available)

    def test_what_is_available_is_left_alone(self) -> None:
        available = torch.tensor([3, 4, 5])
        quotas(available, 7)
        assert available.tolist() == [3, 4, 5]

    @pytest.mark.parametrize(("capacity", "base"), [(1, 0), (6, 1), (26, 5)])
    def test_one_left_over_goes_to_any_class_alike(self, capacity: int, base: int) -> None:
        winners = [0] * 5
        for seed in range(1500):
            shares = quotas(torch.full((5,), 40), capacity, generator=seeded(seed))
            extra = shares - base
            assert extra.sum() == 1
            winners[int(extra.argmax())] += 1
        assert stats.chisquare(winners).pvalue > UNLIKELY

    def test_many_left_over_go_to_any_set_of_classes_alike(self) -> None:
        winners = dict.fromkeys(itertools.combinations(range(5), 2), 0)
        for seed in range(2000):
            shares = quotas(torch.full((5,), 40), 17, generator=seeded(seed))
            winners[tuple((shares == 4).nonzero()[:, 0].tolist())] += 1
        assert stats.chisquare(list(winners.values())).pvalue > UNLIKELY

    def test_left_over_goes_only_to_classes_that_have_more(self) -> None:
        for seed in range(30):
            shares = quotas(torch.tensor([1, 9, 0, 9, 9]), 9, generator=seeded(seed)).tolist()
            assert shares[0] == 1
            assert shares[2] == 0
            assert sorted([shares[1], shares[3], shares[4]]) == [2, 3, 3]

    def test_same_seed_same_shares(self) -> None:
        shares = [quotas(torch.full((9,), 5), 13, generator=seeded(4)).tolist() for _ in range(5)]
        assert all(share == shares[0] for share in shares)
        others = [quotas(torch.full((9,), 5), 13, generator=seeded(s)).tolist() for s in range(9)]
        assert any(share != shares[0] for share in others)


@st.composite
def memories(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """Proposals, labels (any class may be absent), a capacity and a seed."""
    labels = draw(st.lists(st.integers(0, 7), min_size=1, max_size=60))
    seed = draw(st.integers(0, 2**31))
    g = torch.rand(len(labels), generator=seeded(seed)) ** 4
    return g, torch.tensor(labels), draw(st.integers(0, 80)), seed


def sets_drawn_in_turn(odds: list[float], keep: int) -> dict[tuple[int, ...], float]:
    """Probability of every set of this size, drawing one after another without replacement."""
    probabilities: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(odds)), keep):
        probability, left = 1.0, sum(odds)
        for index in order:
            probability *= odds[index] / left
            left -= odds[index]
        kept = tuple(sorted(order))
        probabilities[kept] = probabilities.get(kept, 0.0) + probability
    return probabilities


class TestSelect:
    @SETTINGS
    @given(memories())
    def test_properties(self, case: tuple[Tensor, Tensor, int, int]) -> None:
        g, labels, capacity, seed = case
        kept = select(g, labels, capacity, generator=seeded(seed))
        assert kept.dtype == torch.int64
        assert kept.shape == (min(capacity, len(labels)),)
        assert len(set(kept.tolist())) == len(kept)
        assert all(0 <= index < len(labels) for index in kept.tolist())
        assert labels[kept].tolist() == sorted(labels[kept].tolist())
        shares = labels[kept].bincount(minlength=8).tolist()
        has = labels.bincount(minlength=8).tolist()
        unexhausted = [share for share, most in zip(shares, has, strict=True) if share < most]
        if unexhausted:
            assert max(shares) - min(unexhausted) <= 1

    @SETTINGS
    @given(memories())
    def test_same_seed_same_picks(self, case: tuple[Tensor, Tensor, int, int]) -> None:
        g, labels, capacity, seed = case
        before = g.clone(), labels.clone()
        first = select(g, labels, capacity, generator=seeded(seed))
        assert torch.equal(first, select(g, labels, capacity, generator=seeded(seed)))
        assert torch.equal(g, before[0])
        assert torch.equal(labels, before[1])

    def test_other_seed_other_picks(self) -> None:
        g, labels = torch.full((100,), 0.02), torch.arange(100) % 2
        picks = {tuple(select(g, labels, 10, generator=seeded(s)).tolist()) for s in range(20)}
        assert len(picks) == 20

    def test_one_generator_continues(self) -> None:
        g, labels, generator = torch.full((100,), 0.02), torch.arange(100) % 2, seeded(0)
        first = select(g, labels, 10, generator=generator)
        assert not torch.equal(first, select(g, labels, 10, generator=generator))

    def test_without_a_generator_the_global_seed_decides(self) -> None:
        g, labels = torch.full((100,), 0.02), torch.arange(100) % 3
        with torch.random.fork_rng():
            torch.manual_seed(5)
            first = select(g, labels, 10)
            second = select(g, labels, 10)
            torch.manual_seed(5)
            again = select(g, labels, 10)
        assert torch.equal(first, again)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize(
        ("odds", "keep"),
        [
            ([0.5, 0.25, 0.15, 0.07, 0.03], 2),
            ([0.5, 0.25, 0.15, 0.07, 0.03], 1),
            ([0.2, 0.2, 0.2, 0.2, 0.2], 3),
            ([0.9, 0.05, 0.02, 0.02, 0.01], 4),
        ],
    )
    def test_odds_are_those_of_drawing_in_turn(self, odds: list[float], keep: int) -> None:
        # One call draws for 20,000 classes alike: as many independent trials.
        trials, size = 20_000, len(odds)
        labels = torch.arange(trials).repeat_interleave(size)
        g = torch.tensor(odds).repeat(trials)
        kept = select(g, labels, keep * trials, generator=seeded(12))
        assert torch.equal(labels[kept], torch.arange(trials).repeat_interleave(keep))
        chosen = (kept % size).view(trials, keep).sort(dim=1).values
        expected = sets_drawn_in_turn(odds, keep)
        seen = dict.fromkeys(expected, 0)
        for row in map(tuple, chosen.tolist()):
            seen[row] += 1
        assert sum(expected.values()) == pytest.approx(1)
        test = stats.chisquare(list(seen.values()), [p * trials for p in expected.values()])
        assert test.pvalue > UNLIKELY
        for index in range(size):
            inclusion = sum(p for kept_set, p in expected.items() if index in kept_set)
            count = (chosen == index).any(dim=1).sum().item()
            sigma = math.sqrt(trials * inclusion * (1 - inclusion))
            assert abs(count - trials * inclusion) <= 5 * sigma + 1e-6

    def test_odds_are_relative_within_a_class(self) -> None:
        # The classes' totals differ by eight orders of magnitude.
        labels = torch.tensor([0, 0, 1, 1])
        g = torch.tensor([3e-9, 1e-9, 0.2, 0.6])
        kept = [select(g, labels, 2, generator=seeded(seed)).tolist() for seed in range(2000)]
        for position, index in ((0, 0), (1, 3)):
            count = sum(pair[position] == index for pair in kept)
            assert abs(count - 1500) <= 5 * math.sqrt(2000 * 0.75 * 0.25)

    def test_positions_in_the_input_do_not_matter(self) -> None:
        # Equal odds, mixed labels: every sample of a class is kept about equally often.
        labels = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0, 1])
        counts = torch.zeros(9)
        for seed in range(1500):
            counts[select(torch.full((9,), 1 / 3), labels, 3, generator=seeded(seed))] += 1
        for m in range(3):
            assert stats.chisquare(counts[labels == m].numpy()).pvalue > UNLIKELY

    def test_capacity_below_the_number_of_classes(self) -> None:
        labels, seen = torch.arange(6).repeat(4), [0] * 6
        for seed in range(1200):
            kept = select(torch.full((24,), 0.25), labels, 2, generator=seeded(seed))
            classes = labels[kept].tolist()
            assert len(set(classes)) == 2
            for m in classes:
                seen[m] += 1
        sigma = math.sqrt(1200 * (1 / 3) * (2 / 3))
        assert all(abs(count - 400) <= 5 * sigma for count in seen)

    def test_a_small_class_gives_its_share_away(self) -> None:
        labels = torch.tensor([0] * 2 + [1] * 30 + [2] * 30)
        kept = select(torch.full((62,), 0.1), labels, 22, generator=seeded(1))
        assert labels[kept].bincount().tolist() == [2, 10, 10]

    def test_everything_fits(self) -> None:
        labels = torch.tensor([3, 0, 3, 1])
        kept = select(torch.tensor([0.5, 1.0, 0.5, 1.0]), labels, 100)
        assert sorted(kept.tolist()) == [0, 1, 2, 3]

    @pytest.mark.parametrize("smallest", [1e-12, 1e-38, 1e-250])
    def test_zero_is_chosen_only_when_nothing_else_is_left(self, smallest: float) -> None:
        g = torch.tensor([0.0, 0.5, 0.0, smallest, 0.0, 0.5], dtype=torch.float64)
        labels = torch.zeros(6, dtype=torch.int64)
        extras = set()
        for seed in range(200):
            assert set(select(g, labels, 3, generator=seeded(seed)).tolist()) == {1, 3, 5}
            four = set(select(g, labels, 4, generator=seeded(seed)).tolist())
            assert four > {1, 3, 5}
            extras |= four - {1, 3, 5}
        assert extras == {0, 2, 4}

    def test_the_scale_of_the_proposal_does_not_matter(self) -> None:
        g, labels = torch.rand(40, generator=seeded(1)) + 0.01, torch.arange(40) % 4
        for seed in range(20):
            kept = select(g, labels, 12, generator=seeded(seed))
            assert torch.equal(kept, select(g * 1024, labels, 12, generator=seeded(seed)))

    def test_nothing_to_keep(self) -> None:
        g, labels = torch.tensor([0.5, 0.5]), torch.tensor([0, 0])
        for kept in (select(g, labels, 0), select(g[:0], labels[:0], 5)):
            assert kept.shape == (0,)
            assert kept.dtype == torch.int64

    @pytest.mark.parametrize("capacity", [-1, -200])
    def test_negative_capacity(self, capacity: int) -> None:
        with pytest.raises(InputError, match=str(capacity)):
            select(torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), capacity)

    def test_negative_capacity_without_samples(self) -> None:
        with pytest.raises(InputError, match="negative"):
            select(torch.empty(0), torch.empty(0, dtype=torch.int64), -1)

    @pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (1, 3), (0,), ()])
    def test_proposal_and_labels_must_match(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InputError, match="must match"):
            select(torch.ones(shape), torch.tensor([0, 0, 1]), 2)


def test_the_form_that_takes_embeddings_is_the_proposal():
    rng = torch.Generator().manual_seed(0)
    z, c = (torch.nn.functional.normalize(torch.randn(n, 6, generator=rng)) for n in (30, 4))
    labels = torch.arange(30) % 4
    expected = proposal(c @ z.T, labels, temperature=0.3)
    found = normalise(log_scores(z, c, labels, temperature=0.3), labels)
    torch.testing.assert_close(found, expected)
