"""Runs side by side: means over seeds, the difference from the paper, tests paired over seeds."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclis.errors import InputError
from cclis.files import read_json
from cclis.report import figures
from cclis.report.drawing import Line, line_figure, picture
from cclis.report.page import environment
from cclis.report.paper import COLUMNS as SCORES
from cclis.report.paper import Table, compared_head, markdown, paper_row, spread
from cclis.runs.records import Result

COLUMNS = (
    *("benchmark", "memory", "method", "changed", "head", "Class-IL", "forgetting"),
    *("Task-IL", "forgetting (task)", "seconds", "memory (GiB)", "runs"),
)
LONGEST_FILE_NAME = 80
PAIRS = ("benchmark", "memory", "first", "second", "seeds", "difference", "p")


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
        """Those that all runs have, in the order of the first."""
        first, *others = self.runs
        return [head for head in first.class_il if all(head in run.class_il for run in others)]

    @property
    def main_head(self) -> str:
        """The head whose accuracies are drawn and tested."""
        return self.runs[0].main_head

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
        return [run.class_il[self.main_head].matrix for run in self.runs]


def read_runs(
    paths: Sequence[Path], warn: Callable[[str], None] = lambda said: None
) -> list[Result]:
    """The results in run directories, in folders of them, in studies, and in summaries.

    Args:
        paths: Where they are.
        warn: Told what is left out because it has not ended.
    """
    found: list[Result] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no {path}")
        if path.is_file() and path.suffix != ".json" and len(paths) > 1:
            continue  # such as the logs beside the runs of a study
        if path.is_file():
            files = [path]
        elif (path / "result.json").is_file():
            files = [path / "result.json"]
        else:
            below = ("*/result.json", "*.json", "runs/*/result.json")
            files = sorted(file for pattern in below for file in path.glob(pattern))
        if not files:
            said = f"{path} holds no finished run: no result.json in it, nor below it"
            if len(paths) == 1:
                raise InputError(said)
            warn(said)
        found += [Result.from_json(read_json(file), file) for file in files]
    if not found:
        raise InputError("none of these holds a finished run: no result.json in them, nor below")
    return found


def entries(results: Sequence[Result]) -> list[Entry]:
    """Runs grouped by all but the seed; the same run given twice counts once.

    Benchmarks of one name that have other classes or tasks are numbered.
    """
    streams: dict[str, list[object]] = {}
    grouped: dict[tuple[str, int, str, str], list[Result]] = {}
    for result in results:
        benchmark = result.benchmark
        stream = (result.class_names, result.task_sizes)
        known = streams.setdefault(benchmark, [])
        if stream not in known:
            known.append(stream)
        if number := known.index(stream):
            benchmark = f"{benchmark} ({number + 1})"
        key = (benchmark, result.memory, result.method, result.variation)
        runs = grouped.setdefault(key, [])
        if result not in runs:
            runs.append(result)
    return [Entry(*key, runs) for key, runs in sorted(grouped.items())]


def accuracy_table(found: Sequence[Entry]) -> Table:
    """A row for every entry and head, under `COLUMNS`; below the head that the paper's protocol
    has, the paper's numbers and the difference from them."""
    rows = []
    for entry in found:
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


def numbers_table(found: Sequence[Entry]) -> tuple[list[str], Table]:
    """The same for programs: a header, and rows in which means, deviations and the paper's numbers
    stand apart."""
    header = ["benchmark", "memory", "method", "changed", "head", "runs", *number_columns(SCORES)]
    header += ["train_seconds", "peak_memory_bytes"]
    rows = []
    for entry in found:
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


def number_columns(scores: Sequence[tuple[str, str]]) -> list[str]:
    """What `numbers` gives for each score."""
    parts = ("", "_deviation", "_paper")
    return [f"{scenario}_{key}{part}" for scenario, key in scores for part in parts]


def numbers(values: Sequence[float], paper: Sequence[float] | None) -> list[str]:
    """Mean, standard deviation and the paper's mean; empty where there is none."""
    return [
        str(statistics.mean(values)) if values else "",
        str(statistics.stdev(values)) if len(values) > 1 else "",
        "" if paper is None else str(paper[0]),
    ]


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


def comparison(results: Sequence[Result]) -> dict[str, bytes]:
    """Everything that sets runs side by side, by the name of its file."""
    found = entries(results)
    rows, pairs = accuracy_table(found), paired_table(found)
    texts = {
        "comparison.html": comparison_page(found),
        "comparison.md": markdown(COLUMNS, rows),
        "comparison.csv": comma_separated(*numbers_table(found)),
        "comparison.tex": latex(COLUMNS, rows),
    }
    if pairs:
        texts |= {
            "paired.md": markdown(PAIRS, pairs),
            "paired.csv": comma_separated(PAIRS, pairs),
            "paired.tex": latex(PAIRS, pairs),
        }
    files = {name: text.encode() for name, text in texts.items()}
    for stream, together in groups(found).items():
        figure, name = curves(together), _file_name(stream, files)
        files |= {f"{name}.{kind}": picture(figure, kind) for kind in ("svg", "png")}
    return files


def _file_name(stream: str, taken: Collection[str]) -> str:
    """What a picture is called: letters, digits and dashes, and no other's name."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", stream).strip("-")[:LONGEST_FILE_NAME] or "runs"
    number, found = 1, name
    while f"{found}.svg" in taken:
        number += 1
        found = f"{name}-{number}"
    return found


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


def _published(entry: Entry) -> dict[str, Any]:
    """The paper's numbers; a result that does not say how it came about is no row of it."""
    if any(run.changed is None for run in entry.runs):
        return {}
    return paper_row(entry.benchmark, entry.memory, entry.method, entry.changed)


def _by_seed(entry: Entry) -> dict[int, float]:
    return {run.seed: run.class_il[entry.main_head].accuracy for run in entry.runs}


TEX = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "–": "--", "λ": r"$\lambda$", "×": r"$\times$"},
}


def _tex(text: str) -> str:
    return "".join(TEX.get(sign, sign) for sign in text)
