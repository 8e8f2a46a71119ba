"""Batched augmentation on tensors: every sample has its own parameters, none waits for the host.

All shapes follow from the batch and the settings. torch.compile cannot trace a generator, which
only `draw_uniforms` touches: a compiled step takes what it drew as an input, and `augment` is one
graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cclis.errors import InputError
from cclis.settings import AugmentationOptions

TRIES = 10
UNIFORMS = 2 * TRIES + 11  # random numbers a sample takes
ASPECT = (3 / 4, 4 / 3)
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.4, 0.1
SIGMA = (0.1, 2.0)
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, eq=False)
class Draw:
    """The parameters of a batch of B samples, each tensor with one entry a sample.

    Attributes:
        box: Top, left, height and width of the crop in whole pixels, float (B, 4).
        flip: Whether left and right change places, bool (B,).
        brightness: Factor, (B,); one without jitter.
        contrast: Factor, (B,); one without jitter.
        saturation: Factor, (B,); one without jitter.
        hue: Shift as a share of the colour circle, (B,); zero without jitter.
        gray: Whether the colour goes, bool (B,).
        blur: Whether the image is blurred, bool (B,).
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
    """Uniform random numbers for `count` samples, (UNIFORMS, count), on the generator's device."""
    return torch.rand(UNIFORMS, count, generator=generator, device=generator.device)


def parameters(
    augmentation: AugmentationOptions, uniforms: Tensor, height: int, width: int
) -> Draw:
    """The parameters that random numbers stand for.

    Every stage has its own of them whatever the settings are, so that changing one stage leaves
    the draws of the others as they were.

    Args:
        augmentation: The settings.
        uniforms: Uniform in [0, 1), (UNIFORMS, B).
        height: Height of the images, H.
        width: Width of the images, W.
    """
    area, aspect, others = uniforms[:TRIES], uniforms[TRIES : 2 * TRIES], uniforms[2 * TRIES :]
    top, left, flip, jitter, brightness, contrast, saturation, hue, gray, blur, sigma = others
    if augmentation.crop == "resized":
        box = _resized_box(augmentation.crop_scale, height, width, area, aspect, top, left)
    else:
        reach = augmentation.padding if augmentation.crop == "padded" else 0
        top, left = (_integer(uniform, 2 * reach + 1) - reach for uniform in (top, left))
        box = torch.stack((top, left, torch.full_like(top, height), torch.full_like(left, width)))
    # Scaling the deviations by zero is the jitter's absence.
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
    """Augmented images: crop, flip, brightness, contrast, saturation, hue, grayscale, blur.

    torchvision's ColorJitter shuffles its four changes for every image; here their order is fixed.
    One-channel images have no colour, so saturation, hue and grayscale leave them alone.

    Args:
        images: uint8, (B, H, W, C) with one or three channels.
        draw: Parameters of B samples, on the images' device.
        augmentation: The settings `draw` was made with; stages with probability zero are skipped.

    Returns:
        float32 within [0, 1], (B, C, H, W) in channels-last memory.
    """
    _check(images)
    with torch.autocast(images.device.type, enabled=False):
        x = images.permute(0, 3, 1, 2)
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        if augmentation.crop != "none" or augmentation.flip > 0:
            x = _crop(x, draw.box, draw.flip)
        # Only now, because whole numbers up to 255 pass unchanged through a reduced-precision
        # product, and an image that is not cropped has to stay exactly what it was.
        x = x / 255
        if augmentation.jitter > 0 and augmentation.jitter_strength > 0:
            x = _jitter(x, draw)
        if augmentation.grayscale > 0 and x.shape[1] == 3:
            x = torch.where(_per_sample(draw.gray), _luma(x), x)
        if augmentation.blur > 0:
            x = torch.where(_per_sample(draw.blur), _blur(x, draw.sigma), x)
        return x.clamp(0, 1).contiguous(memory_format=torch.channels_last)


def augment(images: Tensor, augmentation: AugmentationOptions, uniforms: Tensor) -> Tensor:
    """Images augmented as random numbers say; everything but drawing them is one graph.

    Args:
        images: uint8, (B, H, W, C) with one or three channels.
        augmentation: The settings.
        uniforms: What `draw_uniforms` drew for B samples, on the images' device.

    Returns:
        float32 within [0, 1], (B, C, H, W) in channels-last memory.
    """
    _check(images)
    height, width = images.shape[1:3]
    return apply(images, parameters(augmentation, uniforms, height, width), augmentation)


def to_float(images: Tensor) -> Tensor:
    """Images as they are: uint8 (B, H, W, C) to float32 in [0, 1], (B, C, H, W), channels-last."""
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
    """The boxes (4, B) of torchvision's RandomResizedCrop from uniforms (TRIES, B) and (B,)."""
    low, high = ASPECT
    root = (height * width * (scale + (1 - scale) * area)).sqrt()
    stretch = (0.5 * (math.log(low) + math.log(high / low) * aspect)).exp()
    tall, wide = (root / stretch).round(), (root * stretch).round()
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    # argmax over booleans is the first True: the try at which a loop would have stopped.
    first = fits.int().argmax(dim=0, keepdim=True)
    # If no try fits: as much of the image as the allowed aspect ratios permit, from its centre.
    most_tall, most_wide = min(height, round(width / low)), min(width, round(height * high))
    found = fits.any(dim=0)
    tall = torch.where(found, tall.gather(0, first)[0], most_tall)
    wide = torch.where(found, wide.gather(0, first)[0], most_wide)
    middle_top, middle_left = (height - most_tall) // 2, (width - most_wide) // 2
    return torch.stack(
        (
            torch.where(found, _integer(top, height - tall + 1), middle_top),
            torch.where(found, _integer(left, width - wide + 1), middle_left),
            tall,
            wide,
        )
    )


def _per_sample(values: Tensor) -> Tensor:
    """One value a sample, (B,), against images (B, C, H, W)."""
    return values[:, None, None, None]


def _crop(x: Tensor, box: Tensor, flip: Tensor) -> Tensor:
    """The boxes (B, 4) of the images (B, C, H, W), stretched to H and W, flipped where asked."""
    top, left, tall, wide = box.unbind(dim=1)
    rows = _interpolation(top, tall, x.shape[2])
    columns = _interpolation(left, wide, x.shape[3])
    columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    return _separable(x, rows, columns)


def _interpolation(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Bilinear weights (B, size, size): how much of pixel j is in pixel i of a stretched crop.

    Args:
        start: First pixel of the crop, (B,); weights on pixels outside the image are zero.
        length: Number of its pixels, (B,), at most `size`.
    """
    pixel = torch.arange(size, device=start.device, dtype=torch.float32)
    offset = (pixel + 0.5) * (length / size)[:, None] - 0.5
    # Within the crop: its border is repeated, and the image around it does not leak in.
    source = start[:, None] + offset.clamp(min=0).minimum(length[:, None] - 1)
    return (1 - (source[:, :, None] - pixel).abs()).relu()


def _separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Images (B, C, H, W) with weights rows (B, H, H) and columns (B, W, W) on their axes."""
    return rows[:, None] @ x @ columns[:, None].mT


def _luma(x: Tensor) -> Tensor:
    """Brightness (B, 1, H, W) as the eye weighs the channels of (B, C, H, W)."""
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
    """RGB (B, 3, H, W) turned by a share of the colour circle, value and saturation kept."""
    red, green, blue = x[:, 0:1], x[:, 1:2], x[:, 2:3]
    value, least = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)
    chroma = value - least
    # Grey has no hue: any will do, as its chroma of zero takes the hue out again below.
    unit = chroma.clamp(min=torch.finfo(x.dtype).tiny)
    sextant = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit),
    )
    # Where red, green and blue lie on the circle, 5/6, 3/6 and 1/6 of it on; the whole turn more
    # keeps the sum positive, as `frac` needs, which takes a tenth of the time of `remainder`.
    origin = 1 + (5 - 2 * torch.arange(3, device=x.device)[:, None, None]) / 6
    along = (origin + (sextant / 6 + shift)).frac_().mul_(6)
    return value - along.sub_(2).abs_().neg_().add_(2).clamp_(0, 1).mul_(chroma)


def _blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of (B, C, H, W) by deviations (B,), the border reflected."""
    height, width = x.shape[2:]
    reach = min(height, width) // 20
    offset = torch.arange(-reach, reach + 1, device=x.device)
    kernel = (-0.5 * (offset / sigma[:, None]).square()).softmax(dim=1)
    return _separable(x, _convolution(kernel, height), _convolution(kernel, width))


def _convolution(kernel: Tensor, size: int) -> Tensor:
    """Odd kernels (B, K) as matrices (B, size, size) that reflect at the border."""
    pixel = torch.arange(size, device=kernel.device)
    offset = torch.arange(kernel.shape[1], device=kernel.device) - kernel.shape[1] // 2
    source = (pixel[:, None] + offset).abs()
    source = (size - 1) - (size - 1 - source).abs()
    places = (source[:, :, None] == pixel).to(kernel.dtype)
    return torch.einsum("bk,ikj->bij", kernel, places)
