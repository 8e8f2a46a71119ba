"""Cosines of per-sample gradients, computed layer by layer without storing all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cclis.errors import InputError

PAIRS_FACTOR = 4.0
"""Pairs of places are compared, rather than weight gradients, if they are this many times fewer:
they need more multiplications (benchmarks/per_sample.py)."""


class _Call(NamedTuple):
    layer: nn.Conv2d | nn.Linear
    input: Tensor
    output: GradientEdge


def gradient_cosines(
    module: nn.Module, loss: Callable[[], Tensor], first: int, others: int
) -> Tensor:
    """Cosines of the gradients of a batch's first samples with those of all others.

    One backward pass of the sum of the samples' losses gives the output gradient of every layer.
    Together with the layer's input it gives the weight gradient of each sample (Goodfellow, 2015).

    Only the trainable weights of convolutions and linear layers count. Biases and the scales of
    normalisation layers, one parameter in a thousand, are left out, and so are other layers such as
    attention. Samples must not depend on one another: batch norm has to be in eval mode.

    Args:
        module: The module that contains the layers.
        loss: Applies the module to a batch of N + R samples and returns the sum of their losses.
        first: N.
        others: R.

    Returns:
        (N, R), in float32 or float64; 0 for a gradient of zeros. Layers that compute in 16 bits are
        compared in 16 bits, but sums over places and over layers are at least float32.
    """
    with _recorded_calls(module) as calls:
        total = loss()
    gradients = torch.autograd.grad(total, [call.output for call in calls], allow_unused=True)
    # A weight that several calls share has one gradient, the sum over all their places.
    sharing: dict[Tensor | nn.Module, list[tuple[_Call, Tensor]]] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is not None:
            if len(gradient) != first + others:
                raise InputError(
                    f"gradients of {first + others} samples are compared one by one, but "
                    f"{call.layer} gives {len(gradient)} rows; its first dimension must be theirs"
                )
            weight = call.layer.weight
            # A computed weight, as under a parametrisation, is a new tensor in each call.
            owner = weight if isinstance(weight, nn.Parameter) else call.layer
            sharing.setdefault(owner, []).append((call, gradient))
    products, squares = total.new_zeros(()), total.new_zeros(())
    with torch.autocast(total.device.type, enabled=False), torch.no_grad():
        for shared in sharing.values():
            # The arguments have no name, so that the patches of one layer are freed before those
            # of the next are made.
            layer_products, layer_squares = _compare(*_by_places(shared), first)
            products, squares = products + layer_products, squares + layer_squares
        lengths = torch.where(squares > 0, squares, 1.0).sqrt()
        return products / torch.outer(lengths[:first], lengths[first:])


@contextmanager
def _recorded_calls(module: nn.Module) -> Iterator[list[_Call]]:
    """Context that records the calls of all layers with trainable weights."""
    calls: list[_Call] = []

    def record(
        layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        if not output.requires_grad:
            return output
        # The edge rather than the output, because an in-place ReLU may overwrite the output. If the
        # output is a view, the edge would be lost as well.
        output = output.clone() if output._is_view() else output
        layer_input = inputs[0] if inputs else named["input"]
        calls.append(_Call(layer, layer_input.detach(), get_gradient_edge(output)))
        return output

    handles = [
        layer.register_forward_hook(record, with_kwargs=True)
        for layer in module.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.weight.requires_grad
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _by_places(shared: list[tuple[_Call, Tensor]]) -> tuple[Tensor, Tensor]:
    """`_by_place` of all calls that share a weight, joined along the places."""
    if len(shared) == 1:
        call, gradient = shared[0]
        return _by_place(call.layer, call.input, gradient)
    # Contiguous, so that the patches of all calls have the same order.
    parts = [_by_place(call.layer, call.input.contiguous(), grad) for call, grad in shared]
    inputs, errors = (torch.cat(values, dim=2) for values in zip(*parts, strict=True))
    return inputs, errors


def _by_place(layer: nn.Conv2d | nn.Linear, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Input patch and output gradient of a layer at every place.

    Returns:
        Inputs (B, G, L, K) and errors (B, G, L, C) of G groups at L places, in the layer's
        precision. The sum over places of their outer products is the weight gradient of a sample.
    """
    x = x.to(gradient.dtype)
    if isinstance(layer, nn.Linear):
        inputs, errors = (v.reshape(len(v), 1, -1, v.shape[-1]) for v in (x, gradient))
        return inputs, errors
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    sample_stride, channel_stride, *pixel_strides = padded.stride()
    steps = [s * t for s, t in zip(pixel_strides, layer.stride, strict=True)]
    reach = [s * d for s, d in zip(pixel_strides, layer.dilation, strict=True)]
    groups, width = layer.groups, x.shape[1] // layer.groups
    # The order within a patch does not matter, so it is read in memory order.
    axes = zip((width, *layer.kernel_size), (channel_stride, *reach), strict=True)
    sizes, strides = zip(*sorted(axes, key=lambda axis: axis[1], reverse=True), strict=True)
    # A view of all patches at once: F.unfold launches a kernel per sample.
    patches = padded.as_strided(
        (len(x), groups, *gradient.shape[2:], *sizes),
        (sample_stride, width * channel_stride, *steps, *strides),
    )
    by_group = gradient.reshape(len(x), groups, -1, gradient[0, 0].numel())
    return patches.reshape(*by_group.shape[:2], by_group.shape[3], -1), by_group.mT


def _compare(inputs: Tensor, errors: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Compare the gradients of one layer.

    Returns:
        Inner products of the first samples' gradients with the others', (N, R), and the squared
        length of every gradient, (B,).
    """
    samples, _, places, width = inputs.shape
    pairs = max(first * (samples - first), samples) * places**2
    if PAIRS_FACTOR * pairs < samples * width * errors.shape[3]:
        return _compare_by_pairs(inputs, errors, first)
    return _compare_by_weights(inputs, errors, first)


def _compare_by_weights(inputs: Tensor, errors: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """With the weight gradient of every sample, Σ x e' over places."""
    rows = (errors.mT @ inputs).flatten(1, 2).transpose(0, 1)
    # One product per row of the weights, summed afterwards: a GPU does not split a single product
    # with a small result over its cores, however long it is.
    products = rows[:, :first] @ rows[:, first:].mT
    dtype = _sum_dtype(rows)
    lengths = torch.linalg.vector_norm(rows, dim=(0, 2), dtype=dtype)
    return products.sum(dim=0, dtype=dtype), lengths.square()


def _compare_by_pairs(inputs: Tensor, errors: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Without weight gradients: <Σ x e', Σ y f'> is the sum of (x·y)(e·f) over pairs of places."""
    samples, groups, places, _ = inputs.shape
    of_inputs, of_errors = (_pairs(v[:first], v[first:]) for v in (inputs, errors))
    products = (of_inputs * of_errors).view(groups, first, places, samples - first, places)
    squares = (inputs @ inputs.mT) * (errors @ errors.mT)
    dtype = _sum_dtype(inputs)
    return products.sum(dim=(0, 2, 4), dtype=dtype), squares.sum(dim=(1, 2, 3), dtype=dtype)


def _sum_dtype(values: Tensor) -> torch.dtype:
    """The dtype in which values are summed: at least float32."""
    return torch.promote_types(values.dtype, torch.float32)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of all pairs of places: (N, G, L, K) and (R, G, L, K) to (G, N · L, R · L)."""
    left, right = (v.transpose(0, 1).flatten(1, 2) for v in (left, right))
    return left @ right.mT
