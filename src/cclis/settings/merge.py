"""Settings from several sources: defaults, a recipe, a file, flags; the later overrule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all sources; a later one overrules those before it.

    `epochs` says how long every task is learned. A source that gives it without `first_epochs`
    therefore resets a `first_epochs` that came with the `epochs` of an earlier source.
    """
    merged: dict[str, Any] = {}
    from_pair = False
    for source in sources:
        if "epochs" in source and "first_epochs" not in source and from_pair:
            merged["first_epochs"] = None
        if "first_epochs" in source:
            from_pair = "epochs" in source
        merged |= source
    return merged
