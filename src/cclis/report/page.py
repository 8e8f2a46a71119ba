"""The result of a run as one self-contained page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cclis.report.table import SCENARIOS, main_head


def environment() -> Environment:
    """Where pages are rendered: names in them are shown as text, never run."""
    found = Environment(
        loader=PackageLoader("cclis.report"), autoescape=True, undefined=StrictUndefined
    )
    found.filters["shade"] = _shade
    return found


def render(result: Mapping[str, Any]) -> str:
    """The page for a result, as in result.json."""
    template = environment().get_template("page.html")
    return template.render(result=result, scenarios=SCENARIOS, main=main_head(result))


def _shade(accuracy: float) -> str:
    """Background of a heat-map cell: from amber at 0 % to teal at 100 %."""
    hue = 30 + 145 * max(0.0, min(100.0, accuracy)) / 100
    return f"hsl({hue:.0f} 55% 45%)"
