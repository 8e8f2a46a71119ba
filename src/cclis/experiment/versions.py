"""The versions of everything that can change a number."""

from __future__ import annotations

import hashlib
import inspect
import platform
from functools import cache
from pathlib import Path

import numpy
import torch

import cclis
from cclis.methods.registry import OURS, recorded


def versions(method: str) -> dict[str, str]:
    """Of this package, of what it computes with, and of a method from elsewhere."""
    found = {
        "cclis": f"{cclis.__version__}+{source_digest(Path(cclis.__file__).parent)}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if method not in OURS:
        found[method] = _digest([inspect.getsource(recorded(method)).encode()])
    return found


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
