"""cclis: continual learning of image classes with a small replay memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cclis import functional, methods
    from cclis.data.benchmarks import Benchmark, Task, load_benchmark
    from cclis.errors import InputError
    from cclis.experiment.loop import resume, train
    from cclis.learner import ContinualLearner
    from cclis.runs import Run

__all__ = [
    "Benchmark",
    "ContinualLearner",
    "InputError",
    "Run",
    "Task",
    "__version__",
    "functional",
    "load_benchmark",
    "methods",
    "resume",
    "train",
]

_HOME = {
    "Benchmark": "cclis.data.benchmarks",
    "Task": "cclis.data.benchmarks",
    "load_benchmark": "cclis.data.benchmarks",
    "InputError": "cclis.errors",
    "ContinualLearner": "cclis.learner",
    "Run": "cclis.runs",
    "resume": "cclis.experiment.loop",
    "train": "cclis.experiment.loop",
}


def __getattr__(name: str) -> Any:
    # Late, so that the command line can answer --help without importing torch.
    if name in ("functional", "methods"):
        return import_module(f"cclis.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'cclis' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
