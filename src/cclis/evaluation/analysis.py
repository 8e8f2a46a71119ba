"""What a report shows beside the numbers: confusions, the memory, where embeddings lie."""

from __future__ import annotations

import torch
from torch import Tensor

from cclis.engine.inference import Inference
from cclis.evaluation.accuracy import Evaluation
from cclis.memory import Memory
from cclis.nn.network import PrototypeNetwork


def analyse(
    found: Evaluation, memory: Memory, inference: Inference, classes: int, samples: int
) -> dict[str, Tensor]:
    """What is kept of the last evaluation, by name.

    Args:
        found: The evaluation of all tasks.
        memory: After the last task.
        inference: The network after the last task.
        classes: How many there are.
        samples: How many test samples to keep at most, of all classes alike; with none, no
            embeddings are kept.

    Returns:
        confusion.HEAD: how often class i was taken for class j, int64 (C, C); test.* of some test
        samples: images, labels, predicted (by the main head), embeddings; memory.*: images,
        labels, proposal, embeddings; prototypes, (C, D).
    """
    test, kept = found.test, memory.samples
    tensors = {
        f"confusion.{head}": confusion(test.labels, predicted, classes)
        for head, predicted in found.predicted.items()
    }
    if kept is not None:
        tensors |= {"memory.images": kept.images, "memory.labels": kept.labels}
        tensors["memory.proposal"] = memory.proposal
    if samples:
        some = evenly_spaced(test.labels, samples)
        tensors["test.images"] = test.images[some]
        tensors["test.labels"] = test.labels[some]
        tensors["test.predicted"] = list(found.predicted.values())[-1][some]
        tensors["test.embeddings"] = found.represented.embeddings[some].half()
        if kept is not None:
            tensors["memory.embeddings"] = inference(kept.images).embeddings.half()
        if isinstance(inference.network, PrototypeNetwork):
            prototypes = inference.network.prototypes[:classes].detach()
            tensors["prototypes"] = torch.nn.functional.normalize(prototypes, dim=1).half()
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """How often a sample of class i was taken for class j, int64 (C, C)."""
    return (labels * classes + predicted).bincount(minlength=classes**2).view(classes, classes)


def evenly_spaced(labels: Tensor, count: int) -> Tensor:
    """Indices of at most `count` samples: evenly spaced within a class, all classes alike."""
    classes = labels.bincount().nonzero()[:, 0]
    share = max(1, count // len(classes))
    chosen = []
    for label in classes[:count]:
        rows = (labels == label).nonzero()[:, 0]
        number = min(share, len(rows))
        chosen.append(rows[torch.arange(number, device=rows.device) * len(rows) // number])
    return torch.cat(chosen)
