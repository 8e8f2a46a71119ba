"""What the documents promise is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROMISES = NAMED.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "name"), PROMISES)
def test_every_promise_names_a_test_that_is_there(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_promises() -> None:
    assert len(PROMISES) > 30
