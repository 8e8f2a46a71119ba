"""One function, compiled for many shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._dynamo import config, reset
from torch._inductor import list_options

from cclis.nn.compiling import OPTIONS, allow_shapes
from cclis.nn.conv import ConvEncoder


def test_an_encoder_is_compiled_for_every_batch_size() -> None:
    graphs = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(graph)
        return graph.forward

    reset()
    with config.patch(recompile_limit=2):
        allow_shapes()
        encoder = ConvEncoder(channels=1, width=4)
        encoder.compile(dynamic=False, backend=backend)
        for size in range(2, 7):
            encoder(torch.rand(size, 1, 8, 8))
    assert len(graphs) == 5


def test_torch_knows_the_options() -> None:
    # It refuses others only when something is compiled, which the tests do on a GPU alone.
    assert OPTIONS.keys() <= set(list_options())
