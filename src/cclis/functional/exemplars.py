"""Which samples to keep, chosen by other rules than a proposal. Pure functions.

A class-balanced uniform choice is `sampling.select` with equal proposals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cclis.errors import InputError


def reservoir_slots(
    seen: int, capacity: int, count: int, *, generator: torch.Generator, batches: int = 1
) -> Tensor:
    """Where a reservoir puts the next samples of a stream (Algorithm R: Vitter, 1985).

    Sample n of the stream, from 0, takes slot n while n < capacity. A later one draws r evenly
    from 0..n and takes slot r if there is one. After any number of samples, each of them is kept
    with the same probability.

    Args:
        seen: How many samples have passed before.
        capacity: How many samples the memory holds.
        count: How many samples come at a time.
        generator: Source of randomness; one number is drawn for every sample.
        batches: How often so many come.

    Returns:
        int64 slots in 0..capacity-1, (batches · count,) on the CPU. -1 stands for a sample that is
        not kept, or that a later one of its batch overrules, so that no batch names a slot twice.
    """
    if min(seen, capacity, count, batches) < 0:
        raise InputError(
            "samples seen, capacity, count and batches must not be negative, but are "
            f"{seen}, {capacity}, {count} and {batches}"
        )
    position = torch.arange(batches * count)
    number = seen + position
    draws = torch.rand(
        len(number), generator=generator, device=generator.device, dtype=torch.float64
    )
    drawn = (draws.cpu() * (number + 1)).long()
    slots = torch.where(number < capacity, number, drawn)
    slots = torch.where(slots < capacity, slots, -1)
    # Every batch has places of its own, the first for what is not kept.
    place = position // count * (capacity + 1) + slots + 1
    _, place = torch.unique(place, return_inverse=True)
    last = torch.zeros_like(position).scatter_reduce(0, place, position, reduce="amax")
    return torch.where(last[place] == position, slots, -1)


def herding(features: Tensor, count: int) -> Tensor:
    """Exemplars whose mean stays nearest the class mean (iCaRL: Rebuffi et al., 2017, Alg. 4).

    One after another is chosen, none twice, so that the mean of those chosen so far comes as near
    as it can to the mean of all. Fewer exemplars are the first ones of more.

    Args:
        features: Features of the samples of one class, (N, D); brought to unit length here.
        count: How many exemplars to choose.

    Returns:
        Indices in order of choice, int64, (min(count, N),).
    """
    if features.dim() != 2:
        raise InputError(f"features must have two dimensions, but are {tuple(features.shape)}")
    if count < 0:
        raise InputError(f"the number of exemplars must not be negative, but is {count}")
    check_finite(features, "features")
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    length = unit.square().sum(dim=1)
    chosen = torch.zeros(len(unit), dtype=torch.bool, device=unit.device)
    mean = unit.mean(dim=0)
    wanted = torch.zeros_like(mean)
    order = []
    for _ in range(min(count, len(unit))):
        # |k μ - Σ φ(p) - φ(x)|² without what is the same for every x.
        wanted = wanted + mean
        distance = (length - 2 * (unit @ wanted)).masked_fill(chosen, torch.inf)
        best = distance.argmin(keepdim=True)
        chosen = chosen.index_fill(0, best, True)
        wanted = wanted - unit[best[0]]
        order.append(best)
    return torch.cat(order) if order else torch.empty(0, dtype=torch.int64, device=unit.device)


def check_finite(values: Tensor, name: str) -> None:
    """Refuse values that a diverged network gives."""
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"{name} hold NaN or infinite values: the network has diverged")
