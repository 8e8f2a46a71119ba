"""Runs side by side: means over seeds, the difference from the paper, tests paired over seeds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from cclis.report import figures
from cclis.report.drawing import Line, inline, line_figure, picture
from cclis.report.entries import Entry, entries, groups
from cclis.report.formats import (
    Table,
    comma_separated,
    latex,
    markdown,
    number_columns,
    numbers,
    spread,
)
from cclis.report.page import environment
from cclis.report.paper import SCORES, compared_head, paper_row
from cclis.runs.records import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    *("benchmark", "memory", "method", "changed", "head", "Class-IL", "forgetting"),
    *("Task-IL", "forgetting (task)", "seconds", "memory (GiB)", "runs"),
)
PAIRS = ("benchmark", "memory", "first", "second", "seeds", "difference", "p")
LONGEST_FILE_NAME = 80


def accuracy_table(compared: Sequence[Entry]) -> Table:
    """A row for every entry and head, under `COLUMNS`.

    Below the head that the paper's protocol has stand the paper's numbers and the difference from
    them.
    """
    rows = []
    for entry in compared:
        start = [entry.benchmark, str(entry.memory), entry.method, entry.changed]
        published = _published(entry)
        paper = [published.get(scenario, {}).get(key) for scenario, key in SCORES]
        seconds = [run.seconds.train for run in entry.runs]
        peak = [run.peak_memory_bytes / 2**30 for run in entry.runs]
        costs = [spread(seconds, digits=1), spread(peak), str(len(entry.runs))]
        for head in entry.heads:
            values = [[run.number(s, head, key) for run in entry.runs] for s, key in SCORES]
            rows.append([*start, head, *map(spread, values), *costs])
            if any(paper) and head == compared_head(entry.runs[0]):
                printed = [" ± ".join(f"{number:.2f}" for number in cell or []) for cell in paper]
                gaps = [
                    "" if cell is None else f"{statistics.mean(ours) - cell[0]:+.2f}"
                    for ours, cell in zip(values, paper, strict=True)
                ]
                rows.append([*start, "the paper", *printed, "", "", ""])
                rows.append([*start, f"{head} − the paper", *gaps, "", "", ""])
    return rows


def numbers_table(compared: Sequence[Entry]) -> tuple[list[str], Table]:
    """The same for programs: a header, and rows with a cell for each mean and deviation."""
    header = ["benchmark", "memory", "method", "changed", "head", "runs", *number_columns(SCORES)]
    header += ["train_seconds", "peak_memory_bytes"]
    rows = []
    for entry in compared:
        published = _published(entry)
        for head in entry.heads:
            same = head == compared_head(entry.runs[0])
            row = [entry.benchmark, str(entry.memory), entry.method, entry.changed, head]
            row.append(str(len(entry.runs)))
            for scenario, key in SCORES:
                values = [run.number(scenario, head, key) for run in entry.runs]
                row += numbers(values, published.get(scenario, {}).get(key) if same else None)
            row.append(str(statistics.mean(run.seconds.train for run in entry.runs)))
            row.append(str(statistics.mean(run.peak_memory_bytes for run in entry.runs)))
            rows.append(row)
    return header, rows


def paired_table(compared: Sequence[Entry]) -> Table:
    """A paired t-test for every two entries that share two seeds or more, under `PAIRS`.

    It compares the Class-IL accuracy of their main heads.
    """
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    rows = []
    for one, other in combinations(compared, 2):
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


def comparison(results: Sequence[Result]) -> dict[str, bytes]:
    """The page, tables and figures that compare runs, by file name."""
    compared = entries(results)
    rows, pairs = accuracy_table(compared), paired_table(compared)
    drawn = {stream: curves(together) for stream, together in groups(compared).items()}
    pictures = {stream: picture(figure, "svg") for stream, figure in drawn.items()}
    texts = {
        "comparison.html": comparison_page(compared, pictures),
        "comparison.md": markdown(COLUMNS, rows),
        "comparison.csv": comma_separated(*numbers_table(compared)),
        "comparison.tex": latex(COLUMNS, rows),
    }
    if pairs:
        texts |= {
            "paired.md": markdown(PAIRS, pairs),
            "paired.csv": comma_separated(PAIRS, pairs),
            "paired.tex": latex(PAIRS, pairs),
        }
    files = {name: text.encode() for name, text in texts.items()}
    for stream, figure in drawn.items():
        name = _file_name(stream, files)
        files |= {f"{name}.svg": pictures[stream], f"{name}.png": picture(figure, "png")}
    return files


def comparison_page(compared: Sequence[Entry], pictures: Mapping[str, bytes]) -> str:
    """All of it as one self-contained page; names in it are shown as text, never run.

    Args:
        compared: What is compared.
        pictures: The curves as SVG, by a key of `groups`.
    """
    panels = {
        f"matrix-{number}": [
            figures.accuracy_matrix({f"method-{number}": entry.name}, entry.matrix)
            for entry in together
        ]
        for number, together in enumerate(groups(compared).values())
    }
    return (
        environment()
        .get_template("comparison.html")
        .render(
            columns=COLUMNS,
            rows=accuracy_table(compared),
            pair_columns=PAIRS,
            pairs=paired_table(compared),
            groups=groups(compared),
            curves={stream: inline(svg) for stream, svg in pictures.items()},
            panels=panels,
        )
    )


def curves(together: Sequence[Entry]) -> Figure:
    """Accuracy on all tasks so far, as tasks are learned."""
    lines = []
    for number, entry in enumerate(together):
        means, deviations = zip(*entry.curve, strict=True)
        lines.append(Line(entry.name, range(1, len(means) + 1), means, deviations, number))
    return line_figure(lines, "after task", "Class-IL accuracy in %")


def _file_name(stream: str, taken: Collection[str]) -> str:
    """The name of a picture: letters, digits and dashes, and no other's name."""
    start = re.sub(r"[^A-Za-z0-9]+", "-", stream).strip("-")[:LONGEST_FILE_NAME] or "runs"
    number, name = 1, start
    while f"{name}.svg" in taken:
        number += 1
        name = f"{start}-{number}"
    return name


def _published(entry: Entry) -> dict[str, Any]:
    """The paper's numbers; none for a result that does not say which settings it has."""
    if any(run.changed is None for run in entry.runs):
        return {}
    return paper_row(entry.benchmark, entry.memory, entry.method, entry.changed)


def _by_seed(entry: Entry) -> dict[int, float]:
    return {run.seed: run.class_il[entry.main_head].accuracy for run in entry.runs}
