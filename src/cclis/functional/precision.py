"""The floating-point precision that results are computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Promote 16-bit floats to float32; leave float32 and float64 as they are.

    Counts and proposals do not survive 16 bits: 257 samples of a class are 256 in bfloat16.

    >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))
