"""A whole run: every task of a benchmark learned, evaluated and recorded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

import cclis
from cclis.checkpoints import State
from cclis.config import Config, EvaluationOptions
from cclis.data.benchmarks import Benchmark, Task, load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.compiling import seconds_compiling
from cclis.engine.device import (
    device_name,
    global_chance,
    globally_seeded,
    peak_memory,
    restore_global_chance,
)
from cclis.engine.trainer import Learned, Trainer, under
from cclis.errors import InputError
from cclis.evaluation.accuracy import Accuracies, evaluate
from cclis.files import write_atomically
from cclis.interruption import Interrupted, Interruption
from cclis.progress import QUIET, Progress
from cclis.report.page import render
from cclis.runs import Run, summarise

PLACES = ("output", "data", "start_from")
"""Settings that say where, not what: a result leaves them out."""
MAY_CHANGE = frozenset({*PLACES, "device", "images", "checkpoint_minutes"})
"""Settings that may be others when a run goes on."""
Row = dict[str, Accuracies]


class Journey:
    """A run under way: what it has come to so far, and when that is saved."""

    def __init__(self, run: Run, trainer: Trainer, benchmark: Benchmark, stop: Interruption):
        self.run, self.trainer, self._stop = run, trainer, stop
        self._stream = {
            "class_names": list(benchmark.class_names),
            "task_sizes": list(benchmark.task_sizes),
            "samples": benchmark.samples,
        }
        self.rows: list[Row] = []
        self.images = 0
        self._compiled_before = seconds_compiling()
        self._before = {"train": 0.0, "total": 0.0, "compile": 0.0}
        self.train_seconds = 0.0
        self._started = self._saved = time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """What the run took so far, in all processes that worked on it."""
        now = {
            "train": self.train_seconds,
            "total": time.perf_counter() - self._started,
            "compile": seconds_compiling() - self._compiled_before,
        }
        return {name: self._before[name] + spent for name, spent in now.items()}

    def save(self) -> None:
        """Write a checkpoint."""
        steps, task = self.trainer.steps, len(self.trainer.task_sizes)
        name = f"task-{task - 1}" if steps is None else f"task-{task}-step-{steps}"
        tensors, description = self.trainer.state()
        chance, description["chance"] = global_chance()
        tensors |= {f"chance.{name}": state for name, state in chance.items()}
        description["versions"] = versions()
        settings = json.dumps(description["config"], sort_keys=True)
        description["config_hash"] = hashlib.sha256(settings.encode()).hexdigest()
        description["journey"] = {
            "stream": self._stream,
            "rows": [_plain(row) for row in self.rows],
            "images": self.images,
            "seconds": self.seconds,
            "logged": self.run.logged,
        }
        self.run.checkpoints.save(name, (tensors, description))
        self._saved = time.perf_counter()

    def restore(self, state: State) -> None:
        """Go back to where a checkpoint was written."""
        tensors, description = state
        there = description["journey"]
        _refuse_differences(there["stream"], self._stream, "this checkpoint learned another stream")
        self.trainer.restore(tensors, description)
        restore_global_chance(under("chance.", tensors), description["chance"])
        self.rows = [{h: Accuracies(**found) for h, found in r.items()} for r in there["rows"]]
        self.images = there["images"]
        self._before = there["seconds"]
        self.run.unlog(there["logged"])

    def step(self) -> None:
        """After a step: save when it is time or when asked to stop, and then stop."""
        minutes = (time.perf_counter() - self._saved) / 60
        if self._stop.asked or minutes >= self.trainer.config.checkpoint_minutes:
            self.save()
        self._stop.check()

    def learn(self, task: Task) -> Learned:
        """Learn a task, from wherever in it the trainer is."""
        # While steps are taken a signal waits for the end of one, and the state is saved; later
        # it need not: everything is on disk.
        self._stop.waits = True
        learned = self.trainer.learn(
            task.train, len(task.classes), self.run.log, self.step, self._trained
        )
        self.images += learned.images
        self.train_seconds += learned.seconds
        return learned

    def _trained(self) -> None:
        self.save()
        self._stop.waits = False
        self._stop.check()


def train(config: Config, progress: Progress = QUIET) -> Run:
    """Learn a benchmark task by task and leave a run directory behind."""
    benchmark = _benchmark(config, progress)
    trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
    _take_over_first_task(trainer)
    run = Run.create(config)
    with _going_on(run) as stop:
        _learn_all(Journey(run, trainer, benchmark, stop), benchmark, progress)
    return run


def resume(run: Run, config: Config, progress: Progress = QUIET) -> Run:
    """Go on with a run that was interrupted, from its newest whole checkpoint.

    Args:
        run: The run.
        config: Its settings; only those of `MAY_CHANGE` may be other than they were.
        progress: Where to show what goes on.
    """
    _refuse_differences(
        run.config.to_dict(), config.to_dict(), "a run goes on with its own settings", MAY_CHANGE
    )
    if run.ended:
        progress.say(f"{run.path} has ended already")
        return run
    with _going_on(run) as stop:
        run.checkpoints.clean()
        state = run.checkpoints.newest(progress.say)
        if state is not None:
            _refuse_differences(
                state[1]["config"], config.to_dict(), "the checkpoint has others", MAY_CHANGE
            )
        benchmark = _benchmark(config, progress)
        trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
        journey = Journey(run, trainer, benchmark, stop)
        if state is not None:
            journey.restore(state)
        else:
            run.unlog(0)
            _take_over_first_task(trainer)
        _learn_all(journey, benchmark, progress)
    return run


def _learn_all(journey: Journey, benchmark: Benchmark, progress: Progress) -> None:
    run, trainer = journey.run, journey.trainer
    config, device = trainer.config, trainer.fabric.device
    progress.say(
        f"{config.method} on {config.benchmark}: {len(benchmark)} tasks, {benchmark.classes} "
        f"classes, memory {config.memory}, on {device_name(device)}"
    )
    if 0 < config.memory < benchmark.classes:
        progress.say(
            f"a memory of {config.memory} is smaller than the {benchmark.classes} classes: some "
            "will keep no sample, and nothing but distillation holds them"
        )
    if trainer.task_sizes or trainer.steps:
        where = f", after step {trainer.steps}" if trainer.steps else ""
        progress.say(f"going on in task {len(trainer.task_sizes) + 1}{where}")
    for task, tests in _stages(benchmark, trainer):
        if task.index < len(journey.rows):
            continue
        learned = journey.learn(task)
        row = evaluate(
            trainer.inference,
            trainer.method.heads,
            learned.visible,
            tests,
            benchmark.task_sizes[: len(tests)],
            config,
            config.seed,
            progress,
        )
        journey.rows.append(row)
        run.log({"task": task.index, "evaluation": _plain(row), "seconds": learned.seconds})
        journey.save()
        found = row[trainer.method.heads[-1]]
        progress.say(
            f"task {task.index + 1}/{len(benchmark)} ({', '.join(task.names[:6])}"
            f"{', …' if len(task.names) > 6 else ''}) learned in {learned.seconds:.1f} s, "
            f"Class-IL so far {sum(found.class_il) / len(tests):.1f} %"
        )
    seconds = journey.seconds
    if seconds["compile"]:
        progress.say(f"{seconds['compile']:.1f} s of {seconds['total']:.1f} s went into compiling")
    result = {
        "benchmark": config.benchmark,
        "method": config.method,
        "memory": config.memory,
        "seed": config.seed,
        **summarise(_triangle(journey.rows, len(benchmark))),
        "task_sizes": list(benchmark.task_sizes),
        "class_names": list(benchmark.class_names),
        "seconds": seconds,
        "images_per_second": journey.images / seconds["train"],
        "peak_memory_bytes": peak_memory(device),
        "device": device_name(device),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": {k: v for k, v in config.to_dict().items() if k not in PLACES},
    }
    write_atomically(run.path / "report.html", render(result).encode())
    run.save_result(result)


def _stages(benchmark: Benchmark, trainer: Trainer) -> Iterator[tuple[Task, Sequence[ImageSet]]]:
    """What is learned one after another, and the test sets it is judged by then."""
    tests: list[ImageSet] = []
    if trainer.method.joint:
        tasks = list(benchmark)
        classes, names = tuple(range(benchmark.classes)), tuple(benchmark.class_names)
        train = ImageSet.concatenate(*(task.train for task in tasks))
        test = ImageSet.concatenate(*(task.test for task in tasks))
        yield Task(0, classes, names, train, test), [task.test for task in tasks]
        return
    for task in benchmark:
        tests.append(task.test)
        yield task, tests


def _triangle(rows: Sequence[Row], tasks: int) -> list[Row]:
    """A row for every task; where all were learned at once, each shows the tasks up to it."""
    if len(rows) == tasks:
        return list(rows)
    (last,) = rows

    def up_to(row: Row, count: int) -> Row:
        return {
            head: Accuracies(found.class_il[:count], found.task_il[:count])
            for head, found in row.items()
        }

    return [up_to(last, count) for count in range(1, tasks + 1)]


@contextmanager
def _going_on(run: Run) -> Iterator[Interruption]:
    """Alone in the run's directory, with its own seed, and told by a signal how to go on."""
    with run.alone(), Interruption() as stop, globally_seeded(run.config.seed):
        try:
            yield stop
        except Interrupted as signal:
            how = f"go on with: cclis train --resume {run.path}"
            raise Interrupted(f"{signal}; {how}") from None


def _take_over_first_task(trainer: Trainer) -> None:
    """Bring a new trainer to where another run had trained its first task, if one is named."""
    config = trainer.config
    if config.start_from is None:
        return
    other = Run.open(config.start_from)
    _refuse_differences(
        other.config.to_dict(),
        config.to_dict(),
        f"the first task of {other.path} was learned with other settings",
        MAY_CHANGE | config.after_first_task(),
    )
    tensors, description = other.checkpoints.load("task-0")
    trainer.restore(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("memory.")},
        {
            **description,
            "task_sizes": [],
            "position": {
                "classes": description["task_sizes"][0],
                "epoch": config.first_epochs or config.epochs,
                "step": 0,
                "done": 0,
            },
        },
    )


def _refuse_differences(
    before: dict[str, Any], now: dict[str, Any], why: str, free: Collection[str] = ()
) -> None:
    found = [
        f"{name} {before.get(name)!r} → {now.get(name)!r}"
        for name in {**before, **now}
        if name not in free and before.get(name) != now.get(name)
    ]
    if found:
        raise InputError(f"{why}: {'; '.join(found)}")


def reevaluate(
    run: Run,
    *,
    data: str | None = None,
    device: str | None = None,
    options: EvaluationOptions | None = None,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Evaluate the checkpoints of a run again; with the same options, the same numbers.

    Args:
        run: The run.
        data: Where the datasets lie now [default: where they lay].
        device: Where to compute now [default: where it was computed].
        options: Other settings of the evaluation.
        progress: Where to show what goes on.

    Returns:
        The matrices and averages, as in result.json.
    """
    config = dataclasses.replace(run.config, data=data or run.config.data)
    benchmark = _benchmark(config, progress)
    trainer = Trainer.from_state(*run.checkpoints.load("task-0"), device=device)
    rows = []
    for task, tests in _stages(benchmark, trainer):
        # Heads are fitted to what was visible during the task: the memory as it was before it.
        here = task.train.to(trainer.fabric.device)
        visible = trainer.memory.visible(here) if task.index else here
        trainer.restore(*run.checkpoints.load(f"task-{task.index}"))
        rows.append(
            evaluate(
                trainer.inference,
                trainer.method.heads,
                trainer.fitted_to(visible),
                tests,
                benchmark.task_sizes[: len(tests)],
                options or config,
                config.seed,
                progress,
            )
        )
    result = {key: getattr(config, key) for key in ("benchmark", "method", "memory", "seed")}
    return {**result, **summarise(_triangle(rows, len(benchmark)))}


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    return {
        "cclis": cclis.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def _benchmark(config: Config, progress: Progress) -> Benchmark:
    return load_benchmark(
        config.benchmark,
        config.data,
        tasks=config.tasks,
        class_order=config.class_order,
        image_size=config.image_size,
        skip_corrupt=config.skip_corrupt,
        limit=config.limit,
        progress=progress,
    )


def _plain(row: Row) -> dict[str, Any]:
    return {head: dataclasses.asdict(found) for head, found in row.items()}
