"""The command `cclis`. Thin: it parses, calls, and turns an InputError into exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from rich.console import Console

from cclis import __version__
from cclis.errors import InputError, as_input_errors
from cclis.experiment.interruption import STOPPED, Interrupted
from cclis.progress import Progress
from cclis.settings import (
    CONFIGS,
    AugmentationOptions,
    Config,
    EvaluationOptions,
    MeansOptions,
    NetworkOptions,
    Options,
    ProbeOptions,
    RunOptions,
    StreamOptions,
    TrainingOptions,
    TuneOptions,
    config_class,
    make_config,
    methods_with,
    names_of,
    read_yaml,
    recipe_for,
    recipe_path,
    recipe_settings,
    recipes,
    setting_of,
)

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Parser(ArgumentParser):
    """A parser whose complaints are one sentence, not a screen of usage.

    Flags are written out: which recipe applies is read from them before they are parsed.
    """

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong as an InputError."""
        message = re.sub(r'Parser key "([\w.]+)"[\w ]*:', r"--\1:", " ".join(message.split()))
        message = re.sub(
            r"arguments are required: \w+\.(\w+)", r"argument is required: \1", message
        )
        message = re.sub(r"<class '(\w+)'>", r"\1", message)
        message = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", message)
        message = re.sub(
            r"Does not validate .*Subtypes: \[(.*)\] Errors: .*Given value:",
            r"Expected one of \1. Got value:",
            message,
        ).replace("Expected a ", "Expected ")
        unknown_flag = re.search(r"unrecognized arguments: --([\w-]+)|option '(\w+)'", message)
        if unknown_flag is not None:
            name = unknown_flag[1] or unknown_flag[2]
            methods = methods_with(name)
            known = set().union(*map(names_of, CONFIGS.values()))
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            if "-" in name:
                message += f". Did you mean --{name.replace('-', '_')}?"
            elif len(methods) == len(CONFIGS):
                message += ", a setting of train and tune"
            elif methods:
                message += f", {setting_of(methods)}"
            elif near:
                message += f". Did you mean {near[0]}?"
        raise InputError(message) from None


TUNING = {"epochs": 50, "first_epochs": None, "validation": 0.1}
"""What `cclis tune` has other than `cclis train`: Appendix B of the paper."""
FIRST = (StreamOptions, RunOptions, TrainingOptions)
LAST = (NetworkOptions, AugmentationOptions, ProbeOptions, MeansOptions)
"""Groups of settings in the order of the help; a method's own stand between them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except InputError as error:
        print(f"cclis: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cclis: interrupted", file=sys.stderr)
        return 130
    except Interrupted as signal:
        print(f"cclis: stopped by {signal}", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        # Whoever read what is printed has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    arguments = _config_first(_written_out(arguments))
    parser = Parser(
        prog="cclis",
        description="Continual learning of image classes with a small replay memory.",
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, dest="command")
    training = _train_parser(arguments)
    training.add_argument(
        "--resume", type=str | None, help="run directory of an interrupted run to go on with."
    )
    commands.add_subcommand("train", training, help="learn a benchmark")
    commands.add_subcommand("evaluate", _evaluate_parser(), help="evaluate a run again")
    tuning = _tune_parser(arguments) if arguments[:1] == ["tune"] else Parser()
    commands.add_subcommand("tune", tuning, help="choose settings on a validation split")
    commands.add_subcommand("report", _report_parser(), help="a page of a run, or of several")
    commands.add_subcommand("study", _study_parser(), help="a table or figure of the paper")
    commands.add_subcommand("benchmarks", Parser(), help="list benchmarks and methods")
    commands.add_subcommand("data", _data_parser(), help="list, check and download datasets")
    parsed = parser.parse_args(arguments)
    run: dict[str, Callable[[Namespace], int | None]] = {
        "train": _train,
        "evaluate": _evaluate,
        "tune": lambda options: _tune(options, _flags(arguments)),
        "report": _report,
        "study": _study,
        "benchmarks": _benchmarks,
        "data": _data,
    }
    return run[parsed.command](parsed[parsed.command]) or 0


def _train_parser(arguments: list[str]) -> ArgumentParser:
    """The parser for the method asked for, with the recipe for its benchmark as defaults."""
    hint = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--benchmark", "--method", "--config", "--resume"):
        hint.add_argument(name)
    hint.add_argument("--memory", type=int)
    try:
        given = vars(hint.parse_known_args(arguments)[0])
    except argparse.ArgumentError:
        given = {}
    asked = {name: value for name, value in given.items() if value is not None}
    file, resumed = asked.pop("config", None), asked.pop("resume", None)
    if resumed is not None:
        return _resume_parser(resumed)
    if file is not None and Path(file).is_file():
        asked = {**read_yaml(Path(file)), **asked}
    kind = config_class(str(asked.get("method", RunOptions.method)))
    parser = _settings_parser(kind)
    parser.set_defaults({field.name: field.default for field in dataclasses.fields(kind)})
    if file is None:
        benchmark = asked.get("benchmark", StreamOptions.benchmark)
        method, memory = asked.get("method", RunOptions.method), asked.get("memory")
        parser.set_defaults(recipe_settings(benchmark, method, memory))
    return parser


def _resume_parser(run: str) -> ArgumentParser:
    """The parser whose defaults are a run's own settings, so that others show."""
    from cclis.runs.directory import Run

    config = Run.open(run).config
    parser = _settings_parser(type(config))
    parser.set_defaults(config.to_dict())
    return parser


def _settings_parser(kind: type[Config]) -> ArgumentParser:
    parser = Parser(description="Learn a benchmark task by task.")
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file of settings, or a recipe by name; `cclis benchmarks` lists them.",
    )
    for group in _groups(kind):
        parser.add_class_arguments(group)
    return parser


def _groups(kind: type[Config]) -> list[type]:
    """The groups of settings that a config joins."""
    joined = [c for c in kind.__mro__ if issubclass(c, Options) and not issubclass(c, Config)]
    own = [c for c in joined if c not in (*FIRST, *LAST) and inspect.get_annotations(c)]
    return [*FIRST, *own, *(c for c in LAST if c in joined)]


def _tune_parser(arguments: list[str]) -> ArgumentParser:
    """The parser of train, with the options of tuning."""
    parser = _train_parser(arguments)
    parser.description = (
        "Choose settings on a validation split, averaged over seeds, and write them as a recipe. "
        "Settings that are not tried are flags, as for train; --epochs are those of the trials. "
        "The same command goes on, and several at once, with one --output, share the work."
    )
    parser.add_class_arguments(TuneOptions)
    parser.set_defaults(TUNING)
    return parser


def _tune(options: Namespace, flags: set[str]) -> None:
    settings = options.as_dict()
    files = settings.pop("config", None) or []
    how = TuneOptions(**{name: settings.pop(name) for name in names_of(TuneOptions)})
    benchmark, method, memory = (settings[name] for name in ("benchmark", "method", "memory"))
    if settings["output"] is None:
        settings["output"] = f"tuning/{benchmark}-{method}-{memory}"
    config = make_config(settings.pop("method"), settings)
    found = recipe_for(benchmark, method, memory)
    path = Path(str(files[-1])) if files else recipe_path(found) if found else None
    recipe = read_yaml(path) if path is not None else {}

    from rich.table import Column, Table

    from cclis.tune.tuning import main_head_of, short, tune

    trials = tune(config, how, recipe=recipe, fixed=flags, progress=Progress())
    tried = list(trials[0].settings)
    # Long names are folded rather than cut: they are what one wants to know.
    columns = [Column(name, overflow="fold") for name in tried]
    title = f"The best on the validation split, by the head {main_head_of(method)}"
    table = Table("Class-IL", "±", *columns, title=title)
    for trial in trials[:10]:
        if trial.accuracy is not None:
            spread = "" if trial.deviation is None else f"{trial.deviation:.2f}"
            values = [short(trial.settings[name]) for name in tried]
            table.add_row(f"{trial.accuracy:.2f}", spread, *values)
    console = _console()
    console.print(table)
    for what, name in (("trials", "trials.csv"), ("recipe", "recipe.yaml")):
        console.print(f"{what}  {Path(config.output or '') / name}", soft_wrap=True)


def _train(options: Namespace) -> None:
    settings = options.as_dict()
    settings.pop("config", None)
    resumed = settings.pop("resume")
    if resumed is not None:
        from cclis.runs.directory import Run

        method = Run.open(resumed).config.method
        if settings["method"] != method:
            raise InputError(
                f"a run goes on with its own settings: method '{method}' → '{settings['method']}'"
            )
    config = make_config(settings.pop("method"), settings)

    from cclis.experiment.loop import resume, train
    from cclis.report.table import result_tables
    from cclis.runs.directory import Run

    if resumed is None:
        run = train(config, Progress())
    else:
        run = resume(Run.open(resumed), config, Progress())
    result = run.result
    console = _console()
    console.print(result_tables(result))
    console.print(
        f"learned in {result['seconds']['train']:.1f} s "
        f"({result['images_per_second']:,.0f} images/s), {result['seconds']['total']:.1f} s in all"
    )
    console.print(f"report   {run.path / 'report.html'}", soft_wrap=True)
    console.print(f"numbers  {run.path / 'result.json'}", soft_wrap=True)


def _console() -> Console:
    """Where results are printed; names and paths as they are, whatever brackets they have."""
    return Console(markup=False, highlight=False)


def _evaluate_parser() -> ArgumentParser:
    parser = Parser(description="Evaluate the checkpoints of a run again.")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--data", type=str | None, help="where the datasets lie now")
    parser.add_argument("--device", type=str | None, help="where to compute: auto, cpu, cuda")
    parser.add_argument("--output", type=str | None, help="write the numbers to this JSON file")
    for name, kind in get_type_hints(EvaluationOptions).items():
        parser.add_argument(f"--{name}", type=kind | None, help="[default: as the run had]")
    return parser


def _evaluate(options: Namespace) -> None:
    from cclis.experiment.loop import reevaluate
    from cclis.files import write_json
    from cclis.report.table import result_tables
    from cclis.runs.directory import Run

    output = Path(options.output) if options.output else None
    if output is not None and output.exists():
        raise InputError(f"{output} exists already; choose another --output or remove it")
    if output is not None and not output.parent.is_dir():
        raise InputError(f"there is no folder {output.parent} to write {output.name} into")
    run = Run.open(options.run)
    given = {f.name: options[f.name] for f in dataclasses.fields(EvaluationOptions)}
    changed = {name: value for name, value in given.items() if value is not None}
    config = run.config
    for name in changed.keys() - names_of(type(config)):
        raise InputError(f"{config.method} is judged without {name}")
    config = dataclasses.replace(config, **changed)
    result = reevaluate(
        run, data=options.data, device=options.device, options=config, progress=Progress()
    )
    _console().print(result_tables(result))
    if output is not None:
        write_json(output, result)


def _report_parser() -> ArgumentParser:
    parser = Parser(description="Write the page of a run again, or set several side by side.")
    parser.add_argument(
        "runs", nargs="+", help="run directories, folders of them, or result.json files"
    )
    parser.add_argument(
        "--output",
        type=str | None,
        help="folder to write into, new or of such files [default: the run; comparison]",
    )
    return parser


def _report(options: Namespace) -> None:
    from cclis.files import write_atomically
    from cclis.report.compare import comparison, read_runs
    from cclis.report.page import render
    from cclis.runs.directory import Run

    paths = [Path(name) for name in options.runs]
    paths = [p.parent if p.name == "result.json" and _is_run(p.parent) else p for p in paths]
    results = read_runs(paths, Progress().say)
    alone = paths[0] if len(results) == 1 and (paths[0] / "result.json").is_file() else None
    with as_input_errors("not what runs of this cclis write"):
        if alone is None:
            files = comparison(results)
        else:
            run = Run(alone)
            files = {"report.html": render(run.result, run.records, run.analysis).encode()}
    folder = Path(options.output or alone or "comparison")
    if folder != alone and not (folder / next(iter(files))).is_file():  # written by this before
        _make_new(folder)
    for name, content in files.items():
        write_atomically(folder / name, content)
        print(folder / name)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _make_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already; choose another --output or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}") from None


def _study_parser() -> ArgumentParser:
    parser = Parser(
        description="Run what a table or a figure of the paper needs, and build it; or compare "
        "methods on any benchmark. Runs that are there are not repeated, interrupted ones go on, "
        "and one that fails stops no other."
    )
    parser.add_argument(
        "name",
        help="methods (any of them side by side), table1, table2, ablation-is-prd (Table 3), "
        "ablation-rbs (Table 4), buffers (Table 7), backbones (Table 8), losses (Table 9), lambda "
        "(Figure 2) or tsne (Figure 3)",
    )
    parser.add_argument(
        "--benchmark",
        nargs="+",
        help="one or several [default: those of the paper; split-digits at the scale smoke]",
    )
    parser.add_argument("--method", nargs="+", help="these alone, in this order [default: all]")
    parser.add_argument(
        "--memory",
        nargs="+",
        type=int,
        help="how many samples may be kept, one or several numbers [default: those of the paper]",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        help="a run of everything for each [default: 0 1 2; 0 at the scale smoke]",
    )
    parser.add_argument(
        "--scale",
        default="paper",
        help="paper takes the recipes as they are, short cuts their epochs to 50 and 20 (10 for "
        "methods with a classifier), smoke shows in seconds that everything runs",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        help="folder for pages and runs, shared by the studies of a scale [default: studies/SCALE]",
    )
    parser.add_argument(
        "--data",
        type=str | None,
        help="folder of the datasets, or the folder or file of your own data",
    )
    parser.add_argument(
        "--tasks",
        type=int | list[int] | None,
        help="number of tasks, or how many classes each has [default: as the benchmark has it]",
    )
    parser.add_argument(
        "--image_size", type=int | None, help="side that images of an image folder are resized to"
    )
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--jobs",
        type=int | None,
        help="runs at once, which share the card or the cores [default: 1 on a GPU, otherwise "
        "one a core]",
    )
    parser.add_argument("--dry_run", action="store_true", help="list the runs, and stop")
    return parser


def _study(options: Namespace) -> int:
    from cclis.study.run import run_study

    settings = options.as_dict()
    written, failed = run_study(
        settings.pop("name"),
        benchmarks=settings.pop("benchmark"),
        methods=settings.pop("method"),
        memories=settings.pop("memory"),
        progress=Progress(),
        **settings,
    )
    for path in written:
        print(path)
    if failed:
        print(f"cclis: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _benchmarks(options: Namespace) -> None:
    from rich.table import Table

    from cclis.data.benchmarks import BENCHMARKS

    table = Table("benchmark", "tasks", "what it is", "recipes", title_justify="left")
    for name, spec in BENCHMARKS.items():
        found = [recipe.split("/")[1] for recipe in recipes() if recipe.split("/")[0] == name]
        sizes = f"{len(spec.sizes)} × {spec.sizes[0]} classes" if spec.sizes else "--tasks"
        table.add_row(name, sizes, spec.about, ", ".join(found))
    console = _console()
    console.print(table)
    console.print(f"methods: {', '.join(CONFIGS)}")


def _data_parser() -> ArgumentParser:
    parser = Parser(description="List the datasets that are here and check them.")
    parser.add_argument("name", nargs="?", help="one benchmark alone")
    parser.add_argument("--data", type=str | None, help="folder of the datasets")
    parser.add_argument("--download", action="store_true", help="fetch what is missing")
    parser.add_argument("--thorough", action="store_true", help="compare every file's checksum")
    return parser


def _data(options: Namespace) -> None:
    from rich.table import Table

    from cclis.data.download import ARCHIVES, check, default_root, download
    from cclis.errors import unknown

    if options.name is not None and options.name not in ARCHIVES:
        raise unknown("dataset", options.name, ARCHIVES)
    if options.download and options.name is None:
        raise InputError("say which one to download: cclis data NAME --download")
    root = Path(options.data) if options.data else default_root()
    names = [options.name] if options.name else list(ARCHIVES)
    if options.download:
        download(options.name, root, Progress())
    table = Table("dataset", "state", "where", title_justify="left")
    if options.name is None:
        table.add_row("split-digits", "present", "ships with scikit-learn")
    problems = []
    for name in names:
        found = check(name, root, thorough=options.thorough)
        state = "present" if found.present else "missing"
        table.add_row(name, "damaged" if found.problem else state, str(found.where or root))
        problems += [found.problem] if found.problem else []
    _console().print(table)
    if problems:
        raise InputError("; ".join(problems))


def _config_first(arguments: list[str]) -> list[str]:
    """The arguments with `--config` in front, so that a flag overrules the file wherever it stands.

    A recipe's name is replaced by its file.
    """
    hint = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    hint.add_argument("--config", action="append", default=[])
    try:
        given, others = hint.parse_known_args(arguments)
    except argparse.ArgumentError:
        return arguments
    files = [part for name in given.config for part in ("--config", _recipe_file(name))]
    if others[:1] == ["tune"]:
        # What a file says of these is for the recipe, not for its trials.
        files += [f"--{name}={'null' if v is None else v}" for name, v in TUNING.items()]
    return [*others[:1], *files, *others[1:]]


def _written_out(arguments: list[str]) -> list[str]:
    """The arguments with `true` after switches that stand alone."""
    switches = {
        f"--{name}"
        for kind in CONFIGS.values()
        for name, hint in get_type_hints(kind).items()
        if bool in (hint, *get_args(hint))
    }
    found = []
    for number, argument in enumerate(arguments):
        following = arguments[number + 1 : number + 2]
        alone = argument in switches and (not following or following[0].startswith("--"))
        found += [argument, "true"] if alone else [argument]
    return found


def _flags(arguments: list[str]) -> set[str]:
    """The names of the flags that are given."""
    return {part[2:].split("=")[0] for part in arguments if part.startswith("--")}


def _recipe_file(name: str) -> str:
    if Path(name).exists():
        return name
    if name.endswith((".yaml", ".yml")):
        raise InputError(f"there is no file {name}")
    return str(recipe_path(name))


def entry() -> None:
    """The console script."""
    sys.exit(main())
