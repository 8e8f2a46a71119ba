"""The versions of everything that can change a number."""

from __future__ import annotations

import hashlib
import inspect
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

import cclis
from cclis.methods.registry import OURS, recorded


def versions(method: str) -> dict[str, str]:
    """Of this package, of what it computes with, and of a method from elsewhere."""
    known = {
        "cclis": f"{cclis.__version__}+{source_digest(Path(cclis.__file__).parent)}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if method not in OURS:
        known[method] = _digest(_sources(recorded(method)))
    return known


def _sources(method: type[Any]) -> list[bytes]:
    """The source of a method from elsewhere, of its settings and of their bases."""
    classes = (*method.__mro__, *method.settings.__mro__)
    sources = []
    for kind in classes:
        if not kind.__module__.startswith("cclis."):
            # What was typed into a console has none.
            with suppress(OSError, TypeError):
                sources.append(inspect.getsource(kind).encode())
    return sources


@cache
def source_digest(package: Path) -> str:
    """Twelve digits that tell the code of a package from any other: a version has many commits."""
    parts = []
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        parts += [f"{path.relative_to(package).as_posix()} {len(content)} ".encode(), content]
    return _digest(parts)


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]
