"""ResNet-18/34/50 (He et al., 2016) with a stem for small images: 3×3, stride 1, no max-pooling."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from cclis.nn.parts import PartBatchNorm2d, PartSequential


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1
    takes_parts = True

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.body = PartSequential(
            *_conv(channels_in, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_conv(channels, channels, 3),
        )
        self.shortcut = _shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """(B, channels_in, H, W) to (B, channels, H / stride, W / stride)."""
        return F.relu(self.body(x, parts) + self.shortcut(x, parts))


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1, and a shortcut."""

    expansion = 4
    takes_parts = True

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        channels_out = channels * self.expansion
        self.body = PartSequential(
            *_conv(channels_in, channels, 1),
            nn.ReLU(inplace=True),
            *_conv(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_conv(channels, channels_out, 1),
        )
        self.shortcut = _shortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """(B, channels_in, H, W) to (B, 4 · channels, H / stride, W / stride)."""
        return F.relu(self.body(x, parts) + self.shortcut(x, parts))


class ResNet(nn.Module):
    """Four stages of blocks, then the mean over the image: (B, C, H, W) to (B, features)."""

    takes_parts = True

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        channels: int = 3,
        width: int = 64,
    ):
        super().__init__()
        self.stem = PartSequential(*_conv(channels, width, 3), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        channels_in = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                stages.append(block(channels_in, width * 2**stage, stride))
                channels_in = width * 2**stage * block.expansion
        self.stages = PartSequential(*stages)

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """(B, C, H, W) to (B, features)."""
        features: Tensor = self.stages(self.stem(x, parts), parts)
        return features.mean(dim=(2, 3))


def scale_by_fan_out(encoder: nn.Module) -> None:
    """Initialise convolutions so that gradients keep their scale (He et al., 2015, fan-out).

    torch's default weights are several times smaller. Under batch norm only the direction of the
    weights matters, and a step turns small weights further. So a learning rate is tuned for one
    initialisation or the other.
    """
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _conv(channels_in: int, channels: int, size: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
    return [conv, PartBatchNorm2d(channels)]


def _shortcut(channels_in: int, channels: int, stride: int) -> PartSequential:
    if stride == 1 and channels_in == channels:
        return PartSequential()
    return PartSequential(*_conv(channels_in, channels, 1, stride))


def resnet18(channels: int, width: int) -> ResNet:
    """ResNet-18."""
    return ResNet(BasicBlock, (2, 2, 2, 2), channels, width)


def resnet34(channels: int, width: int) -> ResNet:
    """ResNet-34."""
    return ResNet(BasicBlock, (3, 4, 6, 3), channels, width)


def resnet50(channels: int, width: int) -> ResNet:
    """ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3), channels, width)


RESNETS: dict[str, Callable[[int, int], ResNet]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
}
