"""Heads: classifiers on the frozen network, fitted to the visible samples (task and memory)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.engine.inference import Inference
from cclis.engine.randomness import generator
from cclis.errors import InputError, unknown
from cclis.nn.network import ClassifierNetwork, PrototypeNetwork, Representation
from cclis.settings import MeansOptions, Options, ProbeOptions

PROBE_MOMENTUM = 0.9
PROBE_DECAY = 0.2
PROBE_MILESTONES = (0.6, 0.75, 0.9)
SHRINKAGE = 0.1
"""Shrinkage of the covariance of `discriminant` towards a multiple of the identity."""
MIN_VARIANCE = 1e-9
"""Smallest mean variance of `discriminant`, relative to the mean square of the class means."""
PROBE_BLOCK = 16
"""Number of the probe's batches whose features are computed at once."""
CHECK_SAMPLES = 64
"""Number of samples for which a fitted head must give finite scores."""


@dataclass(frozen=True)
class Head:
    """A linear classifier of features or of embeddings.

    Attributes:
        on: Its inputs.
        weight: (C, D).
        bias: (C,).
    """

    on: Literal["features", "embeddings"]
    weight: Tensor
    bias: Tensor

    def scores(self, representation: Representation) -> Tensor:
        """Scores of all classes for N samples, (N, C)."""
        inputs = getattr(representation, self.on)
        return F.linear(inputs.to(self.weight.dtype), self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Moments:
    """Means and covariance of the visible samples.

    Attributes:
        embeddings: Unit-norm mean embedding of every class, (C, D).
        features: Mean features of every class, float64, (C, F).
        covariance: Within-class covariance of the features, averaged over classes, float64, (F, F).
        present: Whether a class has samples, bool (C,).
        dtype: dtype of the network's features.
    """

    embeddings: Tensor
    features: Tensor
    covariance: Tensor
    present: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class View:
    """The network and the samples that heads are fitted to, and what several heads share.

    Attributes:
        inference: The frozen network.
        visible: Samples of the task, and of the memory as it was while the task was learned.
        classes: Number of seen classes, C.
        options: Settings of the heads.
        seed: Seed of all generators, together with the number of classes.
    """

    inference: Inference
    visible: ImageSet
    classes: int
    options: Options
    seed: int

    @cached_property
    def check_batch(self) -> Representation:
        """Representation of a few visible samples."""
        return self.inference(self.visible.images[:CHECK_SAMPLES])

    def rng(self, purpose: str) -> torch.Generator:
        """Random generator for one purpose."""
        return generator(self.inference.device, self.seed, "head", purpose, self.classes)

    @cached_property
    def moments(self) -> Moments:
        """Means and covariance over augmented passes of the visible samples."""
        assert isinstance(self.options, MeansOptions)
        rng, labels, passes = self.rng("means"), self.visible.labels, self.options.mean_passes
        counts = labels.bincount(minlength=self.classes)
        share = (1 / (passes * counts[labels].double()))[:, None]
        sums = []
        for _ in range(passes):
            represented = self.inference(self.visible.images, rng)
            with self.inference.numerics():
                embeddings, features = represented.embeddings * share, represented.features.double()
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
        means = F.normalize(means, dim=1).to(represented.embeddings.dtype)
        return Moments(means, centres, covariance, counts > 0, represented.features.dtype)

    @cached_property
    def probes(self) -> dict[str, Head]:
        """The paper's linear probe (Appendix B), one for each learning rate.

        Each draw takes a random class, then a random sample of it, augmented. Trained by SGD with
        momentum 0.9 and no weight decay; the weights after the last epoch are used. Probes with
        different learning rates have the same initial weights and see the same features.
        """
        options, rng, visible = self.options, self.rng("linear"), self.visible
        assert isinstance(options, ProbeOptions)
        rates = {"linear": options.probe_learning_rate}
        if options.paper_probe_learning_rate is not None:
            rates["linear_paper"] = options.paper_probe_learning_rate
        device = self.inference.device
        features = self.inference(visible[:1].images).features
        dimension, dtype = features.shape[1], features.dtype
        # Drawn in float32, so that the initial weights do not depend on the precision.
        start = torch.empty(self.classes, dimension + 1, device=device)
        start.uniform_(-(dimension**-0.5), dimension**-0.5, generator=rng)
        # One layer per learning rate, (rates, classes, features + 1 for the bias).
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
                with self.inference.numerics():
                    inputs = F.pad(features, (0, 1), value=1.0)
                    targets = F.one_hot(chosen.labels, self.classes).to(inputs.dtype)
                    for x, y in zip(
                        torch.split(inputs, batch), torch.split(targets, batch), strict=True
                    ):
                        # The gradient of the cross-entropy, written out to launch few kernels.
                        error = (layers @ x.T).softmax(dim=1) - y.T
                        momentum = PROBE_MOMENTUM * momentum + error @ x / len(x)
                        layers = layers - decayed * momentum
        return {
            name: Head("features", layer[:, :-1].contiguous(), layer[:, -1].contiguous())
            for name, layer in zip(rates, layers, strict=True)
        }


def fit_linear(view: View) -> Head:
    """The linear probe with the learning rate `probe_learning_rate`."""
    return view.probes["linear"]


def fit_linear_paper(view: View) -> Head:
    """The linear probe with the learning rate `paper_probe_learning_rate`."""
    return view.probes["linear_paper"]


def fit_means(view: View) -> Head:
    """Nearest class mean of the visible embeddings; a class without samples is never predicted."""
    moments = view.moments
    bias = moments.embeddings.new_zeros(view.classes)
    return Head("embeddings", moments.embeddings, bias.masked_fill(~moments.present, -torch.inf))


def fit_discriminant(view: View) -> Head:
    """Linear discriminant analysis of the visible features, with equal class priors.

    The covariance is shrunk towards a multiple of the identity. A class without samples is never
    predicted.
    """
    moments = view.moments
    size = len(moments.covariance)
    # If features hardly vary within classes, the nearest mean decides rather than rounding errors.
    smallest = (MIN_VARIANCE * moments.features.square().mean()).clamp_min(torch.finfo().tiny)
    variance = (moments.covariance.trace() / size).maximum(smallest)
    target = variance * torch.eye(size).to(moments.covariance)
    covariance = (1 - SHRINKAGE) * moments.covariance + SHRINKAGE * target
    weight = torch.linalg.solve(covariance, moments.features.T).T
    bias = -0.5 * (weight * moments.features).sum(dim=1)
    bias = bias.masked_fill(~moments.present, -torch.inf)
    return Head("features", weight.to(moments.dtype), bias.to(moments.dtype))


def fit_prototype(view: View) -> Head:
    """The normalised sum of each trained prototype and class mean."""
    network = view.inference.network
    if not isinstance(network, PrototypeNetwork):
        raise TypeError("the head 'prototype' needs a network with prototypes")
    prototypes = F.normalize(network.prototypes[: view.classes].detach(), dim=1)
    weight = F.normalize(prototypes + view.moments.embeddings, dim=1)
    return Head("embeddings", weight, weight.new_zeros(view.classes))


def fit_classifier(view: View) -> Head:
    """The network's own classifier; nothing is fitted."""
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
    """Fit a head by name.

    Raises InputError if features or scores are not finite: a network may diverge in the last step
    of a task, whose loss was still finite.
    """
    if not bool(view.check_batch.features.isfinite().all()):
        raise InputError("the network is no longer finite: a lower learning_rate may help")
    head = HEADS[name](view)
    with view.inference.numerics():
        scores = head.scores(view.check_batch)
    # The score of a class without samples is minus infinity.
    scores = scores.masked_fill(head.bias == -torch.inf, 0)
    if not bool(scores.isfinite().all()):
        rate = "probe_learning_rate" if name.startswith("linear") else "learning_rate"
        raise InputError(f"the head {name} is not finite: a lower {rate} may help")
    return head


def heads_for(own: tuple[str, ...], options: Options) -> tuple[str, ...]:
    """A method's heads, with the second linear probe if its learning rate is given.

    It comes before the first probe, so that the method's own head stays the last one.
    """
    if not isinstance(options, ProbeOptions) or options.paper_probe_learning_rate is None:
        return own
    if "linear" not in own:
        return own
    place = own.index("linear")
    return (*own[:place], "linear_paper", *own[place:])


def chosen_heads(
    own: tuple[str, ...], options: Options, asked: Sequence[str] | None
) -> tuple[str, ...]:
    """The heads that are fitted: all of a method's, or those asked for and the main one, last."""
    heads = heads_for(own, options)
    for name in asked or ():
        if name not in heads:
            raise unknown("head", name, heads)
    return heads if asked is None else tuple(h for h in heads if h in asked or h == heads[-1])
