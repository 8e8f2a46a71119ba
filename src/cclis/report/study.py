"""The table and the figure of a study: what was measured beside what the paper prints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclis.errors import InputError
from cclis.report.compare import COLUMNS, PAIRS, accuracy_table, paired_table
from cclis.report.drawing import Line, Map, inline, line_figure, map_figure
from cclis.report.entries import Entry
from cclis.report.formats import Table, number_columns, numbers, spread
from cclis.report.page import environment
from cclis.report.paper import compared_head
from cclis.report.tsne import flattened
from cclis.runs.directory import Run
from cclis.runs.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

NAMES = {
    ("class_il", "accuracy"): "Class-IL",
    ("task_il", "accuracy"): "Task-IL",
    ("class_il", "forgetting"): "Class-IL forgetting",
    ("task_il", "forgetting"): "Task-IL forgetting",
}


@dataclass(frozen=True)
class Row:
    """A row of a study.

    Attributes:
        benchmark: The benchmark.
        memory: How many samples could be kept.
        variant: What was varied, in the paper's words.
        runs: The results of the runs that ended, by name.
        failed: Why the others failed, by name.
        paper: The paper's numbers, by scenario and kind; empty where it has none.
        line: The line of the figure that the row is a point of.
        place: Where on that line, or None where there is no figure.
    """

    benchmark: str
    memory: int
    variant: str
    runs: Mapping[str, Result]
    failed: Mapping[str, str]
    paper: Mapping[str, Any]
    line: str = ""
    place: float | None = None

    @property
    def head(self) -> str:
        """The head that is compared with the paper."""
        return compared_head(next(iter(self.runs.values()))) if self.runs else "–"

    def entry(self, *, compared: bool = False) -> Entry:
        """The row as a comparison has it, under its variant's name; with all heads, or `head`."""
        runs = list(self.runs.values())
        if compared:
            runs = [run.with_head(self.head) for run in runs]
        return Entry(self.benchmark, self.memory, self.variant, "", runs)

    def measured(self, scenario: str, key: str) -> list[float]:
        """The number of every run that ended."""
        return [run.number(scenario, self.head, key) for run in self.runs.values()]

    def published(self, scenario: str, key: str) -> Sequence[float] | None:
        """The paper's mean and standard deviation, or None."""
        numbers: Sequence[float] | None = self.paper.get(scenario, {}).get(key)
        return numbers


def study_table(rows: Sequence[Row], scores: Sequence[tuple[str, str]]) -> Table:
    """A header, and a row for every variant, with the mean ± standard deviation of each score.

    Beside it stands the paper's, where it has any, with the difference of the means in brackets.
    """
    printed = [score for score in scores if any(row.published(*score) for row in rows)]
    names = [name for s in scores for name in (NAMES[s], *["paper"] * (s in printed))]
    table = [["benchmark", "memory", "variant", "head", *names, "runs"]]
    for row in rows:
        cells = []
        for score in scores:
            ours = row.measured(*score)
            cells.append(spread(ours) if ours else "–")
            if score in printed:
                cells.append(_beside(row.published(*score), ours))
        asked = len(row.runs) + len(row.failed)
        ended = f"{len(row.runs)} of {asked}" if row.failed else str(asked)
        table.append([row.benchmark, str(row.memory), row.variant, row.head, *cells, ended])
    return table


def study_numbers(
    rows: Sequence[Row], scores: Sequence[tuple[str, str]]
) -> tuple[list[str], Table]:
    """The same for programs: a header, and rows with a cell for each mean and deviation."""
    header = ["benchmark", "memory", "variant", "head", "runs", "failed", *number_columns(scores)]
    table = []
    for row in rows:
        counts = [str(len(row.runs)), str(len(row.failed))]
        cells = [
            c for score in scores for c in numbers(row.measured(*score), row.published(*score))
        ]
        table.append([row.benchmark, str(row.memory), row.variant, row.head, *counts, *cells])
    return header, table


def study_figure(rows: Sequence[Row], axis: str) -> Figure:
    """Class-IL accuracy along the axis of a study; the paper's points hollow."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.line, []).append(row)
    lines = []
    for number, (name, points) in enumerate(by_name.items()):
        ours = [(p, p.measured("class_il", "accuracy")) for p in points]
        printed = [(p, p.published("class_il", "accuracy")) for p in points]
        for caption, hollow, places in (
            (name, False, [(p.place, *_mean_and_deviation(v)) for p, v in ours if v]),
            (f"{name}, the paper", True, [(p.place, *v) for p, v in printed if v]),
        ):
            if places:
                x, y, deviation = (list(column) for column in zip(*places, strict=True))
                lines.append(Line(caption, x, y, deviation, number, hollow))
    return line_figure(lines, axis, "Class-IL accuracy in %")


def study_map(rows: Sequence[Row], folder: Path) -> Figure:
    """Maps of the first run of every row that lies in this folder, a line for each benchmark."""
    lines: dict[str, list[Map]] = {}
    for row in rows:
        title = f"{row.variant}, {row.benchmark}"
        drawn = Map(title, (), {})
        for name, result in [*row.runs.items()][:1]:
            with suppress(InputError):  # a run is whole without what its report shows
                drawn = run_map(title, result, Run(folder / name).analysis)
        lines.setdefault(row.benchmark, []).append(drawn)
    return map_figure([*lines.values()])


def run_map(title: str, result: Result, analysis: Mapping[str, Tensor]) -> Map:
    """Where test samples, the memory's samples and the prototypes lie, flattened by t-SNE.

    Args:
        title: What stands above it.
        result: The result of the run.
        analysis: What was kept beside it; the map is empty where that is too little.
    """
    points: dict[str, tuple[list[list[float]], list[int]]] = {}
    for kind, places in flattened(analysis).items():
        labels = analysis.get(f"{kind}.labels")  # prototypes are in the order of the classes
        points[kind] = places, [*range(len(places))] if labels is None else labels.tolist()
    return Map(title, result.class_names, points)


def study_page(
    rows: Sequence[Row],
    scores: Sequence[tuple[str, str]],
    *,
    title: str,
    about: str,
    scale: str,
    svg: bytes | None = None,
) -> str:
    """All of it as one page, beside the folder `runs`; names in it are shown as text, never run.

    Args:
        rows: The rows of the study.
        scores: Which numbers, as (scenario, kind).
        title: What stands above it.
        about: What the study asks, in a sentence.
        scale: How large the runs were, in words.
        svg: The figure.
    """
    ended = [row for row in rows if row.runs]
    template = environment().get_template("study.html")
    return template.render(
        title=title,
        about=about,
        scale=scale,
        figure=None if svg is None else inline(svg),
        table=study_table(rows, scores),
        all_heads=[COLUMNS, *accuracy_table([row.entry() for row in ended])],
        pairs=[PAIRS, *paired_table([row.entry(compared=True) for row in ended])],
        rows=rows,
    )


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _beside(paper: Sequence[float] | None, ours: Sequence[float]) -> str:
    if paper is None:
        return "–"
    difference = f" ({statistics.mean(ours) - paper[0]:+.2f})" if ours else ""
    return f"{paper[0]:.2f} ± {paper[1]:.2f}{difference}"
