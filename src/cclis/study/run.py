"""Studies: the runs that a table or a figure of the paper needs, or a comparison of one's own, and
the page made of them.

A study is a grid: benchmarks × memories × variants of a method × seeds. The runs of all studies lie
side by side in one folder under names made of their settings, so that those in common are shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cclis.errors import InputError, unknown
from cclis.files import write_atomically
from cclis.methods import get
from cclis.progress import QUIET, Progress
from cclis.report.drawing import picture
from cclis.report.formats import comma_separated, latex, markdown
from cclis.report.paper import paper_row, paper_row_of_study
from cclis.report.study import (
    Row,
    study_figure,
    study_map,
    study_numbers,
    study_page,
    study_table,
)
from cclis.runs.directory import Run
from cclis.settings import RunOptions, StudyOptions, not_learned, refuse_differences
from cclis.study.catalogue import AXES, SCALES, STUDIES, Study
from cclis.study.plan import Planned, of_own_data, plan
from cclis.study.running import Launcher, default_jobs, run_all


def run_study(
    name: str, options: StudyOptions, progress: Progress = QUIET, *, launch: Launcher = run_all
) -> tuple[list[Path], dict[str, str]]:
    """Run what a study needs and is not there yet, and write its page and tables.

    Args:
        name: A key of `STUDIES`.
        options: Which rows, how large, where.
        progress: Where to show progress.
        launch: Runs what is left to run, such as `run_all`, which starts processes here.

    Returns:
        The files written, and by the names of the runs that failed, why.
    """
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    for method in options.method or ():
        get(method)  # one from elsewhere is imported because a person names it
    study, size = _narrowed(name, options.method, options.memory), SCALES[options.scale]
    benchmarks: Sequence[str] = (size.benchmark,) if size.benchmark else study.benchmarks
    benchmarks = benchmarks if options.benchmark is None else options.benchmark
    seeds = size.seeds if options.seeds is None else options.seeds
    for what, values in (("benchmark", benchmarks), ("seed", seeds)):
        _refuse_repeated(what, values)
    _refuse_other_benchmarks(benchmarks, options.data, here=not options.dry_run)
    _check_device(options.device)
    folder = Path(options.output or f"studies/{options.scale}")
    _refuse_foreign(folder)
    planned = plan(
        study,
        benchmarks=benchmarks,
        seeds=seeds,
        scale=size,
        folder=folder,
        data=str(Path(options.data).absolute()) if options.data else None,
        stream={"tasks": options.tasks, "image_size": options.image_size},
        device=options.device,
    )
    for run in planned:
        _refuse_other_settings(run)
    todo = [run for run in planned if not run.finished]
    progress.say(f"{study.place}: {len(planned)} runs, {len(planned) - len(todo)} of them finished")
    if options.dry_run:
        for run in planned:
            state = "finished" if run not in todo else "interrupted" if run.begun else "new"
            progress.say(f"{state:12} {run.name}")
        return [], {}
    _refuse_bad_data(todo, progress)
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder / 'runs'}: {error.strerror}") from None
    jobs = options.jobs or default_jobs(options.device)
    failed = launch(todo, planned, jobs, progress)
    found = rows_of(name, planned, failed)
    return _write(name, found, f"{size.about} Seeds {', '.join(map(str, seeds))}.", folder), failed


def _narrowed(name: str, methods: Sequence[str] | None, memories: Sequence[int] | None) -> Study:
    """A study with the rows of some methods alone, in their order, or with other memories."""
    study = STUDIES[name]
    if methods is not None:
        _refuse_repeated("method", methods)
        there = {variant.method: None for variant in study.rows}
        for method in methods:
            if method not in there:
                raise unknown(f"method of {name}", method, there)
        variants = [variant for variant in study.rows if variant.method in methods]
        variants.sort(key=lambda variant: methods.index(variant.method))
        study = dataclasses.replace(study, variants=tuple(variants))
    if memories is not None:
        _refuse_repeated("memory", memories)
        study = dataclasses.replace(study, memories=tuple(memories))
    return study


def _refuse_repeated(what: str, values: Sequence[object]) -> None:
    if not values or len(set(values)) < len(values):
        raise InputError(f"name each {what} once, not {' '.join(map(str, values)) or 'none'}")


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
    header, *table = study_table(rows, study.scores)
    figure = None
    if study.maps:
        figure = study_map(rows, folder / "runs")
    elif study.axis is not None:
        figure = study_figure(rows, AXES[study.axis])
    pictures = {kind: picture(figure, kind) for kind in ("svg", "png")} if figure else {}
    page = study_page(
        rows,
        study.scores,
        title=f"{study.place}: {name}",
        about=study.about,
        scale=scale,
        svg=pictures.get("svg"),
    )
    texts = {
        "html": page,
        "md": markdown(header, table),
        "csv": comma_separated(*study_numbers(rows, study.scores)),
        "tex": latex(header, table),
    }
    contents = {kind: text.encode() for kind, text in texts.items()} | pictures
    for kind, content in contents.items():
        write_atomically(folder / f"{name}.{kind}", content)
    return [folder / f"{name}.{kind}" for kind in contents]


def _check_device(device: str) -> None:
    from cclis.engine.devices import make_fabric

    make_fabric(RunOptions(device=device))


def _refuse_other_benchmarks(
    benchmarks: Sequence[str], data: str | None, *, here: bool = True
) -> None:
    from cclis.data.benchmarks import BENCHMARKS, refuse_without_data
    from cclis.data.download import ARCHIVES, check, default_root

    for name in benchmarks:
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS)
        refuse_without_data(name, data)
        if data and of_own_data(name):
            if not Path(data).exists():
                raise InputError(f"{data} does not exist")
            if len(benchmarks) > 1:
                raise InputError(f"--data is that of {name}: it needs a study of its own")
        root = Path(data) if data else default_root()
        if here and name in ARCHIVES and not check(name, root).present:
            raise InputError(
                f"the data of {name} is not in {root}: fetch it with `cclis data {name} "
                "--download`, say where it is with --data, or choose others with --benchmark"
            )


def _refuse_bad_data(runs: Sequence[Planned], progress: Progress) -> None:
    """What is wrong with a benchmark, or with its tasks, is said before any run."""
    from cclis.experiment.stages import benchmark_of

    for run in {run.config.benchmark: run for run in runs}.values():
        benchmark_of(run.config, progress)


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
    before = None
    with suppress(InputError):  # a run that cannot be read fails alone
        before = Run.open(run.path).config.to_dict()
    if before is not None:
        why = f"choose another --output: {run.path} was begun with"
        kind = type(run.config)
        free = not_learned(kind)
        if of_own_data(run.config.benchmark):
            free.remove("data")
        refuse_differences(before, run.config.to_dict(), why, free)
