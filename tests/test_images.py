from __future__ import annotations

import re
from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gatecrash.images import (
    Images,
    batches,
    batches_on,
    check_form,
    check_images,
    check_labels,
    check_pair,
    resized,
    to_channels,
)

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
seeds = st.integers(0, 2**31)
sides = st.integers(1, 40)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def saying(message: str) -> str:
    """A pattern for the whole of a message."""
    return f"^{re.escape(message)}$"


# Form


@given(shapes, seeds, st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=30, deadline=None)
def test_images_pass_as_they_are(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
    x = drawn(*shape, seed=seed, dtype=dtype)
    kept = x.clone()
    assert check_form(x) is x
    assert check_images(x) is x
    assert torch.equal(x, kept)


@pytest.mark.parametrize("check", [check_form, check_images])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((1, 3, 2, 2)), "images must be a torch.Tensor of shape (N, C, H, W), got ndarray"),
        (None, "images must be a torch.Tensor of shape (N, C, H, W), got NoneType"),
        (
            torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
            "images must be float in [0, 1], got uint8; divide by 255: images.float() / 255",
        ),
        (torch.zeros(1, 3, 2, 2, dtype=torch.int64), "images must be float32 or float64, got int64"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.float16), "images must be float32 or float64, got float16"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.complex64), "images must be float32 or float64, got complex64"),
        (
            torch.zeros(3, 2, 2),
            "images must have shape (N, C, H, W), got (3, 2, 2); one image needs a batch dimension: image[None]",
        ),
        (torch.zeros(2, 2), "images must have shape (N, C, H, W), got (2, 2)"),
        (torch.zeros(1, 1, 3, 2, 2), "images must have shape (N, C, H, W), got (1, 1, 3, 2, 2)"),
        (torch.tensor(0.5), "images must have shape (N, C, H, W), got ()"),
    ],
)
def test_what_has_not_the_form_of_images_is_refused(check: object, x: object, message: str) -> None:
    assert callable(check)
    with pytest.raises(ValueError, match=saying(message)):
        check(x)


def test_the_form_is_judged_without_a_look_at_the_values() -> None:
    x = torch.tensor([torch.nan, -3.0, 300.0, torch.inf]).view(1, 1, 2, 2)
    assert check_form(x) is x
    assert check_form(torch.empty(0, 3, 2, 2)).shape == (0, 3, 2, 2)


def test_the_message_names_the_images_as_the_caller_does() -> None:
    with pytest.raises(ValueError, match=saying("start must have shape (N, C, H, W), got (4,)")):
        check_images(torch.zeros(4), "start")


# Values


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2)])
def test_no_image_at_all_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=saying(f"images must hold at least one image, got shape {shape}")):
        check_images(torch.empty(shape))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_nan_is_refused_and_the_first_image_with_one_is_named(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    bad = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    x = drawn(count, 2, 3, 3)
    for index in bad:
        x[index, data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))] = torch.nan
    message = f"images must not hold NaN; found in {len(bad)} of {count} images, first at index {bad[0]}"
    with pytest.raises(ValueError, match=saying(message)):
        check_images(x)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 255.0), "images must lie in [0, 1], got values from 0 to 255; divide by 255"),
        ((-2.118, 2.64), "images must lie in [0, 1], got values from -2.118 to 2.64; undo the normalisation"),
        ((0.5, 1.25), "images must lie in [0, 1], got values from 0.5 to 1.25"),
        ((-0.125, 0.5), "images must lie in [0, 1], got values from -0.125 to 0.5; undo the normalisation"),
        ((0.0, torch.inf), "images must lie in [0, 1], got values from 0 to inf; divide by 255"),
    ],
)
def test_values_outside_the_range_are_refused_with_a_guess_at_the_cause(
    values: tuple[float, float], message: str
) -> None:
    with pytest.raises(ValueError, match=saying(message)):
        check_images(torch.tensor(values).view(1, 1, 1, 2))


@given(st.floats(width=32, allow_nan=False), shapes, seeds)
@settings(max_examples=50, deadline=None)
def test_one_value_decides_whether_the_range_is_kept(value: float, shape: tuple[int, ...], seed: int) -> None:
    x = drawn(*shape, seed=seed)
    x.view(-1)[seed % x.numel()] = value
    if 0 <= value <= 1:
        assert check_images(x) is x
    else:
        with pytest.raises(ValueError, match=r"^images must lie in \[0, 1\], got values from"):
            check_images(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_range_belong_to_it_and_their_neighbours_do_not(dtype: torch.dtype) -> None:
    check_images(torch.tensor([0.0, -0.0, 1.0], dtype=dtype).view(1, 3, 1, 1))
    for end, beyond in ((0.0, -1.0), (1.0, 2.0)):
        neighbour = torch.nextafter(torch.tensor(end, dtype=dtype), torch.tensor(beyond, dtype=dtype))
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            check_images(neighbour.view(1, 1, 1, 1))


def test_a_value_just_above_one_is_not_shown_as_one() -> None:
    with pytest.raises(ValueError, match=r"to 1\.0000001"):
        check_images(torch.full((1, 1, 1, 1), 1.0000001))


def test_images_that_carry_a_graph_keep_it() -> None:
    x = drawn(1, 3, 2, 2).requires_grad_()
    (check_images(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


# Pairs and labels


def test_a_pair_of_batches_has_one_shape() -> None:
    check_pair(torch.zeros(2, 3, 4, 5), torch.ones(2, 3, 4, 5))
    message = "start and target must have the same shape, got (2, 3, 4, 5) and (2, 3, 5, 4)"
    with pytest.raises(ValueError, match=saying(message)):
        check_pair(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_are_labels(dtype: torch.dtype) -> None:
    check_labels(torch.zeros(4, dtype=dtype), 4)


@pytest.mark.parametrize(
    ("y", "came"),
    [
        (torch.zeros(3, dtype=torch.int64), "(3,) int64"),
        (torch.zeros(4, 1, dtype=torch.int64), "(4, 1) int64"),
        (torch.tensor(1), "() int64"),
        (torch.zeros(4), "(4,) float32"),
        (torch.zeros(4, dtype=torch.complex64), "(4,) complex64"),
        ([0, 1, 2, 3], "list"),
        (None, "NoneType"),
    ],
)
def test_anything_but_one_whole_number_per_image_is_refused(y: object, came: str) -> None:
    message = f"inliers: labels must be whole numbers of shape (4,), got {came}"
    with pytest.raises(ValueError, match=saying(message)):
        check_labels(y, 4, "inliers")


# Batches


def all_forms(x: Tensor, y: Tensor | None, batch_size: int) -> dict[str, Images]:
    """The same images in every form that data may come in, cut alike."""
    parts = list(x.split(batch_size))
    if y is None:
        loader: DataLoader[object] = DataLoader(list(x), batch_size=batch_size)
        return {"tensor": x, "list": parts, "generator": iter(parts), "loader": loader}
    pairs = list(zip(parts, y.split(batch_size), strict=True))
    return {
        "pair": (x, y),
        "list": pairs,
        "list of lists": [list(pair) for pair in pairs],
        "generator": (pair for pair in pairs),
        "loader": DataLoader(TensorDataset(x, y), batch_size=batch_size),
    }


@given(st.integers(1, 12), st.integers(1, 14), st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_form_of_data_gives_the_same_batches(count: int, batch_size: int, labelled: bool) -> None:
    x, y = drawn(count, 1, 2, 2, seed=count), torch.arange(count) if labelled else None
    sizes = [min(batch_size, count - begin) for begin in range(0, count, batch_size)]
    for form, data in all_forms(x, y, batch_size).items():
        images, labels = zip(*batches(data, batch_size), strict=True)
        assert [len(part) for part in images] == sizes, form
        assert torch.equal(torch.cat(images), x), form
        if y is None:
            assert labels == (None,) * len(sizes), form
        else:
            assert torch.equal(torch.cat(labels), y), form


def test_a_tensor_comes_in_batches_of_256() -> None:
    assert [len(x) for x, _ in batches(torch.zeros(600, 1, 1, 1))] == [256, 256, 88]


def test_iterables_keep_their_own_batches() -> None:
    parts = [torch.zeros(5, 1, 1, 1), torch.zeros(2, 1, 1, 1)]
    assert [len(x) for x, _ in batches(parts, batch_size=3)] == [5, 2]


def test_labels_may_be_missing_from_some_batches() -> None:
    x, y = torch.zeros(2, 1, 1, 1), torch.tensor([1, 2])
    labels = [labels for _, labels in batches([(x, y), x, (x, None)])]
    assert labels[0] is y
    assert labels[1:] == [None, None]


def test_a_stream_is_read_one_batch_at_a_time() -> None:
    read = []

    def stream() -> Iterator[Tensor]:
        for index in range(3):
            read.append(index)
            yield torch.zeros(1, 1, 1, 1)

    next(batches(stream()))
    assert read == [0]


good, pair = torch.zeros(2, 1, 2, 2), (torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "photos must be a tensor, a pair (images, labels) or an iterable of batches, got int"),
        (None, "photos must be a tensor, a pair (images, labels) or an iterable of batches, got NoneType"),
        (
            torch.zeros(3, 2, 2),
            "photos, batch 0 must have shape (N, C, H, W), got (3, 2, 2); one image needs a batch dimension: "
            "image[None]",
        ),
        (torch.zeros(0, 1, 2, 2), "photos, batch 0 must hold at least one image, got shape (0, 1, 2, 2)"),
        ([good, good + 2], "photos, batch 1 must lie in [0, 1], got values from 2 to 2"),
        ([good, good, "x.png"], "photos, batch 2 must be a torch.Tensor of shape (N, C, H, W), got str"),
        ([pair, (*pair, 0)], "photos, batch 1: expected images or (images, labels), got 3 items"),
        (iter([pair, ()]), "photos, batch 1: expected images or (images, labels), got 0 items"),
        (
            [pair, (good, torch.tensor([0]))],
            "photos, batch 1: labels must be whole numbers of shape (2,), got (1,) int64",
        ),
        ([(good, [0, 1])], "photos, batch 0: labels must be whole numbers of shape (2,), got list"),
        ((good, torch.tensor([0])), "photos: labels must be whole numbers of shape (2,), got (1,) int64"),
        ((good, torch.zeros(2)), "photos: labels must be whole numbers of shape (2,), got (2,) float32"),
        (
            {"x": good},
            "photos, batch 0 must be a torch.Tensor of shape (N, C, H, W), got str",
        ),
        (
            DataLoader(TensorDataset(torch.zeros(4, 1, 2, 2).byte(), torch.zeros(4).long()), batch_size=2),
            "photos, batch 0 must be float in [0, 1], got uint8; divide by 255: images.float() / 255",
        ),
    ],
)
def test_wrong_data_is_refused_and_the_batch_named(data: Images, message: str) -> None:
    with pytest.raises(ValueError, match=saying(message)):
        list(batches(data, name="photos"))


def test_the_batches_before_a_wrong_one_are_given() -> None:
    stream = batches([good, good + torch.nan])
    assert torch.equal(next(stream)[0], good)
    with pytest.raises(
        ValueError, match=saying("images, batch 1 must not hold NaN; found in 2 of 2 images, first at index 0")
    ):
        next(stream)


def test_a_single_number_is_refused_like_any_other_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"must have shape \(N, C, H, W\), got \(\)"):
        list(batches(torch.tensor(0.5)))


# Channels


def test_grey_becomes_three_equal_channels() -> None:
    x = drawn(2, 1, 3, 4)
    assert torch.equal(to_channels(x, 3), torch.cat([x, x, x], dim=1))


def test_three_channels_from_grey_do_not_share_memory() -> None:
    rgb = to_channels(torch.zeros(1, 1, 2, 2), 3)
    rgb[:, 0] = 1
    assert rgb[:, 1:].abs().max() == 0


@pytest.mark.parametrize(
    ("colour", "luma"),
    [((1, 0, 0), 0.299), ((0, 1, 0), 0.587), ((0, 0, 1), 0.114), ((1, 1, 1), 1.0), ((0, 0, 0), 0.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_colour_becomes_its_luma(colour: tuple[int, ...], luma: float, dtype: torch.dtype) -> None:
    grey = to_channels(torch.tensor(colour, dtype=dtype).view(1, 3, 1, 1).expand(2, 3, 4, 5), 1)
    torch.testing.assert_close(grey, torch.full((2, 1, 4, 5), luma, dtype=dtype))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_right_number_of_channels_changes_nothing(channels: int) -> None:
    x = drawn(1, channels, 2, 2)
    assert to_channels(x, channels) is x


@given(shapes, seeds)
@settings(max_examples=30, deadline=None)
def test_grey_survives_colour_and_stays_an_image(shape: tuple[int, ...], seed: int) -> None:
    grey = drawn(*shape, seed=seed)[:, :1]
    torch.testing.assert_close(to_channels(to_channels(grey, 3), 1), grey, rtol=0, atol=1e-6)
    check_images(to_channels(drawn(2, 3, *shape[2:], seed=seed).round(), 1))


def test_channels_pass_their_gradient_on() -> None:
    grey = drawn(1, 1, 2, 2).requires_grad_()
    to_channels(grey, 3).sum().backward()
    assert torch.equal(grey.grad, torch.full((1, 1, 2, 2), 3.0))
    rgb = drawn(1, 3, 2, 2).mul(0.9).requires_grad_()
    to_channels(rgb, 1).sum().backward()
    expected = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    torch.testing.assert_close(rgb.grad, expected)


def test_white_passes_its_gradient_on() -> None:
    white = torch.ones(1, 3, 1, 1, requires_grad=True)
    to_channels(white, 1).sum().backward()
    torch.testing.assert_close(white.grad.flatten(), torch.tensor([0.299, 0.587, 0.114]))


@pytest.mark.parametrize(("came", "asked"), [(4, 3), (2, 1), (3, 4), (1, 2)])
def test_other_numbers_of_channels_are_refused(came: int, asked: int) -> None:
    message = f"images with {came} channels cannot be made into images with {asked}"
    with pytest.raises(ValueError, match=saying(message)):
        to_channels(torch.zeros(1, came, 2, 2), asked)


# Size


def test_two_pixels_become_four_on_paper() -> None:
    x = torch.tensor([0.0, 1.0]).expand(1, 1, 2, 2)
    expected = torch.tensor([0.0, 0.25, 0.75, 1.0]).expand(1, 1, 4, 4)
    torch.testing.assert_close(resized(x, 4), expected)


def test_four_pixels_become_two_under_a_triangle_of_twice_the_width() -> None:
    a, b, c, d = row = torch.tensor([0.1, 0.9, 0.4, 0.6])
    expected = torch.stack([3 * a + 3 * b + c, b + 3 * c + 3 * d]) / 7
    torch.testing.assert_close(resized(row.expand(1, 1, 4, 4), (4, 2)), expected.expand(1, 1, 4, 2))


@pytest.mark.parametrize("size", [(5, 9), (32, 20), (13, 11)])
def test_resizing_is_pillows(size: tuple[int, int]) -> None:
    x = drawn(1, 1, 13, 11)
    picture = Image.fromarray(x[0, 0].numpy()).resize(size[::-1], Image.Resampling.BILINEAR)
    torch.testing.assert_close(resized(x, size)[0, 0], torch.from_numpy(np.array(picture)), rtol=0, atol=1e-5)


def test_one_number_is_both_sides() -> None:
    x = drawn(2, 3, 6, 9)
    assert torch.equal(resized(x, 7), resized(x, (7, 7)))
    assert resized(x, (4, 5)).shape == (2, 3, 4, 5)


def test_the_right_size_changes_nothing() -> None:
    x = drawn(1, 3, 6, 9)
    assert resized(x, (6, 9)) is x


@given(st.floats(0, 1, width=32), sides, sides, sides, sides)
@settings(max_examples=40, deadline=None)
def test_a_constant_image_stays_constant(value: float, height: int, width: int, to_height: int, to_width: int) -> None:
    x = resized(torch.full((1, 1, height, width), value), (to_height, to_width))
    torch.testing.assert_close(x, torch.full((1, 1, to_height, to_width), value), rtol=0, atol=1e-6)


@given(sides, sides, seeds)
@settings(max_examples=40, deadline=None)
def test_resizing_keeps_the_range(side: int, to_side: int, seed: int) -> None:
    x = drawn(1, 1, side, side, seed=seed).round()
    small = resized(x, to_side)
    assert x.min() - 1e-6 <= small.min()
    assert small.max() <= x.max() + 1e-6


@pytest.mark.parametrize("size", [(3, 4), (9, 7)])
def test_the_gradient_of_resizing_is_that_of_finite_differences(size: tuple[int, int]) -> None:
    x = drawn(1, 1, 5, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda image: resized(image, size), x)


class Slow:
    """Batches that say when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, [Event() for _ in range(count + 1)]

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            self.asked[index].set()
            yield torch.full((2, 1, 2, 2), index / 10)
        self.asked[self.count].set()


def test_the_next_batch_is_read_while_one_is_worked_on_elsewhere_than_on_the_cpu() -> None:
    source = Slow(3)
    seen = 0
    for x, y in batches_on(torch.device("meta"), source):
        assert (x.device.type, y, x.shape) == ("meta", None, (2, 1, 2, 2))
        assert source.asked[seen + 1].wait(5), "nobody asked for the next one"
        seen += 1
    assert seen == 3


def test_on_the_cpu_batches_come_when_they_are_asked_for() -> None:
    source = Slow(2)
    found = batches_on(torch.device("cpu"), source)
    assert torch.equal(next(found)[0], torch.zeros(2, 1, 2, 2))
    assert not source.asked[1].is_set()
    assert torch.equal(next(found)[0], torch.full((2, 1, 2, 2), 0.1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bad_batch_is_named_on_every_device(device: str) -> None:
    data = [torch.zeros(2, 1, 2, 2), "nothing"]
    found = batches_on(torch.device(device), data)
    next(found)
    with pytest.raises(ValueError, match="batch 1"):
        next(found)
