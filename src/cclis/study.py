"""Studies: the runs that a table or a figure of the paper needs, and the page made of them.

A study is a grid: benchmarks × memories × variants of a method × seeds. The runs of all studies lie
side by side in one folder under names made of their settings, so that those in common are shared.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from cclis.config import (
    ClassifierConfig,
    Config,
    RunOptions,
    make_config,
    read_yaml,
    recipe_for,
    recipe_path,
)
from cclis.errors import InputError, unknown
from cclis.files import write_atomically
from cclis.interruption import Interrupted, Interruption
from cclis.progress import QUIET, Progress
from cclis.report.compare import comma_separated, latex, markdown, read_runs
from cclis.report.drawing import picture
from cclis.report.results import Result, compared_head, paper_row, paper_row_of_study, variation
from cclis.report.study import (
    Row,
    columns,
    study_figure,
    study_page,
    study_table,
)
from cclis.runs import Run

Axis = Literal["memory", "distill_weight"]
CIFAR10, CIFAR100, TINY = "seq-cifar10", "seq-cifar100", "seq-tinyimagenet"
ACCURACY = (("class_il", "accuracy"), ("task_il", "accuracy"))
FORGETTING = (("class_il", "forgetting"), ("task_il", "forgetting"))
AXES: dict[Axis, str] = {"memory": "memory (samples)", "distill_weight": "λ, weight of the PRD"}
LOOK_AGAIN_SECONDS = 0.5
STOPPED = 75


@dataclass(frozen=True)
class Variant:
    """A row of a study.

    Attributes:
        name: What it is called, as the paper does.
        method: How it learns.
        settings: What it has other than the recipe.
        not_on: Benchmarks on which the paper leaves it out.
    """

    name: str
    method: str = "cclis"
    settings: Mapping[str, Any] = field(default_factory=dict)
    not_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """What a table or a figure of the paper asks.

    Attributes:
        place: Where it stands in the paper.
        about: What it asks.
        variants: Its rows.
        memories: How many samples may be kept.
        benchmarks: Where the paper tries it.
        scores: Which numbers it shows, as (scenario, kind).
        axis: What its figure is drawn along, if it has one.
        embed: Whether its page shows the reports of its runs.
    """

    place: str
    about: str
    variants: tuple[Variant, ...]
    memories: tuple[int, ...] = (200,)
    benchmarks: tuple[str, ...] = (CIFAR10,)
    scores: tuple[tuple[str, str], ...] = ACCURACY
    axis: Axis | None = None
    embed: bool = False


METHODS = (
    Variant("ER", "er"),
    Variant("iCaRL", "icarl"),
    Variant("GEM", "gem", not_on=(TINY,)),
    Variant("GSS", "gss"),
    Variant("DER", "der"),
    Variant("Co2L", "co2l"),
    Variant("GCR", "gcr"),
    Variant("CCLIS", "cclis"),
)
NEITHER = {"selection": "random", "distillation": False}
ABLATION = (
    Variant("w/o IS and PRD", settings=NEITHER),
    Variant("w/ IS only", settings={"distillation": False}),
    Variant("w/ PRD only", settings={"selection": "random"}),
    Variant("CCLIS"),
)
STUDIES: dict[str, Study] = {
    "table1": Study(
        "Table 1",
        "Accuracy of all methods.",
        METHODS,
        (200, 500),
        (CIFAR10, CIFAR100, TINY),
    ),
    "table2": Study(
        "Tables 2 and 6",
        "Average forgetting of all methods; lower is better.",
        METHODS,
        (200, 500),
        (CIFAR10, CIFAR100, TINY),
        scores=FORGETTING,
    ),
    "ablation-is-prd": Study(
        "Table 3",
        "What importance sampling (IS) and prototype-instance relation distillation (PRD) add.",
        ABLATION,
    ),
    "ablation-rbs": Study(
        "Table 4",
        "Replay buffer selection (RBS) by score alone, or with the importance weights that take "
        "its bias out (IS); both without distillation.",
        (
            Variant("RBS only", settings={"importance_sampling": False, "distillation": False}),
            Variant("IS", settings={"distillation": False}),
        ),
        (200, 500),
    ),
    "buffers": Study(
        "Table 7",
        "The ablation of Table 3 with memories from 50 to 500 samples.",
        ABLATION,
        (50, 100, 200, 300, 400, 500),
        axis="memory",
    ),
    "backbones": Study(
        "Table 8",
        "Deeper networks, with neither importance sampling nor distillation and with both.",
        tuple(
            Variant(f"ResNet-{depth}, {name}", settings={"encoder": f"resnet{depth}", **settings})
            for depth in (18, 34, 50)
            for name, settings in (("w/o IS and PRD", NEITHER), ("CCLIS", {}))
        ),
        (100, 300),
    ),
    "losses": Study(
        "Table 9",
        "The contrastive losses alone, without distillation, with a memory chosen at random: "
        "CCLIS's symmetric contrast with prototypes, and Co2L's asymmetric one of instances.",
        (
            Variant("asymmetric supervised contrast (Co2L)", "co2l", {"distill_weight": 0.0}),
            Variant("symmetric prototype NCE (CCLIS)", settings=NEITHER),
        ),
        (200, 500),
        (CIFAR10, CIFAR100),
    ),
    "lambda": Study(
        "Figure 2",
        "Accuracy against λ, the weight of the distillation. The paper prints no numbers in this "
        "figure: its two points are those of Table 3, without distillation and with λ = 0.6.",
        tuple(
            Variant(f"λ = {weight:g}", settings={"distill_weight": weight})
            for weight in (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)
        ),
        axis="distill_weight",
    ),
    "tsne": Study(
        "Figure 3",
        "Where the samples that the memory keeps lie among all: chosen at random by Co2L, at the "
        "edges of the clusters by CCLIS. Each report shows its own run.",
        (Variant("Co2L", "co2l"), Variant("CCLIS")),
        embed=True,
    ),
}


@dataclass(frozen=True)
class Scale:
    """How large the runs of a study are.

    Attributes:
        about: In words.
        seeds: Unless others are asked for.
        benchmark: Where, unless asked for; None takes the study's own.
        first_epochs: Of the first task at most, where a recipe says how many.
        epochs: Of the tasks at most.
        classifier_epochs: The same for methods trained by cross-entropy.
        settings: What else is other than in the recipes, where a method has it.
    """

    about: str
    seeds: tuple[int, ...]
    benchmark: str | None = None
    first_epochs: int = sys.maxsize
    epochs: int = sys.maxsize
    classifier_epochs: int = sys.maxsize
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, config: Config) -> Config:
        """These settings at this scale."""
        most = self.classifier_epochs if isinstance(config, ClassifierConfig) else self.epochs
        changed = {name: v for name, v in self.settings.items() if hasattr(config, name)}
        changed["epochs"] = min(config.epochs, most)
        if config.first_epochs is not None:
            changed["first_epochs"] = min(config.first_epochs, self.first_epochs)
        return dataclasses.replace(config, **changed)


SCALES: dict[str, Scale] = {
    "paper": Scale("The recipes as they are.", (0, 1, 2)),
    "short": Scale(
        "The recipes with fewer epochs: 50 of the first task and 20 of the others at most, 10 for "
        "methods trained by cross-entropy. The paper's numbers beside it took up to 500 and 100.",
        (0, 1, 2),
        first_epochs=50,
        epochs=20,
        classifier_epochs=10,
    ),
    "smoke": Scale(
        "One epoch of a tiny network on 10 images of a class: this shows that everything runs, "
        "and nothing about the methods.",
        (0,),
        benchmark="split-digits",
        first_epochs=1,
        epochs=1,
        classifier_epochs=1,
        settings={
            **{"limit": 10, "width": 4, "batch_size": 32},
            **{"probe_epochs": 1, "mean_passes": 1, "score_passes": 1},
        },
    ),
}


@dataclass(frozen=True)
class Planned:
    """A run of a study.

    Attributes:
        variant: The row it belongs to.
        changed: What it has other than the recipe, but for the scale.
        config: Its settings, with the folder it lies in.
    """

    variant: Variant
    changed: str
    config: Config

    @property
    def path(self) -> Path:
        """Its run directory."""
        return Path(str(self.config.output))

    @property
    def name(self) -> str:
        """What its run directory is called."""
        return self.path.name

    @property
    def log(self) -> Path:
        """What it says while it runs."""
        return self.path.with_name(f"{self.name}.log")

    @cached_property
    def first_task(self) -> str:
        """Every setting that matters to the first task."""
        from cclis.experiment import MAY_CHANGE, PLACES

        free = {*MAY_CHANGE, *PLACES, *self.config.after_first_task()}
        settings = {name: v for name, v in self.config.to_dict().items() if name not in free}
        return json.dumps(settings)

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from."""
        return (self.path / "config.yaml").is_file()

    @property
    def result(self) -> Result:
        """What came out; an InputError where nothing did."""
        return read_runs([self.path / "result.json"])[0]

    @property
    def finished(self) -> bool:
        """Whether it need not be run again."""
        with suppress(InputError):
            return bool(self.result)
        return False


def plan(
    study: Study,
    *,
    benchmarks: Sequence[str],
    seeds: Sequence[int],
    scale: Scale,
    folder: Path,
    data: str | None = None,
    device: str = "auto",
) -> list[Planned]:
    """The runs of a study, row by row."""
    runs = []
    for benchmark, memory, variant in product(benchmarks, study.memories, study.variants):
        if benchmark in variant.not_on:
            continue
        full = _full(variant, benchmark, memory)
        changed = variation({**full.to_dict(), "config": full.to_dict()})
        words = [benchmark, variant.method, str(memory), *changed.replace(",", "").split()]
        for seed in seeds:
            path = folder / "runs" / "-".join([*words, f"seed{seed}"])
            config = dataclasses.replace(
                scale.of(full), seed=seed, output=str(path), data=data, device=device
            )
            runs.append(Planned(variant, changed, config))
    return runs


def run_study(
    name: str,
    *,
    benchmarks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    scale: str = "paper",
    output: str | None = None,
    data: str | None = None,
    device: str = "auto",
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = QUIET,
) -> tuple[list[Path], dict[str, str]]:
    """Run what a study needs and is not there yet, and write its page and tables.

    Args:
        name: A key of `STUDIES`.
        benchmarks: What to learn [default: what the paper does, or the scale's own].
        seeds: A run of everything for each [default: the scale's own].
        scale: A key of `SCALES`.
        output: Folder for the runs and pages of all studies of this scale [default:
            studies/SCALE].
        data: Where the datasets lie.
        device: Where to compute.
        jobs: How many runs at once [default: 1 on a GPU, otherwise one a core].
        dry_run: Only say what would be run.
        progress: Where to show what goes on.

    Returns:
        The files written, and by the names of the runs that failed, why.
    """
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    study, size = STUDIES[name], SCALES[scale]
    if benchmarks is None:
        benchmarks = (size.benchmark,) if size.benchmark else study.benchmarks
    seeds = size.seeds if seeds is None else seeds
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs must be at least 1, not {jobs}")
    for what, values in (("benchmark", benchmarks), ("seed", seeds)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"name each {what} once, not {' '.join(map(str, values)) or 'none'}")
    _refuse_other_benchmarks(benchmarks, data, here=not dry_run)
    _check_device(device)
    folder = Path(output or f"studies/{scale}")
    _refuse_foreign(folder)
    planned = plan(
        study,
        benchmarks=benchmarks,
        seeds=seeds,
        scale=size,
        folder=folder,
        data=data,
        device=device,
    )
    for run in planned:
        _refuse_other_settings(run)
    todo = [run for run in planned if not run.finished]
    progress.say(f"{study.place}: {len(planned)} runs, {len(planned) - len(todo)} of them finished")
    if dry_run:
        for run in planned:
            state = "finished" if run not in todo else "interrupted" if run.begun else "new"
            progress.say(f"{state:12} {run.name}")
        return [], {}
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder / 'runs'}: {error.strerror}") from None
    failed = _run_all(todo, planned, jobs or _default_jobs(device), progress)
    found = rows_of(name, planned, failed)
    return _write(name, found, f"{size.about} Seeds {', '.join(map(str, seeds))}.", folder), failed


def _run_all(
    todo: Sequence[Planned], planned: Sequence[Planned], jobs: int, progress: Progress
) -> dict[str, str]:
    """Run them, so many at once, each in a process of its own; returns why which ones failed."""
    if not todo:
        return {}
    context, threads = _processes(), max(1, _cores() // min(jobs, len(todo)))
    here = os.getcwd(), dict(os.environ)
    waiting, working = list(todo), list[tuple[Planned, BaseProcess]]()
    failed: dict[str, str] = {}
    with progress.bar("runs", len(todo)) as bar, Interruption() as stop:
        stop.waits = True  # a process that was started must be known before it can be stopped
        try:
            while waiting or working:
                stop.check()
                under_way = [run for run, _ in working]
                run = _next(waiting, under_way, planned, failed) if len(working) < jobs else None
                if run is not None:
                    waiting = [other for other in waiting if other.name != run.name]
                    progress.say(f"{'going on with' if run.begun else 'starting'} {run.name}")
                    started = context.Process(target=_work, args=(run, threads, *here), daemon=True)
                    started.start()
                    working.append((run, started))
                    continue
                wait([process.sentinel for _, process in working], LOOK_AGAIN_SECONDS)
                for run, process in [pair for pair in working if not pair[1].is_alive()]:
                    working.remove((run, process))
                    why = _failure(run, process.exitcode)
                    if why is not None:
                        failed[run.name] = why
                        progress.say(f"failed: {run.name}: {why} (its log: {run.log})")
                    else:
                        progress.say(f"{run.name}: {_accuracy(run.result)}")
                    bar.advance(note=f"{len(failed)} failed" if failed else None)
        except Interrupted as caught:
            for _, process in working:
                process.terminate()  # it saves what it has, once
            for _, process in working:
                process.join()
            raise Interrupted(f"{caught}; go on with the same command") from None
    return failed


def _processes() -> SpawnContext | ForkServerContext:
    """How processes are started: by a server that has imported everything once, if possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cclis.experiment", "sklearn.datasets"])
    if threading.current_thread() is threading.main_thread():
        # A key pressed in the terminal must not end the server while it imports.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
    return context


def _work(run: Planned, threads: int, folder: str, environment: dict[str, str]) -> None:
    """What the process of a run does."""
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

    from cclis.experiment import resume, train

    if run.config.threads is None:
        torch.set_num_threads(threads)
    try:
        if run.begun:
            there = Run.open(run.path)
            data, device = run.config.data, run.config.device
            resume(there, dataclasses.replace(there.config, data=data, device=device), Progress())
        else:
            train(run.config, Progress())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Interrupted:
        sys.exit(STOPPED)


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


def _failure(run: Planned, exit_code: int | None) -> str | None:
    """Why a run failed, in a line; None if it did not."""
    if exit_code == 0:
        try:
            return None if run.result else "no result"
        except InputError as error:
            return str(error)
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    try:
        lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return f"cannot write {run.log}: {error.strerror}"
    said = [line.strip() for line in lines if line.strip()]
    return "stopped by a signal" if exit_code == STOPPED or not said else said[-1]


def rows_of(name: str, planned: Sequence[Planned], failed: Mapping[str, str]) -> list[Row]:
    """The rows of a study, each from the runs that differ in nothing but the seed.

    Args:
        name: The study.
        planned: All its runs; those that have not failed are finished.
        failed: Why runs failed, by their names.
    """
    study = STUDIES[name]
    groups: dict[tuple[str, int, str], list[Planned]] = {}
    for run in planned:
        key = (run.config.benchmark, run.config.memory, run.variant.name)
        groups.setdefault(key, []).append(run)
    several = len({benchmark for benchmark, _, _ in groups}) > 1
    rows = []
    for (benchmark, memory, variant), runs in groups.items():
        first = runs[0]
        paper = paper_row_of_study(name, benchmark, memory, variant)
        line = variant if study.axis == "memory" else first.variant.method.upper()
        rows.append(
            Row(
                benchmark,
                memory,
                variant,
                {run.name: run.result for run in runs if run.name not in failed},
                {run.name: failed[run.name] for run in runs if run.name in failed},
                paper or paper_row(benchmark, memory, first.variant.method, first.changed),
                f"{line}, {benchmark}" if several else line,
                getattr(first.config, study.axis) if study.axis else None,
            )
        )
    return rows


def _write(name: str, rows: Sequence[Row], scale: str, folder: Path) -> list[Path]:
    """The page, tables and pictures of a study."""
    study = STUDIES[name]
    header, table = columns(study.scores), study_table(rows, study.scores)
    contents: dict[str, bytes] = {}
    if study.axis is not None:
        figure = study_figure(rows, AXES[study.axis])
        contents |= {kind: picture(figure, kind) for kind in ("svg", "png")}
    page = study_page(
        rows,
        study.scores,
        title=f"{study.place}: {name}",
        about=study.about,
        scale=scale,
        svg=contents.get("svg"),
        embed=study.embed,
    )
    texts = {
        "html": page,
        "md": markdown(header, table),
        "csv": comma_separated(header, table),
        "tex": latex(header, table),
    }
    contents = {**{kind: text.encode() for kind, text in texts.items()}, **contents}
    for kind, content in contents.items():
        write_atomically(folder / f"{name}.{kind}", content)
    return [folder / f"{name}.{kind}" for kind in contents]


def _full(variant: Variant, benchmark: str, memory: int) -> Config:
    """The settings of a variant as the paper has it."""
    recipe = recipe_for(benchmark, variant.method, memory)
    settings = {} if recipe is None else read_yaml(recipe_path(recipe))
    settings |= {"benchmark": benchmark, "memory": memory, **variant.settings}
    settings.pop("method", None)
    return make_config(variant.method, settings)


def _accuracy(result: Result) -> str:
    head = compared_head(result)
    return f"Class-IL {result['class_il'][head]['accuracy']:.1f} % ({head})"


def _check_device(device: str) -> None:
    from cclis.engine.device import make_fabric

    make_fabric(RunOptions(device=device))


def _refuse_other_benchmarks(
    benchmarks: Sequence[str], data: str | None, *, here: bool = True
) -> None:
    from cclis.data.benchmarks import BENCHMARKS
    from cclis.data.download import ARCHIVES, check, default_root

    known = [name for name, spec in BENCHMARKS.items() if spec.sizes]
    for name in benchmarks:
        if name in BENCHMARKS and name not in known:
            raise InputError(f"a study cannot run on {name}; it can on {', '.join(known)}")
        if name not in known:
            raise unknown("benchmark", name, known)
        root = Path(data) if data else default_root()
        if here and name in ARCHIVES and not check(name, root).present:
            raise InputError(
                f"the data of {name} is not in {root}: fetch it with `cclis data {name} "
                "--download`, say where it is with --data, or choose others with --benchmark"
            )


def _refuse_foreign(folder: Path) -> None:
    """A study's folder holds nothing but the runs and pages of studies."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; choose another --output")
    if not folder.exists():
        return
    for path in sorted(folder.iterdir()):
        if path.stem not in {"runs", *STUDIES} and not path.name.startswith("."):
            raise InputError(
                f"{folder} holds {path.name}, which no study has written; choose another --output"
            )


def _refuse_other_settings(run: Planned) -> None:
    """A run that is there must be the one that is asked for."""
    from cclis.experiment import MAY_CHANGE, PLACES, refuse_differences

    before = None
    with suppress(InputError):  # what cannot be read fails as a run, and the others go on
        before = Run.open(run.path).config.to_dict()
    if before is not None:
        why = f"{run.path} was begun with other settings; choose another --output"
        free = {*MAY_CHANGE, *PLACES}
        refuse_differences(before, run.config.to_dict(), why, free)


def _default_jobs(device: str) -> int:
    import torch

    return 1 if device != "cpu" and torch.cuda.is_available() else _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
