"""Several batches in one pass, against one pass after another."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cclis.errors import InputError
from cclis.methods import Batch, make_config
from cclis.nn.conv import ConvEncoder
from cclis.nn.network import JOINT_PASS_DEVICES, ClassifierNetwork, _encode_compiled
from cclis.nn.parts import PartBatchNorm2d
from cclis.nn.resnet import RESNETS
from tests.conftest import METHODS

PARTS = 3


def inputs(channels: int, side: int, each: int = 4) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    batches = torch.randn(PARTS, each, channels, side, side, generator=rng, dtype=torch.float64)
    # Parts differ, so that common statistics would show.
    shifts = torch.arange(PARTS, dtype=torch.float64).view(-1, 1, 1, 1, 1)
    return (batches * (1 + shifts) + shifts).flatten(0, 1)


def learned(module: nn.Module, outputs: Tensor) -> dict[str, Tensor]:
    """Gradients of an uneven loss, and what the module keeps."""
    weights = torch.arange(outputs.numel(), dtype=outputs.dtype).view(outputs.shape).cos()
    (weights * outputs).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return gradients | dict(module.named_buffers())


def agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max().clamp_min(1)
        assert error < 1e-6, name


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_part_has_its_own_statistics(memory_format: torch.memory_format) -> None:
    plain = nn.BatchNorm2d(5).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    partwise = PartBatchNorm2d(5).double()
    partwise.load_state_dict(plain.state_dict())
    x = inputs(5, 6).to(memory_format=memory_format).requires_grad_()
    y = x.detach().clone().requires_grad_()
    together = partwise(x, PARTS)
    apart = torch.cat([plain(part) for part in y.split(4)])
    torch.testing.assert_close(together, apart)
    assert together.is_contiguous(memory_format=memory_format)
    agree(learned(partwise, together), learned(plain, apart))
    torch.testing.assert_close(x.grad, y.grad)
    assert int(partwise.num_batches_tracked) == PARTS


def test_half_precision_is_normalised_in_full() -> None:
    norm, x = PartBatchNorm2d(5), inputs(5, 6).bfloat16()
    found = norm(x, PARTS)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, PartBatchNorm2d(5)(x.float(), PARTS).bfloat16())


def test_parts_do_not_matter_in_eval_mode() -> None:
    norm, x = PartBatchNorm2d(5).double().eval(), inputs(5, 6)
    norm.running_mean.fill_(0.3)
    before = copy.deepcopy(norm.state_dict())
    assert torch.equal(norm(x, PARTS), norm(x))
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())


def test_parts_must_be_equal() -> None:
    with pytest.raises(InputError, match="7 samples are not 2 equal parts"):
        PartBatchNorm2d(5)(torch.zeros(7, 5, 2, 2), 2)


ENCODERS: dict[str, Any] = {name: lambda make=make: make(2, 4) for name, make in RESNETS.items()}
ENCODERS["conv"] = lambda: ConvEncoder(2, 4)


def network(encoder: nn.Module) -> ClassifierNetwork:
    features = encoder.eval()(torch.zeros(2, 2, 8, 8)).shape[1]
    some = ClassifierNetwork(encoder, 2, features, classes=5).train()
    some.encoder.double()  # the classifier always has 32 bits
    return some


def as_on_a_gpu(some: ClassifierNetwork, monkeypatch: Any) -> list[int]:
    """Let a network do what it does on a GPU; of how many parts each of its passes is."""
    monkeypatch.setattr("cclis.nn.network.JOINT_PASS_DEVICES", ("cpu",))
    passes: list[int] = []
    features = some.features

    def noting(images: Tensor, parts: int = 1) -> Tensor:
        passes.append(parts)
        return features(images, parts)

    monkeypatch.setattr(some, "features", noting)
    return passes


@pytest.mark.parametrize("name", list(ENCODERS))
def test_batches_go_through_a_network_in_one_pass(name: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    one = network(ENCODERS[name]())
    other = copy.deepcopy(one)
    x, sizes = inputs(2, 8), (4, 4, 4)
    apart = other.logits_per_part(x, sizes)
    passes = as_on_a_gpu(one, monkeypatch)
    together = one.logits_per_part(x, sizes)
    assert passes == [PARTS]
    assert [len(logits) for logits in together] == list(sizes)
    torch.testing.assert_close(torch.cat(together), torch.cat(apart))
    agree(learned(one, torch.cat(together)), learned(other, torch.cat(apart)))
    assert all(parameter.grad is not None for parameter in one.parameters())


class Derived(ConvEncoder):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def with_another_norm() -> nn.Module:
    encoder = ConvEncoder(2, 4)
    encoder.layers[1] = nn.BatchNorm2d(4)
    return encoder


@pytest.mark.parametrize(
    ("encoder", "sizes"),
    [
        (ConvEncoder(2, 4), (6, 3, 3)),
        (ConvEncoder(2, 4), (1, 1)),
        (nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.BatchNorm1d(6)), (4, 4, 4)),
        (Derived(2, 4), (4, 4, 4)),
        (with_another_norm(), (4, 4, 4)),
    ],
)
def test_what_cannot_be_kept_apart_goes_one_by_one(
    encoder: nn.Module, sizes: tuple[int, ...], monkeypatch: Any
) -> None:
    some = network(encoder)
    passes = as_on_a_gpu(some, monkeypatch)
    x = inputs(2, 8)[: sum(sizes)]
    found = some.logits_per_part(x, sizes)
    assert passes == [1] * len(sizes)
    expected = [some.logits(part) for part in x.split(sizes)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


def test_a_cpu_takes_them_one_by_one(monkeypatch: Any) -> None:
    some = network(ConvEncoder(2, 4))
    passes = as_on_a_gpu(some, monkeypatch)
    monkeypatch.setattr("cclis.nn.network.JOINT_PASS_DEVICES", JOINT_PASS_DEVICES)
    some.logits_per_part(inputs(2, 8), (4, 4, 4))
    assert passes == [1, 1, 1]


def test_a_compiled_encoder_keeps_them_apart(monkeypatch: Any) -> None:
    # Traced and differentiated as always, but run without making code, which takes long.
    traced = partial(torch.compile, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, **_: traced(function))
    monkeypatch.setattr("cclis.nn.network._encode_compiled", cache(_encode_compiled.__wrapped__))
    torch.manual_seed(0)
    plain = network(ConvEncoder(2, 4))
    compiled = copy.deepcopy(plain)
    compiled.compile_encoder()
    x, sizes = inputs(2, 8), (4, 4, 4)
    apart = torch.cat(plain.logits_per_part(x, sizes))
    passes = as_on_a_gpu(compiled, monkeypatch)
    together = torch.cat(compiled.logits_per_part(x, sizes))
    assert passes == [PARTS]
    torch.testing.assert_close(together, apart)
    agree(learned(compiled, together), learned(plain, apart))


@pytest.mark.parametrize("name", ["der", "derpp", "gcr"])
def test_the_task_comes_first_then_its_replays(name: str) -> None:
    """Running statistics lean towards what came last."""
    config = make_config(name, {"memory": 20})
    some = network(ConvEncoder(2, 4))
    method = METHODS[name](config, some)
    x = inputs(2, 8)[: 4 * (1 + method.replays)].float()
    some.encoder.float()
    expected = copy.deepcopy(some)
    for part in x.split(4):
        expected.logits(part)
    labels = torch.zeros(len(x), dtype=torch.int64)
    replayed = len(x) - 4
    extras = {"logits": torch.zeros(replayed, 5), "weight": torch.ones(replayed)}
    masks = torch.arange(len(x)) >= 4, torch.zeros(len(x), dtype=torch.bool)
    sizes = (4,) * (1 + method.replays)
    method.losses(Batch(x, labels, torch.ones(len(x)), *masks, extras, sizes))
    for (key, buffer), wanted in zip(some.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, msg=key)
