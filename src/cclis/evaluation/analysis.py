"""Data for reports: confusion matrices, the memory, embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from cclis.engine.inference import Inference
from cclis.evaluation.accuracy import Evaluation
from cclis.memory import Memory
from cclis.nn.network import PrototypeNetwork


def analyse(
    evaluation: Evaluation, memory: Memory, inference: Inference, classes: int, samples: int
) -> dict[str, Tensor]:
    """Collect what reports show of the last evaluation, as tensors by name.

    Args:
        evaluation: The evaluation of all tasks.
        memory: The memory after the last task.
        inference: The network after the last task.
        classes: Number of classes, C.
        samples: Maximum number of test samples, equally many per class. With 0, no embeddings are
            collected.

    Returns:
        confusion.HEAD: confusion matrices, int64 (C, C). test.*: images, labels, predicted (by the
        main head) and embeddings of the test samples. memory.*: images, labels, proposal and
        embeddings of the memory. prototypes, (C, D).
    """
    test, stored = evaluation.test, memory.samples
    tensors = {
        f"confusion.{head}": confusion(test.labels, predicted, classes)
        for head, predicted in evaluation.predicted.items()
    }
    if stored is not None:
        tensors |= {"memory.images": stored.images, "memory.labels": stored.labels}
        tensors["memory.proposal"] = memory.proposal
    if samples:
        chosen = evenly_spaced(test.labels, samples)
        tensors["test.images"] = test.images[chosen]
        tensors["test.labels"] = test.labels[chosen]
        tensors["test.predicted"] = list(evaluation.predicted.values())[-1][chosen]
        tensors["test.embeddings"] = evaluation.represented.embeddings[chosen].half()
        if stored is not None:
            tensors["memory.embeddings"] = inference(stored.images).embeddings.half()
        if isinstance(inference.network, PrototypeNetwork):
            prototypes = inference.network.prototypes[:classes].detach()
            tensors["prototypes"] = torch.nn.functional.normalize(prototypes, dim=1).half()
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Confusion matrix: how many samples of class i are predicted as class j, int64 (C, C)."""
    return (labels * classes + predicted).bincount(minlength=classes**2).view(classes, classes)


def evenly_spaced(labels: Tensor, count: int) -> Tensor:
    """Indices of at most `count` samples, equally many per class, evenly spaced within a class."""
    classes = labels.bincount().nonzero()[:, 0]
    share = max(1, count // len(classes))
    chosen = []
    for label in classes[:count]:
        rows = (labels == label).nonzero()[:, 0]
        number = min(share, len(rows))
        chosen.append(rows[torch.arange(number, device=rows.device) * len(rows) // number])
    return torch.cat(chosen)
