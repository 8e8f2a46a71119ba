"""Write the tables of the docs from the measurements in a folder.

    python -m tools.tables results README.md docs/results.md

replaces what stands between `<!-- NAME -->` and `<!-- /NAME -->` in each file, for the tables
`results`, `summary`, `variations`, `sorted`, `order`, `lambda`, `gcr`, `gem`, `alone`, `heads`,
`speed`, `compiling`, `methods`, `parts`, `sharing`, `mammoth` and `reliability`. What the folder
holds, its README says.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cclis.errors import InputError
from cclis.files import read_json, write_atomically
from cclis.report.formats import Table, markdown, spread
from cclis.report.paper import PAPER_HEADS, paper_numbers, paper_row
from cclis.report.paper import SCORES as COLUMNS
from cclis.runs.records import SCENARIOS, in_words
from cclis.settings import read_yaml
from tools.speed_tables import (
    compiling_table,
    methods_table,
    parts_table,
    sharing_table,
    speed_table,
)

Run = Mapping[str, Any]
SCORES = ("Class-IL", "forgetting", "Task-IL", "forgetting")
HEADS_IN_ORDER = ("linear_paper", "linear", "discriminant", "means", "prototype", "classifier")
PAPER = "the paper"


def results_table(results: Sequence[Run]) -> str:
    """A row for every benchmark, memory, method and head, after what was published."""
    rows = []
    for (benchmark, method, memory), runs in _rows([run for run in results if not variation(run)]):
        published = published_rows(benchmark, memory, method)
        rows += [[benchmark, str(memory), method, *row] for row in _by_head(published, runs)]
    return markdown(("benchmark", "memory", "method", "head", *SCORES, "runs"), rows)


def summary_table(results: Sequence[Run]) -> str:
    """Class-IL accuracy alone: a row for every benchmark, memory and method, a column a head.

    Where a head has fewer runs than there are, their number stands behind.
    """
    groups = _rows([run for run in results if not variation(run)])
    heads = _heads_of([run for _, runs in groups for run in runs])
    rows = []
    for (benchmark, method, memory), runs in groups:
        published = paper_row(benchmark, memory, method)
        cells = [_published(published["class_il"]["accuracy"]) if published else "–"]
        for head in heads:
            values = [r["class_il"][head]["accuracy"] for r in runs if head in r["class_il"]]
            fewer = f" ({len(values)})" if len(values) < len(runs) else ""
            cells.append(spread(values) + fewer if values else "–")
        rows.append([benchmark, str(memory), method, *cells, str(len(runs))])
    return markdown(("benchmark", "memory", "method", f"*{PAPER}*", *heads, "runs"), rows)


def variations_table(results: Sequence[Run]) -> str:
    """The same for runs whose settings differ from their recipe's."""
    varied: dict[tuple[str, str], list[Run]] = {}
    for result in results:
        if what := variation(result):
            varied.setdefault((result["method"], what), []).append(result)
    rows = []
    for (method, what), same in sorted(varied.items()):
        for (benchmark, _, memory), runs in _rows(same):
            published = {PAPER: paper_row(benchmark, memory, method, what)}
            first = [benchmark, str(memory), method, what]
            rows += [[*first, *row] for row in _by_head(published, runs)]
    header = ("benchmark", "memory", "method", "changed", "head", *SCORES, "runs")
    return markdown(header, rows)


def alone_table(results: Sequence[Run]) -> str:
    """How long whole runs took that had a machine for themselves."""
    which = ("benchmark", "memory", "method", "seed")
    rows = []
    for run in sorted(results, key=lambda run: [run[key] for key in which]):
        if run.get("alone"):
            seconds = [f"{run['seconds'][kind]:.1f} s" for kind in ("total", "train", "compile")]
            about = [run["device"], run.get("note", "")]
            rows.append([*(str(run[key]) for key in which), *seconds, *about])
    return markdown([*which, "in all", "training", "of it compiling", "device", "note"], rows)


def differing_table(runs: Sequence[Run]) -> str:
    """Accuracies of runs that differ in one thing alone, which their notes name."""
    heads = list(runs[0]["class_il"]) if runs else []
    columns = [f"{title}, {head}" for title in ("Class-IL", "Task-IL") for head in heads]
    rows = []
    for run in runs:
        cells = [run[s][head]["accuracy"] for s in SCENARIOS for head in heads]
        rows.append([run["note"], *(f"{cell:.2f}" for cell in cells)])
    return markdown(("", *columns), rows)


def beside_table(results: Sequence[Run], others: Sequence[Run]) -> str:
    """Runs of another rule, each beside the one that has the same settings and seed."""
    which = ("benchmark", "memory", "method", "seed")
    ours = {tuple(run[key] for key in which): run for run in results if not variation(run)}
    rows = []
    for other in others:
        key = tuple(other[key] for key in which)
        head = _compared_head(other)
        pairs = [
            f"{run[scenario][head]['accuracy']:.2f}"
            for scenario in SCENARIOS
            for run in (ours[key], other)
        ]
        rows.append([*map(str, key), *pairs])
    return markdown((*which, "Class-IL", "the other", "Task-IL", "the other"), rows)


def course_table(results: Sequence[Run], others: Sequence[Run]) -> str:
    """Class-IL accuracy after each task and all scores at the end, of what was published, of ours,
    and of runs by other rules, some of which may not have ended."""
    if not others:
        return ""
    tasks = len(others[0]["task_sizes"])
    which = {key: others[0][key] for key in ("benchmark", "memory", "method")}
    published = _by_head(published_rows(**which), [])
    rows = [[where, "", *["–"] * (tasks - 1), *cells] for where, *cells, _ in published]
    same = [run for run in results if which.items() <= run.items() and not variation(run)]
    for run in (*({**run, "rule": "ours"} for run in same), *others):
        head = _compared_head(run)
        matrix = run["class_il"][head]["matrix"]
        course = [f"{statistics.fmean(row[: task + 1]):.2f}" for task, row in enumerate(matrix)]
        gap = ["–"] * (tasks - 1 - len(matrix))
        ended = len(matrix) == tasks
        scores = [f"{run[scenario][head][key]:.2f}" if ended else "–" for scenario, key in COLUMNS]
        rows.append([run["rule"], str(run["seed"]), *course[: tasks - 1], *gap, *scores])
    columns = [f"after {task}" for task in range(2, tasks)]
    return markdown(("rule", "seed", "Class-IL after 1 task", *columns, *SCORES), rows)


def heads_table(analysed: Sequence[Run]) -> str:
    """Class-IL accuracy of a run's representation under several classifiers."""
    runs = [
        f"{f['benchmark']}, {f['method']}, memory {f['memory']}, seed {f['seed']}" for f in analysed
    ]
    rows = [
        [same[0]["classifier"], *(f"{row['class_il']:.2f}" for row in same)]
        for same in zip(*(f["classifiers"] for f in analysed), strict=True)
    ]
    return markdown(("classifier", *runs), rows)


def mammoth_table(results: Sequence[Run], machines: Sequence[Run]) -> str:
    """The baselines beside Mammoth's code; ours from the same file, or else from the results."""
    groups = dict(_rows([run for run in results if not variation(run)]))
    rows = []
    for machine in machines:
        benchmark, memory = machine["benchmark"], machine["memory"]
        for method, theirs in machine["mammoth"].items():
            runs = groups.get((benchmark, method, memory), [])
            measured = {
                name: [r[name][_compared_head(r)]["accuracy"] for r in runs] for name in SCENARIOS
            }
            sides = machine["ours"].get(method, measured), theirs
            cells = [
                spread(side[name]) if side[name] else "–" for name in SCENARIOS for side in sides
            ]
            counts = " and ".join(str(len(side["class_il"])) for side in sides if side["class_il"])
            rows.append([benchmark, method, *cells, counts])
    columns = ("Class-IL, ours", "Mammoth's", "Task-IL, ours", "Mammoth's")
    return markdown(("benchmark", "method", *columns, "runs"), rows)


def reliability_table(soaks: Sequence[Run], costs: Sequence[Run]) -> str:
    """What the last soak survived, and what checkpoints cost."""
    rows = []
    for soak in soaks:
        moments = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in soak["moments"].items())
        inputs = soak["fuzzing_tests"] * soak["inputs_each"]
        rows += [
            ["kills survived, the end the same bit by bit", f"{soak['kills']} ({moments})"],
            ["random inputs, no error but ours", f"{inputs:,}"],
        ]
    for cost in costs:
        every = f"{cost['megabytes']:.0f} MB every {cost['every_minutes']:g} minutes"
        share = f"{100 * cost['share_of_training']:.2f} % of the training time"
        rows.append([f"checkpoints of {every}, on {cost['device']}", share])
    return markdown(("", ""), rows)


def variation(run: Run) -> str:
    """The settings of a run that differ from its recipe, as text; "" for none."""
    return in_words(run["changed"])


def read_results(folder: Path, below: str) -> list[Run]:
    """The summaries in a folder below the results, each with its note of notes.yaml."""
    notes = read_notes(folder)
    paths = sorted((folder / below).glob("*.json"))
    return [read_json(path) | notes.get(f"{below}/{path.name}", {}) for path in paths]


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """What notes.yaml adds to files, by their paths."""
    path = folder / "notes.yaml"
    return read_yaml(path) if path.is_file() else {}


def read_runs(folder: Path) -> list[Run]:
    """All runs of the paper's rows and of variations of these."""
    benchmarks = sorted(path.name for path in (folder / "runs").glob("*"))
    return [run for name in benchmarks for run in read_results(folder, f"runs/{name}")]


def tables(folder: Path) -> dict[str, str]:
    """All tables by name."""
    runs = read_runs(folder)

    def experiment(name: str) -> list[Run]:
        return read_results(folder, f"experiments/{name}")

    def speed(name: str) -> list[Run]:
        return read_results(folder, f"speed/{name}")

    return {
        "results": results_table(runs),
        "summary": summary_table(runs),
        "variations": variations_table(runs),
        "alone": alone_table([*runs, *speed("alone")]),
        "order": differing_table(experiment("class-order")),
        "lambda": differing_table(experiment("lambda")),
        "gcr": beside_table(runs, experiment("gcr-weights")),
        "gem": course_table(runs, experiment("gem-rules")),
        "sorted": results_table(experiment("sorted-classes")),
        "heads": heads_table(experiment("heads")),
        "speed": speed_table(speed("throughput")),
        "compiling": compiling_table(speed("compiling")),
        "methods": methods_table(speed("methods")),
        "parts": parts_table(speed("parts")),
        "sharing": sharing_table(speed("sharing")),
        "mammoth": mammoth_table(runs, experiment("mammoth")),
        "reliability": reliability_table(experiment("soak"), speed("checkpointing")),
    }


def with_tables(text: str, by_name: Mapping[str, str]) -> str:
    """A page with the tables between its markers replaced."""
    places = 0
    for name, table in by_name.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, marker, rest = text.partition(start)
        if marker:
            text = before + start + table + end + rest.partition(end)[2]
            places += 1
    if not places:
        raise InputError("no place for a table: <!-- results --> and <!-- /results --> are missing")
    return text


def _rows(results: Sequence[Run]) -> list[tuple[tuple[str, str, int], list[Run]]]:
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for result in results:
        key = (result["benchmark"], result["method"], result["memory"])
        groups.setdefault(key, []).append(result)
    return sorted(groups.items())


def _by_head(published: Mapping[str, Run], runs: Sequence[Run]) -> Table:
    """Head, scores and number of runs: what was published where, then every head of any run."""
    rows = []
    for where, numbers in published.items():
        if numbers:
            cells = [_published(numbers.get(s, {}).get(key)) for s, key in COLUMNS]
            rows.append([f"*{where}*", *cells, ""])
    for head in _heads_of(runs):
        having = [run for run in runs if head in run["class_il"]]
        cells = [spread([run[s][head][key] for run in having]) for s, key in COLUMNS]
        rows.append([head, *cells, str(len(having))])
    return rows


def _heads_of(runs: Sequence[Run]) -> list[str]:
    """The heads that any of the runs has, in the order of the tables."""
    return sorted({head for run in runs for head in run["class_il"]}, key=_place_of_head)


def _place_of_head(head: str) -> tuple[int, str]:
    """Known heads in their order, then those that were added elsewhere."""
    known = HEADS_IN_ORDER.index(head) if head in HEADS_IN_ORDER else len(HEADS_IN_ORDER)
    return known, head


def published_rows(benchmark: str, memory: int, method: str) -> dict[str, Run]:
    """What the paper and others print for a row, by paper; empty where one has none."""
    elsewhere = {
        where: rows.get(benchmark, {}).get(str(memory), {}).get(method, {})
        for where, rows in paper_numbers()["elsewhere"].items()
    }
    return {PAPER: paper_row(benchmark, memory, method), **elsewhere}


def _compared_head(run: Run) -> str:
    """The head that is compared with the paper, as in `cclis.report.paper`."""
    return next((head for head in PAPER_HEADS if head in run["class_il"]), run["main_head"])


def _published(number: Sequence[float] | None) -> str:
    return "–" if number is None else f"*{number[0]:.2f} ± {number[1]:.2f}*"


def main(folder: str, *pages: str) -> None:
    """Write the tables of a folder's results into pages."""
    by_name = tables(Path(folder))
    for page in map(Path, pages):
        write_atomically(page, with_tables(page.read_text(encoding="utf-8"), by_name).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
