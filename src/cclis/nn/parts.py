"""Several batches in one pass of an encoder, with the results of separate passes.

The batches are joined as equal parts of one batch. A module with `takes_parts` is called with the
number of parts. Only batch norm needs it, to compute the statistics of each part separately.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cclis.errors import InputError


class PartBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with a mean and variance per part; running statistics are updated part by part."""

    takes_parts = True

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """(B, C, H, W) to the same shape; B is a multiple of `parts`."""
        if parts == 1 or not self.training:
            return super().forward(x)
        if len(x) % parts:
            raise InputError(f"{len(x)} samples are not {parts} equal parts")
        return torch.cat([super(PartBatchNorm2d, self).forward(part) for part in x.chunk(parts)])


class PartSequential(nn.Sequential):
    """Layers in sequence; those with `takes_parts` are called with the number of parts."""

    takes_parts = True

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """Apply all layers."""
        for layer in self:
            x = layer(x, parts) if getattr(layer, "takes_parts", False) else layer(x)
        return x


def supports_parts(encoder: nn.Module) -> bool:
    """Whether an encoder and all its batch norms take parts.

    The encoder's own class must say so: a subclass may override `forward` without parts.
    """
    norms = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    takes = "takes_parts" in vars(type(encoder))
    return takes and all(isinstance(norm, PartBatchNorm2d) for norm in norms)
