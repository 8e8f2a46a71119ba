"""Classifiers on top of the frozen network, fitted to what is visible: the task and the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.config import EvaluationOptions
from cclis.data.images import ImageSet
from cclis.engine.inference import Inference, Representation
from cclis.nn.network import ClassifierNetwork, PrototypeNetwork

PROBE_DECAY = 0.2
PROBE_MILESTONES = (0.6, 0.75, 0.9)
PROBE_BLOCK = 16
"""Batches of the probe whose features are computed at once."""


@dataclass(frozen=True)
class Head:
    """A linear classifier of features or of embeddings.

    Attributes:
        on: What it looks at.
        weight: (C, D).
        bias: (C,).
    """

    on: Literal["features", "embeddings"]
    weight: Tensor
    bias: Tensor

    def scores(self, representation: Representation) -> Tensor:
        """Score of every class for every sample, (N, C)."""
        inputs = getattr(representation, self.on)
        return F.linear(inputs, self.weight, self.bias)


Fit = Callable[[Inference, ImageSet, int, EvaluationOptions, torch.Generator], Head]


def fit_linear(
    inference: Inference,
    visible: ImageSet,
    classes: int,
    options: EvaluationOptions,
    generator: torch.Generator,
) -> Head:
    """The paper's linear probe (Appendix B).

    Every draw takes a class at random, then one of its samples at random, augmented. SGD with
    momentum 0.9 and no weight decay; the weights of the last epoch count, whatever they score.
    """
    dimension = inference(visible.images[:1]).features.shape[1]
    bound = dimension**-0.5
    device = inference.device
    weight = torch.empty(classes, dimension, device=device)
    bias = torch.empty(classes, device=device)
    for parameter in (weight, bias):
        parameter.uniform_(-bound, bound, generator=generator).requires_grad_()
    optimizer = torch.optim.SGD([weight, bias], lr=options.probe_learning_rate, momentum=0.9)
    odds = 1 / visible.labels.bincount()[visible.labels].double()
    batch = options.probe_batch_size
    draws = max(1, len(visible) // batch) * batch
    for epoch in range(options.probe_epochs):
        passed = sum(epoch >= share * options.probe_epochs for share in PROBE_MILESTONES)
        optimizer.param_groups[0]["lr"] = options.probe_learning_rate * PROBE_DECAY**passed
        drawn = torch.multinomial(odds, draws, replacement=True, generator=generator)
        for block in torch.split(drawn, PROBE_BLOCK * batch):
            features = inference(visible.images[block], generator).features
            labels = visible.labels[block]
            for x, y in zip(torch.split(features, batch), torch.split(labels, batch), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(F.linear(x, weight, bias), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return Head("features", weight.detach(), bias.detach())


def fit_means(
    inference: Inference,
    visible: ImageSet,
    classes: int,
    options: EvaluationOptions,
    generator: torch.Generator,
) -> Head:
    """Nearest class mean of the visible embeddings; a class without samples is never chosen."""
    means = _class_means(inference, visible, classes, options, generator)
    absent = visible.labels.bincount(minlength=classes) == 0
    bias = torch.zeros(classes, device=means.device).masked_fill(absent, -torch.inf)
    return Head("embeddings", means, bias)


def fit_prototype(
    inference: Inference,
    visible: ImageSet,
    classes: int,
    options: EvaluationOptions,
    generator: torch.Generator,
) -> Head:
    """The sum, brought to length one, of the trained prototype and the class mean."""
    network = inference.network
    if not isinstance(network, PrototypeNetwork):
        raise TypeError("the head 'prototype' needs a network with prototypes")
    means = _class_means(inference, visible, classes, options, generator)
    prototypes = F.normalize(network.prototypes[:classes].detach(), dim=1)
    weight = F.normalize(prototypes + means, dim=1)
    return Head("embeddings", weight, torch.zeros(classes, device=weight.device))


def fit_classifier(
    inference: Inference,
    visible: ImageSet,
    classes: int,
    options: EvaluationOptions,
    generator: torch.Generator,
) -> Head:
    """The classifier that was trained with the network; nothing is fitted."""
    network = inference.network
    if not isinstance(network, ClassifierNetwork):
        raise TypeError("the head 'classifier' needs a network with a classifier")
    weight, bias = network.classifier.weight, network.classifier.bias
    return Head("features", weight[:classes].detach().clone(), bias[:classes].detach().clone())


def _class_means(
    inference: Inference,
    visible: ImageSet,
    classes: int,
    options: EvaluationOptions,
    generator: torch.Generator,
) -> Tensor:
    """Unit-norm mean embedding of every class over augmented passes, (C, D)."""
    embeddings = inference(visible.images, generator).embeddings
    for _ in range(options.mean_passes - 1):
        embeddings = embeddings + inference(visible.images, generator).embeddings
    total = embeddings.new_zeros(classes, embeddings.shape[1])
    return F.normalize(total.index_add(0, visible.labels, embeddings), dim=1)


HEADS: dict[str, Fit] = {
    "linear": fit_linear,
    "means": fit_means,
    "prototype": fit_prototype,
    "classifier": fit_classifier,
}
