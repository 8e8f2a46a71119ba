"""Which samples to keep: the proposal distribution and the draw from it. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cclis.errors import InputError

CHUNK_ELEMENTS = 2**24
"""Largest (classes × samples) block held at a time: 64 MiB in float32."""

Block = Callable[[slice], Tensor]
"""Gives the cosines of all prototypes with a slice of the samples, (C, n)."""


def proposal(similarity: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Proposal distribution of every class over its visible samples (Eq. 12).

    g_j is the mean, over all other classes' prototypes i, of the softmax of s_i over the visible
    samples, normalised within the class of j. With one class alone, it is uniform.

    Args:
        similarity: Cosines of the seen classes' prototypes with all visible samples, (C, N).
        labels: Class of every sample, int64 in 0..C-1, (N,).
        temperature: τ.

    Returns:
        (N,), summing to 1 within every class.
    """
    scores = _log_scores(lambda part: similarity[:, part], len(similarity), labels, temperature)
    return normalise(scores, labels)


def log_scores(
    embeddings: Tensor, prototypes: Tensor, labels: Tensor, *, temperature: float
) -> Tensor:
    """Logarithm of Eq. 12 before its normalisation within classes, from embeddings, (N,).

    The similarities are built in chunks, so the extra memory does not grow with the number of
    samples beyond a few vectors of that length. Scores of several augmented passes are averaged
    (`logsumexp` over passes) and then handed to `normalise`.

    Args:
        embeddings: Unit-norm embeddings of all visible samples, (N, D).
        prototypes: Unit-norm prototypes of the seen classes, (C, D).
        labels: Class of every sample, int64 in 0..C-1, (N,).
        temperature: τ.
    """
    return _log_scores(
        lambda part: prototypes @ embeddings[part].T, len(prototypes), labels, temperature
    )


def normalise(scores: Tensor, labels: Tensor) -> Tensor:
    """Softmax of `scores` (N,) within every class of `labels` (N,)."""
    classes = int(labels.max()) + 1 if len(labels) else 0
    highest = scores.new_full((classes,), -torch.inf)
    highest = highest.scatter_reduce(0, labels, scores, reduce="amax")
    weights = (scores - highest[labels]).exp()
    total = scores.new_zeros(classes).index_add(0, labels, weights)
    return weights / total[labels]


def _log_scores(block: Block, classes: int, labels: Tensor, temperature: float) -> Tensor:
    parts = list(_slices(len(labels), max(1, CHUNK_ELEMENTS // max(1, classes))))
    if classes < 2 or not parts:
        # No other class to be close to: every sample scores alike.
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
    """How many samples each class may keep, (C,): even shares, remainders to random classes.

    What a class with few samples leaves unused goes to the others.

    Args:
        available: How many samples each class has, int64 (C,).
        capacity: How many may be kept in all.
        generator: Decides which classes get the remainder.
    """
    shares = torch.zeros_like(available)
    left = min(capacity, int(available.sum()))
    while left > 0:
        open_classes = (shares < available).nonzero()[:, 0]
        share = left // len(open_classes)
        if share == 0:
            device = generator.device if generator is not None else "cpu"
            lucky = torch.randperm(len(open_classes), generator=generator, device=device).cpu()
            shares[open_classes[lucky[:left]]] += 1
            break
        given = torch.minimum(available[open_classes] - shares[open_classes], torch.tensor(share))
        shares[open_classes] += given
        left -= int(given.sum())
    return shares


def select(
    proposal: Tensor, labels: Tensor, capacity: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw what the memory keeps: class-balanced, without replacement, with odds `proposal`.

    Adding Gumbel noise to log g and taking the largest is the same as drawing one sample after
    another without replacement (Efraimidis & Spirakis, 2006), for all classes at once.

    Args:
        proposal: g of every visible sample, (N,).
        labels: Its class, int64 (N,).
        capacity: How many samples to keep at most.
        generator: Source of randomness, on any device.

    Returns:
        Indices of the kept samples, int64, sorted by class, (at most capacity,).
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
    noise = torch.rand(len(labels), generator=generator, device=device, dtype=torch.float64)
    gumbel = -(-noise.clamp_min(smallest).log()).log().to(proposal.device)
    keys = proposal.double().clamp_min(smallest).log() + gumbel
    order = keys.argsort(descending=True, stable=True)
    order = order[labels[order].argsort(stable=True)]
    counts = labels.bincount()
    rank = (
        torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels[order]]
    )
    share = quotas(counts.cpu(), capacity, generator=generator).to(counts.device)
    return order[rank < share[labels[order]]]
