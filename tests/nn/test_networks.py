from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cclis.engine.trainer import Trainer
from cclis.errors import InputError
from cclis.methods import make_config
from cclis.nn.conv import ConvEncoder
from cclis.nn.network import (
    ClassifierNetwork,
    PrototypeNetwork,
    evaluating,
    feature_dimension,
    make_encoder,
)
from cclis.nn.resnet import RESNETS, ResNet
from cclis.settings import NetworkOptions
from tests.conftest import METHODS


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 5, side: int = 8, channels: int = 1) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=generator())


@pytest.fixture
def prototype_network() -> PrototypeNetwork:
    torch.manual_seed(0)
    return PrototypeNetwork(ConvEncoder(1, 4), 1, 8, embedding=6, classes=5).eval()


@pytest.fixture
def classifier_network() -> ClassifierNetwork:
    torch.manual_seed(0)
    return ClassifierNetwork(ConvEncoder(1, 4), 1, 8, classes=5).eval()


# ----------------------------------------------------------------------------------- encoders


def conv(channels_in: int, channels_out: int, size: int) -> int:
    """Weights of a convolution without bias, and scale and shift of its batch norm."""
    return channels_in * channels_out * size**2 + 2 * channels_out


def expected_parameters(depths: tuple[int, ...], *, bottleneck: bool) -> int:
    total, channels_in = conv(3, 64, 3), 64
    for stage, depth in enumerate(depths):
        inner = 64 * 2**stage
        outer = 4 * inner if bottleneck else inner
        for _ in range(depth):
            if bottleneck:
                total += conv(channels_in, inner, 1) + conv(inner, inner, 3) + conv(inner, outer, 1)
            else:
                total += conv(channels_in, inner, 3) + conv(inner, outer, 3)
            # Only where the shape changes has the shortcut something to learn.
            total += conv(channels_in, outer, 1) if channels_in != outer else 0
            channels_in = outer
    return total


@pytest.mark.parametrize(
    ("name", "depths", "bottleneck", "published", "features"),
    [
        # Published for ten classes on CIFAR, less the last layer's features · 10 + 10.
        ("resnet18", (2, 2, 2, 2), False, 11_173_962 - 5_130, 512),
        ("resnet34", (3, 4, 6, 3), False, 21_282_122 - 5_130, 512),
        ("resnet50", (3, 4, 6, 3), True, 23_520_842 - 20_490, 2048),
    ],
)
def test_resnets_have_the_known_number_of_parameters(name, depths, bottleneck, published, features):
    with torch.device("meta"):
        network = RESNETS[name](3, 64).eval()
        found = network(torch.empty(2, 3, 32, 32))
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == expected_parameters(depths, bottleneck=bottleneck) == published
    assert found.shape == (2, features)


@pytest.mark.parametrize("name", list(RESNETS))
def test_the_stem_keeps_small_images_large(name):
    with torch.device("meta"):
        network = RESNETS[name](3, 64).eval()
        stem = network.stem(torch.empty(1, 3, 32, 32))
        assert stem.shape == (1, 64, 32, 32)
        assert network.stages(stem).shape[2:] == (4, 4)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_resnet_takes_grey_and_colour_and_learns(channels):
    torch.manual_seed(0)
    network = RESNETS["resnet18"](channels, 4)
    features = network(images(4, side=16, channels=channels))
    assert features.shape == (4, 32)
    features.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert network.stem[0].weight.grad.any()


def test_a_resnet_starts_as_torch_makes_it_or_scaled_by_its_fan_out():
    torch.manual_seed(0)
    options = NetworkOptions(encoder="resnet18", width=32)
    plain = make_encoder(options, (32, 32, 3))
    scaled = make_encoder(options, (32, 32, 3), fan_out=True)
    convolutions = [m for m in plain.modules() if isinstance(m, torch.nn.Conv2d)]
    others = [m for m in scaled.modules() if isinstance(m, torch.nn.Conv2d)]
    for one, other in zip(convolutions, others, strict=True):
        out, inner, *size = one.weight.shape
        area = size[0] * size[1]
        # torch: uniform within 1 / sqrt(fan-in); He et al.: variance 2 / fan-out.
        assert float(one.weight.detach().abs().max()) <= (inner * area) ** -0.5
        assert float(one.weight.detach().var()) == pytest.approx(1 / (3 * inner * area), rel=0.2)
        assert float(other.weight.detach().var()) == pytest.approx(2 / (out * area), rel=0.2)


@pytest.mark.parametrize(
    "settings",
    [
        {"width": 10**9},
        {"width": 10**6, "encoder": "resnet18"},
        {"embedding": 10**12},
    ],
)
def test_a_network_that_does_not_fit_into_memory_is_not_made(settings):
    with pytest.raises(InputError, match="does not fit into memory"):
        Trainer(make_config("cclis", {"device": "cpu", **settings}), (8, 8, 1), 2)


@pytest.mark.parametrize("method", ["cclis", "co2l", "er"])
def test_a_network_is_made_only_if_its_weights_fit_into_free_memory(method, monkeypatch):
    def make() -> Trainer:
        return Trainer(make_config(method, {"device": "cpu", "width": 8}), (8, 8, 1), 2)

    network = make().method.network
    needed = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    monkeypatch.setattr("cclis.nn.network.free_memory", lambda: needed)
    make()
    monkeypatch.setattr("cclis.nn.network.free_memory", lambda: needed - 1)
    with pytest.raises(
        InputError, match=r"memory \(0.0 GiB, and 0.0 GiB are free\); use a smaller"
    ):
        make()


def test_a_network_too_large_for_the_gpu_is_refused(monkeypatch):
    def full(self, network):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("lightning_fabric.Fabric.to_device", full)
    with pytest.raises(InputError, match="does not fit into the GPU's memory"):
        Trainer(make_config("cclis", {"device": "cpu", "width": 8}), (8, 8, 1), 2)


def test_making_room_on_no_device_draws_nothing():
    torch.manual_seed(0)
    expected = ConvEncoder(1, 4).state_dict()
    torch.manual_seed(0)
    found = make_encoder(NetworkOptions(encoder="conv", width=4), (8, 8, 1)).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_contrastive_methods_scale_their_encoder_and_classifiers_do_not():
    def spread(name):
        options = {"encoder": "resnet18", "width": 32, "device": "cpu"}
        encoder = Trainer(make_config(name, options), (32, 32, 3), 2).method.network.encoder
        last = [m for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)][-1]
        return float(last.weight.detach().std())

    assert {name for name, method in METHODS.items() if method.fan_out} == {"cclis", "co2l"}
    assert spread("cclis") == pytest.approx(spread("co2l"), rel=0.1)
    assert spread("cclis") > 2 * spread("er")


@pytest.mark.parametrize("side", [8, 16, 28])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_encoder_takes_any_side(side, channels):
    found = ConvEncoder(channels, width=4).eval()(images(3, side, channels))
    assert found.shape == (3, 8)
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "kind", "parameters"),
    [
        ((8, 8, 1), ConvEncoder, None),
        ((28, 28, 1), ConvEncoder, None),
        ((28, 29, 1), ResNet, "resnet18"),
        ((8, 8, 3), ResNet, "resnet18"),
        ((32, 32, 3), ResNet, "resnet18"),
    ],
)
def test_auto_takes_the_small_encoder_for_small_grey_images(shape, kind, parameters):
    with torch.device("meta"):
        encoder = make_encoder(NetworkOptions(width=8), shape)
        assert type(encoder) is kind
        if parameters:
            assert str(encoder) == str(RESNETS[parameters](shape[2], 8))


@pytest.mark.parametrize("name", ["conv", *RESNETS])
def test_an_encoder_can_be_named(name):
    shape = (8, 8, 1)
    with torch.device("meta"):
        encoder = make_encoder(NetworkOptions(encoder=name, width=4), shape)
        expected = ConvEncoder(1, 4) if name == "conv" else RESNETS[name](1, 4)
    assert str(encoder) == str(expected)


# -------------------------------------------------------------------------- feature_dimension


class Own(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.output = output

    def forward(self, x):
        return self.output(self.norm(x))


def test_an_own_encoder_is_tried_and_left_as_it_was():
    encoder = Own(lambda x: x.flatten(1))
    encoder.norm.running_mean.fill_(0.5)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    assert feature_dimension(encoder, (4, 5, 3)) == 60
    assert encoder.training
    assert all(torch.equal(tensor, before[n]) for n, tensor in encoder.state_dict().items())
    assert feature_dimension(encoder.eval(), (4, 5, 3)) == 60
    assert not encoder.training


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (lambda x: x, r"\(2, 3, 4, 5\)"),
        (lambda x: (x.flatten(1), x), "tuple"),
        (lambda x: x.mean(dim=(0, 2, 3)), r"\(3,\)"),
        (lambda x: x.reshape(1, -1), r"\(1, 120\)"),
    ],
    ids=["maps", "tuple", "no batch", "batch in one row"],
)
def test_an_encoder_that_gives_no_features_is_refused(output, found):
    with pytest.raises(InputError, match=rf"features \(B, D\); for B = 2 it gave {found}"):
        feature_dimension(Own(output), (4, 5, 3))


# ------------------------------------------------------------------------------ normalisation


@pytest.mark.parametrize("channels", [1, 3])
def test_normalise_to_takes_mean_and_spread_of_every_channel(channels):
    # More than one part of the sum.
    pixels = np.random.default_rng(0).integers(0, 200, (5000, 2, 3, channels), dtype=np.uint8)
    network = ClassifierNetwork(nn.Flatten(), channels, 6 * channels, classes=2)
    network.fit_normalisation(torch.from_numpy(pixels))
    scaled = pixels.reshape(-1, channels).astype(np.float64) / 255
    assert np.allclose(network.mean.numpy(), scaled.mean(axis=0), rtol=1e-6)
    assert np.allclose(network.std.numpy(), scaled.std(axis=0), rtol=1e-6)

    floats = torch.from_numpy(scaled.reshape(pixels.shape)).permute(0, 3, 1, 2).float()
    features = network.features(floats).view(5000, channels, -1)
    assert torch.allclose(features.mean(dim=(0, 2)), torch.zeros(channels), atol=1e-5)
    assert torch.allclose(features.std(dim=(0, 2), correction=0), torch.ones(channels), atol=1e-5)


@pytest.mark.parametrize("value", [0, 77, 255])
def test_constant_images_normalise_to_nothing_but_zeros(value):
    network = ClassifierNetwork(nn.Flatten(), 1, 4, classes=2)
    network.fit_normalisation(torch.full((10, 2, 2, 1), value, dtype=torch.uint8))
    features = network.features(torch.full((1, 1, 2, 2), value / 255))
    assert features.abs().max() < 1e-4


# --------------------------------------------------------------------------- PrototypeNetwork


def test_embeddings_have_unit_norm(prototype_network):
    embeddings = prototype_network.project(prototype_network.features(images()))
    assert embeddings.shape == (5, 6)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(5))


def test_similarity_is_the_cosine_of_each_prototype_with_each_image(prototype_network):
    classes = 5
    found = prototype_network.similarity(images())
    embeddings = prototype_network.projection(prototype_network.features(images()))
    assert found.shape == (classes, 5)
    for c in range(classes):
        for b in range(5):
            cosine = F.cosine_similarity(prototype_network.prototypes[c], embeddings[b], dim=0)
            assert found[c, b].item() == pytest.approx(cosine.item(), abs=1e-6)
    assert found.abs().max() <= 1 + 1e-6


def test_similarity_is_32_bits_under_autocast(prototype_network):
    exact = prototype_network.similarity(images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prototype_network.encoder(images()).dtype == torch.bfloat16
        found = prototype_network.similarity(images())
        embeddings = prototype_network.project(prototype_network.features(images()))
    assert found.dtype == embeddings.dtype == torch.float32
    assert torch.allclose(found, exact, atol=0.05)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(5))
    # The last product is not rounded to the eight bits of bfloat16.
    assert torch.equal(found, prototype_network.prototypes @ embeddings.T)


def test_prototypes_start_and_are_brought_back_to_unit_norm(prototype_network):
    prototypes = prototype_network.prototypes
    assert torch.allclose(prototypes.norm(dim=1), torch.ones(5))
    before = prototypes.detach().clone()
    with torch.no_grad():
        prototypes.mul_(torch.tensor([0.1, 2, 3, 40, 0.5])[:, None])
    prototype_network.normalise_prototypes()
    assert prototype_network.prototypes is prototypes
    assert prototypes.requires_grad
    assert torch.allclose(prototypes, before)


def test_widening_keeps_the_old_prototypes_and_says_what_replaced_them(prototype_network):
    old = prototype_network.prototypes
    before = prototype_network.similarity(images())
    replaced = prototype_network.widen(9, generator(3))
    new = prototype_network.prototypes
    assert list(replaced) == [old]
    assert replaced[old] is new
    assert new.requires_grad
    assert prototype_network.classes == len(new) == 9
    assert torch.equal(new[:5], old)
    assert torch.allclose(new.norm(dim=1), torch.ones(9))
    assert torch.equal(prototype_network.similarity(images())[:5], before)
    assert new in set(prototype_network.parameters())
    assert old not in set(prototype_network.parameters())


def test_the_generator_decides_new_prototypes(prototype_network):
    def widened(seed: int) -> torch.Tensor:
        network = PrototypeNetwork(nn.Flatten(), 1, 4, embedding=6, classes=5)
        network.prototypes.data.copy_(prototype_network.prototypes)
        network.widen(9, generator(seed))
        return network.prototypes

    assert torch.equal(widened(1), widened(1))
    assert not torch.equal(widened(1)[5:], widened(2)[5:])


# -------------------------------------------------------------------------- ClassifierNetwork


def test_logits_are_the_linear_layer_on_the_features(classifier_network):
    features = classifier_network.features(images())
    whole = classifier_network.classifier(features)
    assert torch.allclose(classifier_network.logits(images()), whole, atol=1e-6)
    assert torch.allclose(
        classifier_network.project(features).norm(dim=1), torch.ones(5), atol=1e-6
    )


def test_logits_are_32_bits_under_autocast(classifier_network):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert classifier_network.logits(images()).dtype == torch.float32


def test_widening_a_classifier_keeps_its_logits(classifier_network):
    before = classifier_network.logits(images())
    old = dict(classifier_network.classifier.named_parameters())
    replaced = classifier_network.widen(8, generator())
    after = classifier_network.logits(images())
    assert torch.equal(after[:, :5], before)
    assert not after[:, 5:].any()
    assert classifier_network.classes == 8
    for name, parameter in classifier_network.classifier.named_parameters():
        assert replaced[old[name]] is parameter
        assert parameter.requires_grad


def test_an_encoder_for_other_images_is_named():
    with pytest.raises(InputError, match="cannot take images of shape"):
        feature_dimension(nn.Conv2d(3, 4, 3), (8, 8, 1))


def test_every_part_goes_back_to_the_mode_it_had():
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval(), nn.Linear(2, 2))
    with contextlib.suppress(ZeroDivisionError), evaluating(module):
        assert not any(part.training for part in module.modules())
        _ = 1 / 0
    assert [part.training for part in module.modules()] == [True, True, False, True]
