"""A small convolutional encoder for small grayscale images (8×8 to 28×28)."""

from __future__ import annotations

from torch import Tensor, nn

from cclis.nn.parts import PartBatchNorm2d, PartSequential


class ConvEncoder(nn.Module):
    """Three 3×3 convolutions, the last two halving the image: (B, C, H, W) to (B, 2 · width)."""

    takes_parts = True

    def __init__(self, channels: int = 1, width: int = 64):
        super().__init__()
        self.layers = PartSequential(
            *_layer(channels, width, stride=1),
            *_layer(width, width, stride=2),
            *_layer(width, 2 * width, stride=2),
        )

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """(B, C, H, W) to (B, 2 · width)."""
        features: Tensor = self.layers(x, parts)
        return features.mean(dim=(2, 3))


def _layer(channels_in: int, channels: int, *, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
    return [conv, PartBatchNorm2d(channels), nn.ReLU(inplace=True)]
