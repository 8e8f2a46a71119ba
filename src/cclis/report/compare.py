"""Runs side by side: means over seeds, the difference from the paper, tests paired over seeds."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclis.errors import InputError
from cclis.files import read_json
from cclis.report import figures
from cclis.report.drawing import Line, line_figure
from cclis.report.page import environment
from cclis.report.results import Result, paper_row, spread, variation

COLUMNS = (
    *("benchmark", "memory", "method", "changed", "head", "Class-IL", "paper", "forgetting"),
    *("Task-IL", "forgetting (task)", "seconds", "memory (GiB)", "runs"),
)
PAIRS = ("benchmark", "memory", "first", "second", "seeds", "difference", "p")

Table = list[list[str]]

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Entry:
    """Runs that differ in nothing but the seed.

    Attributes:
        benchmark: What was learned.
        memory: How many samples could be kept.
        method: How.
        changed: What was other than in the recipe.
        runs: Their results.
    """

    benchmark: str
    memory: int
    method: str
    changed: str
    runs: list[Result]

    @property
    def name(self) -> str:
        """The method, and what was changed."""
        return f"{self.method} ({self.changed})" if self.changed else self.method

    @property
    def heads(self) -> list[str]:
        """Those that all runs were judged by; the method's own, named last, is the main one."""
        first, *others = self.runs
        return [head for head in first["class_il"] if all(head in r["class_il"] for r in others)]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Class-IL accuracy of the main head after each task, over the tasks so far: its mean and
        standard deviation over seeds."""
        so_far = [
            [statistics.mean(row[: t + 1]) for t, row in enumerate(matrix)]
            for matrix in self._matrices
        ]
        return [
            (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0)
            for v in zip(*so_far, strict=True)
        ]

    @property
    def matrix(self) -> list[list[float | None]]:
        """Class-IL accuracies of the main head, the mean over seeds."""
        return [
            [
                None if None in values else statistics.mean(values)
                for values in zip(*rows, strict=True)
            ]
            for rows in zip(*self._matrices, strict=True)
        ]

    @property
    def _matrices(self) -> list[list[list[Any]]]:
        return [run["class_il"][self.heads[-1]]["matrix"] for run in self.runs]


def read_runs(paths: Sequence[Path]) -> list[Result]:
    """The results in run directories, in folders of them, and in summaries."""
    found: list[Result] = []
    for path in paths:
        if path.is_file():
            files = [path]
        elif (path / "result.json").is_file():
            files = [path / "result.json"]
        else:
            files = sorted([*path.glob("*/result.json"), *path.glob("*.json")])
        results = [_result(file) for file in files]
        if not results:
            raise InputError(f"{path} holds no finished run: no result.json in it, nor below it")
        found += results
    return found


def entries(results: Sequence[Result]) -> list[Entry]:
    """Runs grouped by all but the seed; the same run given twice counts once."""
    groups: dict[tuple[str, int, str, str], dict[int, Result]] = {}
    for result in results:
        key = (result["benchmark"], result["memory"], result["method"], variation(result))
        groups.setdefault(key, {})[result["seed"]] = result
    return [Entry(*key, list(runs.values())) for key, runs in sorted(groups.items())]


def accuracy_table(found: Sequence[Entry]) -> Table:
    """A row for every entry and head, under `COLUMNS`."""
    rows = []
    for entry in found:
        published = paper_row(entry.benchmark, entry.memory, entry.method, entry.changed)
        for head in entry.heads:
            numbers = {
                (scenario, key): [run[scenario][head][key] for run in entry.runs]
                for scenario in ("class_il", "task_il")
                for key in ("accuracy", "forgetting")
            }
            paper = published.get("class_il", {}).get("accuracy")
            ours = statistics.mean(numbers["class_il", "accuracy"])
            peak = [run["peak_memory_bytes"] / 2**30 for run in entry.runs]
            rows.append(
                [
                    *(entry.benchmark, str(entry.memory), entry.method, entry.changed, head),
                    spread(numbers["class_il", "accuracy"]),
                    "" if paper is None else f"{paper[0]:.2f} ({ours - paper[0]:+.2f})",
                    spread(numbers["class_il", "forgetting"]),
                    spread(numbers["task_il", "accuracy"]),
                    spread(numbers["task_il", "forgetting"]),
                    spread([run["seconds"]["train"] for run in entry.runs], digits=1),
                    spread(peak),
                    str(len(entry.runs)),
                ]
            )
    return rows


def paired_table(found: Sequence[Entry]) -> Table:
    """For entries that share two seeds or more, the difference of their main heads' Class-IL
    accuracy over those seeds, and how likely one as large is by chance (paired t-test)."""
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    rows = []
    for one, other in combinations(found, 2):
        if (one.benchmark, one.memory) != (other.benchmark, other.memory):
            continue
        first, second = (_by_seed(entry) for entry in (one, other))
        seeds = sorted(first.keys() & second.keys())
        if len(seeds) < 2:
            continue
        pairs = [(first[seed], second[seed]) for seed in seeds]
        gaps = [a - b for a, b in pairs]
        # Differences that are all the same leave nothing to test.
        p = ttest_rel(*zip(*pairs, strict=True)).pvalue if statistics.pstdev(gaps) > 0 else None
        rows.append(
            [
                *(one.benchmark, str(one.memory), one.name, other.name, str(len(seeds))),
                spread(gaps, sign=True),
                "–" if p is None else f"{p:.3g}",
            ]
        )
    return rows


def markdown(header: Sequence[str], rows: Table) -> str:
    """A Markdown table."""
    lines = [list(header), ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |\n" for r in lines)


def comma_separated(header: Sequence[str], rows: Table) -> str:
    """A CSV table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def latex(header: Sequence[str], rows: Table) -> str:
    """A LaTeX table, for the package booktabs."""
    lines = [" & ".join(map(_tex, row)) + r" \\" for row in (header, *rows)]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * len(header)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def groups(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries that learned the same with the same memory, by the name of that."""
    grouped: dict[str, list[Entry]] = {}
    for entry in found:
        grouped.setdefault(f"{entry.benchmark}, memory {entry.memory}", []).append(entry)
    return grouped


def comparison_page(found: Sequence[Entry]) -> str:
    """All of it as one self-contained page; names in it are shown as text, never run."""
    panels = {}
    for number, together in enumerate(groups(found).values()):
        panels[f"curves-{number}"] = [
            figures.compared_curves([(e.name, e.curve) for e in together])
        ]
        panels[f"matrix-{number}"] = [
            figures.accuracy_matrix({f"method-{number}": entry.name}, entry.matrix)
            for entry in together
        ]
    return (
        environment()
        .get_template("comparison.html")
        .render(
            columns=COLUMNS,
            rows=accuracy_table(found),
            pair_columns=PAIRS,
            pairs=paired_table(found),
            groups=groups(found),
            panels=panels,
        )
    )


def curves(together: Sequence[Entry]) -> Figure:
    """Accuracy as tasks are learned, to stand in a paper."""
    lines = []
    for number, entry in enumerate(together):
        means, deviations = zip(*entry.curve, strict=True)
        lines.append(Line(entry.name, range(1, len(means) + 1), means, deviations, number))
    return line_figure(lines, "after task", "Class-IL accuracy in %")


def _by_seed(entry: Entry) -> dict[int, float]:
    head = entry.heads[-1]
    return {run["seed"]: run["class_il"][head]["accuracy"] for run in entry.runs}


def _result(path: Path) -> Result:
    result = read_json(path)
    needed = {"benchmark", "memory", "method", "seed", "class_il", "task_il", "seconds"}
    needed.add("peak_memory_bytes")
    if not isinstance(result, dict) or not needed <= result.keys() or not result["class_il"]:
        raise InputError(f"{path} is not the result of a run")
    return result


def _tex(text: str) -> str:
    for sign in "&%$#_{}":
        text = text.replace(sign, rf"\{sign}")
    return text.replace("±", r"$\pm$").replace("–", "--")
