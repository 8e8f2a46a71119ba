"""Networks: an encoder with a projection, prototypes or a classifier on top."""

from __future__ import annotations

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
from cclis.files import free_memory
from cclis.functional.precision import at_least_float32
from cclis.nn.compiling import compiled
from cclis.nn.conv import ConvEncoder
from cclis.nn.parts import supports_parts
from cclis.nn.resnet import RESNETS, scale_by_fan_out
from cclis.settings import NetworkOptions

ModuleT = TypeVar("ModuleT", bound=nn.Module)

SMALL_SIDE = 28
"""Grayscale images up to this size get the small encoder by default."""
JOINT_PASS_DEVICES = ("cuda",)
"""Devices on which one pass of several small batches is faster than several passes
(benchmarks/parts.py)."""


def build_checked(make: Callable[[], ModuleT]) -> ModuleT:
    """Call `make`, but raise InputError if the module does not fit into the memory that is free.

    The size is measured on torch's meta device, which takes no memory and draws no random numbers.
    """
    try:
        with torch.device("meta"):
            blank = make()
        needed = sum(tensor.nbytes for tensor in (*blank.parameters(), *blank.buffers()))
        free = free_memory()
        if needed > free:
            raise RuntimeError(f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free")
        return make()
    except RuntimeError as error:
        raise InputError(
            f"the network does not fit into memory ({error}); use a smaller width or embedding"
        ) from None


def make_encoder(
    options: NetworkOptions, image_shape: tuple[int, int, int], *, fan_out: bool = False
) -> nn.Module:
    """Make the encoder for images of (height, width, channels).

    With `fan_out` a ResNet is initialised by `scale_by_fan_out`, otherwise as torch does.
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
    """Number of features of an encoder, found by a pass of two blank images."""
    height, width, channels = image_shape
    try:
        with evaluating(encoder), torch.no_grad():
            blank = torch.zeros(2, channels, height, width, dtype=input_dtype(encoder))
            features = encoder(blank)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"the encoder cannot take images of shape (B, {channels}, {height}, {width}): {error}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        result = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"an encoder must turn images (B, C, H, W) into features (B, D); for B = 2 it gave "
            f"{result}"
        )
    return features.shape[1]


def input_dtype(encoder: nn.Module) -> torch.dtype:
    """The precision of images for an encoder: that of its parameters, but at least float32."""
    dtypes = (parameter.dtype for parameter in encoder.parameters())
    return torch.promote_types(next(dtypes, torch.float32), torch.float32)


@dataclass(frozen=True)
class Representation:
    """A network's representation of N images.

    Attributes:
        features: Output of the encoder, (N, F).
        embeddings: Unit-norm embeddings, (N, D).
    """

    features: Tensor
    embeddings: Tensor


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and each submodule back into its own mode afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def _encode(encoder: nn.Module, images: Tensor, parts: int = 1) -> Tensor:
    features: Tensor = encoder(images, parts) if parts > 1 else encoder(images)
    return features


@cache
def _encode_compiled() -> Callable[..., Tensor]:
    """The encoder's pass, compiled separately from its callers.

    Compiling the encoder takes by far the longest. Separately it happens twice at most, whatever
    the losses are: once for training, once for inference (teachers included). Cached, and created
    at first use, because importing the compiler takes seconds.
    """
    compiled_encode = compiled(_encode, True)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def encode(encoder: nn.Module, images: Tensor, parts: int = 1) -> Tensor:
        return compiled_encode(encoder, images, parts)

    return cast(Callable[..., Tensor], encode)


class Network(nn.Module, ABC):
    """An encoder for images within [0, 1], which it normalises, and a head on top.

    Parameters with one row per class have spare rows, so that shapes do not change as classes
    arrive. `widen` changes the number of rows.
    """

    mean: Tensor
    std: Tensor
    _encode: Callable[..., Tensor] = staticmethod(_encode)
    _compiles = False

    def __init__(self, encoder: nn.Module, channels: int):
        super().__init__()
        self.encoder = encoder
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def fit_normalisation(self, images: Tensor) -> None:
        """Set `mean` and `std` to those of the channels of uint8 images (N, H, W, C)."""
        count = images[..., 0].numel()
        # Sums of integers in float64 are exact: the order of summation does not matter.
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
        """Encode images within [0, 1], (B, C, H, W), as features (B, F).

        Args:
            images: The images.
            parts: Number of equal parts of the batch that are normalised separately.
        """
        shape = (1, -1, 1, 1)
        normalised = (images - self.mean.view(shape)) / self.std.view(shape)
        if normalised.device.type == "cpu":
            # A fifth slower than channels-last. With channels-last, torch 2.13 crashes in CPU
            # convolutions of 8 channels on more than 32 pixels (similar to pytorch issue 136348).
            normalised = normalised.contiguous()
        normalised = normalised.to(torch.promote_types(normalised.dtype, input_dtype(self.encoder)))
        encode = _encode_compiled() if self._compiles else self._encode
        return encode(self.encoder, normalised, parts)

    def compile_encoder(self) -> None:
        """Compile the encoder of this network and of its copies."""
        self._compiles = True

    @contextmanager
    def eval_uncompiled(self) -> Iterator[None]:
        """Context in which the network is in eval mode and not compiled, so that hooks run."""
        compiles, self._compiles = self._compiles, False
        try:
            with evaluating(self):
                yield
        finally:
            self._compiles = compiles

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Project features (B, F) to unit-norm embeddings (B, D), in float32 or float64."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """Number of classes there is room for."""

    @abstractmethod
    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Make room for `classes`.

        Args:
            classes: New number of classes, larger or smaller than before.
            generator: Random generator for new rows.

        Returns:
            Replaced parameters, old to new.
        """


class ProjectionNetwork(Network):
    """Encoder and two-layer projection to the unit sphere, without parameters per class."""

    def __init__(
        self, encoder: nn.Module, channels: int, features: int, embedding: int, classes: int
    ):
        super().__init__(encoder, channels)
        self.projection = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(inplace=True), nn.Linear(features, embedding)
        )
        self._classes = classes

    def project(self, features: Tensor) -> Tensor:
        """Project features (B, F) to unit-norm embeddings (B, D), in float32 or float64."""
        first = self.projection[0]
        assert isinstance(first, nn.Linear)
        # A custom encoder may give float64, which autocast does not convert.
        projected: Tensor = self.projection(features.to(first.weight.dtype))
        return F.normalize(at_least_float32(projected), dim=1)

    def embed(self, images: Tensor) -> Tensor:
        """Embed images (B, C, H, W) as unit-norm embeddings (B, D)."""
        return self.project(self.features(images))

    @property
    def classes(self) -> int:
        """Number of classes there is room for."""
        return self._classes

    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Set the number of classes; no parameter depends on it."""
        self._classes = classes
        return {}


class PrototypeNetwork(ProjectionNetwork):
    """Encoder, projection to the unit sphere, and one unit-norm prototype per class."""

    def __init__(
        self, encoder: nn.Module, channels: int, features: int, embedding: int, classes: int
    ):
        super().__init__(encoder, channels, features, embedding, classes)
        self.prototypes = nn.Parameter(torch.randn(classes, embedding))
        if not self.prototypes.is_meta:  # torch needs a second before it can compute on meta
            self.normalise_prototypes()

    def similarity(self, images: Tensor) -> Tensor:
        """Cosines of all prototypes with the embeddings of images (B, C, H, W): (classes, B)."""
        embeddings = self.embed(images)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.prototypes @ embeddings.T

    @torch.no_grad()
    def normalise_prototypes(self) -> None:
        """Scale every prototype to unit length."""
        self.prototypes.copy_(F.normalize(self.prototypes, dim=1))

    @property
    def classes(self) -> int:
        """Number of classes there is room for."""
        return len(self.prototypes)

    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Make room for `classes`; new prototypes have random directions."""
        old = self.prototypes
        new = torch.randn(max(0, classes - len(old)), old.shape[1], generator=generator)
        new = F.normalize(new, dim=1).to(old)
        self.prototypes = nn.Parameter(torch.cat([old.detach()[:classes], new]))
        return {old: self.prototypes}


class ClassifierNetwork(Network):
    """Encoder and a linear classifier."""

    def __init__(self, encoder: nn.Module, channels: int, features: int, classes: int):
        super().__init__(encoder, channels)
        self.classifier = nn.Linear(features, classes)
        self._supports_parts = supports_parts(encoder)

    def project(self, features: Tensor) -> Tensor:
        """Scale features (B, F) to unit length, in float32 or float64."""
        return F.normalize(at_least_float32(features), dim=1)

    def logits(self, images: Tensor, parts: int = 1) -> Tensor:
        """Logits of all classes for images (B, C, H, W): (B, classes).

        Args:
            images: The images.
            parts: Number of equal parts of the batch that are normalised separately.
        """
        features = self.features(images, parts)
        with torch.autocast(features.device.type, enabled=False):
            logits: Tensor = self.classifier(features.to(self.classifier.weight.dtype))
            return logits

    def logits_per_part(self, images: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Logits of the parts of a batch, each computed as if it were a batch of its own.

        On a GPU, parts of equal size go through the encoder in one pass if it supports parts.

        Args:
            images: The images of all parts, (B, C, H, W).
            sizes: Number of images of each part; their sum is B.

        Returns:
            Logits of each part, (size, classes).
        """
        equal = len(set(sizes)) == 1 < sizes[0]
        if equal and images.device.type in JOINT_PASS_DEVICES and self._supports_parts:
            return torch.split(self.logits(images, len(sizes)), list(sizes))
        return tuple(self.logits(part) for part in torch.split(images, list(sizes)))

    @property
    def classes(self) -> int:
        """Number of classes there is room for."""
        return self.classifier.out_features

    def widen(self, classes: int, generator: torch.Generator) -> dict[nn.Parameter, nn.Parameter]:
        """Make room for `classes`; new rows are zero."""
        replaced = {}
        for name, old in list(self.classifier.named_parameters()):
            new = old.new_zeros(max(0, classes - len(old)), *old.shape[1:])
            replaced[old] = nn.Parameter(torch.cat([old.detach()[:classes], new]))
            self.classifier.register_parameter(name, replaced[old])
        self.classifier.out_features = classes
        return replaced
