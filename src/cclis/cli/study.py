"""`cclis study`: the runs that a table or a figure needs, and its page."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cclis.cli.parser import Parser, normalise
from cclis.progress import Progress


def _parser() -> Parser:
    parser = Parser(
        prog="cclis study",
        description="Run what a table or a figure of the paper needs, and build it; or compare "
        "methods on any benchmark. Runs that are there are not repeated, interrupted ones go on, "
        "and one that fails stops no other.",
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


def run(arguments: Sequence[str]) -> int:
    """Run the study, and name the files that it wrote."""
    options = _parser().parse_args(normalise(arguments))

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
