"""Classifiers on top of the frozen network, fitted to what is visible: the task and the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.engine.inference import Inference
from cclis.engine.randomness import generator
from cclis.errors import InputError
from cclis.nn.network import ClassifierNetwork, PrototypeNetwork, Representation
from cclis.settings import MeansOptions, Options, ProbeOptions

PROBE_MOMENTUM = 0.9
PROBE_DECAY = 0.2
PROBE_MILESTONES = (0.6, 0.75, 0.9)
SHRINKAGE = 0.1
"""Share of a round covariance in that of `discriminant`."""
LEAST_SPREAD = 1e-9
"""Share of the features' mean square that the variance of `discriminant` is at least."""
PROBE_BLOCK = 16
"""Batches of the probe whose features are computed at once."""
CHECK_SAMPLES = 64
"""Samples that a fitted head is tried on."""


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
        return F.linear(inputs.to(self.weight.dtype), self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Moments:
    """How the classes lie.

    Attributes:
        embeddings: Unit-norm mean embedding of every class, (C, D).
        features: Mean features of every class, float64, (C, F).
        covariance: Of features around their class's mean, the mean over classes, float64, (F, F).
        present: Whether a class has samples, (C,).
        dtype: Of the features that the network gives.
    """

    embeddings: Tensor
    features: Tensor
    covariance: Tensor
    present: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class View:
    """What heads are fitted to; what several of them need is computed once.

    Attributes:
        inference: The frozen network.
        visible: The memory as it was while the task was learned, and the task.
        classes: How many classes have been seen.
        options: Settings of the evaluation, of the kinds that the heads need.
        seed: Seeds all generators, together with the number of classes.
    """

    inference: Inference
    visible: ImageSet
    classes: int
    options: Options
    seed: int

    @cached_property
    def check_batch(self) -> Representation:
        """What the network makes of a few visible samples."""
        return self.inference(self.visible.images[:CHECK_SAMPLES])

    def rng(self, purpose: str) -> torch.Generator:
        """A generator for one purpose."""
        return generator(self.inference.device, self.seed, "head", purpose, self.classes)

    @cached_property
    def moments(self) -> Moments:
        """How the classes lie, over augmented passes."""
        assert isinstance(self.options, MeansOptions)
        rng, labels, passes = self.rng("means"), self.visible.labels, self.options.mean_passes
        counts = labels.bincount(minlength=self.classes)
        share = (1 / (passes * counts[labels].double()))[:, None]
        sums = []
        for _ in range(passes):
            seen = self.inference(self.visible.images, rng)
            embeddings, features = seen.embeddings * share, seen.features.double()
            weighted = features * share
            sums.append(
                (
                    embeddings.new_zeros(self.classes, embeddings.shape[1]).index_add(
                        0, labels, embeddings
                    ),
                    weighted.new_zeros(self.classes, weighted.shape[1]).index_add(
                        0, labels, weighted
                    ),
                    weighted.T @ features,
                )
            )
        means, centres, squares = (sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True))
        covariance = (squares - centres.T @ centres) / (counts > 0).sum()
        means = F.normalize(means, dim=1).to(seen.embeddings.dtype)
        return Moments(means, centres, covariance, counts > 0, seen.features.dtype)

    @cached_property
    def probes(self) -> dict[str, Head]:
        """The paper's linear probe (Appendix B), at every learning rate that is asked for.

        Every draw takes a class at random, then one of its samples at random, augmented. SGD with
        momentum 0.9 and no weight decay; the weights of the last epoch count, whatever they score.
        Probes of several learning rates start alike and see the same features.
        """
        options, rng, visible = self.options, self.rng("linear"), self.visible
        assert isinstance(options, ProbeOptions)
        rates = {"linear": options.probe_learning_rate}
        if options.paper_probe_learning_rate is not None:
            rates["linear_paper"] = options.paper_probe_learning_rate
        device = self.inference.device
        features = self.inference(visible[:1].images).features
        dimension, dtype = features.shape[1], features.dtype
        # Drawn in float32 whatever the precision is, so that all start alike.
        start = torch.empty(self.classes, dimension + 1, device=device)
        start.uniform_(-(dimension**-0.5), dimension**-0.5, generator=rng)
        # One layer a learning rate, (rates, classes, features and a one for the bias).
        layers = start.to(dtype).repeat(len(rates), 1, 1)
        momentum = torch.zeros_like(layers)
        learning_rates = layers.new_tensor(list(rates.values()))[:, None, None]
        counts = visible.labels.bincount()
        by_class = visible.labels.argsort(stable=True)
        present, first = counts.nonzero()[:, 0], counts.cumsum(dim=0) - counts
        batch = options.probe_batch_size
        draws = max(1, len(visible) // batch) * batch
        for epoch in range(options.probe_epochs):
            passed = sum(epoch >= share * options.probe_epochs for share in PROBE_MILESTONES)
            decayed = learning_rates * PROBE_DECAY**passed
            share = torch.rand(2, draws, generator=rng, device=device, dtype=torch.float64)
            classes = present[(share[0] * len(present)).long()]
            drawn = by_class[first[classes] + (share[1] * counts[classes]).long()]
            for block in torch.split(drawn, PROBE_BLOCK * batch):
                chosen = visible[block]
                features = self.inference(chosen.images, rng).features
                inputs = F.pad(features, (0, 1), value=1.0)
                targets = F.one_hot(chosen.labels, self.classes).to(inputs.dtype)
                for x, y in zip(
                    torch.split(inputs, batch), torch.split(targets, batch), strict=True
                ):
                    # The gradient of the cross-entropy, written out: few kernels to start.
                    error = (layers @ x.T).softmax(dim=1) - y.T
                    momentum = PROBE_MOMENTUM * momentum + error @ x / len(x)
                    layers = layers - decayed * momentum
        return {
            name: Head("features", layer[:, :-1].contiguous(), layer[:, -1].contiguous())
            for name, layer in zip(rates, layers, strict=True)
        }


def fit_linear(view: View) -> Head:
    """The linear probe at the learning rate `probe_learning_rate`."""
    return view.probes["linear"]


def fit_linear_paper(view: View) -> Head:
    """The linear probe at the learning rate `paper_probe_learning_rate`."""
    return view.probes["linear_paper"]


def fit_means(view: View) -> Head:
    """Nearest class mean of the visible embeddings; a class without samples is never chosen."""
    found = view.moments
    bias = found.embeddings.new_zeros(view.classes)
    return Head("embeddings", found.embeddings, bias.masked_fill(~found.present, -torch.inf))


def fit_discriminant(view: View) -> Head:
    """Linear discriminant analysis of the visible features, all classes alike.

    The nearest class mean, where distances are measured by the classes' common covariance, a part
    of which is replaced by a round one; a class without samples is never chosen.
    """
    found = view.moments
    size = len(found.covariance)
    # Where features hardly vary within classes this is the nearest mean, not what rounding left.
    least = (LEAST_SPREAD * found.features.square().mean()).clamp_min(torch.finfo().tiny)
    spread = (found.covariance.trace() / size).maximum(least)
    round_ = spread * torch.eye(size).to(found.covariance)
    covariance = (1 - SHRINKAGE) * found.covariance + SHRINKAGE * round_
    weight = torch.linalg.solve(covariance, found.features.T).T
    bias = -0.5 * (weight * found.features).sum(dim=1)
    bias = bias.masked_fill(~found.present, -torch.inf)
    return Head("features", weight.to(found.dtype), bias.to(found.dtype))


def fit_prototype(view: View) -> Head:
    """The sum, brought to length one, of the trained prototype and the class mean."""
    network = view.inference.network
    if not isinstance(network, PrototypeNetwork):
        raise TypeError("the head 'prototype' needs a network with prototypes")
    prototypes = F.normalize(network.prototypes[: view.classes].detach(), dim=1)
    weight = F.normalize(prototypes + view.moments.embeddings, dim=1)
    return Head("embeddings", weight, weight.new_zeros(view.classes))


def fit_classifier(view: View) -> Head:
    """The classifier that was trained with the network; nothing is fitted."""
    network = view.inference.network
    if not isinstance(network, ClassifierNetwork):
        raise TypeError("the head 'classifier' needs a network with a classifier")
    weight = network.classifier.weight[: view.classes].detach().clone()
    bias = network.classifier.bias[: view.classes].detach().clone()
    return Head("features", weight, bias)


HEADS: dict[str, Callable[[View], Head]] = {
    "linear": fit_linear,
    "linear_paper": fit_linear_paper,
    "means": fit_means,
    "discriminant": fit_discriminant,
    "prototype": fit_prototype,
    "classifier": fit_classifier,
}


def fit(name: str, view: View) -> Head:
    """The head of that name, if the network and it give finite numbers: a network may diverge by
    the very last step of a task, whose loss was still finite."""
    if not bool(view.check_batch.features.isfinite().all()):
        raise InputError("the network is no longer finite: a lower learning_rate may help")
    head = HEADS[name](view)
    # A class without samples scores minus infinity.
    scores = head.scores(view.check_batch).masked_fill(head.bias == -torch.inf, 0)
    if not bool(scores.isfinite().all()):
        rate = "probe_learning_rate" if name.startswith("linear") else "learning_rate"
        raise InputError(f"the head {name} is not finite: a lower {rate} may help")
    return head


def heads_for(own: tuple[str, ...], options: Options) -> tuple[str, ...]:
    """A method's heads, and the second probe where its learning rate is given.

    It comes before the first, so that the last head is the method's own whatever is asked for.
    """
    if not isinstance(options, ProbeOptions) or options.paper_probe_learning_rate is None:
        return own
    if "linear" not in own:
        return own
    place = own.index("linear")
    return (*own[:place], "linear_paper", *own[place:])
