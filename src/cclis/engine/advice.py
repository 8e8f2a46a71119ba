"""What to say where memory or settings make a step fail, instead of what torch says."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from lightning_fabric import Fabric

from cclis.engine.devices import out_of_memory
from cclis.engine.optimizer import Optimizer
from cclis.methods import Batch, Method


def in_words(error: Exception, method: Method[Any, Any], sizes: tuple[int, ...]) -> str | None:
    """The cause of an error, where the settings are to blame.

    Args:
        error: What was raised.
        method: Which was learning.
        sizes: Samples of the task and of each replay in a batch.
    """
    if "more than 1 value per channel" in str(error) and 1 in sizes[1:]:
        more = "memory" if method.by_task else "replay_batch_size"
        return (
            "batch normalisation needs two samples at least, but a part of the memory that is "
            f"replayed by itself has one: a larger {more} helps"
        )
    if any(words in str(error) for words in ("can't allocate memory", "not enough memory")):
        return "this machine's memory is too small for these images and sizes of batches"
    return None


def too_large(
    method: Method[Any, Any],
    fabric: Fabric,
    optimizer: Optimizer,
    image_shape: tuple[int, int, int],
    sizes: tuple[int, ...],
) -> str:
    """What to say when the GPU's memory is full: the largest halving of the batch that fits.

    Args:
        method: Which was learning.
        fabric: Where.
        optimizer: Whose gradients are given back after each try.
        image_shape: Height, width and channels.
        sizes: Samples of the task and of each replay in a batch.
    """
    height, width, _ = image_shape
    batch, *replays = sizes
    said = f"the GPU's memory is too small for batches of {batch} images of {height}×{width}"
    while batch > 2:
        batch //= 2
        # A quarter more, for what libraries ask for besides.
        tried = (batch + batch // 4, *replays)
        if _fits(method, fabric, optimizer, image_shape, tried):
            return f"{said}; batch_size {batch} would fit"
    return f"{said}, and for smaller ones: use smaller images (image_size) or width"


def _fits(
    method: Method[Any, Any],
    fabric: Fabric,
    optimizer: Optimizer,
    image_shape: tuple[int, int, int],
    sizes: tuple[int, ...],
) -> bool:
    (height, width, channels), device = image_shape, fabric.device
    rows = sum(sizes) * method.views
    torch.cuda.empty_cache()
    try:
        labels = torch.arange(rows, device=device) % max(1, method.seen)
        images = torch.zeros(rows, channels, height, width, device=device)
        replayed = torch.ones(rows, dtype=torch.bool, device=device)
        marks = torch.ones(rows, device=device), replayed, ~replayed
        extras = method.blank_extras(sum(sizes[1:]))
        # To compile every size takes minutes; what is not compiled needs rather more memory.
        with torch.compiler.set_stance("force_eager"), fabric.autocast():
            trial = Batch(images, labels, *marks, extras, sizes)
            method.before_step(trial)
            terms = [*method.auxiliary_losses(trial), *method.losses(trial).values()]
        fabric.backward(torch.stack(terms).sum())
        optimizer.zero_grad()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        free_frames(error)
        optimizer.zero_grad()
        return False
    return True


def free_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a failed step hold, and of what failed before it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
