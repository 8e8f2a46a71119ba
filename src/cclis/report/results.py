"""Tables of measured runs beside the paper's numbers, written from the summaries in a folder.

    python -m cclis.report.results results README.md docs/results.md

replaces what stands between `<!-- results -->` and `<!-- /results -->` in each file.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from cclis.errors import InputError
from cclis.files import read_json, write_atomically

Result = Mapping[str, Any]
BETWEEN = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
COLUMNS = [
    (scenario, key) for scenario in ("class_il", "task_il") for key in ("accuracy", "forgetting")
]


def results_table(results: Sequence[Result]) -> str:
    """A Markdown table: a row for every benchmark, memory, method and head, the paper's first."""
    scores = "Class-IL | forgetting | Task-IL | forgetting"
    lines = [f"| benchmark | memory | method | head | {scores} | runs |", "|---" * 9 + "|"]
    paper = json.loads((resources.files("cclis.report") / "paper.json").read_text())
    for (benchmark, method, memory), runs in sorted(_grouped(results).items()):
        start = f"| {benchmark} | {memory} | {method} |"
        published = paper.get(benchmark, {}).get(str(memory), {}).get(method)
        if published is not None:
            cells = [_published(published[scenario][key]) for scenario, key in COLUMNS]
            lines.append(f"{start} *the paper* | {' | '.join(cells)} | |")
        for head in runs[0]["class_il"]:
            cells = [_measured([run[s][head][key] for run in runs]) for s, key in COLUMNS]
            lines.append(f"{start} {head} | {' | '.join(cells)} | {len(runs)} |")
    return "\n".join(lines) + "\n"


def read_results(folder: Path) -> list[Result]:
    """Every summary that lies in a folder."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def with_table(text: str, table: str) -> str:
    """A page with the table between its markers replaced."""
    if not BETWEEN.search(text):
        raise InputError(
            "no place for the table: <!-- results --> and <!-- /results --> are missing"
        )
    return BETWEEN.sub(lambda found: f"{found[1]}{table}{found[2]}", text)


def _grouped(results: Sequence[Result]) -> dict[tuple[str, str, int], list[Result]]:
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        key = (result["benchmark"], result["method"], result["memory"])
        groups.setdefault(key, []).append(result)
    return groups


def _published(number: Sequence[float] | None) -> str:
    return "–" if number is None else f"*{number[0]:.2f} ± {number[1]:.2f}*"


def _measured(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def main(folder: str, *pages: str) -> None:
    """Write the table of a folder's results into pages."""
    table = results_table(read_results(Path(folder)))
    for page in map(Path, pages):
        write_atomically(page, with_table(page.read_text(encoding="utf-8"), table).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
