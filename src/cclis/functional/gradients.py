"""What gradients of samples and of tasks say about one another. Pure functions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.functional.quadratic import solve_nonnegative

CHUNK_ELEMENTS = 2**24
"""Largest part of gradients held in float64 at a time: 128 MiB."""
BLOCK = 2**12
"""Parameters in one of many matrix products: a GPU does not share out a single long one."""
RIDGE = 1e-12
"""Added to the cosines of the references with themselves, which may be the same vectors. It moves
the projection where references nearly oppose each other."""


def inner_products(rows: Tensor) -> Tensor:
    """Inner products of all rows (N, P) with one another, float64 (N, N).

    Gradients of many parameters are nearly orthogonal, so that float32 matrix products, shortened
    to TF32 on a GPU, would get signs wrong.
    """
    count = len(rows)
    products = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, max(1, CHUNK_ELEMENTS // max(1, count)), dim=1):
        whole = part.shape[1] // BLOCK
        blocks = part[:, : whole * BLOCK].double().reshape(count, whole, BLOCK).transpose(0, 1)
        rest = part[:, whole * BLOCK :].double()
        products += (blocks @ blocks.mT).sum(dim=0) + rest @ rest.T
    return products


def gem_coefficients(products: Tensor, *, margin: float, ridge: float = 0.0) -> Tensor:
    """How far to turn a gradient towards those of past tasks, so that none of them is harmed (GEM:
    Lopez-Paz & Ranzato, 2017, Eqs. 8-11).

    To follow is g + G'v, of the gradient g now and the past tasks' G. Without a negative inner
    product in Gg, v is 0. Otherwise it minimises v'GG'v / 2 + (Gg)'v with v ≥ margin: for margin 0,
    g + G'v is the nearest vector that has no negative inner product. Values that are not finite
    give NaN throughout, for whoever watches over the step to see.

    Args:
        products: Of the rows g and G with one another, float64 (1 + T, 1 + T) on the CPU.
        margin: The memory strength γ, 0 or more: how far to lean towards every past task.
        ridge: Added to the diagonal of GG', 0 or more: short gradients, of tasks that are learned
            by heart, then turn g less than they should.

    Returns:
        v, (T,).
    """
    if products.dim() != 2 or not len(products) or len(products) != products.shape[1]:
        raise InputError(f"products of all gradients must be square, not {tuple(products.shape)}")
    if not (margin >= 0 and ridge >= 0):
        raise InputError(f"margin {margin} and ridge {ridge} must not be negative")
    # In numpy: a step waits for this, and for so few numbers torch takes more than twice as long.
    values = products.detach().double().numpy()
    slopes, gram = values[1:, 0], values[1:, 1:]
    if not np.isfinite(values[1:]).all():
        return torch.full((len(slopes),), torch.nan, dtype=torch.float64)
    if (slopes >= 0).all():
        return torch.zeros(len(slopes), dtype=torch.float64)
    eye = np.eye(len(gram))
    gram = gram + ridge * eye
    # In units of the references' lengths: tasks whose gradients are tiny count like any other.
    lengths = np.sqrt(gram.diagonal())
    lengths[lengths == 0] = 1.0
    cosines = gram / np.outer(lengths, lengths) + RIDGE * eye
    linear = slopes / lengths + cosines @ (margin * lengths)
    return torch.from_numpy(margin + solve_nonnegative(cosines, -linear) / lengths)


def gss_slots(
    scores: Tensor, new_scores: Tensor, capacity: int, *, generator: torch.Generator
) -> Tensor:
    """Where a memory puts the next samples of a stream (GSS-Greedy: Aljundi et al., 2019, Alg. 2).

    One new sample after another, of score c, takes the next slot while there is a free one. Then,
    if c < 1 (no reference points its way), slot i is drawn with probability C_i / Σ C, and taken
    with probability C_i / (C_i + c). Its score is c from then on.

    Args:
        scores: C, of the memory's samples: the largest cosine with a reference, plus 1, (M,).
        new_scores: c of every new sample, (n,).
        capacity: How many samples the memory holds, M or more.
        generator: Source of randomness; two numbers are drawn for every new sample.

    Returns:
        int64 slots in 0..capacity-1, (n,), on the CPU. -1 stands for a sample that is not kept, or
        that a later one overrules, so that no slot is named twice.
    """
    if scores.dim() != 1 or new_scores.dim() != 1 or len(scores) > capacity:
        raise InputError(
            f"scores {tuple(scores.shape)} and {tuple(new_scores.shape)} must be (M,) and (n,), "
            f"with M at most the memory's {capacity}"
        )
    # In numpy: a step waits for this, and for so few numbers torch takes three times as long.
    old, new = (v.detach().cpu().double().numpy() for v in (scores, new_scores))
    for values in (old, new):
        if not ((values >= 0) & np.isfinite(values)).all():
            raise InputError("scores must be finite and not negative: a cosine plus 1")
    draws = torch.rand(
        (len(new), 2), generator=generator, device=generator.device, dtype=torch.float64
    )
    slots = [-1] * len(new)
    if capacity == 0:
        return torch.tensor(slots, dtype=torch.int64)
    memory, count = np.concatenate([old, np.zeros(capacity - len(old))]), len(old)
    holders: dict[int, int] = {}
    for sample, (score, (position, acceptance)) in enumerate(
        zip(new.tolist(), draws.tolist(), strict=True)
    ):
        if count < capacity:
            slot, count = count, count + 1
        elif score < 1:
            bounds = memory.cumsum()
            slot = int(bounds.searchsorted(position * bounds[-1], side="right"))
            # Past the end only if all scores are zero, or by rounding.
            slot = min(slot, capacity - 1)
            held = float(memory[slot])
            if acceptance * (held + score) >= held:
                continue
        else:
            continue
        if slot in holders:
            slots[holders[slot]] = -1
        holders[slot] = sample
        slots[sample] = slot
        memory[slot] = score
    return torch.tensor(slots, dtype=torch.int64)
