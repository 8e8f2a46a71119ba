"""Importance sampling of the memory: the proposal distribution, and selection by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cclis.errors import InputError

CHUNK_ELEMENTS = 2**24
"""Largest (classes × samples) block in memory at a time: 64 MiB in float32."""

Block = Callable[[slice], Tensor]
"""Gives the cosines of all prototypes with a slice of the samples, (C, n)."""


def proposal(similarity: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Proposal distribution of every class over its visible samples (Eq. 12).

    g_j is proportional, within the class of j, to the mean over the prototypes i of all other
    classes of softmax(s_i)_j, a softmax over all visible samples with s = similarity / temperature.
    With a single class it is uniform.

    Args:
        similarity: Cosines of the seen classes' prototypes with all visible samples, (C, N).
        labels: Class of every sample, int64 in 0..C-1, (N,).
        temperature: τ.

    Returns:
        (N,), summing to 1 within every class.

    >>> proposal(torch.zeros(2, 3), torch.tensor([0, 0, 1]), temperature=0.5)
    tensor([0.5000, 0.5000, 1.0000])
    """
    scores = _log_scores(lambda part: similarity[:, part], len(similarity), labels, temperature)
    return normalise(scores, labels)


def log_scores(
    embeddings: Tensor, prototypes: Tensor, labels: Tensor, *, temperature: float
) -> Tensor:
    """Logarithm of the proposal (Eq. 12) before its normalisation within classes.

    The similarities are computed in chunks: memory use grows by a few vectors of N numbers only.
    To average several augmented passes, take the `logsumexp` of their scores, then `normalise`.

    Args:
        embeddings: Unit-norm embeddings of all visible samples, (N, D).
        prototypes: Unit-norm prototypes of the seen classes, (C, D).
        labels: Class of every sample, int64 in 0..C-1, (N,).
        temperature: τ.

    Returns:
        (N,).

    >>> z, labels = torch.eye(2), torch.tensor([0, 1])
    >>> log_scores(z, z, labels, temperature=0.5)
    tensor([-2.1269, -2.1269])
    """
    return _log_scores(
        lambda part: prototypes @ embeddings[part].T, len(prototypes), labels, temperature
    )


def normalise(scores: Tensor, labels: Tensor) -> Tensor:
    """Softmax of `scores` (N,) within every class of `labels`, int64 (N,).

    >>> normalise(torch.zeros(3), torch.tensor([0, 0, 1]))
    tensor([0.5000, 0.5000, 1.0000])
    """
    classes = int(labels.max()) + 1 if len(labels) else 0
    highest = scores.new_full((classes,), -torch.inf)
    highest = highest.scatter_reduce(0, labels, scores, reduce="amax")
    weights = (scores - highest[labels]).exp()
    total = scores.new_zeros(classes).index_add(0, labels, weights)
    return weights / total[labels]


def _log_scores(block: Block, classes: int, labels: Tensor, temperature: float) -> Tensor:
    parts = list(_slices(len(labels), max(1, CHUNK_ELEMENTS // max(1, classes))))
    if classes < 2 or not parts:
        # Without another class all samples have the same score.
        return block(slice(0, 0)).new_zeros(len(labels))
    partition = torch.stack(
        [(block(part) / temperature).logsumexp(dim=1) for part in parts]
    ).logsumexp(dim=0)
    scores = []
    for part in parts:
        relative = block(part) / temperature - partition[:, None]
        relative = relative.scatter(0, labels[None, part], -torch.inf)
        scores.append(relative.logsumexp(dim=0))
    return torch.cat(scores)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def quotas(available: Tensor, capacity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Number of samples that each class may keep: equal shares of the capacity.

    What a class with few samples does not use goes to the others. The remainder goes to randomly
    drawn classes.

    Args:
        available: Number of samples of each class, int64 (C,).
        capacity: Number of samples to keep in all.
        generator: Random generator that decides which classes get the remainder.

    Returns:
        int64 (C,).

    >>> quotas(torch.tensor([1, 9, 9]), 9)
    tensor([1, 4, 4])
    """
    shares = torch.zeros_like(available)
    left = min(capacity, int(available.sum()))
    while left > 0:
        unfilled = (shares < available).nonzero()[:, 0]
        share = left // len(unfilled)
        if share == 0:
            device = generator.device if generator is not None else "cpu"
            order = torch.randperm(len(unfilled), generator=generator, device=device).cpu()
            shares[unfilled[order[:left]]] += 1
            break
        granted = torch.minimum(available[unfilled] - shares[unfilled], torch.tensor(share))
        shares[unfilled] += granted
        left -= int(granted.sum())
    return shares


def select(
    proposal: Tensor, labels: Tensor, capacity: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the samples to keep: class-balanced, without replacement, with probability ∝ `proposal`.

    The samples of a class with the largest log g plus Gumbel noise are distributed as if they had
    been drawn one by one without replacement (Efraimidis & Spirakis, 2006).

    Args:
        proposal: g of every visible sample, (N,).
        labels: Its class, int64 (N,).
        capacity: Maximum number of samples.
        generator: Random generator, on any device.

    Returns:
        Indices of the selected samples, int64, sorted by class, (at most capacity,).

    >>> select(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), 2)
    tensor([0, 2])
    """
    if capacity < 0:
        raise InputError(f"the memory's capacity must not be negative, but is {capacity}")
    if proposal.shape != labels.shape:
        raise InputError(
            f"proposal {tuple(proposal.shape)} and labels {tuple(labels.shape)} must match"
        )
    if len(labels) == 0 or capacity == 0:
        return labels.new_empty(0)
    if not bool(torch.isfinite(proposal).all()):
        raise InputError("the proposal holds NaN or infinite values: the network has diverged")
    smallest = torch.finfo(torch.float64).tiny
    device = generator.device if generator is not None else "cpu"
    uniforms = torch.rand(len(labels), generator=generator, device=device, dtype=torch.float64)
    gumbel = -(-uniforms.clamp_min(smallest).log()).log().to(proposal.device)
    keys = proposal.double().clamp_min(smallest).log() + gumbel
    order = keys.argsort(descending=True, stable=True)
    order = order[labels[order].argsort(stable=True)]
    counts = labels.bincount()
    rank = (
        torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels[order]]
    )
    share = quotas(counts.cpu(), capacity, generator=generator).to(counts.device)
    return order[rank < share[labels[order]]]
