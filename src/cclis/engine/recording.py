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
ROOM = 1.25
"""How often what the warm-up borrowed must fit to be recorded: nothing can be moved meanwhile."""

Tensors = dict[str, Tensor]
Results = TypeVar("Results")


class Recording(Generic[Results]):
    """A function of tensors by name, replayed as a CUDA graph from its fourth call on.

    Where the GPU's memory is too full to record, calls stay ordinary ones.

    Everything else that it reads and writes keeps its place in memory, and shapes do not change.
    Calls before the recording are ordinary ones, so nothing is done twice. Results are valid until
    the next call.

    Args:
        function: What to record.
        skip_memory_check: Record without testing for free GPU memory: the function needs little.
    """

    def __init__(self, function: Callable[[Tensors], Results], *, skip_memory_check: bool = False):
        self._function, self._skip_memory_check = function, skip_memory_check
        self.forget()

    def forget(self) -> None:
        """Record anew: what comes may compute something else."""
        self._calls = 0
        self._records = True
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensors, Results] | None = None

    @property
    def recorded(self) -> bool:
        """Whether calls are replayed by now: what they write keeps its place then."""
        return self._recorded is not None

    def __call__(self, inputs: Tensors) -> Results:
        """Call the function, or replay it."""
        self._calls += 1
        if self._calls == WARMUP + 1:
            # Before, not when it has failed: torch keeps the memory of a recording that broke off.
            self._records = self._skip_memory_check or _room_for_what_was_borrowed()
        if self._calls <= WARMUP or not self._records:
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


def _room_for_what_was_borrowed() -> bool:
    """Whether the GPU has once more what ordinary calls took of its memory and gave back.

    A recording has memory of its own: it uses no gaps between what is there to stay.
    """
    borrowed = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    try:
        torch.empty(int(ROOM * borrowed), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True


@cache
def _side_stream() -> torch.cuda.Stream:
    """One for all: what a stream has cached, another cannot use."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return stream
