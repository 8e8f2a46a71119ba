"""Whether a task can be learned, said before anything is."""

from __future__ import annotations

from cclis.data.images import ImageSet
from cclis.errors import InputError
from cclis.settings import AugmentationOptions


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
