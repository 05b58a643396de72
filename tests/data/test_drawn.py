from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.stats import norm
from torch import Generator, Tensor

from gatecrash.data.drawn import blobs, checkerboard, constant, gaussian, noise, spiral, spiral_wave

Family = Callable[[int, int, int, Generator], Tensor]
FAMILIES: list[Family] = [noise, gaussian, spiral, checkerboard, constant, blobs]


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 33)])
def test_images_are_in_range_and_all_different(family: Family, channels: int, size: int) -> None:
    x = family(40, channels, size, seeded())
    assert x.shape == (40, channels, size, size)
    assert x.dtype == torch.float32
    assert x.min() >= 0
    assert x.max() <= 1
    distances = torch.cdist(x.flatten(1), x.flatten(1)) + torch.eye(40)
    assert distances.min() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_generator_alone_determines_what_is_drawn(family: Family) -> None:
    before = torch.get_rng_state()
    first = family(8, 3, 16, seeded(1))
    assert torch.equal(family(8, 3, 16, seeded(1)), first)
    assert not torch.equal(family(8, 3, 16, seeded(2)), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_uniform() -> None:
    x = noise(64, 3, 32, seeded())
    assert float(x.mean()) == pytest.approx(1 / 2, abs=0.004)
    assert float(x.var()) == pytest.approx(1 / 12, abs=0.002)
    assert torch.histc(x, 10, 0, 1).div(x.numel()).sub(0.1).abs().max() < 0.005


def test_gaussian_noise_is_a_clipped_normal() -> None:
    x = gaussian(64, 3, 32, seeded())
    below = norm.cdf(-0.5)
    variance = 0.5 * below + (1 - 2 * below) - norm.pdf(0.5)
    assert float((x == 0).float().mean()) == pytest.approx(below, abs=0.005)
    assert float((x == 1).float().mean()) == pytest.approx(below, abs=0.005)
    assert float(x.var()) == pytest.approx(variance, abs=0.003)


@pytest.mark.parametrize(("fields", "size"), [(2, 2), (2, 33), (3, 9), (4, 16), (8, 8)])
def test_a_checkerboard_has_exactly_its_fields(fields: int, size: int) -> None:
    for image in checkerboard(6, 3, size, seeded(), fields=fields):
        first = image[:, 0, 0]
        second = image[:, 0, -1] if fields % 2 == 0 else image[:, 0, size // fields]
        assert (second - first).abs().min() > 0.33
        for i, j in itertools.product(range(size), repeat=2):
            odd = (i * fields // size + j * fields // size) % 2 == 1
            assert torch.equal(image[:, i, j], second if odd else first)


def test_checkerboards_have_between_two_and_sixteen_fields_a_side() -> None:
    x = checkerboard(300, 1, 48, seeded())
    fields = 1 + (x[:, 0, 0].diff(dim=1) != 0).sum(dim=1)
    assert set(fields.tolist()) == set(range(2, 17))


@pytest.mark.parametrize("fields", [0, 9])
def test_a_checkerboard_with_more_fields_than_pixels_is_refused(fields: int) -> None:
    with pytest.raises(ValueError, match=f"8 pixels takes 1 to 8 fields a side, got {fields}"):
        checkerboard(1, 1, 8, seeded(), fields=fields)


def wave(arms: int, turns: float, phase: float = 0.3, size: int = 33) -> Tensor:
    one = torch.ones(1, 1, 1, 1)
    return spiral_wave(arms * one, turns * one, phase * one, 0 * one, 0 * one, size)[0, 0]


def test_a_spiral_has_as_many_arms_as_it_is_told() -> None:
    ring = torch.ones(33, 33, dtype=torch.bool)
    ring[16, 16] = False
    torch.testing.assert_close(wave(4, 1.5).rot90()[ring], wave(4, 1.5)[ring], rtol=0, atol=1e-4)
    torch.testing.assert_close(wave(2, 1.5).rot90()[ring], -wave(2, 1.5)[ring], rtol=0, atol=1e-4)
    assert (wave(3, 1.5).rot90() - wave(3, 1.5)).abs().max() > 1


def test_a_spiral_turns_with_the_radius() -> None:
    radius = torch.linspace(0, 1, 17)
    torch.testing.assert_close(wave(3, 2.5)[16, 16:], torch.cos(2 * math.pi * 2.5 * radius + 0.3), rtol=0, atol=1e-5)
    torch.testing.assert_close(wave(3, -2.5, -0.3), wave(3, 2.5).flipud(), rtol=0, atol=1e-4)


def test_spirals_are_coloured_with_three_channels_and_show_contrast() -> None:
    x = spiral(50, 3, 32, seeded())
    assert (x[:, 0] - x[:, 1]).abs().amax(dim=(1, 2)).min() > 0.05
    assert (x.amax(dim=(2, 3)) - x.amin(dim=(2, 3))).min() > 0.3


def test_constants_have_one_colour_each() -> None:
    x = constant(200, 3, 8, seeded())
    assert torch.equal(x, x[:, :, :1, :1].expand_as(x))
    assert float(x[:, :, 0, 0].var()) == pytest.approx(1 / 12, abs=0.01)


def test_blobs_are_blurred_coin_flips_above_a_threshold() -> None:
    flips = (torch.rand(5, 2, 28, 28, generator=seeded()) < 0.7).double().numpy()
    blurred = torch.from_numpy(gaussian_filter(flips, (0, 0, 1.5, 1.5), mode="nearest", truncate=4)).float()
    expected = torch.where(blurred < 0.75, 0.0, blurred)
    torch.testing.assert_close(blobs(5, 2, 28, seeded()), expected, rtol=0, atol=1e-5)


def test_blobs_grow_with_the_image() -> None:
    small, large = blobs(30, 1, 32, seeded()), blobs(30, 1, 128, seeded())
    assert large[large > 0].min() >= 0.75
    assert float((large > 0).float().mean()) == pytest.approx(float((small > 0).float().mean()), abs=0.03)
    edges = [(x > 0).float().diff(dim=3).abs().sum() / x.shape[2] for x in (small, large)]
    assert float(edges[1] / edges[0]) == pytest.approx(1, abs=0.15)
