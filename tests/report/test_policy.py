"""What a page allows a browser to load and to run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable

import pytest

from cclis.report.compare import comparison
from cclis.report.page import render
from cclis.report.study import Row, study_page
from cclis.study.catalogue import ACCURACY
from tests.report.made import result
from tests.report.pages import Page


def run() -> str:
    return render(result())


def compared() -> str:
    return comparison([result()])["comparison.html"].decode()


def study() -> str:
    rows = [Row("seq-cifar10", 200, "CCLIS", {"a": result()}, {}, {})]
    return study_page(rows, ACCURACY, title="A study", about="", scale="")


@pytest.mark.parametrize(("page", "own"), [(run, 2), (compared, 2), (study, 0)])
def test_a_page_loads_nothing_and_runs_its_own_scripts_alone(
    page: Callable[[], str], own: int
) -> None:
    text = page()
    taken_apart = Page(text)
    # The first script holds the figures as data and is never run.
    scripts = [code.encode() for code in taken_apart.scripts[1:]]
    assert len(scripts) == own
    hashes = [base64.b64encode(hashlib.sha256(code).digest()).decode() for code in scripts]
    assert taken_apart.policy == {
        "default-src": ["'none'"],
        "script-src": [f"'sha256-{digest}'" for digest in hashes] or ["'none'"],
        "style-src": ["'unsafe-inline'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    # A policy holds for what follows it.
    assert text.index("Content-Security-Policy") < text.index("<link")
