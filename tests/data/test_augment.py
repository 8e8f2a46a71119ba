from __future__ import annotations

import colorsys
import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from scipy import ndimage, stats
from torch import Tensor

from cclis.data.augment import (
    UNIFORMS,
    Draw,
    apply,
    augment,
    draw_uniforms,
    parameters,
    to_float,
)
from cclis.errors import InputError
from cclis.settings import AugmentationOptions

Array = NDArray[Any]

OFF = AugmentationOptions(crop="none", flip=0, jitter=0, grayscale=0, blur=0)
EVERYTHING = AugmentationOptions(flip=0.5, jitter=0.8, grayscale=0.5, blur=0.5)
LUMA = np.array([0.299, 0.587, 0.114])
MANY = 20_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(
    setting: AugmentationOptions, count: int, height: int, width: int, rng: torch.Generator
) -> Draw:
    return parameters(setting, draw_uniforms(count, rng), height, width)


def augmented(images: Tensor, setting: AugmentationOptions, rng: torch.Generator) -> Tensor:
    return augment(images, setting, draw_uniforms(len(images), rng))


def some_images(count: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """Noise, and among it what colour code trips over: black, white, greys, pure colours."""
    shape = (count, height, width, channels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))
    pure = torch.tensor([[0, 0, 0], [255, 255, 255], [128, 128, 128], [255, 0, 0], [0, 255, 0]])
    row = pure[:, :channels].to(torch.uint8)[:width]
    images[:, 0, : len(row)] = row
    return images


def unchanged(count: int, height: int, width: int, **changed: Any) -> Draw:
    """Parameters that change nothing, but for those given."""
    neutral = draw(OFF, count, height, width, seeded())
    tensors = {name: torch.as_tensor(value) for name, value in changed.items()}
    return dataclasses.replace(neutral, **tensors)


def boxes(count: int, height: int, width: int, seed: int = 0) -> list[tuple[int, int, int, int]]:
    """Any boxes within the image, the smallest and the whole one among them."""
    rng = random.Random(seed)
    found = [(0, 0, height, width), (height - 1, width - 1, 1, 1), (0, 0, 1, width)]
    while len(found) < count:
        tall, wide = rng.randint(1, height), rng.randint(1, width)
        found.append((rng.randint(0, height - tall), rng.randint(0, width - wide), tall, wide))
    return found[:count]


# The oracles: one image, (H, W, C) in float64 within [0, 1].


def pillow_crop(image: Array, box: tuple[int, ...]) -> Array:
    height, width, channels = image.shape
    top, left, tall, wide = box
    planes = [Image.fromarray(image[..., c].astype(np.float32)) for c in range(channels)]
    corners = (left, top, left + wide, top + tall)
    resized = [p.crop(corners).resize((width, height), Image.Resampling.BILINEAR) for p in planes]
    return np.stack([np.asarray(p, dtype=np.float64) for p in resized], axis=-1)


def jittered(image: Array, brightness: float, contrast: float, saturation: float) -> Array:
    luma = LUMA if image.shape[-1] == 3 else np.ones(1)
    image = np.clip(image * brightness, 0, 1)
    image = np.clip(contrast * image + (1 - contrast) * (image @ luma).mean(), 0, 1)
    if image.shape[-1] == 1:
        return image
    return np.clip(saturation * image + (1 - saturation) * (image @ luma)[..., None], 0, 1)


def turned(image: Array, shift: float) -> Array:
    result = np.empty_like(image)
    for place in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*image[place])
        result[place] = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
    return result


def blurred(image: Array, sigma: float) -> Array:
    reach = min(image.shape[:2]) // 20
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    once = ndimage.correlate1d(image, kernel, axis=0, mode="mirror")
    return np.asarray(ndimage.correlate1d(once, kernel, axis=1, mode="mirror"))


def as_array(result: Tensor) -> Array:
    return result.permute(0, 2, 3, 1).double().numpy()


def unit(images: Tensor) -> Array:
    return images.double().numpy() / 255


# Geometry


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (24, 40), (40, 13), (1, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resized_crop_is_pillows(height: int, width: int, channels: int) -> None:
    chosen = boxes(40, height, width)
    images = some_images(len(chosen), height, width, channels)
    given_box = torch.tensor(chosen, dtype=torch.float32)
    setting = dataclasses.replace(OFF, crop="resized")
    result = apply(images, unchanged(len(chosen), height, width, box=given_box), setting)
    expected = [pillow_crop(i, b) for i, b in zip(unit(images), chosen, strict=True)]
    np.testing.assert_allclose(as_array(result), expected, atol=1e-4 / 2, rtol=0)


def test_nothing_outside_the_crop_leaks_in() -> None:
    image = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    image[:, 4:9, 5:12] = 255
    box = torch.tensor([[4.0, 5.0, 5.0, 7.0]])
    result = apply(image, unchanged(1, 16, 16, box=box), dataclasses.replace(OFF, crop="resized"))
    torch.testing.assert_close(result, torch.ones_like(result))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 12)])
def test_padded_crop_is_padding_and_slicing(height: int, width: int) -> None:
    padding = 3
    setting = dataclasses.replace(OFF, crop="padded", padding=padding)
    images = some_images(200, height, width)
    drawn = draw(setting, len(images), height, width, seeded())
    result = apply(images, drawn, setting)
    seen = set()
    for image, box, got in zip(
        unit(images), drawn.box.int().tolist(), as_array(result), strict=True
    ):
        top, left, tall, wide = box
        assert (tall, wide) == (height, width)
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        rows = slice(padding + top, padding + top + height)
        columns = slice(padding + left, padding + left + width)
        np.testing.assert_allclose(got, padded[rows, columns], atol=1e-7)
        seen.add((top, left))
    assert len(seen) > 40  # of 49 shifts


@pytest.mark.parametrize("crop", ["none", "resized"])
@pytest.mark.parametrize("channels", [1, 3])
def test_flip_is_numpys(crop: Any, channels: int) -> None:
    images = some_images(6, 10, 7, channels)
    flip = torch.tensor([True, False, True, True, False, False])
    drawn = unchanged(6, 10, 7, flip=flip)
    result = apply(images, drawn, dataclasses.replace(OFF, crop=crop, flip=0.5))
    expected = images.numpy().copy()
    expected[flip.numpy()] = expected[flip.numpy(), :, ::-1]
    assert torch.equal(result, to_float(torch.from_numpy(expected)))


def test_flip_follows_the_crop() -> None:
    images = some_images(5, 12, 12)
    chosen = boxes(5, 12, 12, seed=3)
    box = torch.tensor(chosen, dtype=torch.float32)
    flip = torch.ones(5, dtype=torch.bool)
    drawn = unchanged(5, 12, 12, box=box, flip=flip)
    result = apply(images, drawn, dataclasses.replace(OFF, crop="resized", flip=0.5))
    expected = [pillow_crop(i, b)[:, ::-1] for i, b in zip(unit(images), chosen, strict=True)]
    np.testing.assert_allclose(as_array(result), expected, atol=1e-5)


# Colour

JITTER = dataclasses.replace(OFF, jitter=1)
FACTORS = [0.0, 0.6, 0.9, 1.0, 1.2, 1.4, 2.0]


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_factors_are_pillows(name: str) -> None:
    enhance = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
    }[name]
    images = some_images(len(FACTORS), 16, 16)
    drawn = unchanged(len(FACTORS), 16, 16, **{name: torch.tensor(FACTORS)})
    result = as_array(apply(images, drawn, JITTER))
    for image, factor, got in zip(images.numpy(), FACTORS, result, strict=True):
        expected = np.asarray(enhance(Image.fromarray(image)).enhance(factor))
        np.testing.assert_allclose(got, expected / 255, atol=2 / 255)


@pytest.mark.parametrize("channels", [1, 3])
def test_factors_in_a_row_are_the_formulas(channels: int) -> None:
    rng = np.random.default_rng(0)
    factors = rng.uniform(0, 2, (3, 20)).astype(np.float32)
    images = some_images(20, 9, 11, channels)
    named = dict(zip(("brightness", "contrast", "saturation"), factors, strict=True))
    result = as_array(apply(images, unchanged(20, 9, 11, **named), JITTER))
    for image, three, got in zip(unit(images), factors.T, result, strict=True):
        np.testing.assert_allclose(got, jittered(image, *three), atol=2e-6)


def test_hue_is_that_of_colorsys() -> None:
    shifts = [-0.5, -0.25, -0.1, -1 / 6, 0.0, 0.03, 0.1, 1 / 3, 0.5]
    images = some_images(len(shifts), 12, 12)
    result = as_array(
        apply(images, unchanged(len(shifts), 12, 12, hue=torch.tensor(shifts)), JITTER)
    )
    for image, shift, got in zip(unit(images), shifts, result, strict=True):
        np.testing.assert_allclose(got, turned(image, shift), atol=3e-6)


def test_hue_leaves_grey_and_goes_round() -> None:
    grey = torch.arange(0, 256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    result = apply(grey, unchanged(1, 16, 16, hue=torch.tensor([0.1])), JITTER)
    assert torch.equal(result, to_float(grey))
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).expand(1, 1, 1, 3)
    green = apply(red, unchanged(1, 1, 1, hue=torch.tensor([1 / 3])), JITTER).flatten()
    torch.testing.assert_close(green, torch.tensor([0.0, 1.0, 0.0]))


def test_grayscale_is_pillows() -> None:
    setting = dataclasses.replace(OFF, grayscale=0.5)
    images = some_images(4, 16, 16)
    gray = torch.tensor([True, False, True, False])
    result = apply(images, unchanged(4, 16, 16, gray=gray), setting)
    assert torch.equal(result[~gray], to_float(images[~gray]))
    for image, got in zip(images[gray].numpy(), as_array(result)[gray.numpy()], strict=True):
        expected = np.asarray(Image.fromarray(image).convert("L"))[..., None] / 255
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), atol=1 / 255)
        np.testing.assert_allclose(got, np.repeat((image @ LUMA)[..., None], 3, 2) / 255, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 64), (101, 63)])
@pytest.mark.parametrize("channels", [1, 3])
def test_blur_is_scipys(height: int, width: int, channels: int) -> None:
    setting = dataclasses.replace(OFF, blur=0.5)
    sigma = torch.tensor([0.1, 0.5, 1.0, 2.0, 1.3])
    blur = torch.tensor([True, True, True, True, False])
    images = some_images(5, height, width, channels)
    result = apply(images, unchanged(5, height, width, blur=blur, sigma=sigma), setting)
    assert torch.equal(result[~blur], to_float(images[~blur]))
    for i in range(4):
        expected = blurred(unit(images)[i], float(sigma[i]))
        np.testing.assert_allclose(as_array(result)[i], expected, atol=2e-6)


def test_blur_changes_nothing_below_twenty_pixels() -> None:
    images = some_images(3, 19, 32)
    assert torch.equal(
        augmented(images, dataclasses.replace(OFF, blur=1), seeded()), to_float(images)
    )


# Everything together


@pytest.mark.parametrize(("height", "width", "channels"), [(40, 40, 3), (24, 41, 3), (28, 28, 1)])
def test_order_of_the_stages(height: int, width: int, channels: int) -> None:
    images = some_images(24, height, width, channels)
    drawn = draw(EVERYTHING, len(images), height, width, seeded(5))
    assert drawn.gray.any()
    assert drawn.blur.any()
    result = as_array(apply(images, drawn, EVERYTHING))
    for i, image in enumerate(unit(images)):
        expected = pillow_crop(image, tuple(drawn.box[i].int().tolist()))
        if drawn.flip[i]:
            expected = expected[:, ::-1]
        factors = (float(f[i]) for f in (drawn.brightness, drawn.contrast, drawn.saturation))
        expected = jittered(expected, *factors)
        if channels == 3:
            expected = turned(expected, float(drawn.hue[i]))
        if channels == 3 and drawn.gray[i]:
            expected = np.repeat((expected @ LUMA)[..., None], 3, axis=2)
        if drawn.blur[i]:
            expected = blurred(expected, float(drawn.sigma[i]))
        np.testing.assert_allclose(result[i], expected, atol=1e-4)


@pytest.mark.parametrize(
    "setting",
    [
        OFF,
        dataclasses.replace(OFF, crop="resized", crop_scale=1.0),
        dataclasses.replace(OFF, crop="padded", padding=0),
        dataclasses.replace(OFF, jitter=1.0, jitter_strength=0.0),
    ],
)
@pytest.mark.parametrize("side", [1, 5, 8, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_nothing_asked_is_the_identity(
    setting: AugmentationOptions, side: int, channels: int
) -> None:
    images = some_images(64, side, side, channels)
    assert torch.equal(augmented(images, setting, seeded()), to_float(images))


def test_samples_without_jitter_are_unchanged() -> None:
    images = some_images(200, 8, 8)
    setting = dataclasses.replace(OFF, jitter=0.5)
    drawn = draw(setting, 200, 8, 8, seeded())
    still = drawn.hue == 0
    assert 50 < still.sum() < 150
    for factor in (drawn.brightness, drawn.contrast, drawn.saturation):
        assert (factor[still] == 1).all()
        assert (factor[~still] != 1).all()
    result = apply(images, drawn, setting)
    torch.testing.assert_close(result[still], to_float(images)[still], atol=3e-6, rtol=0)


def test_white_stays_within_the_range() -> None:
    white = torch.full((500, 32, 32, 3), 255, dtype=torch.uint8)
    setting = dataclasses.replace(OFF, crop="resized", blur=1)
    result = augmented(white, setting, seeded())
    assert result.max() == 1  # weights that sum to a little more than one would exceed it
    torch.testing.assert_close(result, torch.ones_like(result))


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 4),
    height=st.integers(1, 45),
    width=st.integers(1, 45),
    channels=st.sampled_from([1, 3]),
    setting=st.builds(
        AugmentationOptions,
        crop=st.sampled_from(["resized", "padded", "none"]),
        crop_scale=st.floats(0.01, 1),
        padding=st.integers(0, 50),
        flip=st.floats(0, 1),
        jitter=st.floats(0, 1),
        jitter_strength=st.floats(0, 2.5),
        grayscale=st.floats(0, 1),
        blur=st.floats(0, 1),
    ),
    seed=st.integers(0, 1000),
)
def test_any_setting_gives_images(
    count: int, height: int, width: int, channels: int, setting: AugmentationOptions, seed: int
) -> None:
    images = some_images(count, height, width, channels, seed)
    result = augmented(images, setting, seeded(seed))
    assert result.shape == (count, channels, height, width)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert result.isfinite().all()
    assert ((result >= 0) & (result <= 1)).all()


def test_same_seed_same_bits() -> None:
    images = some_images(16, 24, 24)
    first = augmented(images, EVERYTHING, seeded(1))
    assert torch.equal(first, augmented(images, EVERYTHING, seeded(1)))
    assert not torch.equal(first, augmented(images, EVERYTHING, seeded(2)))
    generator = seeded(1)
    augmented(images, EVERYTHING, generator)
    assert not torch.equal(first, augmented(images, EVERYTHING, generator))


def test_only_the_given_generator_is_used() -> None:
    before = torch.get_rng_state()
    augmented(some_images(4, 24, 24), EVERYTHING, seeded())
    assert torch.equal(before, torch.get_rng_state())


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    images = some_images(6, 24, 24)
    drawn = draw(EVERYTHING, 6, 24, 24, seeded())
    alone = Draw(*(getattr(drawn, f.name)[2:3] for f in dataclasses.fields(Draw)))
    together = apply(images, drawn, EVERYTHING)[2:3]
    torch.testing.assert_close(apply(images[2:3], alone, EVERYTHING), together, atol=1e-6, rtol=0)


def test_one_stage_does_not_change_the_draws_of_another() -> None:
    with_crop = draw(EVERYTHING, 50, 24, 24, seeded())
    without = draw(dataclasses.replace(EVERYTHING, crop="none"), 50, 24, 24, seeded())
    assert torch.equal(with_crop.hue, without.hue)
    assert torch.equal(with_crop.sigma, without.sigma)
    assert not torch.equal(with_crop.box, without.box)


def test_autocast_outside_changes_nothing() -> None:
    images = some_images(4, 24, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = augmented(images, EVERYTHING, seeded())
    assert torch.equal(inside, augmented(images, EVERYTHING, seeded()))


def test_all_but_the_random_numbers_is_one_graph() -> None:
    def step(images: Tensor, uniforms: Tensor) -> Tensor:
        return apply(images, parameters(EVERYTHING, uniforms, 24, 24), EVERYTHING)

    images, uniforms = some_images(4, 24, 24), torch.rand(UNIFORMS, 4, generator=seeded())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    result = compiled(images, uniforms)
    torch.testing.assert_close(result, augmented(images, EVERYTHING, seeded()))
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_images_need_not_be_contiguous() -> None:
    images = some_images(8, 24, 24)
    strided = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert torch.equal(
        augmented(strided, EVERYTHING, seeded()), augmented(images, EVERYTHING, seeded())
    )
    assert torch.equal(to_float(strided), to_float(images))
    assert to_float(strided).is_contiguous(memory_format=torch.channels_last)


# What is drawn


def looped_box(height: int, width: int, scale: float, rng: random.Random) -> tuple[int, ...]:
    """The box of a random resized crop, as one would write it for a single image."""
    for _ in range(10):
        area = height * width * rng.uniform(scale, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return rng.randint(0, height - tall), rng.randint(0, width - wide), tall, wide
    if width / height < 3 / 4:
        wide, tall = width, round(width / (3 / 4))
    elif width / height > 4 / 3:
        wide, tall = round(height * (4 / 3)), height
    else:
        wide, tall = width, height
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def same_distribution(first: Array, second: Array) -> bool:
    """Chi-square test of two integer-valued samples; rare values are counted together."""
    values = np.union1d(first, second)
    table = np.array([[np.sum(s == v) for v in values] for s in (first, second)])
    rare = table.sum(axis=0) < 20
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)])
    table = table[:, table.sum(axis=0) > 0]
    return table.shape[1] == 1 or stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(32, 32, 0.2), (64, 64, 0.1), (8, 8, 0.2), (20, 32, 0.7), (32, 12, 0.5), (32, 12, 0.05)],
)
def test_boxes_are_distributed_as_those_of_a_loop(height: int, width: int, scale: float) -> None:
    rng = random.Random(0)
    expected = np.array([looped_box(height, width, scale, rng) for _ in range(MANY)])
    box = draw(AugmentationOptions(crop_scale=scale), MANY, height, width, seeded()).box.numpy()
    assert (box == np.rint(box)).all()
    found = box.astype(int)
    top, left, tall, wide = found.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + tall <= height).all()
    assert (left + wide <= width).all()
    for column in range(4):
        assert same_distribution(found[:, column], expected[:, column])
    area, aspect = tall * wide, wide / tall
    assert stats.ks_2samp(area, expected[:, 2] * expected[:, 3]).pvalue > 1e-3
    assert stats.ks_2samp(aspect, expected[:, 3] / expected[:, 2]).pvalue > 1e-3


def test_large_crops_have_the_uniform_laws() -> None:
    side = 4096  # rounding to pixels does not show, and at this scale every try fits
    augmentation = AugmentationOptions(crop_scale=0.01)
    top, _, tall, wide = draw(augmentation, MANY, side, side, seeded()).box.double().numpy().T
    area, aspect = tall * wide / side**2, np.log(wide / tall)
    small = area < 0.5  # accepted whatever the aspect, so uniform there
    assert stats.kstest(area[small], "uniform", (0.01, 0.49)).pvalue > 1e-3
    spread = math.log(4 / 3)
    assert stats.kstest(aspect[small], "uniform", (-spread, 2 * spread)).pvalue > 1e-3
    place = (top[small] + 0.5) / (side - tall[small] + 1)
    assert stats.kstest(place, "uniform").pvalue > 1e-3


def test_fallback_is_the_central_crop_of_the_nearest_aspect() -> None:
    box = draw(AugmentationOptions(crop_scale=1.0), 10, 30, 90, seeded()).box
    assert (box == torch.tensor([0.0, 25.0, 30.0, 40.0])).all()
    box = draw(AugmentationOptions(crop_scale=1.0), 10, 90, 30, seeded()).box
    assert (box == torch.tensor([25.0, 0.0, 40.0, 30.0])).all()


def test_shifts_of_a_padded_crop_are_uniform() -> None:
    box = draw(AugmentationOptions(crop="padded", padding=4), MANY, 32, 32, seeded()).box.numpy()
    for shift in box[:, :2].T:
        values, counts = np.unique(shift, return_counts=True)
        assert values.tolist() == list(range(-4, 5))
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_rates(rate: float) -> None:
    setting = AugmentationOptions(flip=rate, jitter=rate, grayscale=rate, blur=rate)
    drawn = draw(setting, MANY, 32, 32, seeded())
    for happened in (drawn.flip, drawn.hue != 0, drawn.gray, drawn.blur):
        low, high = stats.binom.interval(0.9999, MANY, rate) if 0 < rate < 1 else [rate * MANY] * 2
        # A hue shift of exactly zero is possible, if rare.
        assert low - 2 <= int(happened.sum()) <= high


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_jitter_and_sigma_are_uniform(strength: float) -> None:
    setting = AugmentationOptions(jitter=1, jitter_strength=strength, blur=1)
    drawn = draw(setting, MANY, 32, 32, seeded())
    reach = 0.4 * strength
    for factor in (drawn.brightness, drawn.contrast, drawn.saturation):
        assert (
            stats.kstest(factor.double().numpy(), "uniform", (1 - reach, 2 * reach)).pvalue > 1e-3
        )
    hue = (-0.1 * strength, 0.2 * strength)
    assert stats.kstest(drawn.hue.double().numpy(), "uniform", hue).pvalue > 1e-3
    assert stats.kstest(drawn.sigma.double().numpy(), "uniform", (0.1, 1.9)).pvalue > 1e-3


def test_draws_are_independent_of_each_other() -> None:
    drawn = draw(EVERYTHING, MANY, 32, 32, seeded())
    factors = [drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue, drawn.sigma]
    booleans = [drawn.flip, drawn.hue != 0, drawn.gray, drawn.blur]
    rows = torch.stack([*factors, *(b.float() for b in booleans), drawn.box[:, 2]])
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 4.5 / math.sqrt(MANY)


def test_every_sample_has_its_own_parameters() -> None:
    drawn = draw(dataclasses.replace(EVERYTHING, jitter=1), 100, 32, 32, seeded())
    for values in (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue, drawn.sigma):
        assert len(values.unique()) == 100
    assert len(drawn.box.unique(dim=0)) > 90
    image = some_images(1, 32, 32).expand(100, -1, -1, -1)
    results = augmented(image, dataclasses.replace(EVERYTHING, jitter=1), seeded())
    assert len(results.flatten(1).unique(dim=0)) == 100


# The rest


@pytest.mark.parametrize("channels", [1, 3])
def test_to_float_is_the_image_itself(channels: int) -> None:
    images = some_images(3, 5, 7, channels)
    plain = to_float(images)
    assert plain.shape == (3, channels, 5, 7)
    assert plain.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(as_array(plain), unit(images), atol=1e-7)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"crop": "resize"}, "Did you mean 'resized'"),
        ({"crop_scale": 0.0}, "crop_scale"),
        ({"crop_scale": 1.1}, "crop_scale"),
        ({"padding": -1}, "padding"),
        ({"flip": -0.1}, "flip"),
        ({"jitter": 1.5}, "jitter"),
        ({"grayscale": math.nan}, "grayscale"),
        ({"blur": 2}, "blur"),
        ({"jitter_strength": -1.0}, "jitter_strength"),
        ({"jitter_strength": 2.6}, "jitter_strength"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        AugmentationOptions(**changed)


@pytest.mark.parametrize("images", [torch.rand(2, 8, 8, 3), torch.zeros(8, 8, 3).byte()])
def test_bad_images_are_refused(images: Tensor) -> None:
    for call in (lambda: augmented(images, OFF, seeded()), lambda: to_float(images)):
        with pytest.raises(InputError, match="uint8 images of shape"):
            call()
