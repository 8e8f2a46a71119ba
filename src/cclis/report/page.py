"""A run as one self-contained page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from cclis.report import figures
from cclis.report.pictures import Sheet, sheet
from cclis.report.results import compared_head, paper_row, variation
from cclis.report.table import SCENARIOS, main_head

Result = Mapping[str, Any]


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
    records: Sequence[Mapping[str, Any]] = (),
    analysis: Mapping[str, Tensor] | None = None,
) -> str:
    """The page of a run.

    Args:
        result: As in result.json.
        records: As in metrics.jsonl.
        analysis: As in analysis.safetensors.
    """
    analysis = analysis or {}
    panels = {
        "matrix": figures.accuracy_matrices(result),
        "curves": figures.accuracy_curves(result),
        "forgetting": figures.forgetting_bars(result),
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
            main=main_head(result),
            paper=_paper(result),
            compared=compared_head(result),
            panels={name: found for name, found in panels.items() if found},
            sheets=sheets,
            memory=_memory(result, analysis, sheets.get("memory")),
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
    if "config" not in result:
        return {}
    return paper_row(result["benchmark"], result["memory"], result["method"], variation(result))


def _memory(
    result: Result, analysis: Mapping[str, Tensor], found: Sheet | None
) -> list[tuple[str, list[tuple[int, float]]]]:
    """Every class with its samples in the memory, the number of each and its g, largest first."""
    if found is None:
        return []
    labels, proposal = analysis["memory.labels"].tolist(), analysis["memory.proposal"].tolist()
    kept: dict[int, list[tuple[int, float]]] = {}
    for number, (label, g) in enumerate(zip(labels, proposal, strict=True)):
        kept.setdefault(label, []).append((number, g))
    return [
        (result["class_names"][label], sorted(samples, key=lambda sample: -sample[1]))
        for label, samples in sorted(kept.items())
    ]


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return Markup(get_plotlyjs())
