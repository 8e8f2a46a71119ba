"""The state of a run, and how it is saved and restored."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cclis.data.benchmarks import Benchmark
from cclis.engine.randomness import restore_rng_state, rng_state
from cclis.engine.trainer import Trainer
from cclis.errors import as_input_errors
from cclis.evaluation.accuracy import Accuracies
from cclis.experiment.stages import Row, stream_of
from cclis.experiment.versions import versions
from cclis.files import strip_prefix
from cclis.nn.compiling import seconds_compiling
from cclis.runs import Run
from cclis.runs.checkpoints import State
from cclis.settings import Config, not_learned, refuse_differences


@dataclass
class Costs:
    """Seconds and images, over all processes that worked on a run.

    Attributes:
        train: Seconds of learning.
        evaluation: Seconds of evaluating.
        total: Seconds in all.
        compile: Seconds of compiling, within the others.
        images: Images that the steps have gone through.
    """

    train: float = 0.0
    evaluation: float = 0.0
    total: float = 0.0
    compile: float = 0.0
    images: float = 0


@dataclass
class RunState:
    """The state of a run, beside that of its trainer.

    Attributes:
        rows: The accuracies after every task.
        costs: What it had taken when this process began, and what it spent on learning and on
            evaluating since.
    """

    rows: list[Row] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
    _started: float = field(default_factory=time.perf_counter)
    _compiled: float = field(default_factory=seconds_compiling)
    _running: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the seconds of the block as `train` or `evaluation`."""
        self._running[what] = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - self._running.pop(what)
            setattr(self.costs, what, getattr(self.costs, what) + seconds)

    def costs_now(self, images: int) -> Costs:
        """The costs up to now; `images` are those of this process."""
        now = time.perf_counter()
        so_far = dataclasses.replace(
            self.costs,
            total=self.costs.total + now - self._started,
            compile=self.costs.compile + seconds_compiling() - self._compiled,
            images=self.costs.images + images,
        )
        for what, since in self._running.items():
            setattr(so_far, what, getattr(so_far, what) + now - since)
        return so_far


def save(run: Run, trainer: Trainer, benchmark: Benchmark, state: RunState) -> None:
    """Write a checkpoint of where a run is, unless there is one."""
    steps, task = trainer.steps, len(trainer.task_sizes)
    name = f"task-{task - 1}" if steps is None else f"task-{task}-step-{steps}"
    if name in run.checkpoints.names:
        return  # and is not put at risk by being written again
    run.sync_log()
    tensors, description = trainer.state()
    rng, description["chance"] = rng_state()
    tensors |= {f"chance.{name}": value for name, value in rng.items()}
    description["versions"] = versions(trainer.config.method)
    # Only earlier versions read it.
    description["config_hash"] = _hash(description["config"])
    description["journey"] = {
        "stream": stream_of(benchmark),
        "rows": [{head: dataclasses.asdict(a) for head, a in row.items()} for row in state.rows],
        "costs": dataclasses.asdict(state.costs_now(trainer.images)),
        "logged": run.logged,
        "threads": torch.get_num_threads(),
    }
    run.checkpoints.save(name, (tensors, description))


def restore(
    run: Run,
    trainer: Trainer,
    benchmark: Benchmark,
    checkpoint: State,
    warn: Callable[[str], None],
) -> RunState:
    """Go back to where a checkpoint was written; returns the state of the run."""
    tensors, description = checkpoint
    with as_input_errors("not a checkpoint that this cclis wrote"):
        saved = description["journey"]
        refuse_other_stream(saved["stream"], benchmark)
        if trainer.fabric.device.type == "cpu":
            # Another number of threads sums in another order, which rounds differently.
            torch.set_num_threads(int(saved["threads"]))
        trainer.restore(tensors, description)
        restore_rng_state(strip_prefix("chance.", tensors), description["chance"])
        rows = [{h: Accuracies(**values) for h, values in row.items()} for row in saved["rows"]]
        costs = Costs(**{name: float(value) for name, value in saved["costs"].items()})
        begun, now = description["versions"], versions(trainer.config.method)
        if begun != now:
            warn(f"begun with {begun}, resumed with {now}: results may differ slightly")
        if run.logged < int(saved["logged"]):
            warn(f"lines are missing from {run.path / 'metrics.jsonl'}")
        run.unlog(int(saved["logged"]))
    return RunState(rows, costs)


def first_task_of(config: Config) -> State | None:
    """The checkpoint after the first task of the run that `start_from` names."""
    if config.start_from is None:
        return None
    other, kind = Run.open(config.start_from), type(config)
    free = not_learned(kind)
    refuse_differences(
        other.config.to_dict(),
        config.to_dict(),
        f"cannot take over the first task of {other.path}: it was learned with",
        free | config.after_first_task(),
    )
    return other.checkpoints.load("task-0")


def reuse_first_task(trainer: Trainer, benchmark: Benchmark, checkpoint: State) -> None:
    """Put a trainer where the run of a checkpoint had trained its first task."""
    tensors, description = checkpoint
    with as_input_errors("not a checkpoint that this cclis wrote"):
        refuse_other_stream(description["journey"]["stream"], benchmark)
        classes = description["task_sizes"][0]
        position = {"classes": classes, "epoch": trainer.epochs, "step": 0, "done": 0}
    if not trainer.method.streams:
        # Chosen anew, with these settings, when the first task is concluded.
        tensors = {k: v for k, v in tensors.items() if not k.startswith("memory.")}
    trainer.restore(tensors, {**description, "task_sizes": [], "position": position})


def refuse_other_stream(stream: dict[str, Any], benchmark: Benchmark) -> None:
    """Raise an InputError that shows the difference, if there is one."""
    refuse_differences(stream, stream_of(benchmark), "the checkpoint is of another stream: it had")


def _hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
