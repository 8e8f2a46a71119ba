"""Batched augmentation on tensors, with separate parameters per sample and without host syncs.

All shapes follow from the batch and the settings, so that `augment` compiles to one graph.
torch.compile cannot trace random generators: only `draw_uniforms` uses one, and a compiled step
takes its result as an input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.settings import AugmentationOptions

TRIES = 10
UNIFORMS = 2 * TRIES + 11  # random numbers per sample
ASPECT = (3 / 4, 4 / 3)
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.4, 0.1
SIGMA = (0.1, 2.0)
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, eq=False)
class Draw:
    """Augmentation parameters of B samples.

    Attributes:
        box: Top, left, height and width of the crop in whole pixels, float (B, 4).
        flip: Whether to flip horizontally, bool (B,).
        brightness: Factor, (B,); 1 without jitter.
        contrast: Factor, (B,); 1 without jitter.
        saturation: Factor, (B,); 1 without jitter.
        hue: Shift as a fraction of the colour circle, (B,); 0 without jitter.
        gray: Whether to convert to grayscale, bool (B,).
        blur: Whether to blur, bool (B,).
        sigma: Standard deviation of the blur in pixels, (B,).
    """

    box: Tensor
    flip: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    gray: Tensor
    blur: Tensor
    sigma: Tensor


def draw_uniforms(count: int, generator: torch.Generator) -> Tensor:
    """Draw numbers in [0, 1) for `count` samples, (UNIFORMS, count), on the generator's device."""
    return torch.rand(UNIFORMS, count, generator=generator, device=generator.device)


def parameters(
    augmentation: AugmentationOptions, uniforms: Tensor, height: int, width: int
) -> Draw:
    """Compute augmentation parameters from uniform random numbers.

    Each stage uses fixed rows of the numbers: changing the settings of one stage does not change
    the parameters of the others.

    Args:
        augmentation: The settings.
        uniforms: Numbers in [0, 1), (UNIFORMS, B).
        height: Height of the images.
        width: Width of the images.
    """
    area, aspect, others = uniforms[:TRIES], uniforms[TRIES : 2 * TRIES], uniforms[2 * TRIES :]
    top, left, flip, jitter, brightness, contrast, saturation, hue, gray, blur, sigma = others
    if augmentation.crop == "resized":
        box = _resized_box(augmentation.crop_scale, height, width, area, aspect, top, left)
    else:
        reach = augmentation.padding if augmentation.crop == "padded" else 0
        top, left = (_integer(uniform, 2 * reach + 1) - reach for uniform in (top, left))
        box = torch.stack((top, left, torch.full_like(top, height), torch.full_like(left, width)))
    # Without jitter the deviations are scaled by zero.
    strength = augmentation.jitter_strength * (jitter < augmentation.jitter)
    return Draw(
        box=box.T,
        flip=flip < augmentation.flip,
        brightness=1 + BRIGHTNESS * strength * (2 * brightness - 1),
        contrast=1 + CONTRAST * strength * (2 * contrast - 1),
        saturation=1 + SATURATION * strength * (2 * saturation - 1),
        hue=HUE * strength * (2 * hue - 1),
        gray=gray < augmentation.grayscale,
        blur=blur < augmentation.blur,
        sigma=SIGMA[0] + (SIGMA[1] - SIGMA[0]) * sigma,
    )


def apply(images: Tensor, draw: Draw, augmentation: AugmentationOptions) -> Tensor:
    """Augment images: crop, flip, brightness, contrast, saturation, hue, grayscale, blur.

    torchvision's ColorJitter shuffles its four stages for every image; here their order is fixed.
    Saturation, hue and grayscale do not change images with one channel.

    Args:
        images: uint8, (B, H, W, C) with one or three channels.
        draw: Parameters of B samples, on the images' device.
        augmentation: The settings of `draw`; stages with probability zero are skipped.

    Returns:
        float32 within [0, 1], (B, C, H, W) in channels-last memory.
    """
    _check(images)
    with torch.autocast(images.device.type, enabled=False):
        x = images.permute(0, 3, 1, 2)
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        if augmentation.crop != "none" or augmentation.flip > 0:
            x = _crop(x, draw.box, draw.flip)
        # Scaled after the crop, because reduced-precision products keep integers up to 255 exact:
        # an image that is not cropped must not change.
        x = x / 255
        if augmentation.jitter > 0 and augmentation.jitter_strength > 0:
            x = _jitter(x, draw)
        if augmentation.grayscale > 0 and x.shape[1] == 3:
            x = torch.where(_per_sample(draw.gray), _luma(x), x)
        if augmentation.blur > 0:
            x = torch.where(_per_sample(draw.blur), _blur(x, draw.sigma), x)
        return x.clamp(0, 1).contiguous(memory_format=torch.channels_last)


def augment(images: Tensor, augmentation: AugmentationOptions, uniforms: Tensor) -> Tensor:
    """Augment images by random numbers from `draw_uniforms`.

    Args:
        images: uint8, (B, H, W, C) with one or three channels.
        augmentation: The settings.
        uniforms: Random numbers for B samples, (UNIFORMS, B), on the images' device.

    Returns:
        float32 within [0, 1], (B, C, H, W) in channels-last memory.
    """
    _check(images)
    height, width = images.shape[1:3]
    return apply(images, parameters(augmentation, uniforms, height, width), augmentation)


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 images (B, H, W, C) to float32 within [0, 1], (B, C, H, W), channels-last."""
    _check(images)
    return images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.channels_last) / 255


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise InputError(
            "augmentation takes uint8 images of shape (B, H, W, 1 or 3), "
            f"not {images.dtype} of shape {tuple(images.shape)}"
        )


def _integer(uniform: Tensor, count: Tensor | int) -> Tensor:
    """Uniform integers 0..count-1, as floats, from uniform numbers in [0, 1)."""
    return (uniform * count).floor()


def _resized_box(
    scale: float,
    height: int,
    width: int,
    area: Tensor,
    aspect: Tensor,
    top: Tensor,
    left: Tensor,
) -> Tensor:
    """Boxes (4, B) of torchvision's RandomResizedCrop, from uniforms (TRIES, B) and (B,)."""
    low, high = ASPECT
    root = (height * width * (scale + (1 - scale) * area)).sqrt()
    stretch = (0.5 * (math.log(low) + math.log(high / low) * aspect)).exp()
    tall, wide = (root / stretch).round(), (root * stretch).round()
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    # argmax over booleans is the first True: the try at which a loop would stop.
    first = fits.int().argmax(dim=0, keepdim=True)
    # If no try fits: the largest centre crop with an allowed aspect ratio.
    most_tall, most_wide = min(height, round(width / low)), min(width, round(height * high))
    any_fits = fits.any(dim=0)
    tall = torch.where(any_fits, tall.gather(0, first)[0], most_tall)
    wide = torch.where(any_fits, wide.gather(0, first)[0], most_wide)
    middle_top, middle_left = (height - most_tall) // 2, (width - most_wide) // 2
    return torch.stack(
        (
            torch.where(any_fits, _integer(top, height - tall + 1), middle_top),
            torch.where(any_fits, _integer(left, width - wide + 1), middle_left),
            tall,
            wide,
        )
    )


def _per_sample(values: Tensor) -> Tensor:
    """Reshape one value per sample, (B,), to broadcast over images (B, C, H, W)."""
    return values[:, None, None, None]


def _crop(x: Tensor, box: Tensor, flip: Tensor) -> Tensor:
    """Crop images (B, C, H, W) to boxes (B, 4), resize them to H and W, and flip some."""
    top, left, tall, wide = box.unbind(dim=1)
    rows = _interpolation(top, tall, x.shape[2])
    columns = _interpolation(left, wide, x.shape[3])
    columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    return _separable(x, rows, columns)


def _interpolation(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Bilinear weights (B, size, size) of input pixels j in pixels i of a resized crop.

    Args:
        start: First pixel of the crop, (B,). Pixels outside the image have weight zero.
        length: Number of pixels of the crop, (B,), at most `size`.
    """
    pixel = torch.arange(size, device=start.device, dtype=torch.float32)
    offset = (pixel + 0.5) * (length / size)[:, None] - 0.5
    # Clamped to the crop: its border is repeated, and no pixel outside the crop is used.
    source = start[:, None] + offset.clamp(min=0).minimum(length[:, None] - 1)
    return (1 - (source[:, :, None] - pixel).abs()).relu()


def _separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply weights `rows` (B, H, H) and `columns` (B, W, W) to the axes of (B, C, H, W)."""
    return rows[:, None] @ x @ columns[:, None].mT


def _luma(x: Tensor) -> Tensor:
    """Luma (B, 1, H, W) of images (B, C, H, W)."""
    if x.shape[1] == 1:
        return x
    return LUMA[0] * x[:, 0:1] + LUMA[1] * x[:, 1:2] + LUMA[2] * x[:, 2:3]


def _jitter(x: Tensor, draw: Draw) -> Tensor:
    """Brightness, contrast, saturation and hue of (B, C, H, W), in this order."""
    x = (x * _per_sample(draw.brightness)).clamp_(0, 1)
    mean = _luma(x).mean(dim=(1, 2, 3), keepdim=True)
    x = mean.lerp(x, _per_sample(draw.contrast)).clamp_(0, 1)
    if x.shape[1] == 1:
        return x
    x = _luma(x).lerp(x, _per_sample(draw.saturation)).clamp_(0, 1)
    return _shift_hue(x, _per_sample(draw.hue))


def _shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue of RGB (B, 3, H, W) by a fraction of the colour circle."""
    red, green, blue = x[:, 0:1], x[:, 1:2], x[:, 2:3]
    value, least = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)
    chroma = value - least
    # Gray has no hue. Any value will do, because it is multiplied by a chroma of zero below.
    unit = chroma.clamp(min=torch.finfo(x.dtype).tiny)
    sextant = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit),
    )
    # Positions of red, green and blue on the circle, shifted by 5/6, 3/6 and 1/6. One turn is added
    # to keep the sum positive for `frac`, which takes a tenth of the time of `remainder`.
    origin = 1 + (5 - 2 * torch.arange(3, device=x.device)[:, None, None]) / 6
    along = (origin + (sextant / 6 + shift)).frac_().mul_(6)
    return value - along.sub_(2).abs_().neg_().add_(2).clamp_(0, 1).mul_(chroma)


def _blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of (B, C, H, W) with standard deviations (B,), reflected at the border."""
    height, width = x.shape[2:]
    reach = min(height, width) // 20
    offset = torch.arange(-reach, reach + 1, device=x.device)
    kernel = (-0.5 * (offset / sigma[:, None]).square()).softmax(dim=1)
    return _separable(x, _convolution(kernel, height), _convolution(kernel, width))


def _convolution(kernel: Tensor, size: int) -> Tensor:
    """Convolution by odd kernels (B, K), reflected at the border, as matrices (B, size, size)."""
    pixel = torch.arange(size, device=kernel.device)
    offset = torch.arange(kernel.shape[1], device=kernel.device) - kernel.shape[1] // 2
    source = (pixel[:, None] + offset).abs()
    source = (size - 1) - (size - 1 - source).abs()
    selection = (source[:, :, None] == pixel).to(kernel.dtype)
    return torch.einsum("bk,ikj->bij", kernel, selection)
