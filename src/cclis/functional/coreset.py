"""Weighted coresets: few samples whose gradients add up to those of all samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.functional.exemplars import check_finite
from cclis.functional.quadratic import solve_nonnegative

MIN_COSINE = 1e-6
"""Smallest cosine of a gradient with the target that is more than a rounding error."""


def matching_pursuit(
    gradients: Tensor, target: Tensor, count: int, *, ridge: float
) -> tuple[Tensor, Tensor]:
    """Select samples and non-negative weights by orthogonal matching pursuit (GradMatch:
    Killamsetty et al., 2021, Alg. 2; GCR: Tiwari et al., 2022).

    Minimises |target - Σ w_i g_i|² + ridge |w|² subject to w ≥ 0. Each iteration adds the sample
    whose gradient has the largest inner product with the residual, refits the weights of all
    selected samples, and drops those whose weight became zero. It stops at `count` samples, or
    when no other gradient has a positive inner product with the residual.

    Args:
        gradients: One gradient per sample, g, (N, D).
        target: What their weighted sum should be, (D,).
        count: Maximum number of samples.
        ridge: L2 penalty on the weights, 0 or more.

    Returns:
        Indices, int64, and positive weights, both (at most count,), in order of selection.

    >>> matching_pursuit(torch.eye(3), torch.tensor([0.0, 2.0, 1.0]), 2, ridge=0.0)
    (tensor([1, 2]), tensor([2., 1.]))
    """
    if gradients.dim() != 2 or gradients.shape[1:] != target.shape:
        raise InputError(
            f"gradients must be (N, D) and target (D,), but they are {tuple(gradients.shape)} and "
            f"{tuple(target.shape)}"
        )
    if count < 0 or not ridge >= 0:
        raise InputError(f"count and ridge must not be negative, but are {count} and {ridge}")
    check_finite(gradients, "gradients")
    check_finite(target, "target")
    rows, goal = gradients.double(), target.double()
    alignment = (rows @ goal).cpu().numpy()
    threshold = MIN_COSINE * (rows.norm(dim=1) * goal.norm()).cpu().numpy()
    selected, gram = np.zeros(0, dtype=np.int64), np.zeros((0, len(rows)))
    weights, gain = np.zeros(0), 0.0
    while len(selected) < min(count, len(rows)):
        residual = alignment - weights @ gram
        residual[residual <= threshold] = -np.inf
        residual[selected] = -np.inf
        best = int(residual.argmax())
        if residual[best] == -np.inf:
            break
        candidates = np.append(selected, best)
        products = np.vstack([gram, (rows @ rows[best]).cpu().numpy()])
        penalty = ridge * np.eye(len(candidates))
        fitted = solve_nonnegative(products[:, candidates] + penalty, alignment[candidates])
        # By how much the fit lowers the objective. It must grow, or the loop might never end.
        new_gain = float(alignment[candidates] @ fitted)
        if new_gain <= gain:
            break
        positive = fitted > 0
        selected, gram = candidates[positive], products[positive]
        weights, gain = fitted[positive], new_gain
    indices = torch.from_numpy(selected).to(gradients.device)
    return indices, torch.from_numpy(weights).to(gradients)


def weighted_coreset(
    gradients: Tensor, before: Tensor, count: int, *, ridge: float
) -> tuple[Tensor, Tensor]:
    """Select a weighted coreset of one class (GCR: Tiwari et al., 2022, Eq. 4).

    `matching_pursuit` selects samples whose weighted gradient is close to that of all samples with
    their weights from before. If it selects fewer than `count`, other samples fill the remaining
    places with their weights from before (1 in the authors' code). In a class that is learned well
    these weigh more than what the L2 penalty leaves to the selected samples, so that the gradient
    may change. The weights are rescaled to the sum from before: however few samples are left, they
    represent the whole class.

    Args:
        gradients: One gradient per sample, (N, D).
        before: Weight of each sample from before, 0 or more, (N,). Samples of weight 0 are the
            last to be selected, and then have weight 1.
        count: Maximum number of samples.
        ridge: L2 penalty on the weights, 0 or more.

    Returns:
        Indices, int64, and weights, both (min(count, N),); those of `matching_pursuit` come first.

    >>> weighted_coreset(torch.eye(2), torch.tensor([3.0, 1.0]), 1, ridge=0.0)
    (tensor([0]), tensor([4.]))
    """
    if before.shape != gradients.shape[:1] or bool((before < 0).any()):
        raise InputError(
            f"weights must not be negative, one for each of {len(gradients)} gradients, but are "
            f"{tuple(before.shape)}"
        )
    order = (before == 0).argsort(stable=True)
    gradients, before = gradients[order], before[order]
    weighted = before > 0
    fallback = before.where(weighted, 1)
    selected, weight = matching_pursuit(gradients[weighted], before @ gradients, count, ridge=ridge)
    others = torch.ones_like(before).index_fill(0, selected, 0).nonzero()[:, 0]
    fillers = others[: count - len(selected)]
    weights = torch.cat([weight, fallback[fillers]])
    return order[torch.cat([selected, fillers])], weights / weights.sum() * fallback.sum()
