"""How well weighted samples stand for all of their class. Pure functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cclis.errors import InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def diagnose(logits: Tensor, labels: Tensor, kept: Tensor, proposal: Tensor) -> dict[str, Any]:
    """All of the below for every class, as lists; None where there is no number.

    Arguments are those of `denominator_errors`.
    """
    classes, of_kept = len(logits), labels[kept]
    errors = denominator_errors(logits, labels, kept, proposal)
    return {
        "visible": labels.bincount(minlength=classes).tolist(),
        "kept": of_kept.bincount(minlength=classes).tolist(),
        "effective": _plain(effective_samples(proposal[kept], of_kept, classes)),
        "spread": [_plain(row) for row in proposal_spread(proposal, labels, classes)],
        "errors": {name: _plain(values) for name, values in errors.items()},
    }


def effective_samples(proposal: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Effective sample size of every class under the weights 1/g: (Σ w)² / Σ w² (Kish, 1965).

    As many equally weighted samples would vary as much; it is the number of samples where all g
    are alike, and 1 where one outweighs all others.

    Args:
        proposal: g of the kept samples, (M,).
        labels: Their classes, int64 in 0..classes-1, (M,).
        classes: How many classes there are.

    Returns:
        float64 (classes,); 0 for a class of which nothing is kept.
    """
    _check(proposal, labels)
    weights = 1 / proposal.double().clamp_min(torch.finfo(torch.float64).tiny)
    # Only ratios within a class matter; this keeps their squares finite.
    weights = weights / _largest(weights, labels, classes)[labels]
    total, squares = (_sums(values, labels, classes) for values in (weights, weights.square()))
    return torch.where(squares > 0, total.square() / squares, 0.0)


def proposal_spread(proposal: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Quantiles of g times the number of visible samples, class by class; 1 is an even choice.

    Args:
        proposal: g of all visible samples, summing to 1 within a class, (N,).
        labels: Their classes, int64 in 0..classes-1, (N,).
        classes: How many classes there are.

    Returns:
        float64 (classes, quantiles), at `QUANTILES`; NaN for a class without samples.
    """
    _check(proposal, labels)
    at = torch.tensor(QUANTILES, dtype=torch.float64, device=proposal.device)
    found = [proposal[labels == label].double() for label in range(classes)]
    nothing = torch.full_like(at, torch.nan)
    return torch.stack([(g * len(g)).quantile(at) if len(g) else nothing for g in found])


def denominator_errors(
    logits: Tensor, labels: Tensor, kept: Tensor, proposal: Tensor
) -> dict[str, Tensor]:
    """How far kept samples are from the share of their class in InfoNCE's denominators (Eq. 10).

    With s the cosines over the temperature, class m has a share D_im = Σ_{k ∈ m} exp(s_ik) in the
    denominator of the prototype i. Of the kept samples J_m alone it is estimated

    - weighted: by 1/|J_m| Σ_{k ∈ J_m} exp(s_ik) / g_k, as the loss does,
    - unweighted: by |m|/|J_m| Σ_{k ∈ J_m} exp(s_ik), from the same samples.

    An error is |estimate / D_im - 1|, the mean over all prototypes i of other classes. For as many
    samples drawn with even chances, without weights, `random` is the error to expect, as if it were
    normal: sqrt(2/π) · Sd(exp s) / Mean(exp s) · sqrt((1 - |J_m|/|m|) / |J_m|).

    Args:
        logits: s of the seen classes' prototypes with all visible samples, (C, N), such as the
            proposal was made from; a constant added to all changes nothing.
        labels: Classes of these samples, int64 in 0..C-1, (N,).
        kept: Which of them are kept, int64 (M,).
        proposal: g of all visible samples, (N,).

    Returns:
        weighted, unweighted and random, float64 (C,) each; NaN for a class of which nothing is
        kept, and where there is no other class.
    """
    _check(proposal, labels)
    classes = len(logits)
    errors: dict[str, list[Tensor]] = {name: [] for name in ("weighted", "unweighted", "random")}
    chosen = torch.zeros_like(labels, dtype=torch.bool).index_fill(0, kept, True)
    for label in range(classes):
        own = labels == label
        others = torch.arange(classes, device=labels.device) != label
        of_class = logits[others][:, own].double()
        of_kept, g = chosen[own], proposal[own].double()
        count, number = int(own.sum()), int(of_kept.sum())
        if not number or classes < 2:
            for found in errors.values():
                found.append(logits.new_tensor(torch.nan, dtype=torch.float64))
            continue
        # A common factor changes no ratio, and keeps the exponentials finite.
        values = (of_class - of_class.amax(dim=1, keepdim=True)).exp()
        true = values.sum(dim=1)
        smallest = torch.finfo(torch.float64).tiny
        weighted = (values / g.clamp_min(smallest))[:, of_kept].sum(dim=1) / number
        unweighted = values[:, of_kept].sum(dim=1) * count / number
        relative = values.std(dim=1, correction=min(1, count - 1)) / values.mean(dim=1)
        left = 2 / math.pi * (1 - number / count) / number
        errors["weighted"].append((weighted / true - 1).abs().mean())
        errors["unweighted"].append((unweighted / true - 1).abs().mean())
        errors["random"].append((relative * left**0.5).mean())
    return {name: torch.stack(found) for name, found in errors.items()}


def _plain(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _sums(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    return values.new_zeros(classes).index_add(0, labels, values)


def _largest(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    return values.new_zeros(classes).scatter_reduce(0, labels, values, reduce="amax")


def _check(proposal: Tensor, labels: Tensor) -> None:
    if proposal.shape != labels.shape or labels.dim() != 1:
        raise InputError(
            f"proposal {tuple(proposal.shape)} and labels {tuple(labels.shape)} must match"
        )
