"""A whole run: every task of a benchmark learned, evaluated and recorded."""

from __future__ import annotations

import dataclasses
import platform
import time
from typing import Any

import numpy
import torch

import cclis
from cclis.config import Config, EvaluationOptions
from cclis.data.benchmarks import Benchmark, load_benchmark
from cclis.engine.device import device_name, peak_memory
from cclis.engine.trainer import Trainer
from cclis.evaluation.accuracy import Accuracies, evaluate
from cclis.files import write_atomically
from cclis.progress import QUIET, Progress
from cclis.report.page import render
from cclis.runs import Run, summarise

PLACES = ("output", "data")
"""Settings that say where, not what: a result leaves them out."""


def train(config: Config, progress: Progress = QUIET) -> Run:
    """Learn a benchmark task by task and leave a run directory behind."""
    started = time.perf_counter()
    benchmark = _benchmark(config, progress)
    trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
    run = Run.create(config)
    progress.say(
        f"{config.method} on {config.benchmark}: {len(benchmark)} tasks, {benchmark.classes} "
        f"classes, memory {config.memory}, on {device_name(trainer.fabric.device)}"
    )
    rows, tests, images, seconds = [], [], 0, 0.0
    for task in benchmark:
        learned = trainer.learn(task.train, len(task.classes), run.log)
        images, seconds = images + learned.images, seconds + learned.seconds
        run.save_checkpoint(task.index, trainer.state())
        tests.append(task.test)
        row = evaluate(
            trainer.inference,
            trainer.method.heads,
            learned.visible,
            tests,
            trainer.task_sizes,
            config,
            config.seed,
            progress,
        )
        rows.append(row)
        run.log({"task": task.index, "evaluation": _plain(row), "seconds": learned.seconds})
        found = row[trainer.method.heads[-1]]
        progress.say(
            f"task {task.index + 1}/{len(benchmark)} ({', '.join(task.names[:6])}"
            f"{', …' if len(task.names) > 6 else ''}) learned in {learned.seconds:.1f} s, "
            f"Class-IL so far {sum(found.class_il) / len(tests):.1f} %"
        )
    result = {
        "benchmark": config.benchmark,
        "method": config.method,
        "memory": config.memory,
        "seed": config.seed,
        **summarise(rows),
        "task_sizes": list(benchmark.task_sizes),
        "class_names": list(benchmark.class_names),
        "seconds": {"train": seconds, "total": time.perf_counter() - started},
        "images_per_second": images / seconds,
        "peak_memory_bytes": peak_memory(trainer.fabric.device),
        "device": device_name(trainer.fabric.device),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": {k: v for k, v in config.to_dict().items() if k not in PLACES},
    }
    write_atomically(run.path / "report.html", render(result).encode())
    run.save_result(result)
    return run


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
    trainer = Trainer.from_state(*run.load_checkpoint(0), device=device)
    rows, tests = [], []
    for task in benchmark:
        # Heads are fitted to what was visible during the task: the memory as it was before it.
        here = task.train.to(trainer.fabric.device)
        visible = trainer.memory.visible(here) if task.index else here
        trainer.restore(*run.load_checkpoint(task.index))
        tests.append(task.test)
        rows.append(
            evaluate(
                trainer.inference,
                trainer.method.heads,
                visible,
                tests,
                trainer.task_sizes,
                options or config,
                config.seed,
                progress,
            )
        )
    result = {key: getattr(config, key) for key in ("benchmark", "method", "memory", "seed")}
    return {**result, **summarise(rows)}


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
        limit=config.limit,
        progress=progress,
    )


def _plain(row: dict[str, Accuracies]) -> dict[str, Any]:
    return {head: dataclasses.asdict(found) for head, found in row.items()}
