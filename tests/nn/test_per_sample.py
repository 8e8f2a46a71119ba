"""Gradients of single samples, against one pass back for every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cclis.errors import InputError
from cclis.nn import per_sample
from cclis.nn.per_sample import gradient_cosines
from cclis.nn.resnet import resnet18

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=(0, 2)),
    "dilated": lambda: nn.Conv2d(3, 4, (3, 2), dilation=2, bias=False),
    "grouped": lambda: nn.Conv2d(3, 6, 3, groups=3),
    "groups of two": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, groups=2)),
    "few places": lambda: nn.Conv2d(3, 4, 7),
    "few places, grouped": lambda: nn.Conv2d(3, 6, 7, groups=3),
    "same": lambda: nn.Conv2d(3, 4, (3, 5), padding="same"),
    "reflected": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "on the last dimension": lambda: nn.Linear(8, 5),
}


def naive(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cosines of all samples' gradients with one another."""
    weights = [
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.weight.requires_grad
    ]
    rows = []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(module(image[None]), label[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
    return torch.stack([F.cosine_similarity(row[None], torch.stack(rows)) for row in rows])


def found(module: nn.Module, images: Tensor, labels: Tensor, first: int) -> Tensor:
    loss = lambda: F.cross_entropy(module(images), labels, reduction="sum")  # noqa: E731
    return gradient_cosines(module, loss, first, len(labels) - first)


def samples(count: int, side: int = 8) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, side, side, generator=rng, dtype=torch.float64)
    return images, torch.randint(0, 4, (count,), generator=rng)


LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_kind_of_layer(layer: str, layout: str) -> None:
    torch.manual_seed(0)
    first = LAYERS[layer]()
    module = nn.Sequential(first, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4)).double()
    images, labels = samples(7)
    images = images.contiguous(memory_format=LAYOUTS[layout])
    module(images)
    cosines = found(module, images, labels, 4)
    torch.testing.assert_close(cosines, naive(module, images, labels)[:4, 4:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fewer", [0, 10**9], ids=["by pairs", "by weights"])
def test_both_ways_to_compare(
    layer: str, layout: str, fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_sample, "PAIRS_FACTOR", fewer)
    test_every_kind_of_layer(layer, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_patches_are_read_as_they_lie_in_memory(layout: str) -> None:
    x = torch.randn(2, 3, 5, 6).contiguous(memory_format=LAYOUTS[layout])
    patches, _ = per_sample._by_place(nn.Conv2d(3, 4, (3, 2)), x, torch.zeros(2, 4, 3, 5))
    corner = x[0, :, :3, :2]
    lies = corner.permute(1, 2, 0) if layout == "channels last" else corner
    assert torch.equal(patches[0, 0, 0], lies.flatten())


@pytest.mark.parametrize("first", [0, 5])
def test_nothing_to_compare_with(first: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(LAYERS["few places"](), nn.Flatten(), nn.LazyLinear(4)).double()
    images, labels = samples(5)
    module(images)
    assert found(module, images, labels, first).shape == (first, 5 - first)


def test_a_resnet() -> None:
    torch.manual_seed(0)
    encoder = resnet18(3, 2)
    encoder.stages[0].requires_grad_(False)
    network = nn.Sequential(encoder, nn.Linear(16, 4)).double().eval()
    images, labels = samples(6, side=16)
    cosines = found(network, images, labels, 2)
    torch.testing.assert_close(cosines, naive(network, images, labels)[:2, 2:])
    assert all(p.grad is None for p in network.parameters())
    assert not any(m._forward_hooks for m in network.modules())


class Encoder(nn.Module):
    """As people write them: a layer twice, weights in common, by keyword, not to be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(192, 6), nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.fixed, self.unused, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(input=x.flatten(1)).tanh()).tanh()
        x = self.tied(self.twice(x).tanh())
        with torch.no_grad():
            shift = self.fixed(x)
        self.unused(x)
        return self.last((x + shift).tanh())


def test_layers_may_be_used_in_any_way() -> None:
    torch.manual_seed(0)
    module = Encoder().double()
    images, labels = samples(7)
    cosines = found(module, images, labels, 4)
    # They get no gradient at all.
    module.fixed.requires_grad_(False)
    module.unused.requires_grad_(False)
    module.tied = module.twice  # its weights count once
    torch.testing.assert_close(cosines, naive(module, images, labels)[:4, 4:])


class Anew(nn.Module):
    """The same weights, made anew whenever they are asked for."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.clone()


class Twice(nn.Module):
    """One convolution, of inputs that lie differently in memory."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.last = conv, nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).tanh().contiguous(memory_format=torch.channels_last)
        return self.last(self.conv(x).flatten(1))


@pytest.mark.parametrize("computed", [False, True])
def test_a_convolution_may_be_used_twice(computed: bool) -> None:
    torch.manual_seed(0)
    module = Twice(nn.Conv2d(3, 3, 3, padding=1)).double()
    images, labels = samples(7)
    expected = naive(module, images, labels)[:4, 4:]
    if computed:
        parametrize.register_parametrization(module.conv, "weight", Anew())
    torch.testing.assert_close(found(module, images, labels, 4), expected)


def test_rows_that_are_no_samples_are_refused() -> None:
    folded = nn.Sequential(
        nn.Flatten(0, 1), nn.Flatten(), nn.Linear(64, 2), nn.Unflatten(0, (7, 3))
    )
    module = nn.Sequential(folded, nn.Flatten(), nn.Linear(6, 4)).double()
    images, labels = samples(7)
    with pytest.raises(InputError, match=r"7 samples .* Linear\(in_features=64.* gives 21 rows"):
        found(module, images, labels, 4)


def test_a_gradient_of_zeros_has_cosine_zero() -> None:
    module = nn.Linear(3, 2)
    x = torch.tensor([[0.0, 0, 0], [1, 2, 3], [1, 2, 3]])
    cosines = gradient_cosines(module, lambda: module(x).square().sum(), 2, 1)
    torch.testing.assert_close(cosines, torch.tensor([[0.0], [1.0]]))


@pytest.mark.parametrize("fewer", [0, 10**9], ids=["by pairs", "by weights"])
def test_half_precision_is_summed_in_full(fewer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_sample, "PAIRS_FACTOR", fewer)
    torch.manual_seed(0)
    module = nn.Sequential(resnet18(3, 8), nn.Linear(64, 4))
    images, labels = samples(12, side=16)
    images = images.float()
    module(images)  # batch statistics
    module.eval()
    with torch.autocast("cpu", torch.bfloat16):
        cosines = found(module, images, labels, 6)
        expected = naive(module, images, labels)[:6, 6:]
    assert cosines.dtype == torch.float32
    assert float(expected.std()) > 0.1
    assert float((cosines - expected).abs().max()) < 0.003


@pytest.mark.parametrize(
    ("compare", "shape"),
    [(per_sample._compare_by_pairs, (257, 1)), (per_sample._compare_by_weights, (1, 65))],
)
def test_sums_have_more_digits_than_their_parts(compare: Any, shape: tuple[int, int]) -> None:
    # 257² pairs of places, 63 · 65 weights: no number of bfloat16.
    places, width = shape
    channels = 63 if places == 1 else 1
    inputs = torch.ones(2, 1, places, width, dtype=torch.bfloat16)
    errors = torch.ones(2, 1, places, channels, dtype=torch.bfloat16)
    for found in compare(inputs, errors, 1):
        assert found.dtype == torch.float32
        expected = torch.full_like(found, places**2 * channels * width)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_autocast_outside_shortens_nothing() -> None:
    linear = nn.Linear(3, 1, bias=False)
    rows = torch.tensor([[1.0, 1 + 2**-10, 0], [1, 0, 1 + 2**-10]])
    expected = F.cosine_similarity(*rows.double(), dim=0)

    def loss() -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return linear(rows).sum()

    with torch.autocast("cpu", torch.bfloat16):
        assert float(gradient_cosines(linear, loss, 1, 1)) == pytest.approx(
            float(expected), abs=1e-7
        )
