"""A setting: one line of a frozen dataclass, with its documentation, bounds and role."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
import types
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cclis.errors import InputError, unknown

LARGEST = 2**63 - 1
NUMBERS = {int: numbers.Integral, float: numbers.Real}
"""What counts as a number, numpy's included."""

Kind = Literal["learning", "row", "place", "hardware", "record"]
_TYPES: dict[type[Any], dict[str, Any]] = {}


@dataclass(frozen=True)
class Info:
    """What is known of a setting beside its name, type and default.

    Attributes:
        doc: A sentence for `--help`.
        minimum: The smallest value.
        maximum: The largest value.
        above: Values are greater than this.
        below: Values are less than this.
        because: Why there is a bound.
        kind: What it decides: how a model learns (learning), which row of a table a run is (row),
            where files lie (place), on what it is computed (hardware), or what is written down
            (record).
        resumable: Whether it may change when a run is resumed.
        first_task: Whether it matters while the first task is learned.
        run_only: Whether only runs have it, and `ContinualLearner` does not.
        in_recipe: Whether a tuned recipe holds it; by default if it is of learning or of a row.
        stability: Whether it is named when a loss is no longer finite.
    """

    doc: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    because: str = ""
    kind: Kind = "learning"
    resumable: bool = False
    first_task: bool = True
    run_only: bool = False
    in_recipe: bool = True
    stability: bool = False

    def allows(self, value: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        if self.minimum is not None and self.maximum is not None:
            same = self.minimum == self.maximum
            return f"{self.minimum:g}" if same else f"between {self.minimum:g} and {self.maximum:g}"
        if self.minimum is not None:
            return "0 or more" if self.minimum == 0 else f"at least {self.minimum:g}"
        ends = {"greater than": self.above, "at most": self.maximum, "less than": self.below}
        return " and ".join(f"{how} {x:g}" for how, x in ends.items() if x is not None) or "finite"


def setting(default: Any, doc: str, **info: Any) -> Any:
    """A field of a group of settings; `info` is that of `Info`.

    >>> epochs: int = setting(50, "Epochs of every task.", minimum=1)
    """
    info.setdefault("in_recipe", info.get("kind", "learning") in ("learning", "row"))
    return dataclasses.field(default=default, metadata={"setting": Info(doc, **info)})


def shared(group: type[Any], name: str) -> Any:
    """A field that another group has too: the same default, documentation, bounds and role."""
    return dataclasses.field(
        default=getattr(group, name), metadata={"setting": info_of(group, name)}
    )


def info_of(kind: type[Any], name: str) -> Info:
    """What is known of a setting, also where a subclass has only given it another default."""
    for base in kind.__mro__:
        field = vars(base).get("__dataclass_fields__", {}).get(name)
        if field is not None and "setting" in field.metadata:
            info: Info = field.metadata["setting"]
            return info
    return Info()


def names_of(group: type[Any], **wanted: Any) -> set[str]:
    """The settings of a group or of a config that have these attributes of `Info`.

    >>> names_of(Config, kind="place")
    {'data', 'output', 'start_from'}
    """
    return {
        field.name
        for field in dataclasses.fields(group)
        if all(getattr(info_of(group, field.name), key) == v for key, v in wanted.items())
    }


def types_of(group: type[Any]) -> dict[str, Any]:
    """The types of a group's settings, by name."""
    # To work them out takes a millisecond, and every setting of every config asks.
    return _TYPES.get(group) or _TYPES.setdefault(group, get_type_hints(group))


def own_names(group: type[Any]) -> list[str]:
    """The settings that a group has and none of its bases, in their order."""
    bases = [base for base in group.__mro__[1:] if dataclasses.is_dataclass(base)]
    inherited = set().union(*map(names_of, bases))
    return [name for name in inspect.get_annotations(group) if name not in inherited]


class Options:
    """A group of settings that checks itself."""

    def __post_init__(self) -> None:
        for name in types_of(type(self)):
            check_value(type(self), name, getattr(self, name))


def check_value(group: type[Any], name: str, value: Any) -> None:
    """Raise an InputError if a setting cannot have this value."""
    hint, info = types_of(group)[name], info_of(group, name)
    if not any(_fits(value, kind) for kind in (get_args(hint) if _is_union(hint) else (hint,))):
        if get_origin(hint) is Literal:
            raise unknown(name, str(value), get_args(hint))
        raise InputError(f"{name} must be {_in_words(hint)}, not {value!r}")
    if info.kind == "place" and isinstance(value, str) and not _is_path(value):
        raise InputError(f"{name} must be a path, not {value!r}: no path has these characters")
    values = value if isinstance(value, list) else [value]
    for number in values:
        if not isinstance(number, numbers.Real) or isinstance(number, bool):
            continue
        if isinstance(number, numbers.Integral) and abs(int(number)) > LARGEST:
            raise InputError(f"{name} must be at most {LARGEST}")
        if not info.allows(float(number)):
            because = f": {info.because}" if info.because else ""
            raise InputError(f"{name} must be {info.bounds}, not {number}{because}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, NUMBERS.get(kind, kind))


def _is_path(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType)


def _in_words(hint: Any) -> str:
    kinds = get_args(hint) if _is_union(hint) else (hint,)
    return " or ".join("None" if k is type(None) else getattr(k, "__name__", str(k)) for k in kinds)


def plain(value: Any) -> Any:
    """A number of numpy's as Python's own."""
    return value.item() if hasattr(value, "item") else value
