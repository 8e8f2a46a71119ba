"""The paper's numbers, and the head that is compared with them."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from cclis.runs.records import SCENARIOS, Result

SCORES = [(scenario, key) for scenario in SCENARIOS for key in ("accuracy", "forgetting")]
"""What the paper prints of a method, as (scenario, kind)."""
PAPER_HEADS = ("classifier", "linear_paper", "linear")
"""The heads that follow the paper's protocol, the nearest first."""


def compared_head(result: Result) -> str:
    """The head nearest to the paper's protocol; chosen by name, never by accuracy."""
    return next((head for head in PAPER_HEADS if head in result.class_il), result.main_head)


def paper_row(benchmark: str, memory: int, method: str, changed: str = "") -> dict[str, Any]:
    """The paper's numbers for a row, empty where it has none."""
    rows = paper_numbers().get(benchmark, {}).get(str(memory), {})
    # What it varies is its own method.
    varied = rows.get("variations", {}) if method == "cclis" else {}
    row: dict[str, Any] = varied.get(changed, {}) if changed else rows.get(method, {})
    return row


def paper_row_of_study(study: str, benchmark: str, memory: int, variant: str) -> dict[str, Any]:
    """What one table prints otherwise than another for the same settings; empty elsewhere."""
    rows = paper_numbers()["studies"].get(study, {}).get(benchmark, {}).get(str(memory), {})
    row: dict[str, Any] = rows.get(variant, {})
    return row


@cache
def paper_numbers() -> dict[str, Any]:
    """All of paper.json.

    By benchmark, memory and method; what other papers print below `elsewhere`, and what a table
    prints otherwise below `studies`.
    """
    text = (resources.files("cclis.report") / "paper.json").read_text(encoding="utf-8")
    numbers: dict[str, Any] = json.loads(text)
    return numbers
