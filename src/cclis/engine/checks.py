"""What is checked before a task is learned or a state is restored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cclis.data.images import ImageSet
from cclis.engine.inference import BATCH
from cclis.errors import InputError
from cclis.files import free_memory, strip_prefix
from cclis.methods import Method
from cclis.nn.network import make_encoder
from cclis.settings import AugmentationOptions, Config, EmbeddingOptions


def check_task(
    task: ImageSet,
    image_shape: tuple[int, int, int],
    augmentation: AugmentationOptions,
) -> None:
    """Refuse images that do not fit the network or the augmentation."""
    if task.shape != image_shape:
        raise InputError(
            f"images of (height, width, channels) {task.shape}, "
            f"but the first task had {image_shape}"
        )
    if len(task) < 2:
        raise InputError("a task needs at least two samples")
    (height, width, _), padding = image_shape, augmentation.padding
    if augmentation.crop == "padded" and padding >= min(height, width):
        raise InputError(
            f"a padding of {padding} can push images of {height}×{width} out of sight: it must "
            "be smaller than their sides"
        )


def check_memory(samples: int, method: Method[Any, Any], features: int, *, momentum: bool) -> None:
    """Refuse a task that takes more of the host's memory than is free.

    The system would end the process without a message.

    Args:
        samples: Samples of the task.
        method: Which learns.
        features: How many features its encoder gives.
        momentum: Whether a momentum for its parameters is still to be made.
    """
    config = method.config
    embedding = config.embedding if isinstance(config, EmbeddingOptions) else features
    parameters = (p for group in method.parameter_groups() for p in group.parameters)
    weights = sum(p.nbytes for p in parameters if p.requires_grad)
    represented = samples if method.passes else min(samples, BATCH)
    # Gradients, momentum, and representations in float32.
    needed = (2 if momentum else 1) * weights + 4 * represented * (features + embedding)
    free = free_memory()
    if needed > free:
        raise InputError(
            f"to learn this task takes {needed / 2**30:,.1f} GiB of memory at least, and "
            f"{free / 2**30:,.1f} GiB are free: use a smaller width or embedding"
        )


def check_classes(
    task: ImageSet, new_classes: int, old_classes: int, begun: int | None, *, again: bool
) -> None:
    """Refuse labels out of range.

    Args:
        task: The samples.
        new_classes: How many classes they bring.
        old_classes: How many were learned before.
        begun: How many classes the task brings that was begun, if one was.
        again: Whether samples of classes learned before may be among them.
    """
    if begun is not None and begun != new_classes:
        raise InputError(f"a task of {begun} classes was begun, not one of {new_classes}")
    high = old_classes + new_classes
    low = 0 if again else old_classes
    smallest, largest = int(task.labels.min()), int(task.labels.max())
    if new_classes < (0 if again else 1) or smallest < low or largest >= high:
        raise InputError(
            f"labels out of range: this task's classes are {low} to {high - 1}, "
            f"but labels reach from {smallest} to {largest}"
        )


def check_claims(
    tensors: dict[str, Tensor],
    config: Config,
    method: type[Method[Any, Any]],
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    own_encoder: bool,
) -> None:
    """Refuse a state whose tensors are smaller than the network that it claims.

    A small file may claim a network of any size: they are compared before one takes memory. What
    the encoder gives, and an encoder of the user's own, are not known by then.
    """
    with torch.device("meta"):
        encoder = nn.Identity() if own_encoder else make_encoder(config, image_shape)
        claimed = method.make_network(config, encoder, image_shape[2], 1, classes)
    saved = strip_prefix("network.", tensors)
    for name, value in claimed.state_dict().items():
        if name not in saved or value.numel() > saved[name].numel():
            raise InputError(f"these weights belong to another network: {name} differs")
    kept = tensors.get("memory.images")
    if kept is not None and kept.shape[1:] != image_shape:
        raise InputError(f"images of {image_shape} were learned, but others are kept")
