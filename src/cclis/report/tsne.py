"""A map of embeddings in two dimensions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

PERPLEXITY = 30.0
TINY = 1e-4
"""Embeddings that spread less are all the same."""


def flattened(analysis: Mapping[str, Tensor]) -> dict[str, list[list[float]]]:
    """Where test samples, the memory's samples and prototypes lie in two dimensions, by kind.

    The same for the same embeddings; empty where they are too few for a map, or all the same.
    """
    import torch
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    names = {"test": "test.embeddings", "memory": "memory.embeddings", "prototypes": "prototypes"}
    parts = {kind: analysis[name].float() for kind, name in names.items() if name in analysis}
    if not parts:
        return {}
    points = torch.cat(list(parts.values()))
    # Of points that are all the same, t-SNE makes nothing, or crashes.
    few, spread = len(points) < 4, float(points.std(dim=0).max())
    if few or not bool(points.isfinite().all()) or spread < TINY:
        return {}
    if points.shape[1] == 1:
        points = torch.nn.functional.pad(points, (0, 1))
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=0)
    # With more threads the map may depend on how many there are, and runs that end at the same
    # time are in each other's way: their threads wait for one another without sleeping.
    with threadpool_limits(limits=1):
        flat = tsne.fit_transform(points.numpy())
    split = torch.split(torch.from_numpy(flat), [len(part) for part in parts.values()])
    return {
        kind: [[round(v, 2) for v in row] for row in part.tolist()]
        for kind, part in zip(parts, split, strict=True)
    }
