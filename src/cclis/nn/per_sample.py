"""Gradients of single samples, compared layer by layer and never held all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Call(NamedTuple):
    layer: nn.Conv2d | nn.Linear
    input: Tensor
    output: GradientEdge


def gradient_cosines(module: nn.Module, loss: Callable[[], Tensor], first: int) -> Tensor:
    """Cosines of the gradients of a batch's first samples with those of all others.

    One pass back through the sum of the samples' losses gives the output gradient of every layer;
    with the layer's input it makes the weights' gradient of each sample (Goodfellow, 2015).
    These are the weights of convolutions and linear layers that learn: biases and what scales
    normalised activations, one parameter in a thousand, are left out. Samples must not depend on
    one another, so batch normalisation has to be in eval mode, nor a layer be used twice.

    Args:
        module: What holds the layers.
        loss: Applies the module to a batch of B samples and gives the sum of their losses.
        first: N, how many samples are the first; R = B - N are the others.

    Returns:
        (N, R), in 32 bits or more; a gradient of zeros has cosine 0 with all others.
    """
    with _watching(module) as calls:
        total = loss()
    found = torch.autograd.grad(total, [call.output for call in calls], allow_unused=True)
    products, squares = total.new_zeros(()), total.new_zeros(())
    # 16 bits would do for the layers, but not for sums over all weights.
    with torch.autocast(total.device.type, enabled=False), torch.no_grad():
        for call, gradient in zip(calls, found, strict=True):
            if gradient is not None:
                rows = _weight_gradients(call.layer, call.input, gradient)
                products = products + rows[:first] @ rows[first:].T
                squares = squares + torch.linalg.vector_norm(rows, dim=1).square()
        lengths = torch.where(squares > 0, squares, 1.0).sqrt()
        return products / torch.outer(lengths[:first], lengths[first:])


@contextmanager
def _watching(module: nn.Module) -> Iterator[list[_Call]]:
    """Notes the calls of layers whose weights learn, for a while."""
    calls: list[_Call] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        # An edge rather than the output, which a ReLU may overwrite; it would cut off a view's.
        output = output.clone() if output._is_view() else output
        calls.append(_Call(layer, inputs[0].detach(), get_gradient_edge(output)))
        return output

    handles = [
        part.register_forward_hook(note)
        for part in module.modules()
        if isinstance(part, nn.Conv2d | nn.Linear) and part.weight.requires_grad
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _weight_gradients(layer: nn.Conv2d | nn.Linear, x: Tensor, gradient: Tensor) -> Tensor:
    """Of every sample, (B, P), from a layer's input and the gradient of its output."""
    x, gradient = (v.to(torch.promote_types(v.dtype, torch.float32)) for v in (x, gradient))
    if isinstance(layer, nn.Linear):
        x, gradient = (v.reshape(len(v), -1, v.shape[-1]) for v in (x, gradient))
        return (gradient.mT @ x).flatten(1)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    patches = F.unfold(padded, layer.kernel_size, layer.dilation, stride=layer.stride)
    by_group = (len(x), layer.groups, -1, patches.shape[2])
    return (gradient.reshape(by_group) @ patches.reshape(by_group).mT).flatten(1)
