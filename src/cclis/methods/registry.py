"""Methods by name: ours, those of installed packages, and `package.module:Class`.

A method is imported when a person names it: by a flag, an argument, or a file given by `--config`.
What a run folder, a checkpoint or a saved learner names is never imported: a method that is not
ours has to be named again.
"""

from __future__ import annotations

import inspect
import numbers
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, get_args

from cclis.errors import InputError, did_you_mean, unknown
from cclis.settings import Config, names_of, types_of

if TYPE_CHECKING:
    from cclis.methods.base import Method

OURS = {
    "cclis": "cclis.methods.cclis:CCLIS",
    "co2l": "cclis.methods.co2l:Co2L",
    "er": "cclis.methods.er:ER",
    "icarl": "cclis.methods.icarl:ICaRL",
    "der": "cclis.methods.der:DER",
    "derpp": "cclis.methods.der:DERPP",
    "gcr": "cclis.methods.gcr:GCR",
    "gem": "cclis.methods.gem:GEM",
    "gss": "cclis.methods.gss:GSS",
    "finetune": "cclis.methods.finetune:Finetune",
    "joint": "cclis.methods.joint:Joint",
}
"""Where the methods of this package are."""
ENTRY_POINTS = "cclis.methods"
"""The group of entry points by which installed packages name methods."""

_named: dict[str, type[Method[Any, Any]]] = {}
"""Methods that are not ours and that a person has named in this process."""


def available() -> list[str]:
    """The names of all methods: ours, those of installed packages, and others named so far."""
    return list(dict.fromkeys([*OURS, *sorted(entry_points(group=ENTRY_POINTS).names), *_named]))


def imported() -> list[str]:
    """The names of the methods that may be used without importing what nobody named."""
    return [*OURS, *_named]


def get(method: str | type[Method[Any, Any]]) -> type[Method[Any, Any]]:
    """The class of a method that a person names, imported where it is not yet.

    >>> get("er"), get("my_package.my_module:LwF")
    """
    if not isinstance(method, str):
        return _named_by_person(name_of(_checked(method)), method)
    if method in OURS or method in _named:
        return recorded(method)
    found: Any
    try:
        if ":" in method:
            found = _load(method)
        else:
            (point,) = entry_points(group=ENTRY_POINTS, name=method) or (None,)
            if point is None:
                raise unknown("method", method, available())
            found = point.load()
    except InputError:
        raise
    # A module of somebody else's may raise anything while it is imported.
    except Exception as error:
        raise InputError(
            f"cannot import the method {method} ({type(error).__name__}: {error})"
        ) from error
    return _named_by_person(method, _checked(found))


def recorded(method: str) -> type[Method[Any, Any]]:
    """The class of a method that a file names: ours, or one that a person has named already."""
    if method in OURS:
        module, _, name = OURS[method].partition(":")
        ours: type[Method[Any, Any]] = getattr(import_module(module), name)
        return ours
    if method not in _named:
        raise InputError(
            f"the method '{method}' is not one of ours and is not imported because a file names "
            f"it; name it as well, by --method {method} or method="
        )
    return _named[method]


def name_of(method: type[Method[Any, Any]]) -> str:
    """The name of a method's class: that of `available`, or else `package.module:Class`."""
    place = f"{method.__module__}:{method.__qualname__}"
    names = {place: name for name, place in OURS.items()}
    names |= {point.value: point.name for point in entry_points(group=ENTRY_POINTS)}
    named = (name for name, known in _named.items() if known is method)
    return names.get(place) or next(named, place)


def slug(method: str) -> str:
    """A method's name as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", method)


def make_config(method: str | type[Method[Any, Any]], settings: Mapping[str, Any]) -> Config:
    """The config of a method that a person names; an unknown setting is refused by name."""
    kind = get(method)
    return _config(kind, method if isinstance(method, str) else name_of(kind), settings)


def recorded_config(
    settings: Mapping[str, Any], method: type[Method[Any, Any]] | None = None
) -> Config:
    """The config that a file holds, of its method; a setting that came later has its default."""
    others = dict(settings)
    name = str(others.pop("method"))
    return _config(method or recorded(name), name, others)


def keeps_samples(method: str) -> bool:
    """Whether a method has a memory."""
    default: int = get(method).settings.memory
    return default > 0


def methods_with(setting: str) -> list[str]:
    """The methods that have a setting of that name."""
    kinds = {name: recorded(name) for name in imported()}
    return [name for name, kind in kinds.items() if setting in names_of(kind.settings)]


def setting_of(methods: Sequence[str]) -> str:
    """Whose setting it is, in words."""
    *others, last = methods
    return f"a setting of {', '.join(others)}{' and ' if others else ''}{last} alone"


def _config(kind: type[Method[Any, Any]], name: str, settings: Mapping[str, Any]) -> Config:
    hints = types_of(kind.settings)
    for setting in settings:
        if setting not in hints:
            raise unknown_setting(setting, name)
    values = {k: _as_float(v) if _is_float(hints[k]) else v for k, v in settings.items()}
    return kind.settings(**{**values, "method": name})


def unknown_setting(setting: str, method: str) -> InputError:
    """What to say of a setting that a method does not have."""
    if others := methods_with(setting):
        return InputError(f"{setting} is {setting_of(others)}, not of {method}")
    known = names_of(recorded(method).settings)
    return InputError(
        f"{method} has no setting '{setting}'.{did_you_mean(setting, known)} "
        f"`cclis train --method {method} --help` shows all"
    )


def _is_float(hint: Any) -> bool:
    return float in (hint, *get_args(hint))


def _as_float(value: Any) -> Any:
    """A whole number as a float, where a setting is one."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return float(value) if whole else value


def _named_by_person(name: str, method: type[Method[Any, Any]]) -> type[Method[Any, Any]]:
    if name not in OURS:
        _named[name] = method
    return method


def _load(method: str) -> Any:
    """What `package.module:Class` names, found from the current folder too."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # behind all else, so that a file there hides no package
    module, _, name = method.partition(":")
    return getattr(import_module(module), name)


def _checked(method: Any) -> type[Method[Any, Any]]:
    from cclis.methods.base import Method

    said = getattr(method, "__qualname__", repr(method))
    if not isinstance(method, type) or not issubclass(method, Method):
        raise InputError(f"{said} is not a method: it must be a subclass of cclis.methods.Method")
    own = {name for kind in method.settings.__mro__ for name in inspect.get_annotations(kind)}
    if not issubclass(method.settings, Config) or not own <= names_of(method.settings):
        raise InputError(
            f"the settings of {said} must be a subclass of Config with @dataclass(frozen=True)"
        )
    if inspect.isabstract(method) or not hasattr(method, "heads"):
        missing = ", ".join(sorted(getattr(method, "__abstractmethods__", ()))) or "heads"
        raise InputError(f"the method {said} lacks {missing}")
    return method
