"""Whether to compile, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

from cclis.settings import RunOptions

OPTIONS: dict[str, Any] = {"triton.autotune_pointwise": False, "combo_kernels": True}
"""Pointwise kernels that do not wait for one another share a launch, such as those that shorten
weights to 16 bits: in a step of few images launches count. Each is taken as it comes: to try
several takes seconds longer for a step of 512 images, which is no faster then
(benchmarks/compiling.py)."""
SHAPES = 256
"""How many shapes one function may be compiled for in a process."""

Function = TypeVar("Function", bound=Callable[..., Any])


def compiles(options: RunOptions, device: torch.device) -> bool:
    """Whether to compile: as asked, and on a GPU unless told otherwise."""
    return device.type == "cuda" if options.compile is None else options.compile


def compiled(function: Function, yes: bool) -> Function:
    """A function compiled for the shapes it is called with, or as it is."""
    if not yes:
        return function
    _clock()
    allow_shapes()  # Parts of a batch differ in size from task to task.
    return cast(Function, torch.compile(function, dynamic=False, options=OPTIONS))


def allow_shapes() -> None:
    """Let torch compile a function for many shapes, not for eight.

    Past its limit it runs a function as it is, and the gradients of an encoder fail that is applied
    to several batches, compiled and not: a compiled pass counts as a change of the running
    statistics of batch norm, which the backward pass of one that is not compiled needs unchanged.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, SHAPES)


@cache
def compiled_for_all(function: Function) -> Function:
    """The same for all who ask: at the same batch size it is compiled once."""
    return compiled(function, True)


def seconds_compiling() -> float:
    """How long this process has spent compiling so far."""
    return _clock().seconds if _clock.cache_info().currsize else 0.0


class _Clock:
    seconds = 0.0

    def __init__(self) -> None:
        from torch._dynamo.callback import on_compile_end, on_compile_start

        self._started = 0.0
        on_compile_start(self._start)
        on_compile_end(self._stop)

    def _start(self, _: object) -> None:
        self._started = time.perf_counter()

    def _stop(self, _: object) -> None:
        self.seconds += time.perf_counter() - self._started


@cache
def _clock() -> _Clock:
    return _Clock()
