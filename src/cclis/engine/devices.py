"""Where and how exactly to compute, and what it took."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from threading import RLock

import torch
from lightning_fabric import Fabric
from threadpoolctl import ThreadpoolController

from cclis.errors import InputError
from cclis.settings import RunOptions


def make_fabric(options: RunOptions) -> Fabric:
    """The device and precision that `options` name."""
    gpu = torch.cuda.is_available()
    if options.device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be one of auto, cpu, cuda, not '{options.device}'")
    if options.device == "cuda" and not gpu:
        raise InputError("this machine has no cuda device; use --device cpu or auto")
    on_gpu = gpu and options.device != "cpu"
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if on_gpu and options.deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return Fabric(
        accelerator="cuda" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if arithmetic(options, on_gpu) == "bf16" else "32-true",
    )


def arithmetic(options: RunOptions, on_gpu: bool) -> str:
    """The precision that `options` ask for: bf16, tf32 or fp32."""
    automatic = "bf16" if on_gpu else "fp32"
    return automatic if options.precision == "auto" else options.precision


_TURN = RLock()
"""Who computes on a GPU: torch's switches and recordings are of the whole process."""


@contextmanager
def numerics(options: RunOptions, device: torch.device) -> Iterator[None]:
    """Torch's process-wide switches as `options` want them on a GPU, put back afterwards.

    Around every step and every pass rather than once, so that several learners with different
    settings can work in one process; one of them at a time.
    """
    if device.type != "cuda":
        yield
        return
    exact = arithmetic(options, on_gpu=True) == "fp32"
    wanted = (
        # The fastest kernels for the fixed shapes are found by trying them once; another process
        # may find others.
        not options.deterministic,
        options.deterministic,
        not exact,
        "highest" if exact else "high",
        options.deterministic,
    )
    with _TURN:
        before = _switches()
        _switch(*wanted)
        try:
            yield
        finally:
            _switch(*before)


def _switches() -> tuple[bool, bool, bool, str, bool]:
    cudnn = torch.backends.cudnn
    return (
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _switch(
    benchmark: bool, deterministic: bool, tf32: bool, matmul: str, algorithms: bool
) -> None:
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = benchmark, deterministic, tf32
    torch.set_float32_matmul_precision(matmul)
    torch.use_deterministic_algorithms(algorithms)


def one_thread() -> AbstractContextManager[object]:
    """For a little work on the host now and then: to wake all threads can take several times as
    long as the work (benchmarks/drawing.py), and a GPU waits for it meanwhile."""
    # Not by torch: threads that first use it meanwhile would have one thread for good.
    limit: AbstractContextManager[object] = _pools().limit(limits=1, user_api="openmp")
    return limit


@cache
def _pools() -> ThreadpoolController:
    """The pools of threads in this process; to look for them takes milliseconds."""
    return ThreadpoolController()


def on_host(options: RunOptions, image_bytes: int, device: torch.device) -> bool:
    """Whether a task's images stay on the host: as asked, or when they would crowd the GPU."""
    if options.images != "auto" or device.type != "cuda":
        return options.images == "host"
    # Heads look at the memory and the task joined together, which is a second copy.
    return 2 * image_bytes > torch.cuda.mem_get_info(device)[0] // 2


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU had no memory left: libraries that find no room say so in their own words."""
    words = ("out of memory", "ALLOC_FAILED", "unable to find an engine")
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the GPU where there is one, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
