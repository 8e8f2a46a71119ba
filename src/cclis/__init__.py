"""cclis: continual learning of image classes with a small replay memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cclis.data.benchmarks import Benchmark, Task, load_benchmark
    from cclis.errors import InputError
    from cclis.learner import ContinualLearner

__all__ = [
    "Benchmark",
    "ContinualLearner",
    "InputError",
    "Task",
    "__version__",
    "load_benchmark",
]

_HOME = {
    "Benchmark": "cclis.data.benchmarks",
    "Task": "cclis.data.benchmarks",
    "load_benchmark": "cclis.data.benchmarks",
    "InputError": "cclis.errors",
    "ContinualLearner": "cclis.learner",
}


def __getattr__(name: str) -> Any:
    # Late, so that the command line can answer --help without importing torch.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'cclis' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
