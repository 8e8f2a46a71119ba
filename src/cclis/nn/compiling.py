"""torch.compile: when to use it, with which options, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

from cclis.settings import RunOptions

OPTIONS: dict[str, Any] = {"triton.autotune_pointwise": False, "combo_kernels": True}
"""Independent pointwise kernels, such as casts of weights to 16 bits, share a launch: launches
dominate steps of few images. Pointwise kernels are not autotuned: autotuning takes seconds, and a
step of 512 images is no faster afterwards (benchmarks/compiling.py)."""
SHAPES = 256
"""Maximum number of shapes that a function is compiled for in a process."""

Function = TypeVar("Function", bound=Callable[..., Any])


def compiles(options: RunOptions, device: torch.device) -> bool:
    """Whether to compile: as `options.compile` says, by default on a GPU only."""
    return device.type == "cuda" if options.compile is None else options.compile


def compiled(function: Function, enabled: bool) -> Function:
    """Compile a function for each shape that it is called with; return it as it is unless
    `enabled`."""
    if not enabled:
        return function
    _clock()
    allow_shapes()  # the parts of a batch differ in size from task to task
    return cast(Function, torch.compile(function, dynamic=False, options=OPTIONS))


def allow_shapes() -> None:
    """Raise torch's limit of eight shapes per compiled function.

    Above its limit torch runs the function uncompiled. An encoder that is applied to several
    batches, some compiled and some not, then fails in the backward pass: the uncompiled pass needs
    batch norm's running statistics unchanged, and a compiled one counts as a change.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, SHAPES)


@cache
def compiled_for_all(function: Function) -> Function:
    """The compiled function, shared by all callers: it is compiled once per shape."""
    return compiled(function, True)


def seconds_compiling() -> float:
    """Seconds that this process has spent compiling so far."""
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
