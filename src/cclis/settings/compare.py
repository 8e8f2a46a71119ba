"""Settings compared with those of a run, a checkpoint or a study from before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cclis.errors import InputError
from cclis.settings.fields import names_of


def not_learned(kind: type[Any]) -> set[str]:
    """Settings that do not change what a run learns: places, records, and what may be resumed."""
    kinds = (names_of(kind, kind=name) for name in ("place", "record"))
    return names_of(kind, resumable=True).union(*kinds)


def refuse_differences(
    used: Mapping[str, Any], now: Mapping[str, Any], prefix: str, ignore: Collection[str] = ()
) -> None:
    """Raise an InputError that names what differs, unless it is ignored.

    Args:
        used: The settings of before, by name.
        now: The settings of now.
        prefix: How the sentence begins, such as "cannot resume: the run used".
        ignore: Settings that may differ.
    """
    differences = [
        f"{name} {used.get(name)!r}, not {now.get(name)!r}"
        for name in {**used, **now}
        if name not in ignore and used.get(name) != now.get(name)
    ]
    if differences:
        raise InputError(f"{prefix} {'; '.join(differences)}")
