"""Comparing gradients: those of past tasks (GEM) and those of single samples (GSS)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.functional.quadratic import solve_nonnegative

CHUNK_ELEMENTS = 2**24
"""Most gradient entries converted to float64 at a time: 128 MiB."""
BLOCK = 2**12
"""Parameters per matrix product: a GPU does not split one long product over its cores."""
COSINE_RIDGE = 1e-12
"""Added to the diagonal of the cosine matrix, which is singular if two tasks have the same
gradient. It changes the result where two gradients are nearly opposite."""


def inner_products(rows: Tensor) -> Tensor:
    """Inner products of all pairs of rows (N, P), float64 (N, N).

    Gradients of many parameters are nearly orthogonal. Matrix products in float32, or in TF32 on a
    GPU, would give the wrong sign.

    >>> inner_products(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)
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
    """Coefficients that project a gradient so that no past task's loss rises (GEM: Lopez-Paz &
    Ranzato, 2017, Eqs. 8-11).

    The projected gradient is g + G'v, with g the gradient of the current task and G those of the
    past tasks. If no inner product in Gg is negative, v is 0. Otherwise v minimises
    v'GG'v / 2 + (Gg)'v subject to v ≥ margin. With margin 0, g + G'v is the vector nearest to g
    whose inner products with G are all non-negative. If the products contain NaN or infinity, v is
    NaN; the caller has to check.

    Args:
        products: Inner products of the rows g and G, float64 (1 + T, 1 + T), on the CPU.
        margin: The memory strength γ, 0 or more: the least weight of every past gradient.
        ridge: Added to the diagonal of GG', 0 or more. Short gradients, of tasks whose memory is
            fitted well, then turn g less than the projection requires.

    Returns:
        v, (T,).

    >>> gem_coefficients(torch.tensor([[1.0, -2.0], [-2.0, 4.0]]), margin=0.0)
    tensor([0.5000], dtype=torch.float64)
    """
    if products.dim() != 2 or not len(products) or len(products) != products.shape[1]:
        raise InputError(f"products of all gradients must be square, not {tuple(products.shape)}")
    if not (margin >= 0 and ridge >= 0):
        raise InputError(f"margin {margin} and ridge {ridge} must not be negative")
    # In numpy: each step waits for this, and torch takes twice as long for so few numbers.
    values = products.detach().double().numpy()
    slopes, gram = values[1:, 0], values[1:, 1:]
    if not np.isfinite(values[1:]).all():
        return torch.full((len(slopes),), torch.nan, dtype=torch.float64)
    if (slopes >= 0).all():
        return torch.zeros(len(slopes), dtype=torch.float64)
    eye = np.eye(len(gram))
    gram = gram + ridge * eye
    # Scaled to unit length: tasks with tiny gradients count like any other.
    lengths = np.sqrt(gram.diagonal())
    lengths[lengths == 0] = 1.0
    cosines = gram / np.outer(lengths, lengths) + COSINE_RIDGE * eye
    linear = slopes / lengths + cosines @ (margin * lengths)
    return torch.from_numpy(margin + solve_nonnegative(cosines, -linear) / lengths)


def gss_slots(
    scores: Tensor, new_scores: Tensor, capacity: int, *, generator: torch.Generator
) -> Tensor:
    """Slots of the next samples of a stream (GSS-Greedy: Aljundi et al., 2019, Alg. 2).

    New samples are handled one by one. While a slot is free, the sample takes the next one. After
    that, a sample of score c ≥ 1 is not stored. For c < 1, slot i is drawn with probability
    C_i / Σ C, and the sample takes it with probability C_i / (C_i + c). The slot's score is c from
    then on.

    Args:
        scores: C of the memory's samples, (M,): 1 plus the largest cosine of their gradient with
            that of a reference sample.
        new_scores: c of every new sample, (n,).
        capacity: Number of slots, M or more.
        generator: Random generator; two numbers are drawn per new sample.

    Returns:
        int64 slots in 0..capacity-1, (n,), on the CPU. -1 marks a sample that is not stored, or
        that a later one overwrites: no slot occurs twice.

    >>> free = torch.empty(0)
    >>> gss_slots(free, torch.ones(3), 2, generator=torch.Generator().manual_seed(0))
    tensor([ 0,  1, -1])
    """
    if scores.dim() != 1 or new_scores.dim() != 1 or len(scores) > capacity:
        raise InputError(
            f"scores {tuple(scores.shape)} and {tuple(new_scores.shape)} must be (M,) and (n,), "
            f"with M at most the memory's {capacity}"
        )
    # In numpy: each step waits for this, and torch takes three times as long for so few numbers.
    old, new = (v.detach().cpu().double().numpy() for v in (scores, new_scores))
    for values in (old, new):
        if not ((values >= 0) & np.isfinite(values)).all():
            raise InputError("scores must be finite and not negative: a cosine plus 1")
    uniforms = torch.rand(
        (len(new), 2), generator=generator, device=generator.device, dtype=torch.float64
    )
    slots = [-1] * len(new)
    if capacity == 0:
        return torch.tensor(slots, dtype=torch.int64)
    memory, count = np.concatenate([old, np.zeros(capacity - len(old))]), len(old)
    holders: dict[int, int] = {}
    for sample, (score, (position, acceptance)) in enumerate(
        zip(new.tolist(), uniforms.tolist(), strict=True)
    ):
        if count < capacity:
            slot, count = count, count + 1
        elif score < 1:
            bounds = memory.cumsum()
            slot = int(bounds.searchsorted(position * bounds[-1], side="right"))
            # Beyond the end only if all scores are zero, or by rounding.
            slot = min(slot, capacity - 1)
            stored = float(memory[slot])
            if acceptance * (stored + score) >= stored:
                continue
        else:
            continue
        if slot in holders:
            slots[holders[slot]] = -1
        holders[slot] = sample
        slots[sample] = slot
        memory[slot] = score
    return torch.tensor(slots, dtype=torch.int64)
