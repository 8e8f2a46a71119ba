"""Diagnostics: how well weighted replay samples represent all samples of their class."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cclis.errors import InputError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def diagnose(logits: Tensor, labels: Tensor, kept: Tensor, proposal: Tensor) -> dict[str, Any]:
    """All diagnostics of a selection, class by class, as lists for JSON.

    Args:
        logits: As in `denominator_errors`, (C, N).
        labels: Class of every visible sample, int64 in 0..C-1, (N,).
        kept: Indices of the selected samples, int64, (M,).
        proposal: g of every visible sample, (N,).

    Returns:
        visible and kept: numbers of samples per class; effective: `effective_samples`; spread:
        `proposal_spread`; errors: `denominator_errors`. None stands for NaN and infinity.

    >>> labels, kept = torch.tensor([0, 0, 1]), torch.tensor([0, 2])
    >>> diagnose(torch.zeros(2, 3), labels, kept, torch.tensor([0.5, 0.5, 1.0]))["kept"]
    [1, 1]
    """
    classes, kept_labels = len(logits), labels[kept]
    errors = denominator_errors(logits, labels, kept, proposal)
    return {
        "visible": labels.bincount(minlength=classes).tolist(),
        "kept": kept_labels.bincount(minlength=classes).tolist(),
        "effective": _to_list(effective_samples(proposal[kept], kept_labels, classes)),
        "spread": [_to_list(row) for row in proposal_spread(proposal, labels, classes)],
        "errors": {name: _to_list(values) for name, values in errors.items()},
    }


def effective_samples(proposal: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Effective sample size of every class under the weights w = 1/g: (Σ w)² / Σ w² (Kish, 1965).

    It is the number of samples if all g of a class are equal, and 1 if one weight dominates.

    Args:
        proposal: g of the selected samples, (M,).
        labels: Their classes, int64 in 0..classes-1, (M,).
        classes: Number of classes.

    Returns:
        float64 (classes,); 0 for a class without selected samples.

    >>> effective_samples(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0, 0, 1]), 2)
    tensor([2., 1.], dtype=torch.float64)
    """
    _check(proposal, labels)
    weights = 1 / proposal.double().clamp_min(torch.finfo(torch.float64).tiny)
    # Only ratios within a class matter. Dividing by the largest keeps the squares finite.
    weights = weights / _class_max(weights, labels, classes)[labels]
    total, squares = (_class_sum(values, labels, classes) for values in (weights, weights.square()))
    return torch.where(squares > 0, total.square() / squares, 0.0)


def proposal_spread(proposal: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Quantiles of g times the number of visible samples, class by class; 1 if g is uniform.

    Args:
        proposal: g of every visible sample, summing to 1 within a class, (N,).
        labels: Their classes, int64 in 0..classes-1, (N,).
        classes: Number of classes.

    Returns:
        float64 (classes, quantiles), at `QUANTILES`; NaN for a class without samples.

    >>> proposal_spread(torch.full((4,), 0.25), torch.zeros(4, dtype=torch.int64), 1)
    tensor([[1., 1., 1., 1., 1.]], dtype=torch.float64)
    """
    _check(proposal, labels)
    at = torch.tensor(QUANTILES, dtype=torch.float64, device=proposal.device)
    by_class = [proposal[labels == label].double() for label in range(classes)]
    missing = torch.full_like(at, torch.nan)
    return torch.stack([(g * len(g)).quantile(at) if len(g) else missing for g in by_class])


def denominator_errors(
    logits: Tensor, labels: Tensor, kept: Tensor, proposal: Tensor
) -> dict[str, Tensor]:
    """Relative errors of a class's share in InfoNCE's denominators, estimated from the selected
    samples (Eq. 10).

    With s the cosines over the temperature, class m contributes D_im = Σ_{k ∈ m} exp(s_ik) to the
    denominator of prototype i. From the selected samples J_m of the class it is estimated

    - weighted, as in the loss: 1/|J_m| Σ_{k ∈ J_m} exp(s_ik) / g_k;
    - unweighted: |m|/|J_m| Σ_{k ∈ J_m} exp(s_ik).

    The error is |estimate / D_im - 1|, averaged over the prototypes i of all other classes.
    `random` is the expected error of an unweighted estimate from uniformly drawn samples, by a
    normal approximation: sqrt(2/π) · Sd(exp s) / Mean(exp s) · sqrt((1 - |J_m|/|m|) / |J_m|).

    Args:
        logits: s, prototypes of the seen classes with all visible samples, (C, N). The proposal
            should come from the same s. A constant added to all of them changes nothing.
        labels: Classes of the samples, int64 in 0..C-1, (N,).
        kept: Indices of the selected samples, int64, (M,).
        proposal: g of every visible sample, (N,).

    Returns:
        weighted, unweighted and random, float64 (C,) each; NaN for a class without selected
        samples, and if there is only one class.

    >>> labels, kept = torch.tensor([0, 0, 1]), torch.tensor([0, 2])
    >>> denominator_errors(torch.zeros(2, 3), labels, kept, torch.tensor([0.5, 0.5, 1]))["weighted"]
    tensor([0., 0.], dtype=torch.float64)
    """
    _check(proposal, labels)
    classes = len(logits)
    errors: dict[str, list[Tensor]] = {name: [] for name in ("weighted", "unweighted", "random")}
    selected = torch.zeros_like(labels, dtype=torch.bool).index_fill(0, kept, True)
    for label in range(classes):
        own = labels == label
        others = torch.arange(classes, device=labels.device) != label
        class_logits = logits[others][:, own].double()
        class_selected, g = selected[own], proposal[own].double()
        count, number = int(own.sum()), int(class_selected.sum())
        if not number or classes < 2:
            for values in errors.values():
                values.append(logits.new_tensor(torch.nan, dtype=torch.float64))
            continue
        # Subtracting the maximum changes no ratio and keeps the exponentials finite.
        exponentials = (class_logits - class_logits.amax(dim=1, keepdim=True)).exp()
        true = exponentials.sum(dim=1)
        smallest = torch.finfo(torch.float64).tiny
        weighted = (exponentials / g.clamp_min(smallest))[:, class_selected].sum(dim=1) / number
        unweighted = exponentials[:, class_selected].sum(dim=1) * count / number
        deviation = exponentials.std(dim=1, correction=min(1, count - 1))
        relative = deviation / exponentials.mean(dim=1)
        variance = 2 / math.pi * (1 - number / count) / number
        errors["weighted"].append((weighted / true - 1).abs().mean())
        errors["unweighted"].append((unweighted / true - 1).abs().mean())
        errors["random"].append((relative * variance**0.5).mean())
    return {name: torch.stack(values) for name, values in errors.items()}


def _to_list(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _class_sum(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    return values.new_zeros(classes).index_add(0, labels, values)


def _class_max(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    return values.new_zeros(classes).scatter_reduce(0, labels, values, reduce="amax")


def _check(proposal: Tensor, labels: Tensor) -> None:
    if proposal.shape != labels.shape or labels.dim() != 1:
        raise InputError(
            f"proposal {tuple(proposal.shape)} and labels {tuple(labels.shape)} must match"
        )
