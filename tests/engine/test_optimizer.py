"""Gradients as one vector, however the parameters lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cclis.engine.optimizer import Optimizer
from cclis.methods import make_config
from cclis.methods.base import ParameterGroup


def network(layout: torch.memory_format) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Conv2d(4, 6, (3, 2)),
        nn.Conv2d(6, 6, 1),
        nn.Flatten(),
        nn.Linear(36, 2),
    )
    return layers.to(memory_format=layout)


def optimizer(layers: nn.Module) -> Optimizer:
    groups = [ParameterGroup(list(layers.parameters()), 0.1)]
    return Optimizer(groups, make_config("gem", {}), torch.device("cpu"))


def loss(layers: nn.Module) -> Tensor:
    images = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return layers(images).square().sum()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_joined_and_followed(layout: torch.memory_format) -> None:
    layers = network(layout)
    weights = layers[1].weight
    assert weights.is_contiguous(memory_format=layout)
    found = optimizer(layers)
    of_loss = found.gradient_of(loss(layers))
    loss(layers).backward()
    assert torch.equal(found.gradient, of_loss)
    # As they lie in memory: joining them takes no copy of the parts.
    first = layers[0].weight.numel() + layers[0].bias.numel()
    lying = torch.as_strided(weights.grad, (weights.numel(),), (1,))
    assert torch.equal(of_loss[first : first + weights.numel()], lying)

    before = [parameter.grad.clone() for parameter in layers.parameters()]
    found.set_gradient(-2 * of_loss)
    for parameter, gradient in zip(layers.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, -2 * gradient)


def test_gradients_that_lie_otherwise_are_joined_in_the_parameters_order() -> None:
    layers = network(torch.channels_last)
    found = optimizer(layers)
    loss(layers).backward()
    expected = found.gradient
    for parameter in layers.parameters():
        parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
    assert torch.equal(found.gradient, expected)
    found.set_gradient(3 * expected)
    assert torch.equal(found.gradient, 3 * expected)


def test_a_parameter_without_gradient_counts_as_zeros_and_stays_without() -> None:
    layers = network(torch.channels_last)
    layers.append(nn.Linear(2, 2))
    found = optimizer(layers)
    part = loss(layers[:-1])
    of_loss = found.gradient_of(part)
    assert not of_loss[-6:].any()
    part = loss(layers[:-1])
    part.backward()
    assert torch.equal(found.gradient, of_loss)
    found.set_gradient(of_loss + 1)
    assert layers[-1].weight.grad is None
