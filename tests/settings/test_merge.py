from __future__ import annotations

from typing import Any

import pytest

from cclis.settings import merge

RECIPE = {"epochs": 100, "first_epochs": 500, "learning_rate": 1.0}


def test_later_sources_overrule_earlier_ones() -> None:
    sources = {"a": 1, "b": 1, "c": 1}, {"b": 2, "c": 2}, {}, {"c": None}
    assert merge(*sources) == {"a": 1, "b": 2, "c": None}
    assert sources[0] == {"a": 1, "b": 1, "c": 1}
    assert merge() == {}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([RECIPE], (100, 500)),
        ([RECIPE, {"epochs": 4}], (4, None)),
        ([RECIPE, {"epochs": 4}, {"learning_rate": 2.0}], (4, None)),
        ([RECIPE, {"epochs": 4, "first_epochs": 7}], (4, 7)),
        ([RECIPE, {"first_epochs": 7}], (100, 7)),
        ([RECIPE, {"learning_rate": 2.0}], (100, 500)),
        # One that was given without `epochs` is not of the recipe: it stands.
        ([RECIPE, {"first_epochs": 7}, {"epochs": 4}], (4, 7)),
        ([RECIPE, {"epochs": 4, "first_epochs": 7}, {"epochs": 5}], (5, None)),
        ([{"epochs": 50}, {"first_epochs": 7}, {"epochs": 4}], (4, 7)),
    ],
    ids=str,
)
def test_epochs_drop_the_first_epochs_of_an_earlier_pair(
    sources: list[dict[str, Any]], expected: tuple[int, int | None]
) -> None:
    merged = merge({"epochs": 50, "first_epochs": None}, *sources)
    assert (merged["epochs"], merged["first_epochs"]) == expected
