from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cclis.errors import InputError
from cclis.functional.diagnostics import (
    QUANTILES,
    denominator_errors,
    diagnose,
    effective_samples,
    proposal_spread,
)
from cclis.functional.sampling import normalise, proposal, select


def made(seed: int, classes: int = 4, samples: int = 60) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    similarity = torch.rand(classes, samples, generator=rng, dtype=torch.float64) * 2 - 1
    labels = torch.arange(samples) % classes
    g = normalise(torch.randn(samples, generator=rng, dtype=torch.float64), labels)
    kept = select(g, labels, 12, generator=rng)
    return similarity, labels, g, kept


def test_effective_samples_against_a_loop() -> None:
    _, labels, g, kept = made(0)
    found = effective_samples(g[kept], labels[kept], 4)
    for label in range(4):
        weights = [1 / float(g[k]) for k in kept.tolist() if int(labels[k]) == label]
        wanted = sum(weights) ** 2 / sum(w * w for w in weights)
        assert float(found[label]) == pytest.approx(wanted, rel=1e-12)


@given(st.lists(st.floats(1e-30, 1.0), min_size=1, max_size=20))
def test_effective_samples_lie_between_one_and_their_number(values: list[float]) -> None:
    labels = torch.zeros(len(values), dtype=torch.int64)
    found = float(effective_samples(torch.tensor(values, dtype=torch.float64), labels, 1))
    assert 1 - 1e-9 <= found <= len(values) * (1 + 1e-9)


def test_effective_samples_in_the_limits() -> None:
    alike = effective_samples(torch.full((6,), 0.1), torch.tensor([0, 0, 0, 0, 2, 2]), 3)
    assert alike.tolist() == pytest.approx([4, 0, 2])
    outweighed = effective_samples(torch.tensor([1e-12, 0.5, 0.5]), torch.zeros(3).long(), 1)
    assert float(outweighed) == pytest.approx(1)
    underflowed = effective_samples(torch.tensor([0.0, 0.5]), torch.zeros(2).long(), 1)
    assert float(underflowed) == pytest.approx(1)


def test_spread_is_in_even_shares() -> None:
    _, labels, g, _ = made(1)
    found = proposal_spread(g, labels, 5)
    for label in range(4):
        own = g[labels == label].numpy()
        assert np.allclose(found[label], np.quantile(own * len(own), QUANTILES))
    assert found[4].isnan().all()
    even = proposal_spread(torch.full((8,), 1 / 8), torch.zeros(8).long(), 1)
    assert torch.allclose(even, torch.ones_like(even))


@pytest.mark.parametrize("seed", range(3))
def test_errors_of_the_denominator_against_a_loop(seed: int) -> None:
    similarity, labels, g, kept = made(seed)
    temperature = 0.3
    found = denominator_errors(similarity / temperature, labels, kept, g)
    for label in range(4):
        everyone = [k for k in range(60) if int(labels[k]) == label]
        chosen = [k for k in kept.tolist() if int(labels[k]) == label]
        errors: dict[str, list[float]] = {"weighted": [], "unweighted": [], "random": []}
        for i in range(4):
            if i == label:
                continue
            e = {k: math.exp(float(similarity[i, k]) / temperature) for k in everyone}
            true = sum(e.values())
            weighted = sum(e[k] / float(g[k]) for k in chosen) / len(chosen)
            unweighted = sum(e[k] for k in chosen) * len(everyone) / len(chosen)
            mean = true / len(everyone)
            sd = math.sqrt(sum((v - mean) ** 2 for v in e.values()) / (len(everyone) - 1))
            errors["weighted"].append(abs(weighted / true - 1))
            errors["unweighted"].append(abs(unweighted / true - 1))
            left = (1 - len(chosen) / len(everyone)) / len(chosen)
            errors["random"].append(math.sqrt(2 / math.pi) * sd / mean * math.sqrt(left))
        for name, values in errors.items():
            assert float(found[name][label]) == pytest.approx(sum(values) / 3, rel=1e-9), name


def test_weights_leave_no_error_where_samples_are_drawn_as_they_count() -> None:
    # With one other class g is exp(s) over its sum: every draw gives the denominator itself.
    similarity, labels, _, _ = made(3, classes=2)
    g = proposal(similarity, labels, temperature=0.5)
    kept = select(g, labels, 6, generator=torch.Generator().manual_seed(0))
    found = denominator_errors(similarity / 0.5, labels, kept, g)
    assert found["weighted"].tolist() == pytest.approx([0, 0], abs=1e-12)
    assert float(found["unweighted"].min()) > 1e-3


def test_the_error_to_expect_of_a_random_choice_is_the_one_that_comes() -> None:
    similarity, labels, _, _ = made(6, samples=800)
    rng = torch.Generator().manual_seed(1)
    even = normalise(torch.zeros(800, dtype=torch.float64), labels)
    draws = []
    for _ in range(300):
        kept = select(even, labels, 80, generator=rng)
        found = denominator_errors(similarity / 0.5, labels, kept, even)
        # Even odds weigh all alike, so that both estimates are the same.
        assert torch.allclose(found["weighted"], found["unweighted"])
        draws.append(found["unweighted"])
    measured = torch.stack(draws).mean(dim=0)
    assert torch.allclose(measured, found["random"], rtol=0.08)


def test_all_that_is_visible_has_no_error_without_weights() -> None:
    similarity, labels, g, _ = made(4)
    found = denominator_errors(similarity / 0.5, labels, torch.arange(60), g)
    assert found["unweighted"].tolist() == pytest.approx([0] * 4, abs=1e-12)
    assert found["random"].tolist() == pytest.approx([0] * 4, abs=1e-12)


def test_where_there_is_no_number_there_is_none() -> None:
    similarity, labels, g, kept = made(5)
    without = kept[labels[kept] != 2]
    found = diagnose(similarity / 0.5, labels, without, g)
    assert found["kept"][2] == 0
    assert found["effective"][2] == 0
    assert found["errors"]["weighted"][2] is None
    assert found["errors"]["weighted"][1] is not None
    alone = diagnose(similarity[:1], torch.zeros(60).long(), kept, g)
    assert alone["errors"]["weighted"] == [None]


def test_shapes_are_checked() -> None:
    with pytest.raises(InputError, match="must match"):
        effective_samples(torch.ones(3), torch.zeros(2).long(), 1)
