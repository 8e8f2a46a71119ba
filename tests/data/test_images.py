from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cclis.data.images import ImageSet, as_uint8_images
from cclis.errors import InputError


def image_set(count: int, height: int = 4, width: int = 5, channels: int = 3) -> ImageSet:
    images = torch.arange(count * height * width * channels) % 251
    return ImageSet(
        images.to(torch.uint8).view(count, height, width, channels), torch.arange(count)
    )


# ----------------------------------------------------------------------------------- ImageSet


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 4, 4, 3),
        torch.zeros(4, 4, 3, dtype=torch.uint8),
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
        torch.zeros(2, 4, 4, 2, dtype=torch.uint8),
    ],
    ids=["floats", "one image", "channels first", "two channels"],
)
def test_images_must_be_uint8_with_their_channels_last(images):
    with pytest.raises(InputError, match=r"uint8 of shape \(N, H, W, 1 or 3\)"):
        ImageSet(images, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    "labels",
    [torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.zeros(2, 1, dtype=torch.int64)],
    ids=["too many", "floats", "a column"],
)
def test_labels_must_be_one_integer_an_image(labels):
    with pytest.raises(InputError, match="one int64 per image: 2 images"):
        ImageSet(torch.zeros(2, 4, 4, 1, dtype=torch.uint8), labels)


def test_a_set_knows_its_length_and_shape():
    assert len(image_set(3)) == 3
    assert image_set(3).shape == (4, 5, 3)
    assert len(image_set(0)) == 0


def test_indexing_keeps_images_and_labels_together():
    whole = image_set(5)
    for index in (
        torch.tensor([3, 0]),
        slice(1, 4),
        torch.tensor([True, False, True] + [False] * 2),
    ):
        part = whole[index]
        assert torch.equal(part.images, whole.images[index])
        assert torch.equal(part.labels, whole.labels[index])


def test_to_moves_both():
    moved = image_set(2).to("meta")
    assert (moved.images.device.type, moved.labels.device.type) == ("meta", "meta")


def test_concatenate_puts_sets_after_one_another():
    one, two = image_set(2), image_set(3)
    both = ImageSet.concatenate(one, two)
    assert both.labels.tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(both.images[2:], two.images)


def test_concatenate_names_the_sizes_that_differ():
    with pytest.raises(InputError, match=r"\(4, 5, 3\) and \(6, 5, 3\)"):
        ImageSet.concatenate(image_set(1, height=6), image_set(1, height=4))


# ---------------------------------------------------------------------------- as_uint8_images


@given(
    hnp.arrays(np.uint8, st.tuples(*[st.integers(1, 5)] * 3, st.sampled_from([1, 3]))),
)
def test_channels_last_pass_as_they_are(images):
    found = as_uint8_images(images)
    assert (found.dtype, found.is_contiguous()) == (torch.uint8, True)
    assert np.array_equal(found.numpy(), images)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_first_are_moved_last(channels):
    images = np.random.default_rng(0).integers(0, 256, (2, channels, 4, 5), dtype=np.uint8)
    found = as_uint8_images(images)
    assert found.shape == (2, 4, 5, channels)
    assert found.is_contiguous()
    assert found[1, 2, 3, channels - 1] == images[1, channels - 1, 2, 3]


def test_images_without_channels_get_one():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5), dtype=np.uint8)
    assert np.array_equal(as_uint8_images(images).numpy(), images[..., None])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_byte_survives_as_a_float(dtype):
    bytes_ = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    floats = (bytes_ / 255).astype(dtype)
    assert np.array_equal(as_uint8_images(floats).numpy(), bytes_)


def test_floats_are_rounded_to_the_nearest_byte():
    images = np.array([0.0, 0.6, 1.4, 253.8, 255.0]).reshape(1, 1, 5) / 255
    assert as_uint8_images(images).flatten().tolist() == [0, 1, 1, 254, 255]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value):
    images = np.full((2, 4, 4, 1), 0.5)
    images[1, 2, 3] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        as_uint8_images(images)


@pytest.mark.parametrize(
    ("value", "reach"), [(-0.25, "from -0.25 to 0.5"), (128, "from 0.5 to 128")]
)
def test_floats_outside_the_unit_interval_are_refused(value, reach):
    images = np.full((2, 4, 4, 1), 0.5)
    images[0, 0, 0] = value
    with pytest.raises(InputError, match=reach):
        as_uint8_images(images)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.bool_, np.complex64])
def test_other_numbers_are_refused(dtype):
    with pytest.raises(InputError, match=f"not {np.dtype(dtype)}"):
        as_uint8_images(np.zeros((2, 4, 4, 1), dtype))


def test_tensors_and_lists_are_taken_too():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    for given_as in (torch.from_numpy(images), list(images), tuple(images)):
        assert np.array_equal(as_uint8_images(given_as).numpy(), images)
    floats = torch.from_numpy(images / 255).requires_grad_()
    assert np.array_equal(as_uint8_images(floats).numpy(), images)


def test_a_list_of_two_sizes_names_both():
    images = [np.zeros((4, 5, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)]
    with pytest.raises(InputError, match=r"\(4, 5, 3\) and \(4, 6, 3\); resize"):
        as_uint8_images(images)


@pytest.mark.parametrize(
    "images",
    [
        [],
        np.zeros((0, 4, 4, 3), np.uint8),
        np.zeros((2, 0, 4, 3), np.uint8),
        np.zeros((4, 4), np.uint8),
        np.zeros((1, 2, 4, 4, 3), np.uint8),
        None,
        "digits.png",
    ],
    ids=["empty list", "no images", "no rows", "one image", "video", "nothing", "a name"],
)
def test_what_is_no_stack_of_images_is_refused(images):
    with pytest.raises(InputError, match="non-empty"):
        as_uint8_images(images)


@pytest.mark.parametrize("shape", [(2, 4, 4, 2), (2, 4, 4, 4), (2, 5, 5, 5)])
def test_other_numbers_of_channels_are_refused(shape):
    with pytest.raises(InputError, match="one or three channels"):
        as_uint8_images(np.zeros(shape, np.uint8))


@pytest.mark.parametrize(
    "images",
    [
        [[[0.0, 1.0], [0.0]], [[0.0, 1.0], [0.0]]],
        torch.zeros(2, 4, 4).to_sparse(),
        torch.zeros(2, 4, 4, device="meta"),
        [torch.zeros(4, 4, requires_grad=True)] * 2,
    ],
    ids=["ragged", "sparse", "meta", "with gradients"],
)
def test_what_cannot_become_an_array_is_refused(images):
    with pytest.raises(InputError, match="must be an array, a dense tensor or a sequence"):
        as_uint8_images(images)


def test_one_colour_image_is_not_taken_for_many_grey_ones():
    with pytest.raises(InputError, match="looks like a single colour image"):
        as_uint8_images(np.zeros((8, 9, 3), dtype=np.uint8))


def test_half_precision_tensors_are_taken():
    images = torch.rand(2, 3, 4, 4)
    expected = as_uint8_images(images.bfloat16().float())
    assert torch.equal(as_uint8_images(images.bfloat16()), expected)


def test_what_is_learned_does_not_follow_the_callers_array():
    array = np.zeros((2, 4, 4, 1), dtype=np.uint8)
    images = as_uint8_images(array)
    array += 7
    assert int(images.max()) == 0
    array.flags.writeable = False
    as_uint8_images(array)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2)], ids=["last", "first"])
def test_floats_are_converted_in_little_more_memory_than_the_pixels(axes):
    floats = np.random.default_rng(0).random((4001, 16, 16, 3), np.float32)
    expected = np.rint(floats * 255).astype(np.uint8)
    tracemalloc.start()
    found = as_uint8_images(floats.transpose(axes))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, expected)
    assert peak < 2 * expected.nbytes
