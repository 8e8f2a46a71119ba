"""Methods: one file each, listed in METHODS."""

from __future__ import annotations

from typing import Any

from cclis.methods.base import Batch, Kept, Method, ParameterGroup, Visible
from cclis.methods.cclis import CCLIS
from cclis.methods.co2l import Co2L
from cclis.methods.der import DER, DERPP
from cclis.methods.er import ER
from cclis.methods.finetune import Finetune
from cclis.methods.gcr import GCR
from cclis.methods.gem import GEM
from cclis.methods.gss import GSS
from cclis.methods.icarl import ICaRL
from cclis.methods.joint import Joint

METHODS: dict[str, type[Method[Any, Any]]] = {
    "cclis": CCLIS,
    "co2l": Co2L,
    "er": ER,
    "icarl": ICaRL,
    "der": DER,
    "derpp": DERPP,
    "gcr": GCR,
    "gem": GEM,
    "gss": GSS,
    "finetune": Finetune,
    "joint": Joint,
}

__all__ = [
    "CCLIS",
    "DER",
    "DERPP",
    "ER",
    "GCR",
    "GEM",
    "GSS",
    "METHODS",
    "Batch",
    "Co2L",
    "Finetune",
    "ICaRL",
    "Joint",
    "Kept",
    "Method",
    "ParameterGroup",
    "Visible",
]
