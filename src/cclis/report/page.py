"""A run as one self-contained page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from cclis.methods.registry import OURS, recorded
from cclis.report import figures
from cclis.report.paper import compared_head, paper_row
from cclis.report.pictures import sheet
from cclis.runs.records import SCENARIOS, Record, Result

MOST_SHOWN = 2000
"""Thumbnails of the memory on a page."""


def environment() -> Environment:
    """Where pages are rendered: names in them are shown as text, never run."""
    found = Environment(
        loader=PackageLoader("cclis.report"), autoescape=True, undefined=StrictUndefined
    )
    found.globals["plotly"] = _plotly
    found.filters["as_data"] = as_data
    return found


def render(
    result: Result,
    records: Sequence[Record] = (),
    analysis: Mapping[str, Tensor] | None = None,
) -> str:
    """The page of a run.

    Args:
        result: Of result.json.
        records: Of metrics.jsonl.
        analysis: As in analysis.safetensors.
    """
    paper = _paper(result)
    # Beside the paper's numbers stand those that are measured as it measures.
    headline = compared_head(result) if paper else result.main_head
    analysis, memory = _memory(result, analysis or {})
    at_once = result.method in OURS and recorded(result.method).joint
    panels = {
        "matrix": figures.accuracy_matrices(result),
        "curves": [] if at_once else figures.accuracy_curves(result),
        "forgetting": [] if at_once else figures.forgetting_bars(result),
        "confusion": figures.confusions(result, analysis),
        "losses": figures.losses(records),
        "importance": figures.importance(result, records),
        "map": figures.embedding_map(result, analysis),
    }
    sheets = {
        kind: sheet(analysis[f"{kind}.images"])
        for kind in ("test", "memory")
        if len(analysis.get(f"{kind}.images", ()))
    }
    return (
        environment()
        .get_template("page.html")
        .render(
            result=result,
            scenarios=SCENARIOS,
            short=SCENARIOS.values(),
            heads=list(dict.fromkeys([headline, *result.heads])),
            paper=paper,
            panels={name: found for name, found in panels.items() if found},
            sheets=sheets,
            memory=memory,
            at_once=at_once,
            proposed=any(kept.proposal[0] > kept.proposal[-1] for kept in memory),
            prototypes="prototypes" in analysis,
        )
    )


def as_data(value: Any) -> Markup:
    """JSON to stand within a script element, which nothing in it can end."""
    text = json.dumps(value, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _paper(result: Result) -> dict[str, Any]:
    """The paper's numbers for this very row, empty where it has none."""
    if result.changed is None:
        return {}
    return paper_row(result.benchmark, result.memory, result.method, result.variation)


@dataclass(frozen=True)
class Kept:
    """What the memory keeps of a class.

    Attributes:
        name: Of the class.
        first: The number of its first sample that is shown.
        proposal: g of those that are shown, the largest first.
        more: How many are not shown.
    """

    name: str
    first: int
    proposal: list[float]
    more: int


def _memory(
    result: Result, analysis: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], list[Kept]]:
    """The analysis with those of the memory's samples that are shown, class by class the largest
    proposal first, and what they are."""
    if not len(analysis.get("memory.images", ())):
        return analysis, []
    labels, proposal = analysis["memory.labels"], analysis["memory.proposal"]
    classes = labels.unique().tolist()  # type: ignore[no-untyped-call]
    most = max(1, MOST_SHOWN // len(classes))
    kept, chosen, first = [], [], 0
    for label in classes:
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[proposal[rows].argsort(descending=True, stable=True)]
        some = rows[:most]
        name = result.class_names[label]
        kept.append(Kept(name, first, proposal[some].tolist(), len(rows) - len(some)))
        chosen.append(some)
        first += len(some)
    order = torch.cat(chosen)
    shown = {k: v[order] if k.startswith("memory.") else v for k, v in analysis.items()}
    return shown, kept


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return Markup(get_plotlyjs())
