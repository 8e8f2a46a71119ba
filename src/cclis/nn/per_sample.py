"""Gradients of single samples, compared layer by layer and never held all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cclis.errors import InputError

FEWER = 4.0
"""How many times fewer numbers pairs of places must be than weights, to go through them: they take
more multiplications (benchmarks/per_sample.py)."""


class _Call(NamedTuple):
    layer: nn.Conv2d | nn.Linear
    input: Tensor
    output: GradientEdge


def gradient_cosines(
    module: nn.Module, loss: Callable[[], Tensor], first: int, others: int
) -> Tensor:
    """Cosines of the gradients of a batch's first samples with those of all others.

    One pass back through the sum of the samples' losses gives the output gradient of every layer;
    with the layer's input it makes the weights' gradient of each sample (Goodfellow, 2015).
    These are the weights of convolutions and linear layers that learn: biases and what scales
    normalised activations, one parameter in a thousand, are left out, and so is what other layers
    hold, such as those of attention. Samples must not depend on one another, so batch normalisation
    has to be in eval mode.

    Args:
        module: What holds the layers.
        loss: Applies the module to a batch of N + R samples and gives the sum of their losses.
        first: N, how many samples are the first.
        others: R, how many come after them.

    Returns:
        (N, R), in 32 bits or more; a gradient of zeros has cosine 0 with all others. What layers
        computed in 16 bits is compared in 16 bits; sums over a layer's rows, and over layers, are
        not.
    """
    with _watching(module) as calls:
        total = loss()
    found = torch.autograd.grad(total, [call.output for call in calls], allow_unused=True)
    # Weights that several calls share have one gradient, over all their places.
    sharing: dict[Tensor | nn.Module, list[tuple[_Call, Tensor]]] = {}
    for call, gradient in zip(calls, found, strict=True):
        if gradient is not None:
            if len(gradient) != first + others:
                raise InputError(
                    f"gradients of {first + others} samples are compared one by one, but "
                    f"{call.layer} gives {len(gradient)} rows; its first dimension must be theirs"
                )
            weight = call.layer.weight
            # A weight that is computed, as by a parametrisation, is another tensor for each call.
            whose = weight if isinstance(weight, nn.Parameter) else call.layer
            sharing.setdefault(whose, []).append((call, gradient))
    products, squares = total.new_zeros(()), total.new_zeros(())
    with torch.autocast(total.device.type, enabled=False), torch.no_grad():
        for shared in sharing.values():
            # Not by name: patches of one layer are gone before those of the next are made.
            of_layer = _compared(*_by_places(shared), first)
            products, squares = products + of_layer[0], squares + of_layer[1]
        lengths = torch.where(squares > 0, squares, 1.0).sqrt()
        return products / torch.outer(lengths[:first], lengths[first:])


@contextmanager
def _watching(module: nn.Module) -> Iterator[list[_Call]]:
    """Notes the calls of layers whose weights learn, for a while."""
    calls: list[_Call] = []

    def note(
        layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        if not output.requires_grad:
            return output
        # An edge rather than the output, which a ReLU may overwrite; it would cut off a view's.
        output = output.clone() if output._is_view() else output
        given = inputs[0] if inputs else named["input"]
        calls.append(_Call(layer, given.detach(), get_gradient_edge(output)))
        return output

    handles = [
        part.register_forward_hook(note, with_kwargs=True)
        for part in module.modules()
        if isinstance(part, nn.Conv2d | nn.Linear) and part.weight.requires_grad
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _by_places(shared: list[tuple[_Call, Tensor]]) -> tuple[Tensor, Tensor]:
    """`_by_place` of all calls that share their weights, one call's places after another's."""
    if len(shared) == 1:
        call, gradient = shared[0]
        return _by_place(call.layer, call.input, gradient)
    # In one layout, so that patches have one order.
    parts = [_by_place(call.layer, call.input.contiguous(), grad) for call, grad in shared]
    inputs, errors = (torch.cat(of_calls, dim=2) for of_calls in zip(*parts, strict=True))
    return inputs, errors


def _by_place(layer: nn.Conv2d | nn.Linear, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What the weights see at every place, and the gradient of what they give there.

    Returns:
        Inputs (B, G, L, K) and errors (B, G, L, C) of G groups at L places: their products, summed
        over places, are the gradients of a sample's weights. Both have the layer's precision.
    """
    x = x.to(gradient.dtype)
    if isinstance(layer, nn.Linear):
        inputs, errors = (v.reshape(len(v), 1, -1, v.shape[-1]) for v in (x, gradient))
        return inputs, errors
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    samples, channels, *place = padded.stride()
    steps = [s * t for s, t in zip(place, layer.stride, strict=True)]
    reach = [s * d for s, d in zip(place, layer.dilation, strict=True)]
    groups, each = layer.groups, x.shape[1] // layer.groups
    # The order within a patch does not matter, so it is read as it lies in memory.
    inside = zip((each, *layer.kernel_size), (channels, *reach), strict=True)
    sizes, apart = zip(*sorted(inside, key=lambda axis: axis[1], reverse=True), strict=True)
    # A view of all patches at once: F.unfold starts a kernel for every sample.
    patches = padded.as_strided(
        (len(x), groups, *gradient.shape[2:], *sizes),
        (samples, each * channels, *steps, *apart),
    )
    by_group = gradient.reshape(len(x), groups, -1, gradient[0, 0].numel())
    return patches.reshape(*by_group.shape[:2], by_group.shape[3], -1), by_group.mT


def _compared(inputs: Tensor, errors: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of a layer: inner products of the first samples' gradients with the others', (N, R), and
    every gradient's squared length, (B,)."""
    samples, _, places, width = inputs.shape
    pairs = max(first * (samples - first), samples) * places**2
    if FEWER * pairs < samples * width * errors.shape[3]:
        return _compared_by_pairs(inputs, errors, first)
    return _compared_by_weights(inputs, errors, first)


def _compared_by_weights(inputs: Tensor, errors: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Through every sample's gradient: Σ x e' over places."""
    rows = (errors.mT @ inputs).flatten(1, 2).transpose(0, 1)
    # Row by row of the weights, and summed then: a GPU does not share out a single product whose
    # result is small, however long it is.
    products = rows[:, :first] @ rows[:, first:].mT
    wide = _wide(rows)
    lengths = torch.linalg.vector_norm(rows, dim=(0, 2), dtype=wide)
    return products.sum(dim=0, dtype=wide), lengths.square()


def _compared_by_pairs(inputs: Tensor, errors: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Without gradients: <Σ x e', Σ y f'> is the sum of (x·y)(e·f) over all pairs of places."""
    samples, groups, places, _ = inputs.shape
    alike, agree = (_pairs(v[:first], v[first:]) for v in (inputs, errors))
    products = (alike * agree).view(groups, first, places, samples - first, places)
    own = (inputs @ inputs.mT) * (errors @ errors.mT)
    wide = _wide(inputs)
    return products.sum(dim=(0, 2, 4), dtype=wide), own.sum(dim=(1, 2, 3), dtype=wide)


def _wide(values: Tensor) -> torch.dtype:
    """What sums of them are taken in: 32 bits or more."""
    return torch.promote_types(values.dtype, torch.float32)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of what samples have at each place: (N, G, L, K) and (R, G, L, K) to
    (G, N · L, R · L)."""
    left, right = (v.transpose(0, 1).flatten(1, 2) for v in (left, right))
    return left @ right.mT
