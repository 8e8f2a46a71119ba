"""What happens in a run, in order: every task learned, evaluated and recorded."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager

from cclis.data.benchmarks import Benchmark
from cclis.engine.devices import device_name, peak_memory
from cclis.engine.events import EpochEnded, StepDone, TaskLearned, TaskTrained
from cclis.engine.randomness import globally_seeded
from cclis.engine.trainer import Trainer
from cclis.errors import InputError, as_input_errors, os_errors
from cclis.evaluation.analysis import analyse
from cclis.evaluation.heads import chosen_heads
from cclis.experiment.interruption import Interrupted, Interruption
from cclis.experiment.stages import benchmark_of, evaluate_stage, rows_by_task, stages
from cclis.experiment.state import RunState, first_task_of, restore, reuse_first_task, save
from cclis.experiment.versions import versions
from cclis.files import write_atomically
from cclis.methods import recorded_config
from cclis.progress import QUIET, Progress, duration
from cclis.report.page import render
from cclis.runs import Run
from cclis.runs.records import Evaluation, Record, Result, Seconds, changed_settings, summarise
from cclis.runs.tensorboard import TensorBoard, require_tensorboard
from cclis.settings import Config, names_of, refuse_differences
from cclis.settings.recipes import recipe_memory


@os_errors()
def train(config: Config, progress: Progress = QUIET) -> Run:
    """Learn a benchmark task by task; returns the run, whose folder holds what came out."""
    with training(config, progress) as (run, records):
        deque(records, maxlen=0)
    return run


@os_errors()
def resume(run: Run, config: Config, progress: Progress = QUIET) -> Run:
    """Resume a run that was interrupted, from its newest whole checkpoint.

    Args:
        run: The run.
        config: Its settings; only those that are resumable may be other than they were.
        progress: Where to show progress.
    """
    with resuming(run, config, progress) as (_, records):
        deque(records, maxlen=0)
    return run


@contextmanager
def training(config: Config, progress: Progress = QUIET) -> Iterator[tuple[Run, Iterator[Record]]]:
    """A new run, and its records as they happen: what consumes them makes it run.

    While the block runs, no other process may write into the run's folder, and signals stop it at
    the next safe place. The run may be left at any record and resumed later.
    """
    if config.tensorboard:
        require_tensorboard()
    benchmark = benchmark_of(config, progress)
    trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
    chosen_heads(trainer.method.heads, config, config.heads)
    first_task = first_task_of(config)
    run = Run.create(config)
    with _working_on(run) as stop:
        if first_task is not None:
            reuse_first_task(trainer, benchmark, first_task)
        with closing(_learn(run, trainer, benchmark, RunState(), stop, progress)) as records:
            yield run, records


@contextmanager
def resuming(
    run: Run, config: Config, progress: Progress = QUIET
) -> Iterator[tuple[Run, Iterator[Record]]]:
    """An interrupted run, and its records from there on; see `training`."""
    free, used = names_of(type(config), resumable=True), "cannot resume: the run used"
    if "recipe" not in run.settings:
        free.add("recipe")  # earlier versions did not record it
    refuse_differences(run.config.to_dict(), config.to_dict(), used, free)
    if _has_ended(run, progress):
        with run.alone():
            run.clean()
            if not (run.path / "report.html").is_file():
                write_report(run)
        yield run, iter(())
        return
    with _working_on(run) as stop:
        run.clean()
        checkpoint = run.checkpoints.newest(progress.say)
        if checkpoint is not None:
            with as_input_errors("not a checkpoint that this cclis wrote"):
                before = recorded_config(checkpoint[1]["config"]).to_dict()
            used = "cannot resume: the checkpoint was written with"
            refuse_differences(before, config.to_dict(), used, free)
        benchmark = benchmark_of(config, progress)
        trainer = Trainer(config, benchmark.image_shape, benchmark.classes, progress=progress)
        if checkpoint is not None:
            state = restore(run, trainer, benchmark, checkpoint, progress.say)
        else:
            if run.logged:
                progress.say(f"no checkpoint is left in {run.path}: it starts from the beginning")
            run.unlog(0)
            state, first_task = RunState(), first_task_of(config)
            if first_task is not None:
                reuse_first_task(trainer, benchmark, first_task)
        with closing(_learn(run, trainer, benchmark, state, stop, progress)) as records:
            yield run, records


def _learn(
    run: Run,
    trainer: Trainer,
    benchmark: Benchmark,
    state: RunState,
    stop: Interruption,
    progress: Progress,
) -> Generator[Record, None, None]:
    """Learn, evaluate and save what is left, task by task; then write the result and its page."""
    config = trainer.config
    heads = chosen_heads(trainer.method.heads, config, config.heads)
    main_head = trainer.method.main_head()
    _introduce(trainer, benchmark, progress)
    epochs = _epochs(trainer, benchmark)
    done = sum(epochs[: len(state.rows)]) + trainer.trained_epochs
    with (
        progress.bar("run", sum(epochs), "epochs", logged=False, done=done) as whole,
        _loggers(run, config) as loggers,
    ):
        for stage in stages(benchmark, joint=trainer.method.joint):
            task, before = stage.task, sum(epochs[: stage.task.index])
            if task.index < len(state.rows):
                continue
            title = f"run  task {task.index + 1}/{len(epochs)}"
            whole.reach(before + trainer.trained_epochs, title)
            stop.waits = True  # until the end of a step, where the state is whole
            saved = time.perf_counter()
            with (
                state.timed("train"),
                closing(trainer.learn(task.train, len(task.classes))) as events,
            ):
                for event in events:
                    match event:
                        case StepDone(epochs=trained):
                            whole.reach(before + trained, title)
                            minutes = (time.perf_counter() - saved) / 60
                            if stop.asked or minutes >= config.checkpoint_minutes:
                                # What is not finite must not take the place of what is.
                                trainer.stop_if_failed()
                                save(run, trainer, benchmark, state)
                                saved = time.perf_counter()
                            stop.check()
                        case EpochEnded(record):
                            for log in loggers:
                                log(record)
                            yield record
                        case TaskTrained():
                            save(run, trainer, benchmark, state)
                            stop.waits = False  # from here on everything is on disk
                            stop.check()
                        case TaskLearned():
                            learned = event
            with state.timed("evaluation"):
                started = time.perf_counter()
                evaluation = evaluate_stage(
                    trainer, stage, learned.visible, heads, config, progress
                )
                seconds = learned.seconds, time.perf_counter() - started
            state.rows.append(evaluation.accuracies)
            scores = Evaluation(
                task.index, evaluation.accuracies, main_head, seconds[0], learned.diagnosis
            )
            for log in loggers:
                log(scores)
            if len(stage.tests) == len(benchmark):
                # Before the checkpoint that says that all is evaluated.
                classes, samples = benchmark.classes, config.map_samples
                shown = analyse(evaluation, trainer.memory, trainer.inference, classes, samples)
                run.save_analysis(shown)
            save(run, trainer, benchmark, state)
            progress.say(
                f"task {len(stage.tests)}/{len(benchmark)} ({', '.join(task.names[:6])}"
                f"{', …' if len(task.names) > 6 else ''}) learned in {duration(seconds[0])}, "
                f"evaluated in {duration(seconds[1])}, Class-IL so far {scores.accuracy:.1f} %"
            )
            yield scores
    run.save_result(_result(trainer, benchmark, state, progress))
    write_report(run)


def write_report(run: Run) -> None:
    """Write the page of a run that has ended."""
    with as_input_errors(f"{run.path} does not hold what a run of this cclis writes"):
        page = render(run.result, run.records, run.analysis)
    write_atomically(run.path / "report.html", page.encode())


@contextmanager
def _working_on(run: Run) -> Iterator[Interruption]:
    """Alone in the run's folder, with its own seed, and stopped by signals at safe places."""
    with run.alone(), Interruption() as stop, globally_seeded(run.config.seed):
        try:
            yield stop
        except Interrupted as signal:
            how = f"resume with: cclis train --resume {shlex.quote(str(run.path))}"
            raise Interrupted(f"{signal}; {how}") from None


@contextmanager
def _loggers(run: Run, config: Config) -> Iterator[list[Callable[[Record], None]]]:
    """What takes every record: the run's log, and TensorBoard where it is asked for."""
    if not config.tensorboard:
        yield [run.log]
        return
    with closing(TensorBoard(run.path / "tensorboard", run.records)) as board:
        yield [run.log, board.add]


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


def _introduce(trainer: Trainer, benchmark: Benchmark, progress: Progress) -> None:
    """Say what is going to be learned, how, and from where."""
    config = trainer.config
    progress.say(
        f"{config.method} on {config.benchmark}: {len(benchmark)} tasks, {benchmark.classes} "
        f"classes, memory {config.memory}, on {device_name(trainer.fabric.device)}"
    )
    if config.recipe is not None:
        tuned = recipe_memory(config.recipe)
        nearest = f", the nearest to a memory of {config.memory}" * (tuned != config.memory)
        progress.say(f"recipe {config.recipe}{nearest}")
    if benchmark.left_out:
        progress.say(f"{benchmark.left_out} other classes of {config.benchmark} are in no task")
    if config.validation is not None:
        progress.say(f"tested on {config.validation:.0%} of the training samples, held out")
    if 0 < config.memory < benchmark.classes:
        progress.say(
            f"a memory of {config.memory} is smaller than the {benchmark.classes} classes: some "
            "will keep no sample"
        )
    if trainer.steps:
        progress.say(f"resumed in task {len(trainer.task_sizes) + 1}, after step {trainer.steps}")
    elif trainer.task_sizes:
        progress.say(f"resumed after task {len(trainer.task_sizes)}")


def _epochs(trainer: Trainer, benchmark: Benchmark) -> list[int]:
    """Epochs of every stage."""
    config, later = trainer.config, 0 if trainer.method.joint else len(benchmark) - 1
    return [config.first_epochs or config.epochs, *[config.epochs] * later]


def _result(trainer: Trainer, benchmark: Benchmark, state: RunState, progress: Progress) -> Result:
    config, device = trainer.config, trainer.fabric.device
    costs = dataclasses.asdict(state.costs_now(trainer.images))
    images = costs.pop("images")
    if costs["compile"]:
        progress.say(
            f"{duration(costs['compile'])} of {duration(costs['total'])} went into compiling"
        )
    rows = rows_by_task(state.rows, len(benchmark))
    places = names_of(type(config), kind="place")
    return Result(
        benchmark=config.benchmark,
        method=config.method,
        memory=config.memory,
        seed=config.seed,
        main_head=trainer.method.main_head(),
        class_il=summarise(rows, "class_il"),
        task_il=summarise(rows, "task_il"),
        recipe=config.recipe,
        changed=changed_settings(config.to_dict()),
        task_sizes=list(benchmark.task_sizes),
        class_names=list(benchmark.class_names),
        seconds=Seconds(**costs),
        images_per_second=images / costs["train"],
        peak_memory_bytes=peak_memory(device),
        device=device_name(device),
        versions=versions(config.method),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        config={k: v for k, v in config.to_dict().items() if k not in places},
    )
