"""What is learned one after another in a run, and what it is tested on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cclis.data.benchmarks import Benchmark, Task, load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.trainer import Trainer
from cclis.evaluation.accuracy import Accuracies, Evaluation, evaluate
from cclis.progress import QUIET, Progress
from cclis.settings import Config

Row = dict[str, Accuracies]
"""Accuracies on the tasks so far, by head."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A task, or all tasks of a stream as one.

    Attributes:
        task: What is learned.
        tests: The test samples of every task so far.
        sizes: How many classes each of these tasks has.
    """

    task: Task
    tests: Sequence[ImageSet]
    sizes: Sequence[int]


def stages(benchmark: Benchmark, *, joint: bool) -> Iterator[Stage]:
    """The stages of a run, in order; with `joint`, all tasks are learned at once."""
    sizes, tests = benchmark.task_sizes, list[ImageSet]()
    if joint:
        tasks = list(benchmark)
        classes, names = tuple(range(benchmark.classes)), tuple(benchmark.class_names)
        train = ImageSet.concatenate(*(task.train for task in tasks))
        test = ImageSet.concatenate(*(task.test for task in tasks))
        yield Stage(Task(0, classes, names, train, test), [task.test for task in tasks], sizes)
        return
    for task in benchmark:
        tests.append(task.test)
        yield Stage(task, tests, sizes[: len(tests)])


def evaluate_stage(
    trainer: Trainer,
    stage: Stage,
    visible: ImageSet,
    heads: Sequence[str],
    config: Config,
    progress: Progress,
) -> Evaluation:
    """Fit heads to what was visible in a stage, and test them on every task so far."""
    return evaluate(
        trainer.inference,
        heads,
        visible,
        stage.tests,
        stage.sizes,
        config,
        config.seed,
        progress,
    )


def rows_by_task(rows: Sequence[Row], tasks: int) -> list[Row]:
    """A row for every task; where all were learned at once, each shows the tasks up to it."""
    if len(rows) == tasks:
        return list(rows)
    (last,) = rows
    return [
        {
            head: Accuracies(accuracies.class_il[:count], accuracies.task_il[:count])
            for head, accuracies in last.items()
        }
        for count in range(1, tasks + 1)
    ]


def benchmark_of(config: Config, progress: Progress = QUIET) -> Benchmark:
    """The stream that a run with these settings learns."""
    return load_benchmark(
        config.benchmark,
        config.data,
        tasks=config.tasks,
        class_order=config.class_order,
        image_size=config.image_size,
        skip_corrupt=config.skip_corrupt,
        limit=config.limit,
        validation=config.validation,
        seed=config.seed,
        progress=progress,
    )


def stream_of(benchmark: Benchmark) -> dict[str, Any]:
    """What tells a stream from another."""
    return {
        "class_names": list(benchmark.class_names),
        "task_sizes": list(benchmark.task_sizes),
        "samples": benchmark.samples,
        "digest": benchmark.digest,
    }
