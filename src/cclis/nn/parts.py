"""Several batches in one pass, each as if it came alone.

A layer with `takes_parts` is told of how many equal parts its batch consists. What treats samples
one by one need not know; batch norm takes the statistics of every part by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cclis.errors import InputError


class PartBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of each part by its own mean and variance; running ones follow part after part."""

    takes_parts = True

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """(B, C, H, W) to the same shape; B is a multiple of `parts`."""
        if parts == 1 or not self.training:
            return super().forward(x)
        if len(x) % parts:
            raise InputError(f"{len(x)} samples are not {parts} equal parts")
        return torch.cat([super(PartBatchNorm2d, self).forward(part) for part in x.chunk(parts)])


class PartSequential(nn.Sequential):
    """Layers one after another; those that take parts are told how many there are."""

    takes_parts = True

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """Through all layers."""
        for layer in self:
            x = layer(x, parts) if getattr(layer, "takes_parts", False) else layer(x)
        return x


def supports_parts(encoder: nn.Module) -> bool:
    """Whether an encoder takes parts and all its batch norms do.

    A class derived from one that takes them may have a `forward` of its own, which does not.
    """
    norms = [part for part in encoder.modules() if isinstance(part, _BatchNorm)]
    takes = "takes_parts" in vars(type(encoder))
    return takes and all(isinstance(norm, PartBatchNorm2d) for norm in norms)
