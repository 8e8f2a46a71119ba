"""Methods: one file each, listed in METHODS."""

from __future__ import annotations

from typing import Any

from cclis.methods.base import Batch, Kept, Method, ParameterGroup
from cclis.methods.cclis import CCLIS
from cclis.methods.finetune import Finetune

METHODS: dict[str, type[Method[Any, Any]]] = {"cclis": CCLIS, "finetune": Finetune}

__all__ = ["CCLIS", "METHODS", "Batch", "Finetune", "Kept", "Method", "ParameterGroup"]
