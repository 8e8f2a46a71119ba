"""Work on a GPU that is recorded once and replayed: all its kernels start at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensors, Results] | None = None

    def __call__(self, inputs: Tensors) -> Results:
        """Call the function, or replay it."""
        self._calls += 1
        if self._calls <= WARMUP:
            return self._aside(inputs)
        if self._recorded is None:
            places = {name: value.clone() for name, value in inputs.items()}
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self._function(places)
            # Only now: what fails while it is recorded is tried again.
            self._recorded = graph, places, results
        graph, places, results = self._recorded
        for name, place in places.items():
            place.copy_(inputs[name])
        graph.replay()
        return results

    def _aside(self, inputs: Tensors) -> Results:
        # A recording is made on another stream, and so must be what warms up for it.
        current, aside = torch.cuda.current_stream(), _side_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            results = self._function(inputs)
        current.wait_stream(aside)
        return results


@cache
def _side_stream() -> torch.cuda.Stream:
    """One for all: what a stream has cached, another cannot use."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return stream
