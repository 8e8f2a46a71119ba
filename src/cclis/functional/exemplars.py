"""Selection of exemplars: reservoir sampling and herding.

For a class-balanced uniform selection use `sampling.select` with a constant proposal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cclis.errors import InputError


def reservoir_slots(
    seen: int, capacity: int, count: int, *, generator: torch.Generator, batches: int = 1
) -> Tensor:
    """Slots of the next samples of a stream in a reservoir (Algorithm R: Vitter, 1985).

    Sample n of the stream, counted from 0, takes slot n while n < capacity. For a later sample r is
    drawn uniformly from 0..n, and the sample takes slot r if r < capacity. At any time, all samples
    so far are in the reservoir with the same probability.

    Args:
        seen: Number of samples before these.
        capacity: Number of slots.
        count: Samples per batch.
        generator: Random generator; one number is drawn per sample.
        batches: Number of batches.

    Returns:
        int64 slots in 0..capacity-1, (batches · count,), on the CPU. -1 marks a sample that is not
        stored, or that a later sample of the same batch overwrites: no slot occurs twice in a
        batch.

    >>> reservoir_slots(0, 3, 2, generator=torch.Generator().manual_seed(0))
    tensor([0, 1])
    """
    if min(seen, capacity, count, batches) < 0:
        raise InputError(
            "samples seen, capacity, count and batches must not be negative, but are "
            f"{seen}, {capacity}, {count} and {batches}"
        )
    position = torch.arange(batches * count)
    number = seen + position
    uniforms = torch.rand(
        len(number), generator=generator, device=generator.device, dtype=torch.float64
    )
    drawn = (uniforms.cpu() * (number + 1)).long()
    slots = torch.where(number < capacity, number, drawn)
    slots = torch.where(slots < capacity, slots, -1)
    # One key per batch and slot; slot -1 comes first.
    key = position // count * (capacity + 1) + slots + 1
    _, key = torch.unique(key, return_inverse=True)
    last = torch.zeros_like(position).scatter_reduce(0, key, position, reduce="amax")
    return torch.where(last[key] == position, slots, -1)


def herding(features: Tensor, count: int) -> Tensor:
    """Select exemplars whose mean is near the class mean (iCaRL: Rebuffi et al., 2017, Alg. 4).

    Greedy: each step adds the sample that brings the mean of the exemplars so far nearest to the
    class mean. The first k exemplars of a longer list are the list of k.

    Args:
        features: Features of the samples of one class, (N, D). They are normalised to unit length.
        count: Number of exemplars.

    Returns:
        Indices in order of selection, int64, (min(count, N),).

    >>> herding(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), 2)
    tensor([1, 0])
    """
    if features.dim() != 2:
        raise InputError(f"features must have two dimensions, but are {tuple(features.shape)}")
    if count < 0:
        raise InputError(f"the number of exemplars must not be negative, but is {count}")
    check_finite(features, "features")
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    squares = unit.square().sum(dim=1)
    selected = torch.zeros(len(unit), dtype=torch.bool, device=unit.device)
    mean = unit.mean(dim=0)
    target = torch.zeros_like(mean)
    order = []
    for _ in range(min(count, len(unit))):
        # |k μ - Σ φ(p) - φ(x)|² without the terms that are the same for every x.
        target = target + mean
        distance = (squares - 2 * (unit @ target)).masked_fill(selected, torch.inf)
        best = distance.argmin(keepdim=True)
        selected = selected.index_fill(0, best, True)
        target = target - unit[best[0]]
        order.append(best)
    return torch.cat(order) if order else torch.empty(0, dtype=torch.int64, device=unit.device)


def check_finite(values: Tensor, name: str) -> None:
    """Raise InputError if `values` contain NaN or infinity, as those of a diverged network do."""
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"{name} hold NaN or infinite values: the network has diverged")
