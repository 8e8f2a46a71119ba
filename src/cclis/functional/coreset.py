"""Weighted samples whose gradients stand for those of all. Pure functions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.functional.exemplars import check_finite
from cclis.functional.quadratic import solve_nonnegative

USEFUL = 1e-6
"""Smallest cosine of a gradient with the target that counts as more than rounding."""


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
    check_finite(gradients, "gradients")
    check_finite(target, "target")
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
        fitted = solve_nonnegative(grown[:, tried] + ridge * np.eye(len(tried)), agreement[tried])
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
