"""Projection, directions and random starts of the balls."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatecrash import L2, Ball, Linf
from gatecrash.ball import BALLS, distance, normalised


@st.composite
def balls_and_points(draw: st.DrawFn) -> tuple[Ball, Tensor, Tensor, Tensor]:
    """A ball, centres in its box, and two batches of points anywhere, in float64 so that rounding hides nothing."""
    kind = draw(st.sampled_from([L2, Linf]))
    eps = draw(st.floats(1e-3, 20))
    box = draw(st.sampled_from([None, (0.0, 1.0), (-2.0, 0.5)]))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    spread = draw(st.sampled_from([0.1, 1.0, 30.0]))
    low, high = box or (-1.0, 1.0)
    centre = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):  # pixels on the border of the box, as black backgrounds have
        centre = torch.where(
            torch.rand(shape, generator=generator) < 0.5, torch.tensor(low, dtype=torch.float64), centre
        )
    x, y = (centre + spread * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return kind(eps, box), centre, x, y


@settings(deadline=None, max_examples=150)
@given(balls_and_points())
def test_projection_is_inside_idempotent_and_non_expansive(case: tuple[Ball, Tensor, Tensor, Tensor]) -> None:
    ball, centre, x, y = case
    px, py = ball.project(x, centre), ball.project(y, centre)
    assert ball.contains(px, centre).all()
    torch.testing.assert_close(ball.project(px, centre), px, rtol=1e-6, atol=1e-6)
    assert (distance(px, py, "l2") <= distance(x, y, "l2") * (1 + 1e-6) + 1e-5 * ball.eps).all()


@settings(deadline=None, max_examples=60)
@given(balls_and_points())
def test_projection_is_the_nearest_point(case: tuple[Ball, Tensor, Tensor, Tensor]) -> None:
    """The nearest point p of a convex set has (x − p)·(q − p) ≤ 0 for every q of the set."""
    ball, centre, x, y = case
    p, q = ball.project(x, centre), ball.project(y, centre)
    for other in (q, centre):
        angle = ((x - p) * (other - p)).flatten(1).sum(dim=1)
        assert (angle <= 1e-4 * (1 + distance(x, p, "l2") * ball.eps)).all()


def test_l2_projection_uses_the_whole_radius_beside_a_wall() -> None:
    """Clamping after scaling would leave a point short of the ball's border; the projection does not."""
    centre = torch.tensor([[[[0.0, 0.5]]]])
    p = L2(0.3).project(torch.tensor([[[[-3.0, 3.0]]]]), centre)
    torch.testing.assert_close(p, torch.tensor([[[[0.0, 0.8]]]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ball", [L2(0.5), Linf(0.1), L2(5.0), Linf(3.0)])
def test_points_inside_stay_where_they_are(ball: Ball) -> None:
    centre = torch.full((3, 1, 4, 4), 0.5)
    x = centre + 0.01 * torch.rand(3, 1, 4, 4)
    assert torch.equal(ball.project(x, centre), x)


def test_float32_rounding_does_not_leave_a_large_ball() -> None:
    centre = torch.rand(2, 3, 224, 224)
    for ball in (L2(5.0), L2(30.0), Linf(8 / 255)):
        p = ball.project(centre + torch.randn_like(centre), centre)
        assert (ball.distance(p.double(), centre.double()) <= ball.eps + 1e-6).all()


@pytest.mark.parametrize("grey", [0.1, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("eps", [0.1, 1.0, 5.0])
def test_flat_images_whose_pixels_all_round_the_same_way_stay_inside(grey: float, eps: float) -> None:
    centre = torch.full((1, 3, 224, 224), grey)
    for sign in (1, -1):
        p = L2(eps).project(centre + sign, centre)
        reached = float(L2(eps).distance(p.double(), centre.double()))
        assert (1 - 1e-3) * eps < reached <= eps + 1e-6
    latents = torch.full((8, 500), 123.4)
    for ball in (L2(1.0, box=None), Linf(0.1, box=None)):
        assert ball.contains(ball.project(latents + torch.randn(8, 500), latents), latents).all()


@pytest.mark.parametrize("kind", [L2, Linf])
def test_random_starts_fill_the_ball_and_stay_in_it(kind: type[Ball]) -> None:
    centre = torch.full((64, 3, 8, 8), 0.5)
    x = kind(0.2).random_start(centre, torch.rand(centre.shape))
    assert kind(0.2).contains(x, centre).all()
    assert (kind(0.2).distance(x, centre) > 0.19).all()
    assert x.flatten(1).std(dim=0).min() > 0


def test_directions_are_steepest_ascent_of_unit_length() -> None:
    gradient = torch.randn(5, 3, 4, 4)
    assert torch.equal(Linf(1.0).direction(gradient), gradient.sign())
    torch.testing.assert_close(L2(1.0).direction(gradient).flatten(1).norm(dim=1), torch.ones(5))
    torch.testing.assert_close(normalised(gradient * 1e-30), normalised(gradient))
    assert torch.equal(normalised(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("eps", [0, -0.1, float("nan"), float("inf")])
def test_an_eps_that_is_not_positive_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be positive, got"):
        L2(eps)
    with pytest.raises(ValueError, match="eps must be positive, got"):
        Linf([0.1, eps])


@pytest.mark.parametrize("eps", ["a", None, ["a"], True, [0.1, True], "0.1"])
def test_an_eps_that_is_no_number_is_refused(eps: object) -> None:
    with pytest.raises(ValueError, match="eps must be a positive number or a list of them, got"):
        Linf(eps)


def test_other_bad_balls_are_refused() -> None:
    with pytest.raises(ValueError, match="empty list"):
        L2([])
    for box in ((1.0, 0.0), (0.0, float("nan")), (0.0, 0.5, 1.0), 1.0, ("a", "b"), "01"):
        with pytest.raises(ValueError, match=r"box must be \(low, high\) with low < high, got"):
            L2(1.0, box=box)
    with pytest.raises(ValueError, match="unknown norm 'l1'"):
        BALLS["l1"]
    with pytest.raises(ValueError, match="'l2' or 'linf'"):
        distance(torch.zeros(1, 1), torch.zeros(1, 1), "l1")


def test_a_list_of_eps_is_a_ladder() -> None:
    ball = Linf([0.1, 0.3, 0.2])
    assert ball.eps == 0.3
    assert ball.rungs == [Linf(0.1), Linf(0.3), Linf(0.2)]
    assert repr(ball) == "Linf([0.1, 0.3, 0.2])"
    assert Linf(0.1) != L2(0.1)
    assert len({Linf(0.1), Linf(0.1), Linf(0.1, box=None)}) == 2
    assert repr(L2(2.0, box=None)) == "L2(2, box=None)"


@pytest.mark.parametrize("ball", [L2(0.4), L2(0.4, box=None), Linf(0.1), Linf(0.1, box=None)], ids=str)
def test_a_sample_is_projected_the_same_whoever_else_is_there(ball: Ball) -> None:
    centre = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    if ball.box is None:
        centre = centre * torch.tensor([1.0, 10, 100, 1000, 10_000]).view(-1, 1, 1, 1)
    x = centre + torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    together = ball.project(x, centre)
    alone = torch.cat([ball.project(x[i : i + 1], centre[i : i + 1]) for i in range(5)])
    assert torch.equal(together, alone)


class Upwards(Linf):
    """A ball of which only the half above the centre is allowed."""

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        return super().project(torch.maximum(x, centre), centre)


@settings(deadline=None, max_examples=60)
@given(balls_and_points())
def test_projections_onto_one_centre_are_projections(case: tuple[Ball, Tensor, Tensor, Tensor]) -> None:
    ball, centre, x, y = case
    for own in (ball, Upwards(ball.eps, ball.box)):
        project = own.projection(centre)
        for points in (x, y, x.float().double()):
            assert torch.equal(project(points.clone()), own.project(points, centre))


def test_another_projection_put_in_the_place_of_a_balls_own_is_the_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linf, "project", lambda self, x, centre: x + 7)
    assert torch.equal(Linf(0.1).projection(torch.zeros(1, 2))(torch.zeros(1, 2)), torch.full((1, 2), 7.0))


@pytest.mark.parametrize("box", [(0.0, 1.0), (-2.0, 0.5)])
def test_the_l2_projection_ends_early_only_where_more_would_change_nothing(
    box: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    centre = box[0] + (box[1] - box[0]) * torch.rand(64, 1, 6, 6, generator=generator).round(decimals=1)
    x = centre + torch.randn(centre.shape, generator=generator) * torch.logspace(-2, 2, 64).view(-1, 1, 1, 1)
    early = [L2(eps, box).project(x, centre) for eps in (0.1, 1.0, 5.0)]
    monkeypatch.setattr("gatecrash.ball.waits", lambda tensor: True)
    assert all(torch.equal(p, L2(eps, box).project(x, centre)) for eps, p in zip((0.1, 1.0, 5.0), early, strict=True))


def test_what_is_not_a_number_is_nowhere() -> None:
    x = torch.full((2, 1, 2, 2), 0.5)
    broken = x.clone()
    broken[1, 0, 0, 0] = torch.nan
    for ball in (L2(1.0), Linf(1.0)):
        assert ball.contains(broken, x).tolist() == [True, False]


@pytest.mark.parametrize("box", [[0, 1], (0, 1), np.array([0.0, 1.0])], ids=["list", "ints", "array"])
def test_a_box_is_two_floats_whatever_it_came_as(box: Any) -> None:
    ball = Linf(0.1, box=box)
    assert ball == Linf(0.1) and ball.box == (0.0, 1.0) and isinstance(ball.box, tuple)
