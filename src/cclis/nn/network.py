"""Networks: an encoder with what a method puts on top of it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclis.errors import InputError
from cclis.functional.precision import at_least_float32
from cclis.nn.compiling import compiled
from cclis.nn.conv import ConvEncoder
from cclis.nn.parts import supports_parts
from cclis.nn.resnet import RESNETS, scale_by_fan_out
from cclis.settings import NetworkOptions

ModuleT = TypeVar("ModuleT", bound=nn.Module)

SMALL_SIDE = 28
"""Grey images up to this side get the small encoder."""
IDLE_DEVICES = ("cuda",)
"""Where one pass of several small batches is faster than several passes (benchmarks/parts.py)."""


def build_checked(make: Callable[[], ModuleT]) -> ModuleT:
    """What `make` makes, unless this machine has less memory than it takes.

    It is made on torch's meta device first, which takes none and draws no random numbers.
    """
    try:
        with torch.device("meta"):
            blank = make()
        needed = sum(tensor.nbytes for tensor in (*blank.parameters(), *blank.buffers()))
        if needed > _memory():
            raise RuntimeError(f"{needed / 2**30:.0f} GiB")
        return make()
    except RuntimeError as error:
        raise InputError(
            f"the network does not fit into memory ({error}); use a smaller width or embedding"
        ) from None


def _memory() -> float:
    """Bytes of this machine's memory, where it says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


def make_encoder(
    options: NetworkOptions, image_shape: tuple[int, int, int], *, fan_out: bool = False
) -> nn.Module:
    """The encoder that `options` name for images of (height, width, channels).

    With `fan_out` a ResNet starts by `scale_by_fan_out`, otherwise as torch makes it.
    """
    height, width, channels = image_shape
    name = options.encoder
    if name == "auto":
        small = channels == 1 and max(height, width) <= SMALL_SIDE
        name = "conv" if small else "resnet18"
    if name == "conv":
        return build_checked(lambda: ConvEncoder(channels, options.width))
    encoder = build_checked(lambda: RESNETS[name](channels, options.width))
    if fan_out:
        scale_by_fan_out(encoder)
    return encoder


def feature_dimension(encoder: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """How many features an encoder gives, found by trying it on blank images."""
    height, width, channels = image_shape
    try:
        with evaluating(encoder), torch.no_grad():
            features = encoder(torch.zeros(2, channels, height, width))
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"the encoder cannot take images of shape (B, {channels}, {height}, {width}): {error}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"an encoder must turn images (B, C, H, W) into features (B, D); for B = 2 it gave "
            f"{found}"
        )
    return features.shape[1]


@dataclass(frozen=True)
class Representation:
    """What a network makes of images.

    Attributes:
        features: Of the encoder, (N, F).
        embeddings: On the unit sphere, (N, D).
    """

    features: Tensor
    embeddings: Tensor


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A module in eval mode for a while; each of its parts then goes back to the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _encode(encoder: nn.Module, images: Tensor, parts: int = 1) -> Tensor:
    features: Tensor = encoder(images, parts) if parts > 1 else encoder(images)
    return features


@cache
def _encode_compiled() -> Callable[..., Tensor]:
    """Compiled apart from what calls it: that takes by far the longest, and happens once for
    training and once for all that only looks, teachers included, whatever the losses are.

    Made when first asked for: the compiler takes seconds to import.
    """
    apart = compiled(_encode, True)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def encode(encoder: nn.Module, images: Tensor, parts: int = 1) -> Tensor:
        return apart(encoder, images, parts)

    return cast(Callable[..., Tensor], encode)


class Network(nn.Module, ABC):
    """An encoder that takes images within [0, 1] and normalises them itself.

    What it holds per class has a fixed number of rows, so that shapes do not change as classes
    arrive; `widen` makes room for more, or takes back room that was not used.
    """

    mean: Tensor
    std: Tensor
    _encode: Callable[..., Tensor] = staticmethod(_encode)

    def __init__(self, encoder: nn.Module, channels: int):
        super().__init__()
        self.encoder = encoder
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def fit_normalisation(self, images: Tensor) -> None:
        """Take the channels' mean and spread from uint8 images (N, H, W, C)."""
        count = images[..., 0].numel()
        # Sums of whole numbers in float64 are exact, so the order of summation cannot matter.
        total = torch.zeros(images.shape[-1], dtype=torch.float64, device=images.device)
        squares = torch.zeros_like(total)
        for part in torch.split(images, 4096):
            values = part.flatten(0, 2).double()
            total += values.sum(dim=0)
            squares += values.square().sum(dim=0)
        mean = total / count
        std = (squares / count - mean.square()).clamp_min(0).sqrt()
        self.mean.copy_(mean / 255)
        self.std.copy_((std / 255).clamp_min(1 / 255))

    def features(self, images: Tensor, parts: int = 1) -> Tensor:
        """Images within [0, 1], (B, C, H, W), of equal parts, to features (B, F)."""
        shape = (1, -1, 1, 1)
        normalised = (images - self.mean.view(shape)) / self.std.view(shape)
        if normalised.device.type == "cpu":
            # A fifth slower than channels-last, which crashes torch 2.13's CPU convolutions of 8
            # channels on more than 32 pixels (the kind of fault of pytorch issue 136348).
            normalised = normalised.contiguous()
        return self._encode(self.encoder, normalised, parts)

    def compile_encoder(self) -> None:
        """From now on the encoder runs compiled, and so do copies of this network."""
        self._encode = _encode_compiled()

    @contextmanager
    def eval_uncompiled(self) -> Iterator[None]:
        """For a while in eval mode and not compiled, so that hooks see every layer."""
        encode, self._encode = self._encode, _encode
        try:
            with evaluating(self):
                yield
        finally:
            self._encode = encode

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Features (B, F) to unit-norm embeddings (B, D), float32 or wider."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """For how many classes there is room."""

    @abstractmethod
    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Make room for `classes`; returns which parameter took the place of which."""


class ProjectionNetwork(Network):
    """Encoder and two-layer projection to the unit sphere; nothing is held per class."""

    def __init__(
        self, encoder: nn.Module, channels: int, features: int, embedding: int, classes: int
    ):
        super().__init__(encoder, channels)
        self.projection = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(inplace=True), nn.Linear(features, embedding)
        )
        self._classes = classes

    def project(self, features: Tensor) -> Tensor:
        """Features (B, F) to unit-norm embeddings (B, D), float32 or wider."""
        first = self.projection[0]
        assert isinstance(first, nn.Linear)
        # A custom encoder may give float64, which autocast leaves as it is.
        projected: Tensor = self.projection(features.to(first.weight.dtype))
        return F.normalize(at_least_float32(projected), dim=1)

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to unit-norm embeddings (B, D)."""
        return self.project(self.features(images))

    @property
    def classes(self) -> int:
        """For how many classes there is room."""
        return self._classes

    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Nothing grows."""
        self._classes = classes
        return {}


class PrototypeNetwork(ProjectionNetwork):
    """Encoder, projection to the unit sphere, and one unit-norm prototype a class."""

    def __init__(
        self, encoder: nn.Module, channels: int, features: int, embedding: int, classes: int
    ):
        super().__init__(encoder, channels, features, embedding, classes)
        self.prototypes = nn.Parameter(torch.randn(classes, embedding))
        if not self.prototypes.is_meta:  # to compute there, torch takes a second to get ready
            self.normalise_prototypes()

    def similarity(self, images: Tensor) -> Tensor:
        """Cosines of all prototypes with images (B, C, H, W): (classes, B)."""
        embeddings = self.embed(images)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.prototypes @ embeddings.T

    @torch.no_grad()
    def normalise_prototypes(self) -> None:
        """Bring every prototype back to length one."""
        self.prototypes.copy_(F.normalize(self.prototypes, dim=1))

    @property
    def classes(self) -> int:
        """For how many classes there is room."""
        return len(self.prototypes)

    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Make room for `classes`; new prototypes point anywhere."""
        old = self.prototypes
        more = torch.randn(max(0, classes - len(old)), old.shape[1], generator=generator)
        more = F.normalize(more, dim=1).to(old)
        self.prototypes = nn.Parameter(torch.cat([old.detach()[:classes], more]))
        return {old: self.prototypes}


class ClassifierNetwork(Network):
    """Encoder and a linear classifier."""

    def __init__(self, encoder: nn.Module, channels: int, features: int, classes: int):
        super().__init__(encoder, channels)
        self.classifier = nn.Linear(features, classes)
        self._supports_parts = supports_parts(encoder)

    def project(self, features: Tensor) -> Tensor:
        """Features (B, F) to the unit sphere."""
        return F.normalize(at_least_float32(features), dim=1)

    def logits(self, images: Tensor, parts: int = 1) -> Tensor:
        """Logits of all classes for images (B, C, H, W) of equal parts: (B, classes)."""
        features = self.features(images, parts)
        with torch.autocast(features.device.type, enabled=False):
            logits: Tensor = self.classifier(features.to(self.classifier.weight.dtype))
            return logits

    def logits_per_part(self, images: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Logits of several batches of these sizes, each as if it came alone.

        Where small batches leave a device idle they go through the encoder in one pass, if it can
        keep them apart.
        """
        alike = len(set(sizes)) == 1 < sizes[0]
        if alike and images.device.type in IDLE_DEVICES and self._supports_parts:
            return torch.split(self.logits(images, len(sizes)), list(sizes))
        return tuple(self.logits(part) for part in torch.split(images, list(sizes)))

    @property
    def classes(self) -> int:
        """For how many classes there is room."""
        return self.classifier.out_features

    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Make room for `classes`; new classes start at zero."""
        replaced = {}
        for name, old in list(self.classifier.named_parameters()):
            more = old.new_zeros(max(0, classes - len(old)), *old.shape[1:])
            replaced[old] = nn.Parameter(torch.cat([old.detach()[:classes], more]))
            self.classifier.register_parameter(name, replaced[old])
        self.classifier.out_features = classes
        return replaced
