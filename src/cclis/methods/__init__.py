"""Methods: one file each, and a registry that finds them by name."""

from cclis.methods.base import Batch, Exemplars, Method, ParameterGroup, Visible
from cclis.methods.registry import (
    available,
    get,
    keeps_samples,
    make_config,
    name_of,
    recorded,
    recorded_config,
)

__all__ = [
    "Batch",
    "Exemplars",
    "Method",
    "ParameterGroup",
    "Visible",
    "available",
    "get",
    "keeps_samples",
    "make_config",
    "name_of",
    "recorded",
    "recorded_config",
]
