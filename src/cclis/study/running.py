"""Runs of a study in processes of their own, several at once."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from cclis.errors import InputError
from cclis.experiment.interruption import STOPPED, Interrupted, Interruption
from cclis.methods import get
from cclis.progress import Progress, Screen, print_line
from cclis.report.paper import compared_head
from cclis.runs.directory import Run
from cclis.runs.records import Result
from cclis.study.plan import Planned

LOOK_AGAIN_SECONDS = 0.5
Launcher = Callable[[Sequence[Planned], Sequence[Planned], int, Progress], dict[str, str]]
"""Runs what is left of all that is planned, so many at once; returns why which runs failed."""


def run_all(
    todo: Sequence[Planned], planned: Sequence[Planned], jobs: int, progress: Progress
) -> dict[str, str]:
    """Run them, so many at once, each in a process of its own; returns why which ones failed."""
    if not todo:
        return {}
    context, threads = _processes(), max(1, _cores() // min(jobs, len(todo)))
    here = os.getcwd(), dict(os.environ)
    waiting, working = list(todo), list[tuple[Planned, BaseProcess, Connection]]()
    failed: dict[str, str] = {}
    with progress.bar("runs", len(todo)) as bar, Interruption() as stop:
        stop.waits = True  # a process that was started must be known before it can be stopped
        try:
            while waiting or working:
                stop.check()
                under_way = [run for run, *_ in working]
                run = _next(waiting, under_way, planned, failed) if len(working) < jobs else None
                if run is not None:
                    waiting = [other for other in waiting if other.name != run.name]
                    progress.say(f"{'resuming' if run.begun else 'starting'} {run.name}")
                    told, tell = context.Pipe(duplex=False)
                    arguments = (run, tell, threads, *here)
                    started = context.Process(target=_work, args=arguments, daemon=True)
                    started.start()
                    working.append((run, started, told))
                    continue
                wait([process.sentinel for _, process, _ in working], LOOK_AGAIN_SECONDS)
                for ended in [each for each in working if not each[1].is_alive()]:
                    working.remove(ended)
                    run, process, told = ended
                    why = _failure(run, process.exitcode, told)
                    if why is not None:
                        failed[run.name] = why
                        progress.say(f"failed: {run.name}: {why} (its log: {run.log})")
                    else:
                        progress.say(f"{run.name}: {_accuracy(run.result)}")
                    bar.advance(note=f"{len(failed)} failed" if failed else None)
        except Interrupted as caught:
            for _, process, _ in working:
                process.terminate()  # it saves what it has, once
            for _, process, _ in working:
                process.join()
            raise Interrupted(f"{caught}; the same command resumes it") from None
    # Another study may have ended meanwhile what it would not let go of.
    return {run.name: failed[run.name] for run in todo if run.name in failed and not run.finished}


def _processes() -> SpawnContext | ForkServerContext:
    """How processes are started: by a server that has imported everything once, if possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cclis.experiment.loop", "sklearn.datasets"])
    if threading.current_thread() is threading.main_thread():
        # A key pressed in the terminal must not end the server, nor the terminal when it closes.
        numbers = (signal.SIGINT, signal.SIGHUP)
        before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
        forkserver.ensure_running()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    return context


def _work(
    run: Planned, tell: Connection, threads: int, folder: str, environment: dict[str, str]
) -> None:
    """The process of a run. It sends why it fails, as others may write to its log."""
    try:
        _learn(run, threads, folder, environment)
    except Interrupted:
        sys.exit(STOPPED)
    except InputError as error:
        tell.send(str(error))
        print_line(Screen(stderr=True), str(error))
        sys.exit(2)
    except Exception as error:
        tell.send(f"{type(error).__name__}: {error}")
        raise


def _learn(run: Planned, threads: int, folder: str, environment: dict[str, str]) -> None:
    # A server knows those of the moment it was started.
    os.chdir(folder)
    os.environ.update(environment)
    if hasattr(os, "setsid"):
        # A key pressed in the terminal reaches the study alone, which passes it on once.
        os.setsid()
    with run.log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import torch

    from cclis.experiment.loop import resume, train

    get(run.config.method)  # which a person has named, so that its runs can be read

    if run.config.threads is None:
        torch.set_num_threads(threads)
    if run.begun:
        there = Run.open(run.path)
        data, device = run.config.data, run.config.device
        resume(there, dataclasses.replace(there.config, data=data, device=device), Progress())
    else:
        train(run.config, Progress())


def _next(
    waiting: Sequence[Planned],
    working: Collection[Planned],
    planned: Sequence[Planned],
    failed: Collection[str],
) -> Planned | None:
    """The next run that need not wait for the first task of another, ready to take one over."""
    under_way = {run.first_task for run in working}
    for run in waiting:
        alike = (r for r in planned if r.first_task == run.first_task and r.name != run.name)
        donor = next((r for r in alike if r.name not in failed and _has_first_task(r)), None)
        if donor is not None:
            config = dataclasses.replace(run.config, start_from=str(donor.path))
            return dataclasses.replace(run, config=config)
        if run.begun or run.first_task not in under_way:
            return run
    return None


def _has_first_task(run: Planned) -> bool:
    """Whether the first task of a run can be taken over."""
    there = Run(run.path)
    with suppress(InputError):
        return "task-0" in there.checkpoints.names and bool(there.config)
    return False


def _failure(run: Planned, exit_code: int | None, told: Connection) -> str | None:
    """Why a run failed, in a line; None if it did not."""
    try:
        _ = run.result
        return None
    except InputError as error:
        reason = str(error)
    if exit_code == STOPPED:
        return "stopped by a signal"
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    with suppress(EOFError):
        reason = told.recv() if told.poll() else reason
    # YAML's errors have lines of their own for a caret below the place they speak of.
    lines = [line.strip() for line in reason.splitlines()]
    return " ".join(line for line in lines if line not in ("", "^"))


def _accuracy(result: Result) -> str:
    head = compared_head(result)
    return f"Class-IL {result.class_il[head].accuracy:.1f} % ({head})"


def default_jobs(device: str) -> int:
    """How many runs at once: one on a GPU, otherwise one a core."""
    import torch

    return 1 if device != "cpu" and torch.cuda.is_available() else _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
