"""A run as one self-contained page that opens offline."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from cclis.methods.registry import OURS, recorded
from cclis.report import figures
from cclis.report.paper import compared_head, paper_row
from cclis.report.pictures import sheet
from cclis.runs.records import SCENARIOS, Record, Result

MOST_SHOWN = 2000
"""Thumbnails of the memory on a page."""


def environment() -> Environment:
    """The templates of pages; names in them are shown as text, never run."""
    loader = PackageLoader("cclis.report")
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    drawing, _, _ = loader.get_source(templates, "page.js")
    templates.globals["drawing_scripts"] = lambda: (_plotly(), drawing)
    templates.filters["content_security_policy"] = content_security_policy
    templates.filters["as_data"] = as_data
    return templates


def content_security_policy(scripts: Sequence[str]) -> str:
    """The policy of a page: it loads nothing, and runs only these scripts.

    Styles are not restricted: plotly and the figures as SVG set them on elements.
    """
    digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()) for code in scripts]
    allowed = " ".join(f"'sha256-{digest.decode()}'" for digest in digests) or "'none'"
    rules = ("default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'")
    return "; ".join((*rules, "img-src data:", "base-uri 'none'", "form-action 'none'"))


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
            panels={name: drawn for name, drawn in panels.items() if drawn},
            sheets=sheets,
            memory=memory,
            at_once=at_once,
            proposed=any(kept.proposal[0] > kept.proposal[-1] for kept in memory),
            prototypes="prototypes" in analysis,
        )
    )


def as_data(value: Any) -> str:
    """JSON to stand within a script element; nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _paper(result: Result) -> dict[str, Any]:
    """The paper's numbers for the row of this run, empty where it has none."""
    if result.changed is None:
        return {}
    return paper_row(result.benchmark, result.memory, result.method, result.variation)


@dataclass(frozen=True)
class Exemplars:
    """The samples of a class in the memory.

    Attributes:
        name: The class.
        first: The number of the first sample that is shown, among those of all classes.
        proposal: g of the samples that are shown, the largest first.
        more: How many samples are not shown.
    """

    name: str
    first: int
    proposal: list[float]
    more: int


def _memory(
    result: Result, analysis: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], list[Exemplars]]:
    """Which of the memory's samples are shown, class by class, the largest proposal first.

    Returns:
        The analysis with these samples alone, and their classes.
    """
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
        kept.append(Exemplars(name, first, proposal[some].tolist(), len(rows) - len(some)))
        chosen.append(some)
        first += len(some)
    order = torch.cat(chosen)
    shown = {k: v[order] if k.startswith("memory.") else v for k, v in analysis.items()}
    return shown, kept


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    code: str = get_plotlyjs()
    return code
