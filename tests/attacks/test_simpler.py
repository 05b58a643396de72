"""Simpler versions of images, and what the suite makes of them where a gradient does not tell all of a score."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gatecrash import L2, Ball, Linf, worst_case
from gatecrash.attacks.simpler import blurred, flattened, gap_within, simpler
from gatecrash.detectors import Card, Detector
from gatecrash.detectors.likelihood import png_bits
from small_models import one_thread

assert one_thread


def smooth(count: int) -> Tensor:
    """Colours that run into each other, as files have them."""
    coarse = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    return (255 * interpolate(coarse, size=16, mode="bicubic").clamp(0, 1)).round() / 255


class Plainness(Detector):
    """How few bits the image's file takes, which no gradient tells, and a little of how bright it is."""

    card = Card(paper="", year=2020, reads="pixels", gradient="omitted")

    def encode(self, x: Tensor) -> Tensor:
        return x

    def judge(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return 0.01 * z.flatten(1).mean(dim=1) - png_bits(z)


# The simpler images


@pytest.mark.parametrize("eps", [1, 2, 8])
def test_the_nearest_grey_is_inside_the_ball_at_every_pixel_and_no_wider_gap_would_do(eps: int) -> None:
    files = (torch.arange(256) / 255).view(1, 1, 16, 16)
    gap = gap_within(Linf(eps / 255), 256)
    assert gap == 2 * eps + 1
    assert bool(Linf(eps / 255).contains(flattened(files, gap).clamp(0, 1), files))
    assert not bool(Linf(eps / 255).contains(flattened(files, gap + 1).clamp(0, 1), files))


def test_in_l2_the_gap_is_as_wide_as_the_ball_on_average() -> None:
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for eps in (2.0, 8.0):
        gap = gap_within(L2(eps), x[0].numel())
        assert float((flattened(x, gap) - x).norm()) == pytest.approx(eps, rel=1 / gap + 0.05)


def test_flattened_images_have_the_greys_and_blurred_ones_the_means() -> None:
    x = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    levels = flattened(x, 51) * 5
    torch.testing.assert_close(levels, levels.round())
    assert float((flattened(x, 51) - x).abs().max()) <= 0.1 + 1e-6
    torch.testing.assert_close(blurred(x, 3)[:, :, 2, 2], x[:, :, 1:4, 1:4].mean(dim=(2, 3)))
    torch.testing.assert_close(blurred(x, 3)[:, :, 0, 0], x[:, :, :2, :2].mean(dim=(2, 3)))
    torch.testing.assert_close(blurred(torch.full_like(x, 0.3), 5), torch.full_like(x, 0.3))


def test_there_are_several_of_both_in_a_ball_of_any_size() -> None:
    for ball in (Linf(1 / 255), Linf(1.0), L2(0.01), L2(100.0)):
        ways = simpler(ball, 256)
        assert sum("flattened" in name for name in ways) >= 2 and sum("blurred" in name for name in ways) == 3
        for simplify in ways.values():
            assert simplify(smooth(2)).shape == (2, 1, 16, 16)


# The suite


@pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5)], ids=["linf", "l2"])
def test_the_suite_finds_what_the_gradient_leaves_out(ball: Ball) -> None:
    x, detector = smooth(6), Plainness(None)
    found = worst_case(detector, x, ball, "in", "quick")
    flat = ball.project(flattened(x, gap_within(ball, 256)), x)
    assert found.score is not None and found.start_score is not None
    assert bool((found.score >= detector.scores(flat) - 1e-6).all())
    assert float((found.score - found.start_score).mean()) > (2.0 if ball.norm == "linf" else 0.5)


def test_an_exact_gradient_needs_no_simpler_images() -> None:
    class Exact(Plainness):
        card = replace(Plainness.card, gradient="exact")

    class Jumps(Plainness):
        card = replace(Plainness.card, gradient="exact between jumps")

    names = {
        kind.__name__: set(worst_case(kind(None), smooth(2), Linf(8 / 255), "in", "quick").spent)
        for kind in (Exact, Jumps, Plainness)
    }
    assert not any("flattened" in name or "blurred" in name for name in names["Exact"])
    assert names["Jumps"] == names["Plainness"] == names["Exact"] | set(simpler(Linf(8 / 255), 256))
    assert math.isclose(len(names["Jumps"]) - len(names["Exact"]), 7)
