"""Work on a GPU that is recorded once and replayed: all its kernels start at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

WARMUP = 3
"""Calls that start one kernel after another before the next is recorded: libraries choose kernels
in them."""

Tensors = dict[str, Tensor]
Results = TypeVar("Results")


class Recording(Generic[Results]):
    """A function of tensors by name, replayed as a CUDA graph from its fourth call on.

    Everything else that it reads and writes keeps its place in memory, and shapes do not change.
    Calls before the recording are ordinary ones, so nothing is done twice. Results are valid until
    the next call.
    """

    def __init__(self, function: Callable[[Tensors], Results]):
        self._function = function
        self.forget()

    def forget(self) -> None:
        """Record anew: what comes may compute something else."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensors = {}
        self._results: Results | None = None

    def __call__(self, inputs: Tensors) -> Results:
        """Call the function, or replay it."""
        self._calls += 1
        if self._calls <= WARMUP:
            return self._aside(inputs)
        if self._graph is None:
            self._record(inputs)
        for name, place in self._inputs.items():
            place.copy_(inputs[name])
        assert self._graph is not None
        assert self._results is not None
        self._graph.replay()
        return self._results

    def _aside(self, inputs: Tensors) -> Results:
        # A recording is made on a stream of its own, and so must be what warms up for it.
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            results = self._function(inputs)
        current.wait_stream(aside)
        return results

    def _record(self, inputs: Tensors) -> None:
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = self._function(self._inputs)
