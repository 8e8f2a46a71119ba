"""CUDA graphs: work on a GPU that is recorded once and replayed with a single launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

WARMUP = 3
"""Ordinary calls before the recording, in which libraries choose their kernels."""
MEMORY_FACTOR = 1.25
"""Free memory needed for a recording, relative to what the warm-up used temporarily: fragmented
memory cannot be compacted during a recording."""

Tensors = dict[str, Tensor]
Results = TypeVar("Results")


class Recording(Generic[Results]):
    """A function of named tensors, replayed as a CUDA graph from its fourth call on.

    The first three calls are ordinary calls. If the GPU has too little free memory for a recording,
    all calls are. Shapes must not change, and everything else that the function reads or writes
    must keep its address. Results are valid until the next call.

    Args:
        function: The function to record.
        skip_memory_check: Record without checking for free memory; for functions that need little.
    """

    def __init__(self, function: Callable[[Tensors], Results], *, skip_memory_check: bool = False):
        self._function, self._skip_memory_check = function, skip_memory_check
        self.forget()

    def forget(self) -> None:
        """Delete the recording; the next calls are warm-up calls for a new one."""
        self._calls = 0
        self._records = True
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensors, Results] | None = None

    @property
    def recorded(self) -> bool:
        """Whether calls are replayed by now, so that results keep their address."""
        return self._recorded is not None

    def __call__(self, inputs: Tensors) -> Results:
        """Call the function, or replay it."""
        self._calls += 1
        if self._calls == WARMUP + 1:
            # Checked in advance, because torch never frees the memory of a failed recording.
            self._records = self._skip_memory_check or _enough_memory()
        if self._calls <= WARMUP or not self._records:
            return self._call_on_side_stream(inputs)
        if self._recorded is None:
            static_inputs = {name: value.clone() for name, value in inputs.items()}
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self._function(static_inputs)
            # Set last, so that the next call retries a recording that failed.
            self._recorded = graph, static_inputs, results
        graph, static_inputs, results = self._recorded
        for name, static_input in static_inputs.items():
            static_input.copy_(inputs[name])
        graph.replay()
        return results

    def _call_on_side_stream(self, inputs: Tensors) -> Results:
        # Recordings are made on a side stream, so their warm-up must run on one as well.
        current, side = torch.cuda.current_stream(), _side_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            results = self._function(inputs)
        current.wait_stream(side)
        return results


def _enough_memory() -> bool:
    """Whether the GPU has as much free memory as ordinary calls used temporarily.

    A recording has a memory pool of its own and cannot use gaps in the existing one.
    """
    borrowed = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    try:
        torch.empty(int(MEMORY_FACTOR * borrowed), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True


@cache
def _side_stream() -> torch.cuda.Stream:
    """One stream for all recordings: memory cached for one stream is useless to another."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return stream
