"""Settings compared with those of a run, a checkpoint or a study from before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cclis.errors import InputError


def refuse_differences(
    used: Mapping[str, Any], now: Mapping[str, Any], why: str, free: Collection[str] = ()
) -> None:
    """Raise an InputError that names what differs, unless it is free to differ.

    Args:
        used: The settings of before, by name.
        now: The settings of now.
        why: How the sentence begins, such as "cannot resume: the run used".
        free: Settings that may differ.
    """
    differences = [
        f"{name} {used.get(name)!r}, not {now.get(name)!r}"
        for name in {**used, **now}
        if name not in free and used.get(name) != now.get(name)
    ]
    if differences:
        raise InputError(f"{why} {'; '.join(differences)}")
