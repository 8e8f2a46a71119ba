"""A whole run: every task of a benchmark learned, evaluated and recorded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

import cclis
from cclis.data.benchmarks import Benchmark, Task, load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.devices import device_name, peak_memory
from cclis.engine.randomness import globally_seeded, restore_rng_state, rng_state
from cclis.engine.trainer import Learned, Record, Trainer, strip_prefix
from cclis.errors import InputError, as_input_errors
from cclis.evaluation.accuracy import Accuracies, evaluate
from cclis.evaluation.analysis import analyse
from cclis.experiment.interruption import Interrupted, Interruption
from cclis.files import write_atomically
from cclis.methods import recorded_config
from cclis.nn.compiling import seconds_compiling
from cclis.progress import QUIET, Bar, Progress
from cclis.report.page import render
from cclis.runs.checkpoints import State
from cclis.runs.directory import Run, summarise
from cclis.runs.tensorboard import Events, require_tensorboard
from cclis.settings import Config, Options, names_of, refuse_differences

Row = dict[str, Accuracies]
OnTask = Callable[[int, float], None]
"""Told, after each task, its index and the main head's Class-IL accuracy over the tasks so far."""


def stream_of(benchmark: Benchmark) -> dict[str, Any]:
    """What tells a stream from another."""
    return {
        "class_names": list(benchmark.class_names),
        "task_sizes": list(benchmark.task_sizes),
        "samples": benchmark.samples,
        "digest": benchmark.digest,
    }


class Journey:
    """A run under way: what it has come to so far, and when that is saved."""

    def __init__(self, run: Run, trainer: Trainer, benchmark: Benchmark, stop: Interruption):
        self.run, self.trainer, self._stop = run, trainer, stop
        self._stream = stream_of(benchmark)
        self.rows: list[Row] = []
        self.events: Events | None = None
        self._compiled_before = seconds_compiling()
        self._before = {"train": 0.0, "total": 0.0, "compile": 0.0, "images": 0}
        self._trained_for = 0.0
        self._learning_since: float | None = None
        self._started = self._saved = time.perf_counter()

    @property
    def costs(self) -> dict[str, float]:
        """Seconds and images so far, in all processes that worked on the run."""
        now = time.perf_counter()
        learning = 0.0 if self._learning_since is None else now - self._learning_since
        here = {
            "train": self._trained_for + learning,
            "total": now - self._started,
            "compile": seconds_compiling() - self._compiled_before,
            "images": self.trainer.images,
        }
        return {name: self._before[name] + spent for name, spent in here.items()}

    def save(self) -> None:
        """Write a checkpoint."""
        steps, task = self.trainer.steps, len(self.trainer.task_sizes)
        name = f"task-{task - 1}" if steps is None else f"task-{task}-step-{steps}"
        self._saved = time.perf_counter()
        if name in self.run.checkpoints.names:
            return  # and is not put at risk by being written again
        self.run.sync_log()
        tensors, description = self.trainer.state()
        rng, description["chance"] = rng_state()
        tensors |= {f"chance.{name}": state for name, state in rng.items()}
        description["versions"] = versions()
        description["config_hash"] = _hash(description["config"])
        description["journey"] = {
            "stream": self._stream,
            "rows": [_plain(row) for row in self.rows],
            "costs": self.costs,
            "logged": self.run.logged,
            "threads": torch.get_num_threads(),
        }
        self.run.checkpoints.save(name, (tensors, description))

    def restore(self, state: State, warn: Callable[[str], None]) -> None:
        """Go back to where a checkpoint was written."""
        tensors, description = state
        with as_input_errors("not a state that this cclis wrote"):
            there = description["journey"]
            self.refuse_other_stream(there["stream"])
            if self.trainer.fabric.device.type == "cpu":
                # Sums over other parts round differently.
                torch.set_num_threads(int(there["threads"]))
            self.trainer.restore(tensors, description)
            restore_rng_state(strip_prefix("chance.", tensors), description["chance"])
            self.rows = [{h: Accuracies(**found) for h, found in r.items()} for r in there["rows"]]
            self._before = {name: float(there["costs"][name]) for name in self._before}
            if description["config_hash"] != _hash(description["config"]):
                raise InputError("the checkpoint's settings are not those it was written with")
            begun, now = description["versions"], versions()
            if begun != now:
                warn(f"begun with {begun}, going on with {now}: the end may have other bits")
            if self.run.logged < int(there["logged"]):
                warn(f"lines are missing from {self.run.path / 'metrics.jsonl'}")
            self.run.unlog(int(there["logged"]))

    def refuse_other_stream(self, stream: dict[str, Any]) -> None:
        """Raise an InputError that shows the difference, if there is one."""
        refuse_differences(stream, self._stream, "the checkpoint is of another stream: it had")

    def accuracy(self, index: int) -> float:
        """The main head's Class-IL accuracy after a task, over the tasks so far."""
        return statistics.fmean(self.rows[index][self.trainer.method.heads[-1]].class_il)

    def step(self) -> None:
        """After a step: save when it is time or when asked to stop, and then stop."""
        minutes = (time.perf_counter() - self._saved) / 60
        if self._stop.asked or minutes >= self.trainer.config.checkpoint_minutes:
            # What is not finite must not take the place of what is.
            self.trainer.stop_if_failed()
            self.save()
        self._stop.check()

    def learn(self, task: Task, on_epoch: Callable[[int], None]) -> Learned:
        """Learn a task, from wherever in it the trainer is; `on_epoch` hears how many are done."""

        def on_record(record: Record) -> None:
            self.log(record)
            on_epoch(record["epoch"] + 1)

        # While steps are taken a signal waits for the end of one, and the state is saved; later
        # it need not: everything is on disk.
        self._stop.waits = True
        self._learning_since = time.perf_counter()
        learned = self.trainer.learn(
            task.train, len(task.classes), on_record, self.step, self._trained
        )
        self._learning_since = None
        self._trained_for += learned.seconds
        return learned

    def log(self, record: Record) -> None:
        """Write a line of metrics.jsonl, and the same as events."""
        self.run.log(record)
        if self.events is not None:
            self.events.add(record)

    def _trained(self) -> None:
        self.save()
        self._stop.waits = False
        self._stop.check()


def train(
    config: Config, progress: Progress = QUIET, on_task: OnTask = lambda index, accuracy: None
) -> Run:
    """Learn a benchmark task by task and leave a run directory behind."""
    if config.tensorboard:
        require_tensorboard()
    benchmark = benchmark_of(config, progress)
    trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
    start = _first_task_of_another(config)
    run = Run.create(config)
    with _going_on(run) as stop:
        _learn_all(_begun(run, trainer, benchmark, stop, start), benchmark, progress, on_task)
    return run


def resume(
    run: Run,
    config: Config,
    progress: Progress = QUIET,
    on_task: OnTask = lambda index, accuracy: None,
) -> Run:
    """Go on with a run that was interrupted, from its newest whole checkpoint.

    Args:
        run: The run.
        config: Its settings; only those that are resumable may be other than they were.
        progress: Where to show what goes on.
        on_task: Told about every task of a run that had not ended, those learned before included.
    """
    free, used = names_of(type(config), resumable=True), "cannot resume: the run used"
    refuse_differences(run.config.to_dict(), config.to_dict(), used, free)
    if _has_ended(run, progress):
        with run.alone():
            run.clean()
            if not (run.path / "report.html").is_file():
                write_report(run)
        return run
    with _going_on(run) as stop:
        run.clean()
        state = run.checkpoints.newest(progress.say)
        if state is not None:
            with as_input_errors("not a state that this cclis wrote"):
                settings = dict(state[1]["config"])
                # Settings that came later have their defaults.
                before = recorded_config(settings).to_dict()
            used = "cannot resume: the checkpoint was written with"
            refuse_differences(before, config.to_dict(), used, free)
        benchmark = benchmark_of(config, progress)
        trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
        if state is not None:
            journey = Journey(run, trainer, benchmark, stop)
            journey.restore(state, progress.say)
        else:
            if run.logged:
                progress.say(f"no checkpoint is left in {run.path}: it begins anew")
            run.unlog(0)
            start = _first_task_of_another(config)
            journey = _begun(run, trainer, benchmark, stop, start)
        _learn_all(journey, benchmark, progress, on_task)
    return run


def _has_ended(run: Run, progress: Progress) -> bool:
    if not run.ended:
        return False
    try:
        _ = run.result
    except InputError as error:
        progress.say(f"{error}; it is written again")
        return False
    progress.say(f"{run.path} has ended already")
    return True


def _learn_all(journey: Journey, benchmark: Benchmark, progress: Progress, on_task: OnTask) -> None:
    run, trainer = journey.run, journey.trainer
    config, device = trainer.config, trainer.fabric.device
    progress.say(
        f"{config.method} on {config.benchmark}: {len(benchmark)} tasks, {benchmark.classes} "
        f"classes, memory {config.memory}, on {device_name(device)}"
    )
    if benchmark.left_out:
        progress.say(f"{benchmark.left_out} other classes of {config.benchmark} are in no task")
    if config.validation is not None:
        progress.say(f"tested on {config.validation:.0%} of the training samples, kept from it")
    if 0 < config.memory < benchmark.classes:
        progress.say(
            f"a memory of {config.memory} is smaller than the {benchmark.classes} classes: some "
            "will keep no sample"
        )
    if trainer.steps:
        progress.say(f"going on in task {len(trainer.task_sizes) + 1}, after step {trainer.steps}")
    elif trainer.task_sizes:
        progress.say(f"going on after task {len(trainer.task_sizes)}")
    later = 0 if trainer.method.joint else len(benchmark) - 1
    epochs = [config.first_epochs or config.epochs, *[config.epochs] * later]
    done = sum(epochs[: len(journey.rows)]) + trainer.epoch
    with (
        progress.bar("run", sum(epochs), "epochs", logged=False, done=done) as whole,
        _events_of(journey),
    ):
        _learn_each(journey, benchmark, epochs, whole, progress, on_task)
    seconds = journey.costs
    images = seconds.pop("images")
    if seconds["compile"]:
        progress.say(f"{seconds['compile']:.1f} s of {seconds['total']:.1f} s went into compiling")
    places = names_of(type(config), kind="place")
    result = {
        "benchmark": config.benchmark,
        "method": config.method,
        "memory": config.memory,
        "seed": config.seed,
        **summarise(_triangle(journey.rows, len(benchmark))),
        "task_sizes": list(benchmark.task_sizes),
        "class_names": list(benchmark.class_names),
        "seconds": seconds,
        "images_per_second": images / seconds["train"],
        "peak_memory_bytes": peak_memory(device),
        "device": device_name(device),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": {k: v for k, v in config.to_dict().items() if k not in places},
    }
    run.save_result(result)
    write_report(run)


def write_report(run: Run) -> None:
    """Write the page of a run that has ended."""
    with as_input_errors(f"{run.path} does not hold what a run of this cclis writes"):
        page = render(run.result, run.records, run.analysis)
    write_atomically(run.path / "report.html", page.encode())


def _learn_each(
    journey: Journey,
    benchmark: Benchmark,
    epochs: Sequence[int],
    whole: Bar,
    progress: Progress,
    on_task: OnTask,
) -> None:
    """Learn and evaluate what is left, one task after another."""
    trainer, config = journey.trainer, journey.trainer.config
    for task, tests in _stages(benchmark, trainer):
        if task.index < len(journey.rows):
            on_task(task.index, journey.accuracy(task.index))
            continue
        before = sum(epochs[: task.index])
        name = f"run  task {task.index + 1}/{len(epochs)}"
        whole.reach(before + trainer.epoch, name)
        learned = journey.learn(task, lambda done: whole.reach(before + done, name))  # noqa: B023
        found = evaluate(
            trainer.inference,
            trainer.method.heads,
            learned.visible,
            tests,
            benchmark.task_sizes[: len(tests)],
            config,
            config.seed,
            progress,
        )
        row = found.accuracies
        journey.rows.append(row)
        record = {"task": task.index, "evaluation": _plain(row), "seconds": learned.seconds}
        journey.log(record | ({"diagnosis": learned.diagnosis} if learned.diagnosis else {}))
        if len(tests) == len(benchmark):
            # Before the checkpoint that says that all is evaluated.
            trained = (trainer.memory, trainer.inference)
            shown = analyse(found, *trained, benchmark.classes, config.map_samples)
            journey.run.save_analysis(shown)
        journey.save()
        accuracy = journey.accuracy(task.index)
        progress.say(
            f"task {len(tests)}/{len(benchmark)} ({', '.join(task.names[:6])}"
            f"{', …' if len(task.names) > 6 else ''}) learned in {learned.seconds:.1f} s, "
            f"Class-IL so far {accuracy:.1f} %"
        )
        on_task(task.index, accuracy)


@contextmanager
def _events_of(journey: Journey) -> Iterator[None]:
    """TensorBoard's view of what is logged and will be, where it is asked for."""
    if not journey.trainer.config.tensorboard:
        yield
        return
    journey.events = Events(journey.run.path / "tensorboard", journey.run.records)
    try:
        yield
    finally:
        journey.events.close()


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
            how = f"go on with: cclis train --resume {shlex.quote(str(run.path))}"
            raise Interrupted(f"{signal}; {how}") from None


def _first_task_of_another(config: Config) -> State | None:
    """The state after the first task of the run that `start_from` names."""
    if config.start_from is None:
        return None
    other = Run.open(config.start_from)
    kind = type(config)
    free = names_of(kind, resumable=True) | names_of(kind, kind="place")
    refuse_differences(
        other.config.to_dict(),
        config.to_dict(),
        f"cannot take over the first task of {other.path}: it was learned with",
        free | config.after_first_task(),
    )
    return other.checkpoints.load("task-0")


def _begun(
    run: Run, trainer: Trainer, benchmark: Benchmark, stop: Interruption, start: State | None
) -> Journey:
    """A journey at its beginning, or where another had trained its first task."""
    journey = Journey(run, trainer, benchmark, stop)
    if start is not None:
        tensors, description = start
        with as_input_errors("not a state that this cclis wrote"):
            journey.refuse_other_stream(description["journey"]["stream"])
            epochs = trainer.config.first_epochs or trainer.config.epochs
            classes = description["task_sizes"][0]
            position = {"classes": classes, "epoch": epochs, "step": 0, "done": 0}
        if not trainer.method.streams:
            # Chosen anew, with these settings, when the first task is concluded.
            tensors = {k: v for k, v in tensors.items() if not k.startswith("memory.")}
        trainer.restore(tensors, {**description, "task_sizes": [], "position": position})
    return journey


def reevaluate(
    run: Run,
    *,
    data: str | None = None,
    device: str | None = None,
    options: Options | None = None,
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
    benchmark = benchmark_of(config, progress)
    first = run.checkpoints.load("task-0")
    with as_input_errors("not a state that this cclis wrote"):
        before = first[1]["journey"]["stream"]
        refuse_differences(before, stream_of(benchmark), "the run learned another stream: it had")
    trainer = Trainer.from_state(*first, device=device)
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
            ).accuracies
        )
    result = {key: getattr(config, key) for key in ("benchmark", "method", "memory", "seed")}
    return {**result, **summarise(_triangle(rows, len(benchmark)))}


@cache
def source_digest(package: Path) -> str:
    """Twelve digits that tell the code of a package from any other: a version has many commits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    return {
        "cclis": f"{cclis.__version__}+{source_digest(Path(cclis.__file__).parent)}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


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


def _hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _plain(row: Row) -> dict[str, Any]:
    return {head: dataclasses.asdict(found) for head, found in row.items()}
