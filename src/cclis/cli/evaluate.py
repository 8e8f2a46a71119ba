"""`cclis evaluate`: evaluate the checkpoints of a run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from cclis.cli.parser import Parser, normalise
from cclis.errors import InputError
from cclis.methods import get
from cclis.progress import Progress, Screen
from cclis.settings import EvaluationOptions, info_of, names_of, types_of


def _parser() -> Parser:
    parser = Parser(prog="cclis evaluate", description="Evaluate the checkpoints of a run again.")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--data", type=str | None, help="where the datasets lie now")
    parser.add_argument("--device", type=str | None, help="where to compute: auto, cpu, cuda")
    parser.add_argument("--output", type=str | None, help="write the numbers to this JSON file")
    parser.add_argument("--method", type=str | None, help="the run's method, where it is not ours")
    for name, kind in types_of(EvaluationOptions).items():
        doc = info_of(EvaluationOptions, name).doc.partition(" [")[0].removesuffix(".")
        said = f"{doc} [default: as the run had]".replace("%", "%%")
        parser.add_argument(f"--{name}", type=kind | None, help=said)
    return parser


def run(arguments: Sequence[str]) -> None:
    """Evaluate, and show the numbers."""
    options = _parser().parse_args(normalise(arguments))
    if options.method is not None:
        get(options.method)

    from cclis.experiment.reevaluation import reevaluate
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
        raise InputError(f"{config.method} has no setting {name}")
    config = dataclasses.replace(config, **changed)
    result = reevaluate(
        run, data=options.data, device=options.device, config=config, progress=Progress()
    )
    Screen().print(result_tables(result))
    if output is not None:
        write_json(output, result.to_json())
