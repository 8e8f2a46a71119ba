"""A network in float64 computes in float64 from its features to the scores of every head."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cclis.data.augment import draw_uniforms, to_float
from cclis.data.benchmarks import load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.devices import make_fabric
from cclis.engine.inference import Inference
from cclis.evaluation.heads import (
    PROBE_DECAY,
    PROBE_MILESTONES,
    PROBE_MOMENTUM,
    SHRINKAGE,
    View,
    fit,
)
from cclis.functional.sampling import log_scores, normalise
from cclis.memory import Memory
from cclis.methods import Visible
from cclis.methods.cclis import CCLIS, CCLISConfig
from cclis.nn.conv import ConvEncoder
from cclis.nn.network import ClassifierNetwork, Network, PrototypeNetwork, Representation
from cclis.settings import AugmentationOptions, Config, EvaluationOptions

CLASSES = 3
OPTIONS = EvaluationOptions(
    mean_passes=2, probe_epochs=3, probe_learning_rate=0.1, probe_batch_size=8
)
WITHOUT_AUGMENTATION = dataclasses.asdict(
    AugmentationOptions(crop="none", flip=0, jitter=0, grayscale=0)
)


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load_benchmark("split-digits", tasks=[CLASSES], limit=9)[0].train


def prototypes() -> PrototypeNetwork:
    torch.manual_seed(0)
    return PrototypeNetwork(ConvEncoder(1, 4), 1, 8, embedding=6, classes=CLASSES)


def classifier() -> ClassifierNetwork:
    torch.manual_seed(0)
    return ClassifierNetwork(ConvEncoder(1, 4), 1, 8, classes=CLASSES)


def inference(network: Network) -> Inference:
    config = Config(device="cpu", **WITHOUT_AUGMENTATION)
    return Inference(network, make_fabric(config), config)


def compared(narrow: Tensor, wide: Tensor, naive: Tensor) -> None:
    """A result in float32 and in float64, and what a naive computation in float64 gives."""
    assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
    narrow, wide, naive = narrow.detach(), wide.detach(), naive.detach()
    assert float((narrow - wide).abs().max()) < 1e-4
    assert float((wide - naive).abs().max()) < 1e-10
    assert not torch.equal(narrow.double(), wide)


def naive_features(network: Network, images: Tensor) -> Tensor:
    """The encoder's layers one after another in eval mode."""
    x = to_float(images).double().contiguous()
    encoder = network.encoder
    assert isinstance(encoder, ConvEncoder)
    for layer in encoder.layers:
        if isinstance(layer, nn.Conv2d):
            stride, padding = layer.stride[0], layer.padding[0]
            x = nn.functional.conv2d(x, layer.weight.double(), stride=stride, padding=padding)
        elif isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            mean, variance = layer.running_mean.double(), layer.running_var.double()
            x = (x - mean.view(1, -1, 1, 1)) / (variance + layer.eps).sqrt().view(1, -1, 1, 1)
        else:
            x = x.clamp_min(0)
    return x.flatten(2).mean(dim=2).detach()


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def naive_embeddings(network: PrototypeNetwork, features: Tensor) -> Tensor:
    first, second = network.projection[0], network.projection[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    hidden = (features @ first.weight.double().T + first.bias.double()).clamp_min(0)
    return unit(hidden @ second.weight.double().T + second.bias.double()).detach()


def naive_probe(view: View, features: Tensor, labels: Tensor) -> Tensor:
    """The probe's weights and biases by autograd; draws as the probe draws them."""
    rng, (count, dimension) = view.rng("linear"), features.shape
    start = torch.empty(CLASSES, dimension + 1)
    start.uniform_(-(dimension**-0.5), dimension**-0.5, generator=rng)
    layer, velocity = start.double(), torch.zeros(CLASSES, dimension + 1, dtype=torch.float64)
    members = [(labels == label).nonzero()[:, 0] for label in range(CLASSES)]
    options = OPTIONS
    for epoch in range(options.probe_epochs):
        passed = sum(epoch >= share * options.probe_epochs for share in PROBE_MILESTONES)
        rate = options.probe_learning_rate * PROBE_DECAY**passed
        draws = count // options.probe_batch_size * options.probe_batch_size
        share = torch.rand(2, draws, generator=rng, dtype=torch.float64).tolist()
        rows = [members[int(c * CLASSES)] for c in share[0]]
        rows = [
            of_class[int(s * len(of_class))] for of_class, s in zip(rows, share[1], strict=True)
        ]
        draw_uniforms(draws, rng)  # for an augmentation that changes nothing
        for batch in torch.split(torch.stack(rows), options.probe_batch_size):
            weights = layer.requires_grad_()
            logits = features[batch] @ weights[:, :-1].T + weights[:, -1]
            loss = nn.functional.cross_entropy(logits, labels[batch])
            velocity = PROBE_MOMENTUM * velocity + torch.autograd.grad(loss, weights)[0]
            layer = (layer - rate * velocity).detach()
    return layer


def test_features_and_embeddings(digits: ImageSet) -> None:
    network = prototypes()
    narrow, wide = (inference(n)(digits.images) for n in (network, copy.deepcopy(network).double()))
    features = naive_features(network, digits.images)
    compared(narrow.features, wide.features, features)
    compared(narrow.embeddings, wide.embeddings, naive_embeddings(network, features))


def test_logits_and_similarities(digits: ImageSet) -> None:
    images = to_float(digits.images)
    network = classifier().eval()
    layer, features = network.classifier, naive_features(network, digits.images)
    logits = features @ layer.weight.double().T + layer.bias.double()
    compared(network.logits(images), copy.deepcopy(network).double().logits(images), logits)
    other = prototypes().eval()
    cosines = (
        other.prototypes.double() @ naive_embeddings(other, naive_features(other, digits.images)).T
    )
    compared(other.similarity(images), copy.deepcopy(other).double().similarity(images), cosines)


def naive_weights(name: str, view: View, network: Network, visible: ImageSet) -> Tensor:
    """Weights and biases of a head in float64, (C, D + 1)."""
    features, labels = naive_features(network, visible.images), visible.labels
    if name == "linear":
        return naive_probe(view, features, labels)
    if isinstance(network, ClassifierNetwork):
        layer = network.classifier
        return torch.cat([layer.weight, layer.bias[:, None]], dim=1).double()
    assert isinstance(network, PrototypeNetwork)
    if name == "discriminant":
        means = torch.stack([features[labels == c].mean(dim=0) for c in range(CLASSES)])
        scatter = [torch.cov(features[labels == c].T, correction=0) for c in range(CLASSES)]
        covariance = sum(scatter[1:], scatter[0]) / CLASSES
        size = len(covariance)
        spread = covariance.diagonal().mean() * torch.eye(size, dtype=torch.float64)
        inverse = torch.linalg.inv((1 - SHRINKAGE) * covariance + SHRINKAGE * spread)
        weight = means @ inverse
        return torch.cat([weight, -0.5 * (weight * means).sum(dim=1, keepdim=True)], dim=1)
    embeddings = naive_embeddings(network, features)
    weight = unit(torch.stack([embeddings[labels == c].mean(dim=0) for c in range(CLASSES)]))
    if name == "prototype":
        weight = unit(unit(network.prototypes.double()) + weight)
    return torch.cat([weight, weight.new_zeros(CLASSES, 1)], dim=1)


@pytest.mark.parametrize("make", [prototypes, classifier])
def test_new_classes_have_the_precision_of_the_old_ones(make: Callable[[], Network]) -> None:
    network = make().double()
    network.widen(CLASSES + 2, torch.Generator().manual_seed(0))
    assert {tensor.dtype for tensor in network.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["linear", "means", "discriminant", "prototype", "classifier"])
def test_scores_of_heads(name: str, digits: ImageSet) -> None:
    network = classifier() if name == "classifier" else prototypes()
    scores = []
    for each in (network, copy.deepcopy(network).double()):
        view = View(inference(each), digits, CLASSES, OPTIONS, 0)
        head = fit(name, view)
        scores.append(head.scores(view.inference(digits.images)))
    weights = naive_weights(name, view, network, digits)
    inputs = naive_features(network, digits.images)
    if head.on == "embeddings":
        assert isinstance(network, PrototypeNetwork)
        inputs = naive_embeddings(network, inputs)
    naive = (inputs @ weights[:, :-1].T + weights[:, -1]).detach()
    # Those of the discriminant are large: features hardly vary within a class.
    scale = naive.abs().max().clamp_min(1)
    compared(*(values / scale.to(values.dtype) for values in (*scores, naive)))


def test_proposals_in_the_memory(digits: ImageSet) -> None:
    network = prototypes()
    stored = []
    for each in (network, copy.deepcopy(network).double()):
        represent = inference(each)
        method = CCLIS(CCLISConfig(device="cpu", score_passes=1), each)
        method.begin_task(CLASSES)

        def seen(represent: Inference = represent) -> Representation:
            return represent(digits.images)

        exemplars = method.select_exemplars(
            Visible(digits.labels, seen), 12, torch.Generator().manual_seed(0)
        )
        memory = Memory(12)
        memory.replace(digits[exemplars.indices], exemplars.proposal)
        again = Memory(12)
        again.load(memory.state())
        assert torch.equal(again.proposal, memory.proposal)
        assert again.proposal.dtype == memory.proposal.dtype
        stored.append((memory.proposal, exemplars.indices))
    assert torch.equal(stored[0][1], stored[1][1])
    embeddings = naive_embeddings(network, naive_features(network, digits.images))
    temperature = CCLISConfig(device="cpu").temperature
    scores = log_scores(
        embeddings, unit(network.prototypes.double()), digits.labels, temperature=temperature
    )
    naive = normalise(scores, digits.labels)[stored[1][1]].detach()
    compared(stored[0][0], stored[1][0], naive)


def test_an_encoder_in_float64_under_layers_in_float32(digits: ImageSet) -> None:
    class Wide(ConvEncoder):
        def forward(self, x: Tensor, parts: int = 1) -> Tensor:
            return super().forward(x.double(), parts)

    for name in ("prototype", "discriminant", "linear", "classifier"):
        network = classifier() if name == "classifier" else prototypes()
        encoder = Wide(1, 4)
        encoder.load_state_dict(network.encoder.state_dict())
        network.encoder = encoder.double()
        view = View(inference(network), digits, CLASSES, OPTIONS, 0)
        represented = view.inference(digits.images)
        assert (represented.features.dtype, represented.embeddings.dtype) == (
            torch.float64,
            torch.float64 if name == "classifier" else torch.float32,
        )
        assert bool(fit(name, view).scores(represented).isfinite().all())
