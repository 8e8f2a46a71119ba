"""Which samples to keep, chosen by other rules than a proposal. Pure functions.

A class-balanced uniform choice is `sampling.select` with equal proposals.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.quadratic import non_negative

USEFUL = 1e-6
"""Smallest cosine of a gradient with the target that counts as more than rounding."""


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
    _check_finite(features, "features")
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


def matching_pursuit(
    gradients: Tensor, target: Tensor, count: int, *, ridge: float
) -> tuple[Tensor, Tensor]:
    """Samples and weights whose gradients add up to a target, by orthogonal matching pursuit.

    Minimises |target - Σ w_i g_i|² + ridge |w|² with w ≥ 0 (GradMatch: Killamsetty et al., 2021,
    Alg. 2; GCR: Tiwari et al., 2022). The row that has the largest inner product with the residual
    is picked, the weights of all picked rows are fitted anew, and rows whose weight falls to zero
    are put back. It ends with `count` rows, or when no other row agrees with the residual.

    Args:
        gradients: A gradient per sample, (N, D).
        target: What their weighted sum should be, (D,).
        count: How many samples to pick at most.
        ridge: Price of large weights, 0 or more.

    Returns:
        Indices, int64, and their weights, all positive, both (at most count,), in order of choice.
    """
    if gradients.dim() != 2 or gradients.shape[1:] != target.shape:
        raise InputError(
            f"gradients {tuple(gradients.shape)} and target {tuple(target.shape)} must be "
            "(N, D) and (D,)"
        )
    if count < 0 or not ridge >= 0:
        raise InputError(f"count and ridge must not be negative, but are {count} and {ridge}")
    _check_finite(gradients, "gradients")
    _check_finite(target, "target")
    rows, goal = gradients.double(), target.double()
    agreement = (rows @ goal).cpu().numpy()
    useful = USEFUL * (rows.norm(dim=1) * goal.norm()).cpu().numpy()
    picked, products = np.zeros(0, dtype=np.int64), np.zeros((0, len(rows)))
    weights, gain = np.zeros(0), 0.0
    while len(picked) < min(count, len(rows)):
        left = agreement - weights @ products
        left[left <= useful] = -np.inf
        left[picked] = -np.inf
        best = int(left.argmax())
        if left[best] == -np.inf:
            break
        tried = np.append(picked, best)
        grown = np.vstack([products, (rows @ rows[best]).cpu().numpy()])
        fitted = non_negative(grown[:, tried] + ridge * np.eye(len(tried)), agreement[tried])
        # What the fit takes off the cost; were it not to grow, rows could come and go for ever.
        reached = float(agreement[tried] @ fitted)
        if reached <= gain:
            break
        kept = fitted > 0
        picked, products, weights, gain = tried[kept], grown[kept], fitted[kept], reached
    indices = torch.from_numpy(picked).to(gradients.device)
    return indices, torch.from_numpy(weights).to(gradients)


def weighted_coreset(
    gradients: Tensor, before: Tensor, count: int, *, ridge: float
) -> tuple[Tensor, Tensor]:
    """Samples of one class that stand for all of it, and their weights (GCR: Tiwari et al., 2022).

    Samples are picked and weighed so that their gradient comes near that of all samples with the
    weights they had before (Eq. 4). Where fewer suffice, others fill the room with the weights they
    had (1 in the authors' code). Where a class is learned well these are more than the ridge leaves
    to those picked, and the gradient may become another. Together they weigh as much as all samples
    did: what is kept of a class stands for all of it, the fewer the more each.

    Args:
        gradients: A gradient per sample, (N, D).
        before: The weight of each, 0 or more, (N,). One that weighs nothing is kept after all
            others, and stands for itself.
        count: How many samples to keep at most.
        ridge: Price of large weights, 0 or more.

    Returns:
        Indices, int64, and their weights, both (min(count, N),), those picked first.
    """
    if before.shape != gradients.shape[:1] or bool((before < 0).any()):
        raise InputError(
            f"weights must not be negative, one for each of {len(gradients)} gradients, but are "
            f"{tuple(before.shape)}"
        )
    order = (before == 0).argsort(stable=True)
    gradients, before = gradients[order], before[order]
    some = before > 0
    each = before.where(some, 1)
    chosen, weight = matching_pursuit(gradients[some], before @ gradients, count, ridge=ridge)
    rest = torch.ones_like(before).index_fill(0, chosen, 0).nonzero()[:, 0]
    more = rest[: count - len(chosen)]
    weights = torch.cat([weight, each[more]])
    return order[torch.cat([chosen, more])], weights / weights.sum() * each.sum()


def _check_finite(values: Tensor, name: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"{name} hold NaN or infinite values: the network has diverged")
