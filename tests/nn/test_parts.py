"""Several batches in one pass, against one pass after another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cclis.nn.conv import ConvEncoder
from cclis.nn.network import ClassifierNetwork, _encode
from cclis.nn.parts import PartwiseNorm
from cclis.nn.resnet import RESNETS

PARTS = 3


def inputs(channels: int, side: int, each: int = 4) -> Tensor:
    chance = torch.Generator().manual_seed(0)
    batches = torch.randn(PARTS, each, channels, side, side, generator=chance, dtype=torch.float64)
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
    partwise = PartwiseNorm(5).double()
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
    norm, x = PartwiseNorm(5), inputs(5, 6).bfloat16()
    found = norm(x, PARTS)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, PartwiseNorm(5)(x.float(), PARTS).bfloat16())


def test_parts_do_not_matter_in_eval_mode() -> None:
    norm, x = PartwiseNorm(5).double().eval(), inputs(5, 6)
    norm.running_mean.fill_(0.3)
    before = copy.deepcopy(norm.state_dict())
    assert torch.equal(norm(x, PARTS), norm(x))
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())


ENCODERS: dict[str, Any] = {name: lambda make=make: make(2, 4) for name, make in RESNETS.items()}
ENCODERS["conv"] = lambda: ConvEncoder(2, 4)


def network(encoder: nn.Module) -> ClassifierNetwork:
    features = encoder.eval()(torch.zeros(2, 2, 8, 8)).shape[1]
    some = ClassifierNetwork(encoder, 2, features, classes=5).train()
    some.encoder.double()  # the classifier always has 32 bits
    return some


def as_if_compiled(some: ClassifierNetwork, monkeypatch: Any) -> list[int]:
    """What the network does compiled, without the compiler; of how many parts each pass was."""
    passes: list[int] = []

    def encode(encoder: nn.Module, images: Tensor, parts: int = 1) -> Tensor:
        passes.append(parts)
        return _encode(encoder, images, parts)

    monkeypatch.setattr(some, "_encode", encode)
    return passes


@pytest.mark.parametrize("name", list(ENCODERS))
def test_batches_go_through_a_network_in_one_pass(name: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    one = network(ENCODERS[name]())
    other = copy.deepcopy(one)
    passes = as_if_compiled(one, monkeypatch)
    x, sizes = inputs(2, 8), (4, 4, 4)
    together, apart = one.logits_apart(x, sizes), other.logits_apart(x, sizes)
    assert passes == [PARTS]
    assert [len(logits) for logits in together] == list(sizes)
    torch.testing.assert_close(torch.cat(together), torch.cat(apart))
    agree(learned(one, torch.cat(together)), learned(other, torch.cat(apart)))
    assert all(parameter.grad is not None for parameter in one.parameters())


@pytest.mark.parametrize(
    ("encoder", "sizes"),
    [
        (ConvEncoder(2, 4), (6, 3, 3)),
        (ConvEncoder(2, 4), (1, 1)),
        (nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.BatchNorm1d(6)), (4, 4, 4)),
    ],
)
def test_what_cannot_be_kept_apart_goes_one_by_one(
    encoder: nn.Module, sizes: tuple[int, ...], monkeypatch: Any
) -> None:
    some = network(encoder)
    passes = as_if_compiled(some, monkeypatch)
    x = inputs(2, 8)[: sum(sizes)]
    found = some.logits_apart(x, sizes)
    assert passes == [1] * len(sizes)
    expected = [some.logits(part) for part in x.split(sizes)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


def test_a_compiled_encoder_keeps_them_apart() -> None:
    torch.manual_seed(0)
    plain = network(ConvEncoder(2, 4))
    compiled = copy.deepcopy(plain)
    compiled.compile_encoder()
    x, sizes = inputs(2, 8), (4, 4, 4)
    together = torch.cat(compiled.logits_apart(x, sizes))
    apart = torch.cat(plain.logits_apart(x, sizes))
    torch.testing.assert_close(together, apart)
    agree(learned(compiled, together), learned(plain, apart))
