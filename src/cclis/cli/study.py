"""`cclis study`: the runs that a table or a figure needs, and its page."""

from __future__ import annotations

from collections.abc import Sequence

from cclis.cli.parser import Parser, normalise
from cclis.progress import Progress, Screen, print_line
from cclis.settings import StudyOptions, types_of

ABOUT = (
    "Run what a table or a figure of the paper needs, and build it; or compare methods on any "
    "benchmark. Finished runs are not repeated, interrupted ones are resumed, and one that fails "
    "stops no other."
)
NAMES = (
    "methods (any of them side by side), table1, table2, ablation-is-prd (Table 3), ablation-rbs "
    "(Table 4), buffers (Table 7), backbones (Table 8), losses (Table 9), lambda (Figure 2) or "
    "tsne (Figure 3)"
)


def run(arguments: Sequence[str]) -> int:
    """Run the study, and name the files that it wrote."""
    parser = Parser(
        prog="cclis study", usage="cclis study NAME [--OPTION VALUE ...]", description=ABOUT
    )
    parser.add_argument("name", help=NAMES)
    parser.add_group(StudyOptions)
    settings = vars(parser.parse_args(normalise(arguments, types_of(StudyOptions))))
    name = settings.pop("name")

    from cclis.study.run import run_study

    written, failed = run_study(name, StudyOptions(**settings), Progress())
    for path in written:
        print_line(Screen(), str(path))
    if failed:
        said = f"cclis: {len(failed)} runs failed: {', '.join(failed)}"
        print_line(Screen(stderr=True), said)
    return 1 if failed else 0
