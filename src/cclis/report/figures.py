"""Figures of a run, as data that plotly draws. Colours and sizes are the page's."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cclis.engine.records import Epoch
from cclis.functional.diagnostics import QUANTILES
from cclis.functional.metrics import forgetting
from cclis.report.tsne import flattened
from cclis.runs.records import SCENARIOS, Evaluation, Record, Result

Figure = dict[str, Any]
LEGIBLE = 25
"""Most rows or columns of a heat map whose cells have numbers in them."""
MARKED = 25
"""Most epochs whose losses are marked on their line."""
LONGEST_NAME = 24
INVISIBLE = "\u200b"
COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
"""Of ten classes, far apart on a light page and on a dark one: the well-known "category10"."""
SHAPES = ("circle", "square", "triangle-up", "x", "pentagon", "triangle-down", "cross", "hexagon")
"""Of test samples on the map: the next ten classes have the same colours and another shape."""
CELLS = {"type": "category", "showgrid": False}
"""Axes of a heat map."""


def accuracy_matrices(result: Result) -> list[Figure]:
    """Row t, column k: accuracy on task k after task t, for each scenario and head."""
    return [accuracy_matrix(names, matrix) for names, matrix in _matrices(result)]


def accuracy_matrix(choice: dict[str, str], matrix: Sequence[Sequence[Any]]) -> Figure:
    """Row t, column k: accuracy on task k after task t."""
    return _figure(
        choice,
        [_heat(_tasks(matrix), [f"after {n}" for n in _tasks(matrix)], matrix, ".1f", 100)],
        x={"title": "accuracy on task, in %", **CELLS},
        y={"autorange": "reversed", **CELLS},
    )


def accuracy_curves(result: Result) -> list[Figure]:
    """Accuracy on every task, and on all so far, as tasks are learned."""
    figures = []
    for names, matrix in _matrices(result):
        tasks = _tasks(matrix)
        lines = [
            _line(f"task {k + 1}", tasks[k:], [matrix[t][k] for t in range(k, len(matrix))])
            for k in range(len(matrix))
        ]
        so_far = [statistics.mean(row[: t + 1]) for t, row in enumerate(matrix)]
        mean = {**_line("all so far", tasks, so_far), "line": {"width": 4, "color": "text"}}
        y = {"title": "accuracy in %", "range": [0, 102]}
        figures.append(_figure(names, [*lines, mean], x=_tasks_axis("after task"), y=y))
    return figures


def forgetting_bars(result: Result) -> list[Figure]:
    """What was forgotten of every task but the last."""
    return [
        _figure(
            names,
            [{"type": "bar", "x": _tasks(matrix)[:-1], "y": forgetting(matrix), "name": "points"}],
            x=_tasks_axis("task"),
            y={"title": "points forgotten"},
        )
        for names, matrix in _matrices(result)
        if len(matrix) > 1
    ]


def confusions(result: Result, analysis: Mapping[str, Tensor]) -> list[Figure]:
    """How often a class was taken for another, in per cent of its test samples."""
    names = _names(result)
    figures = []
    for head in result.heads:
        counts = analysis.get(f"confusion.{head}")
        if counts is None:
            continue
        shares = 100 * counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
        rounded = [[round(share, 1) or 0 for share in row] for row in shares.tolist()]
        heat = _heat(names, names, rounded, ".0f", 100)
        heat |= {"hovertemplate": "%{y} taken for %{x}: %{z:.1f} %<extra></extra>", "meta": "rare"}
        x, y = {"title": "taken for"}, {"title": "class", "autorange": "reversed"}
        figures.append(_figure({"head": head}, [heat], x=x | CELLS, y=y | CELLS, tall=True))
    return figures


def losses(records: Sequence[Record]) -> list[Figure]:
    """The terms of the loss and the learning rate, epoch by epoch."""
    epochs = [record for record in records if isinstance(record, Epoch)]
    if not epochs:
        return []
    x, ends, before = [], [], 0
    for this, following in zip(epochs, [*epochs[1:], None], strict=True):
        x.append(before + this.step)
        if following is None or following.task != this.task:
            before += this.step
            ends.append(before)
    names = {name: None for record in epochs for name in record.losses}
    # A line of one point cannot be seen.
    mode = "lines" if len(epochs) > MARKED else "lines+markers"
    lines = [_line(name, x, [r.losses.get(name) for r in epochs], mode) for name in names]
    rate = _line("learning rate", x, [r.learning_rate for r in epochs], mode)
    rate |= {"yaxis": "y2", "line": {"dash": "dot", "width": 1.5, "color": "quiet"}}
    figure = _figure(
        {},
        [*lines, rate],
        x={"title": "steps, with a line where a task ends", "showgrid": False},
        y={"title": "loss, mean of an epoch"},
    )
    figure["layout"]["yaxis2"] = {
        **{"title": "learning rate", "overlaying": "y", "side": "right", "rangemode": "tozero"},
        # Left to itself, plotly puts these ticks where those of the loss are, at odd numbers.
        **{"showgrid": False, "tickmode": "auto", "nticks": 6, "exponentformat": "none"},
    }
    figure["layout"]["shapes"] = [
        {
            **{"type": "line", "x0": end, "x1": end, "yref": "paper", "y0": 0, "y1": 1},
            "line": {"width": 1, "color": "quiet"},
        }
        for end in ends[:-1]
    ]
    return [figure]


def importance(result: Result, records: Sequence[Record]) -> list[Figure]:
    """How well what the memory keeps stands for what was visible; empty without a proposal."""
    evaluations = [record for record in records if isinstance(record, Evaluation)]
    diagnoses = {record.task: record.diagnosis for record in evaluations if record.diagnosis}
    if not any(sum(diagnosis["kept"]) for diagnosis in diagnoses.values()):
        return []
    names, classes = _names(result), len(result.class_names)
    share = [
        [e / k if k else None for e, k in zip(d["effective"], d["kept"], strict=True)]
        for d in diagnoses.values()
    ]
    padded = [[*row, *[None] * (classes - len(row))] for row in share]
    heat = _heat(names, [f"after {task + 1}" for task in diagnoses], padded, ".2f", 1)
    heat["customdata"] = [
        [f"{e:.1f} of {k}" for e, k in zip(d["effective"], d["kept"], strict=True)]
        for d in diagnoses.values()
    ]
    heat["hovertemplate"] = "%{y}, %{x}: %{customdata}<extra></extra>"
    effective = _figure(
        {"name": "effective sample size"},
        [heat],
        x={"title": "effective share of the samples kept", **CELLS},
        y={"autorange": "reversed", **CELLS},
    )
    # A class is all there to compare with in the task that brings it.
    arrived = [(c, diagnoses[t]) for c, t in _arrivals(result) if t in diagnoses]
    spread = [d["spread"][c] for c, d in arrived]
    new = [names[c] for c, _ in arrived]
    low, first, middle, third, high = ([row[q] for row in spread] for q in range(len(QUANTILES)))
    box = {"type": "box", "name": "g", "x": new, "median": middle, "q1": first, "q3": third}
    box |= {"lowerfence": low, "upperfence": high}
    boxes = _figure(
        {"name": "spread of g"},
        [box],
        x={"title": "class, when it arrived", "type": "category"},
        y={"title": "g, in even shares (5 to 95 %)", "type": "log", "tickformat": "~g"},
    )
    said = {
        "weighted": "weighted by 1/g",
        "unweighted": "the same, unweighted",
        "random": "random choice, expected",
    }
    bars = [
        {
            **{"type": "bar", "name": said[kind], "x": new},
            "y": [None if (e := d["errors"][kind][c]) is None else 100 * e for c, d in arrived],
        }
        for kind in said
    ]
    error = _figure(
        {"name": "error of the denominator"},
        bars,
        x={"title": "class, when it arrived", "type": "category"},
        y={"title": "error of its share in the denominator, in %", "rangemode": "tozero"},
    )
    return [effective, boxes, error]


def embedding_map(result: Result, analysis: Mapping[str, Tensor]) -> list[Figure]:
    """Where test samples, the memory's samples and the prototypes lie, flattened by t-SNE.

    Traces of test samples and of the memory carry their thumbnails' numbers as `customdata`.
    """
    places = flattened(analysis)
    if not places:
        return []
    names, traces = _names(result), []
    test, predicted = analysis["test.labels"], analysis["test.predicted"]
    for label, name in enumerate(names):
        rows = (test == label).nonzero()[:, 0].tolist()
        said = [f"{name}, taken for {names[int(predicted[row])]}" for row in rows]
        where = [places["test"][row] for row in rows]
        shape = SHAPES[label // len(COLOURS) % len(SHAPES)]
        marker = {"size": 5, "symbol": shape, "color": _colour(label)}
        traces.append(_points("test", name, marker, where, said, rows))
    if "memory" in places:
        kept = analysis["memory.labels"].tolist()
        said = [f"{names[label]}, in the memory" for label in kept]
        marker = _outlined("diamond", 9, kept)
        numbers = list(range(len(kept)))
        traces.append(_points("memory", "in the memory", marker, places["memory"], said, numbers))
    if "prototypes" in places:
        said = [f"prototype of {name}" for name in names]
        marker = _outlined("star", 15, range(len(names)))
        traces.append(_points("prototypes", "prototypes", marker, places["prototypes"], said, []))
    bare = {"visible": False}
    figure = _figure({}, traces, x=bare, y=bare, tall=True)
    figure["layout"]["legend"] = {"itemsizing": "constant"}
    return [figure]


def _points(
    kind: str,
    name: str,
    marker: Figure,
    places: list[list[float]],
    said: list[str],
    numbers: list[int],
) -> Figure:
    return {
        **{"type": "scatter", "mode": "markers", "name": name},
        **{"x": [x for x, _ in places], "y": [y for _, y in places], "text": said},
        **{"customdata": numbers, "meta": kind, "hovertemplate": "%{text}<extra></extra>"},
        "marker": marker,
    }


def _outlined(symbol: str, size: int, labels: Iterable[int]) -> Figure:
    line = {"width": 1.5, "color": "text"}
    return {"symbol": symbol, "size": size, "line": line, "color": [_colour(n) for n in labels]}


def _names(result: Result) -> list[str]:
    """Short names of the classes, all different, that plotly shows as they are.

    It takes some tags and `%{...}` for its own, and a name such as `__proto__` for JavaScript's.
    """
    names: list[str] = []
    for number, whole in enumerate(result.class_names):
        name = whole if len(whole) <= LONGEST_NAME else f"{whole[: LONGEST_NAME - 1]}…"
        name = INVISIBLE + html.escape(name, quote=False).replace("%{", f"%{INVISIBLE}{{")
        names.append(f"{name} ({number + 1})" if name in names else name)
    return names


def _colour(label: int) -> str:
    return COLOURS[label % len(COLOURS)]


def _matrices(result: Result) -> list[tuple[dict[str, str], list[list[Any]]]]:
    """Of each scenario and head."""
    return [
        ({"scenario": title, "head": head}, result.scores(scenario)[head].matrix)
        for scenario, title in SCENARIOS.items()
        for head in result.heads
    ]


def _arrivals(result: Result) -> list[tuple[int, int]]:
    """Every class with the task that brings it."""
    tasks = [task for task, size in enumerate(result.task_sizes) for _ in range(size)]
    return list(enumerate(tasks))


def _tasks(matrix: Sequence[Any]) -> list[int]:
    return list(range(1, len(matrix) + 1))


def _tasks_axis(title: str) -> Figure:
    return {"title": title, "dtick": 1}


def _line(name: str, x: Sequence[Any], y: Sequence[Any], mode: str = "lines+markers") -> Figure:
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y)}


def _heat(
    x: Sequence[Any], y: Sequence[Any], z: Sequence[Sequence[Any]], form: str, high: float
) -> Figure:
    heat: Figure = {"type": "heatmap", "x": list(x), "y": list(y), "z": [list(row) for row in z]}
    heat |= {"zmin": 0, "zmax": high, "xgap": 1, "ygap": 1, "hoverongaps": False}
    heat["hovertemplate"] = f"%{{y}}, %{{x}}: %{{z:{form}}}<extra></extra>"
    if max(len(x), len(y)) <= LEGIBLE:
        heat["texttemplate"] = f"%{{z:{form}}}"
    return heat


def _figure(
    choice: dict[str, str], traces: list[Figure], *, x: Figure, y: Figure, tall: bool = False
) -> Figure:
    """A figure, and what must be chosen on the page for it to be shown."""
    layout = {"xaxis": x, "yaxis": y}
    return {"choice": choice, "data": traces, "tall": tall, "layout": layout}
