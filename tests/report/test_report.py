from __future__ import annotations

from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from cclis.evaluation.accuracy import Accuracies
from cclis.report.page import render
from cclis.report.table import main_head, result_tables
from cclis.runs import summarise

HOSTILE = "<script>alert('class')</script>"


@pytest.fixture
def result() -> dict[str, Any]:
    rows = [
        {"linear": Accuracies([91.25], [97.5]), "prototype": Accuracies([88.125], [96.0])},
        {
            "linear": Accuracies([71.5, 83.75], [94.0, 95.5]),
            "prototype": Accuracies([76.5, 81.0], [93.25, 94.75]),
        },
    ]
    return {
        "benchmark": "npz",
        "method": "cclis",
        "memory": 20,
        "seed": 0,
        **summarise(rows),
        "task_sizes": [1, 2],
        "class_names": [HOSTILE, "cat", "dog & co"],
        "seconds": {"train": 12.3, "total": 15.0},
        "images_per_second": 5000.0,
        "peak_memory_bytes": 2**30,
        "device": HOSTILE,
        "versions": {"torch": "2"},
        "date": "2024-01-01T00:00:00Z",
        "config": {"data": HOSTILE, "epochs": 3},
    }


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_holds_every_number(result: dict[str, Any]) -> None:
    page = Page(render(result))
    for scenario in ("class_il", "task_il"):
        for head in result[scenario].values():
            for row in head["matrix"]:
                for value in row:
                    assert value is None or f"{value:.1f}" in page.words
            for key in ("accuracy", "forgetting", "backward_transfer"):
                assert f"{head[key]:.2f}" in page.words


def test_names_are_shown_as_text(result: dict[str, Any]) -> None:
    page = Page(render(result))
    assert "script" not in page.tags
    assert page.words.count(HOSTILE) == 3
    assert "dog & co" in page.words


def test_the_page_needs_nothing_from_elsewhere(result: dict[str, Any]) -> None:
    text = render(result)
    assert Page(text).addresses == []
    assert "http" not in text
    assert "@import" not in text


def test_the_tables_hold_the_main_heads_matrices(result: dict[str, Any]) -> None:
    out = StringIO()
    Console(file=out, width=120).print(result_tables(result))
    shown = out.getvalue()
    for value in ("88.1", "76.5", "81.0", "93.2", "94.8"):
        assert value in shown
    assert "91.2" not in shown
    assert "77.6" in shown
    assert main_head(result) == "prototype"
