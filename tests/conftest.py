"""What many tests share: real images, a tiny stream, settings that run in a moment."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.engine.events import StepDone, TaskLearned
from cclis.engine.trainer import Description, Trainer
from cclis.errors import InputError
from cclis.files import pack_tensors, unpack_tensors
from cclis.methods import registry
from cclis.methods.registry import OURS, get
from cclis.progress import Progress
from tests.pretended_card import pretended_card

# Two test processes share two cores; more threads would wait for each other.
torch.set_num_threads(1)
ONE_THREAD = threadpool_limits(limits=1, user_api="blas")

IMAGES = Path(__file__).resolve().parents[1].parent / "shared" / "data"

METHODS = {name: get(name) for name in OURS}
CONFIGS = {name: method.settings for name, method in METHODS.items()}

QUICK: dict[str, Any] = {
    "device": "cpu",
    "epochs": 2,
    "batch_size": 32,
    "width": 8,
    "probe_epochs": 2,
    "mean_passes": 1,
    "score_passes": 2,
    "map_samples": 0,
    "crop_scale": 0.6,
    "flip": 0.0,
    "jitter": 0.0,
    "grayscale": 0.0,
}
"""Settings under which split-digits takes a second, on any machine; nothing is learned well."""


def quick(method: str) -> dict[str, Any]:
    """Those of the settings that a method has."""
    names = {field.name for field in dataclasses.fields(CONFIGS[method])}
    return {name: value for name, value in QUICK.items() if name in names}


INPUTS = int(os.environ.get("CCLIS_INPUTS", "100"))
"""How many inputs each fuzzing test makes up; `make soak` takes more."""
FIGURES: dict[str, Any] = {"fuzzing_tests": 0, "inputs_each": INPUTS}
"""What `make soak` writes down."""


def seeded(seed: int) -> torch.Generator:
    """A source of randomness."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    """Numbers to put into mathematics."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def learn(trainer: Trainer, task: ImageSet, classes: int, *, again: bool = False) -> TaskLearned:
    """Learn a task to its end; returns the last event."""
    *_, learned = trainer.learn(task, classes, again=again)
    assert isinstance(learned, TaskLearned)
    return learned


def state_after(
    steps: int, trainer: Trainer, task: ImageSet
) -> tuple[dict[str, Tensor], Description]:
    """A trainer's state in the middle of a task of two classes, where it is stopped."""
    events = (event for event in trainer.learn(task, 2) if isinstance(event, StepDone))
    for _ in range(steps):
        next(events)
    # As files hold it: in another order.
    return unpack_tensors(pack_tensors(*trainer.state()), "state")


class Bars(Progress):
    """Notes what every bar begins with."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.begun: list[tuple[str, int, int]] = []

    def bar(self, description: str, total: int, *rest: Any, done: int = 0, **more: Any) -> Any:
        self.begun.append((description, total, done))
        return super().bar(description, total, *rest, done=done, **more)


@contextmanager
def at_once() -> Iterator[None]:
    """Fail if the block waits, such as for somebody to write into a pipe."""

    def waits(*_: object) -> None:
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, waits)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def refused_at_once(reason: str, megabytes: int = 20) -> Iterator[None]:
    """The block raises an InputError that matches, neither waiting nor taking much memory."""
    tracemalloc.start()
    try:
        with at_once(), pytest.raises(InputError, match=reason):
            yield
        peak = tracemalloc.get_traced_memory()[1] >> 20
    finally:
        tracemalloc.stop()
    assert peak < megabytes


def sparse(path: Path, size: int, content: bytes = b"") -> Path:
    """A file of any size that takes no room: zeros, after some content."""
    path.write_bytes(content)
    os.truncate(path, size)
    return path


def fuzz(test: Callable[..., None]) -> Callable[..., None]:
    """A property-based test; put it above `given`."""
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    made = settings(max_examples=INPUTS, suppress_health_check=health, deadline=None)(test)
    marked: Callable[..., None] = pytest.mark.fuzz(made)
    return marked


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the fuzzing tests that passed."""
    FIGURES["fuzzing_tests"] += (
        report.when == "call" and report.passed and "fuzz" in report.keywords
    )


def pytest_sessionfinish(exitstatus: int) -> None:
    """Write the figures of a soak down, if it was asked for and nothing failed."""
    if "CCLIS_SOAK" in os.environ and exitstatus == 0:
        figures = {**FIGURES, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        Path(os.environ["CCLIS_SOAK"]).write_text(json.dumps(figures, indent=2) + "\n")


@pytest.fixture(autouse=True)
def _methods_of_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that a test names are not those of the next."""
    monkeypatch.setattr(registry, "_named", dict(registry._named))


def on_a_card() -> AbstractContextManager[None]:
    """With a GPU, or where there is none with what pretends to be one."""
    return nullcontext() if torch.cuda.is_available() else pretended_card()


class Outside:
    """Modules of somebody else's in the current folder."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._patch = patch
        self.forget()

    def write(self, name: str, text: str) -> None:
        """Write a module."""
        Path(f"{name}.py").write_text(text, encoding="utf-8")
        self._patch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    def forget(self) -> None:
        """Be as a new process is, in which no method has been named."""
        self._patch.setattr(registry, "_named", {})
        for file in Path().glob("*.py"):
            sys.modules.pop(file.stem, None)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    """A folder for modules of somebody else's, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = Outside(monkeypatch)
    yield modules
    modules.forget()


@pytest.fixture
def card() -> Iterator[None]:
    """The same for a whole test."""
    with on_a_card():
        yield


@pytest.fixture(scope="session")
def real_cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the real CIFAR-10 and CIFAR-100 in their binary layout."""
    if not (IMAGES / "unpack.py").is_file():
        pytest.skip("the real CIFAR images are not at hand")
    base = tmp_path_factory.getbasetemp()
    # Test processes of one run share their parent folder: unpack once for all of them.
    root = (base.parent if base.name.startswith("popen-") else base) / "real-cifar"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            partial = root.with_name("real-cifar-partial")
            for name in ("cifar10", "cifar100"):
                command = [sys.executable, str(IMAGES / "unpack.py"), name, str(partial)]
                subprocess.run(command, check=True)
            partial.rename(root)
    return root
