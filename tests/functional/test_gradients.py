"""Projection and selection by gradients, against other solvers, loops and frequencies."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor

from cclis.errors import InputError
from cclis.functional import gradients
from cclis.functional.gradients import gem_coefficients, gss_slots, inner_products
from tests.conftest import normal, seeded

SETTINGS = settings(max_examples=80, deadline=None)
UNLIKELY = 1e-4


@st.composite
def conflicts(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A gradient and references, of any lengths, at least one of which it harms."""
    tasks, width = draw(st.integers(1, 6)), draw(st.integers(2, 9))
    seed = draw(st.integers(0, 2**31))
    gradient, references = normal(width, seed=seed), normal(tasks, width, seed=seed + 1)
    if (references @ gradient >= 0).all():
        references[0] = -references[0]
    lengths = torch.rand(tasks, 1, generator=seeded(seed), dtype=torch.float64) * 3 + 0.01
    return gradient, references * lengths


def nearest(gradient: Tensor, references: Tensor) -> Tensor:
    """Eq. 8 itself, by another solver: the nearest vector without a negative inner product."""
    g, unit = gradient.numpy(), torch.nn.functional.normalize(references).numpy()
    found = optimize.minimize(
        lambda z: ((z - g) ** 2).sum() / 2,
        np.zeros_like(g),
        jac=lambda z: z - g,
        constraints={"type": "ineq", "fun": lambda z: unit @ z, "jac": lambda _: unit},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.from_numpy(found.x)


def project(gradient: Tensor, references: Tensor, *, margin: float, ridge: float = 0.0) -> Tensor:
    """The gradient to follow: g + G'v."""
    products = inner_products(torch.cat([gradient[None], references]))
    strengths = gem_coefficients(products, margin=margin, ridge=ridge)
    return torch.addmv(gradient, references.T, strengths.to(references))


class TestInnerProducts:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("width", [1, 100, gradients.BLOCK, 2 * gradients.BLOCK + 3])
    def test_against_a_loop(self, width: int, dtype: torch.dtype) -> None:
        rows = normal(3, width, seed=1).to(dtype)
        products = inner_products(rows)
        assert products.dtype == torch.float64
        for i, one in enumerate(rows.double()):
            for j, other in enumerate(rows.double()):
                expected = math.fsum((one * other).tolist())
                assert float(products[i, j]) == pytest.approx(expected, rel=1e-12, abs=1e-10)

    def test_parts_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = normal(7, 1000, seed=3)
        whole = inner_products(rows)
        monkeypatch.setattr(gradients, "CHUNK_ELEMENTS", 1000)
        monkeypatch.setattr(gradients, "BLOCK", 64)
        torch.testing.assert_close(inner_products(rows), whole)

    @pytest.mark.parametrize("width", [3, 2 * gradients.BLOCK, 2 * gradients.BLOCK + 3])
    def test_signs_of_what_is_nearly_orthogonal(self, width: int) -> None:
        # In 32 bits the ones that make the difference are lost.
        rows = torch.zeros(2, width)
        rows[:, :3] = torch.tensor([[1e5, 1.0, 1e5], [1e5, -1.0, -1e5]])
        rows[:, -1] += torch.tensor([1.0, -1.0]) if width > 3 else 0
        expected = math.fsum((rows[0].double() * rows[1].double()).tolist())
        assert expected < 0
        assert float(inner_products(rows)[0, 1]) == expected


class TestProject:
    @SETTINGS
    @given(conflicts(), st.sampled_from([0.0, 0.1, 0.5, 2.0]))
    def test_no_past_task_is_harmed(self, case: tuple[Tensor, Tensor], margin: float) -> None:
        gradient, references = case
        before = gradient.clone(), references.clone()
        turned = project(gradient, references, margin=margin)
        assert turned.shape == gradient.shape
        assert turned.dtype == gradient.dtype
        harm = (references @ turned) / references.norm(dim=1)
        assert harm.min() >= -1e-4 * (gradient.norm() + margin * references.norm())
        assert torch.equal(gradient, before[0])
        assert torch.equal(references, before[1])

    @SETTINGS
    @given(conflicts())
    def test_the_change_is_the_smallest(self, case: tuple[Tensor, Tensor]) -> None:
        gradient, references = case
        turned = project(gradient, references, margin=0.0)
        expected = nearest(gradient, references)
        assert (turned - expected).norm() <= 1e-3 * gradient.norm()
        assert (turned - gradient).norm() <= (expected - gradient).norm() + 1e-6 * gradient.norm()

    @SETTINGS
    @given(conflicts(), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 1e-3, 0.5]))
    def test_against_a_bounded_solver_of_the_dual(
        self, case: tuple[Tensor, Tensor], margin: float, ridge: float
    ) -> None:
        gradient, references = case
        # The dual of Eq. 11 is half of |G'v + g|², but for a constant; the ridge adds its |v|².
        tall = torch.cat([references.T, ridge**0.5 * torch.eye(len(references)).double()])
        right = torch.cat([-gradient, gradient.new_zeros(len(references))])
        strengths = optimize.lsq_linear(
            tall.numpy(), right.numpy(), bounds=(margin, np.inf), method="bvls"
        ).x
        expected = gradient + references.T @ torch.from_numpy(strengths)
        turned = project(gradient, references, margin=margin, ridge=ridge)
        torch.testing.assert_close(turned, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("margin", [0.0, 0.5])
    def test_unchanged_when_all_is_well(self, margin: float) -> None:
        references = normal(3, 8, seed=1)
        gradient = torch.linalg.lstsq(references, torch.tensor([0.5, 0.0, 2.0]).double()).solution
        gradient = gradient + 1e-9 * references.sum(dim=0)
        assert (references @ gradient >= 0).all()
        assert torch.equal(project(gradient, references, margin=margin), gradient)
        assert torch.equal(project(gradient, references[:0], margin=margin), gradient)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("margin", [0.0, 0.5, 5.0])
    def test_one_reference_in_closed_form(self, dtype: torch.dtype, margin: float) -> None:
        gradient, reference = normal(1000, seed=1).to(dtype), normal(1000, seed=2).to(dtype)
        if gradient @ reference > 0:
            reference = -reference
        strength = max(margin, (-(gradient @ reference) / (reference @ reference)).item())
        turned = project(gradient, reference[None], margin=margin)
        assert turned.dtype == dtype
        torch.testing.assert_close(turned, gradient + strength * reference)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("margin", [0.0, 0.5])
    def test_references_that_are_the_same(self, dtype: torch.dtype, margin: float) -> None:
        gradient, references = normal(50, seed=1).to(dtype), normal(2, 50, seed=2).to(dtype)
        references *= -(references @ gradient).sign()[:, None]
        twice = project(gradient, references[[0, 0, 1, 1, 0]], margin=margin)
        assert (references @ twice >= -1e-5).all()
        if margin == 0:
            once = project(gradient, references, margin=0.0)
            torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-5)

    def test_references_that_leave_no_way(self) -> None:
        # Every direction harms one of the three: all that is left is to stand still.
        references = torch.tensor([[1.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
        turned = project(torch.tensor([3.0, -4.0]), references, margin=0.0)
        torch.testing.assert_close(turned, torch.zeros(2), rtol=0, atol=1e-5)

    def test_references_that_nearly_oppose(self) -> None:
        # The way between them is so narrow that it takes a thousand of each to get there.
        references = torch.tensor([[1.0, 0.0], [-1.0, 1e-3]])
        turned = project(torch.tensor([0.0, -1.0]), references, margin=0.0)
        torch.testing.assert_close(turned, torch.zeros(2), rtol=0, atol=1e-5)

    def test_tiny_and_empty_references_count(self) -> None:
        gradient = torch.tensor([1.0, 1.0, 1.0])
        references = torch.tensor([[-1e-6, 0.0, 0.0], [0.0, -1e6, 0.0], [0.0, 0.0, 0.0]])
        turned = project(gradient, references, margin=0.0)
        torch.testing.assert_close(turned, torch.tensor([0.0, 0.0, 1.0]), rtol=0, atol=1e-5)
        assert torch.isfinite(project(gradient, references, margin=0.5)).all()

    @pytest.mark.parametrize("scale", [1e-6, 1e4])
    def test_the_scale_does_not_matter(self, scale: float) -> None:
        gradient, references = normal(20, seed=3), normal(6, 20, seed=4)
        turned = project(gradient, references, margin=0.5)
        scaled = project(gradient * scale, references * scale, margin=0.5)
        torch.testing.assert_close(scaled, turned * scale)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite_stay_visible(self, bad: float) -> None:
        gradient, references = normal(5, seed=1), normal(2, 5, seed=2)
        references[0] = -gradient
        spoilt = references.clone()
        spoilt[1, 2] = bad
        assert project(gradient, spoilt, margin=0.5).isnan().all()
        gradient[3] = bad
        assert not project(gradient, references, margin=0.5).isfinite().all()
        # Nor when no product is negative.
        assert gem_coefficients(torch.tensor([[1.0, bad], [bad, bad]]), margin=0.5).isnan().all()

    def test_a_product_of_zero_is_no_harm(self) -> None:
        assert gem_coefficients(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), margin=0.5).tolist() == [0]

    def test_the_products_are_left_as_they_are(self) -> None:
        products = torch.tensor([[1.0, -1.0], [-1.0, 2.0]], dtype=torch.float64)
        before = products.clone()
        gem_coefficients(products, margin=0.5, ridge=0.3).fill_(7)
        assert torch.equal(products, before)

    def test_bad_input(self) -> None:
        with pytest.raises(InputError, match=r"square, not \(2, 3\)"):
            gem_coefficients(torch.ones(2, 3), margin=0.5)
        with pytest.raises(InputError, match=r"square, not \(0, 0\)"):
            gem_coefficients(torch.ones(0, 0), margin=0.5)
        with pytest.raises(InputError, match=r"-0\.5"):
            gem_coefficients(torch.ones(3, 3), margin=-0.5)
        with pytest.raises(InputError, match=r"ridge -0\.1"):
            gem_coefficients(torch.ones(3, 3), margin=0.5, ridge=-0.1)
        with pytest.raises(InputError, match="ridge nan"):
            gem_coefficients(torch.ones(3, 3), margin=0.5, ridge=math.nan)


def loop_slots(
    scores: list[float], new: list[float], capacity: int, draws: list[list[float]]
) -> list[int]:
    """Algorithm 2 in plain Python, then the overruled ones taken out."""
    memory, slots = list(scores), []
    for c, (position, acceptance) in zip(new, draws, strict=True):
        slots.append(-1)
        if len(memory) < capacity:
            slots[-1] = len(memory)
            memory.append(c)
        elif c < 1 and sum(memory) > 0:
            total, i = 0.0, 0
            for i, score in enumerate(memory):  # noqa: B007
                total += score
                if position * sum(memory) < total:
                    break
            if acceptance < memory[i] / (memory[i] + c):
                memory[i] = c
                slots[-1] = i
    return [-1 if slot in slots[i + 1 :] else slot for i, slot in enumerate(slots)]


def replaced(scores: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
    """Slots of a memory that is full."""
    return gss_slots(scores, new, len(scores), generator=generator)


class TestGSSSlots:
    @SETTINGS
    @given(
        # A cosine plus 1 is never subnormal; those round too coarsely to compare two formulas.
        st.lists(st.floats(0, 2, allow_subnormal=False), max_size=12),
        st.lists(st.floats(0, 1.5, allow_subnormal=False), max_size=32),
        st.integers(0, 12),
        st.integers(0, 2**31),
    )
    def test_against_a_loop(
        self, scores: list[float], new: list[float], free: int, seed: int
    ) -> None:
        memory, capacity = torch.tensor(scores, dtype=torch.float64), len(scores) + free
        slots = gss_slots(
            memory, torch.tensor(new, dtype=torch.float64), capacity, generator=seeded(seed)
        )
        draws = torch.rand(len(new), 2, generator=seeded(seed), dtype=torch.float64).tolist()
        assert slots.dtype == torch.int64
        assert slots.tolist() == loop_slots(scores, new, capacity, draws)
        assert memory.tolist() == scores
        taken = [slot for slot in slots.tolist() if slot >= 0]
        assert len(set(taken)) == len(taken)
        # What was free is filled from the front.
        assert set(taken) >= set(range(len(scores), min(capacity, len(scores) + len(new))))

    @pytest.mark.parametrize("c", [0.0, 0.2, 0.9])
    def test_frequencies_are_the_probabilities(self, c: float) -> None:
        scores, trials, generator = [0.1, 0.5, 1.0, 1.9], 20_000, seeded(1)
        seen = Counter(
            replaced(torch.tensor(scores), torch.tensor([c]), generator).item()
            for _ in range(trials)
        )
        expected = [s / sum(scores) * s / (s + c) for s in scores]
        counts = [seen[i] for i in range(4)]
        if c > 0:
            expected.append(1 - sum(expected))
            counts.append(seen[-1])
        assert sum(counts) == trials
        assert stats.chisquare(counts, [trials * p for p in expected]).pvalue > UNLIKELY

    def test_scores_change_within_a_call(self) -> None:
        # One slot: after the first sample took it at score 1e-9, a second takes it with 1e-8 odds.
        new = torch.tensor([1e-9, 0.1], dtype=torch.float64)
        for seed in range(50):
            slots = replaced(torch.tensor([2.0]), new, seeded(seed))
            assert slots.tolist() == [0, -1]

    def test_the_later_one_stays(self) -> None:
        seen = set()
        for seed in range(100):
            slots = replaced(torch.ones(1), torch.full((2,), 0.5), seeded(seed))
            seen.add(tuple(slots.tolist()))
        assert seen == {(0, -1), (-1, 0), (-1, -1)}

    @pytest.mark.parametrize("c", [1.0, 1.5, 2.0])
    def test_a_sample_that_resembles_the_memory_is_not_kept(self, c: float) -> None:
        slots = replaced(torch.full((4,), 2.0), torch.full((9,), c), seeded(0))
        assert slots.tolist() == [-1] * 9

    @pytest.mark.parametrize("c", [0.0, 0.5])
    def test_a_memory_of_opposites_stays(self, c: float) -> None:
        slots = replaced(torch.zeros(5), torch.full((9,), c), seeded(0))
        assert slots.tolist() == [-1] * 9

    def test_a_slot_of_score_zero_stays(self) -> None:
        scores = torch.tensor([0.0, 1.0, 0.0])
        for seed in range(50):
            slots = replaced(scores, torch.full((4,), 0.3), seeded(seed))
            assert set(slots.tolist()) <= {-1, 1}

    def test_nothing_there(self) -> None:
        none, some = torch.empty(0), torch.full((3,), 0.5)
        assert replaced(none, some, seeded(0)).tolist() == [-1] * 3
        slots = replaced(some, none, seeded(0))
        assert slots.shape == (0,)
        assert slots.dtype == torch.int64

    def test_same_seed_same_slots(self) -> None:
        scores, new = torch.full((50,), 1.2), torch.full((20,), 0.4)
        first = replaced(scores, new, seeded(1))
        assert torch.equal(first, replaced(scores, new, seeded(1)))
        assert not torch.equal(first, replaced(scores, new, seeded(2)))

    @pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
    def test_bad_scores(self, bad: float) -> None:
        good, wrong = torch.ones(2), torch.tensor([0.5, bad])
        for scores, new in [(good, wrong), (wrong, good)]:
            with pytest.raises(InputError, match="finite and not negative"):
                replaced(scores, new, seeded(0))

    def test_a_sample_that_resembles_the_memory_still_fills_it(self) -> None:
        for seed in range(20):
            slots = gss_slots(
                torch.full((2,), 2.0), torch.full((9,), 1.5), 4, generator=seeded(seed)
            )
            assert slots.tolist() == [2, 3] + [-1] * 7

    def test_bad_shapes(self) -> None:
        with pytest.raises(InputError, match="must be"):
            replaced(torch.ones(2, 1), torch.ones(2), seeded(0))
        with pytest.raises(InputError, match="at most the memory's 3"):
            gss_slots(torch.ones(4), torch.ones(2), 3, generator=seeded(0))
