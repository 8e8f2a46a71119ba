"""`cclis data`: list, check and download datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cclis.cli.parser import Parser, normalise
from cclis.errors import InputError, unknown
from cclis.progress import Progress, Screen


def _parser() -> Parser:
    parser = Parser(
        prog="cclis data", description="List the datasets that are here and check them."
    )
    parser.add_argument("name", nargs="?", help="one benchmark alone")
    parser.add_argument("--data", type=str | None, help="folder of the datasets")
    parser.add_argument("--download", action="store_true", help="fetch what is missing")
    parser.add_argument("--thorough", action="store_true", help="compare every file's checksum")
    return parser


def run(arguments: Sequence[str]) -> None:
    """Show the state of the datasets."""
    options = _parser().parse_args(normalise(arguments))

    from rich.table import Table

    from cclis.data.download import ARCHIVES, check, default_root, download

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
    Screen().print(table)
    if problems:
        raise InputError("; ".join(problems))
