"""`cclis report`: the page of a run, or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cclis.cli.parser import Parser, normalise
from cclis.errors import InputError, as_input_errors
from cclis.progress import Progress, Screen, print_line


def _parser() -> Parser:
    parser = Parser(
        prog="cclis report",
        description="Write the page of a run again, or set several side by side.",
    )
    parser.add_argument(
        "runs", nargs="+", help="run directories, folders of them, or result.json files"
    )
    parser.add_argument(
        "--output",
        type=str | None,
        help="folder to write into, new or of such files [default: the run; comparison]",
    )
    return parser


def run(arguments: Sequence[str]) -> None:
    """Write the page of a run, or of several."""
    options = _parser().parse_args(normalise(arguments))

    from cclis.files import write_atomically
    from cclis.report.compare import comparison
    from cclis.report.entries import read_runs
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
        print_line(Screen(), str(folder / name))


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _make_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already; choose another --output or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}") from None
