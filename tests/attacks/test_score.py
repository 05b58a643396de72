"""Attacks on a score, on linear scores whose optimum in the ball is known exactly."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatecrash import L2, Ball, Linf, Sign, admit, evict, score_to
from gatecrash.detectors import Mahalanobis

CENTRE = torch.full((4, 3, 8, 8), 0.5)


class LinearScore:
    """τ = w·x."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def judge(self, z: Tensor) -> Tensor:
        return z @ self.weights.flatten()

    def __call__(self, x: Tensor) -> Tensor:
        return self.judge(self.encode(x))


def dual_norm(weights: Tensor, ball: Ball) -> Tensor:
    return weights.abs().sum() if isinstance(ball, Linf) else weights.norm()


def linear() -> LinearScore:
    return LinearScore(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("ball", [L2(0.5), Linf(0.03)])
@pytest.mark.parametrize("random_start", [False, True])
def test_a_linear_score_is_moved_to_its_exact_extremes(ball: Ball, random_start: bool) -> None:
    score = linear()
    reach = ball.eps * dual_norm(score.weights, ball)
    low = admit(score, CENTRE, ball, steps=200, random_start=random_start)
    torch.testing.assert_close(low.score, score(CENTRE) - reach, rtol=1e-4, atol=1e-4)
    high = evict(score, CENTRE, ball, steps=200, random_start=random_start)
    torch.testing.assert_close(high.score, score(CENTRE) + reach, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(high.start_score, score(CENTRE))
    torch.testing.assert_close(high.value, -score(high.x))


@pytest.mark.parametrize("eps", [0.3, 0.6, 2.0])
def test_beside_the_walls_of_the_box_the_extreme_is_still_reached(eps: float) -> None:
    """With half the pixels at 0, only those that may rise add to an eviction; the rest keep the whole radius."""
    score, start = linear(), CENTRE.clone()
    start[:, :, :4] = 0.0
    movable = torch.where(start[0] > 0, score.weights, score.weights.clamp_min(0))
    room = torch.where(movable > 0, 1 - start[0], start[0])
    low, high = 0.0, 1e6  # the optimum is clip(t·w, room) with ‖·‖ = ε: bisection on t
    for _ in range(200):
        t = (low + high) / 2
        length = torch.minimum(t * movable.double().abs(), room.double()).norm()
        low, high = (t, high) if length < eps else (low, t)
    best = score(start)[0].double() + (torch.minimum(low * movable.double().abs(), room.double()) * movable.abs()).sum()
    found = evict(score, start, L2(eps), steps=300)
    assert float(found.score[0]) == pytest.approx(float(best), rel=1e-3)


def test_forts_attack_is_one_call() -> None:
    """30 sign steps of 3e-4 with the trajectory: every pixel moves by the same amount at each of them."""
    score = linear()
    found = evict(score, CENTRE, Linf(0.009), stepper=Sign(3e-4), steps=30, keep="last", record=True)
    path = found.trajectory
    assert path is not None
    expected = torch.arange(31).view(-1, 1) * 3e-4
    torch.testing.assert_close(path.linf, expected.expand(31, 4), rtol=1e-3, atol=1e-6)
    rise = score(CENTRE) + expected * score.weights.abs().sum()
    torch.testing.assert_close(-path.value, rise, rtol=1e-3, atol=1e-3)


def test_stop_is_a_score_on_both_sides() -> None:
    score = linear()
    middle = float(score(CENTRE)[0])
    out = evict(score, CENTRE, Linf(0.1), steps=50, stepper=Sign(0.001), stop=middle + 1)
    assert out.score is not None and out.success.all()
    assert ((out.score >= middle + 1) & (out.score < middle + 1.5)).all()
    into = admit(score, CENTRE, Linf(0.1), steps=50, stepper=Sign(0.001), stop=torch.full((4,), middle - 1))
    assert into.score is not None and into.success.all()
    assert ((into.score <= middle - 1) & (into.score > middle - 1.5)).all()


def test_a_score_is_brought_to_a_value() -> None:
    score = linear()
    goals = score(CENTRE) + torch.tensor([-1.0, -0.2, 0.3, 1.0])
    found = score_to(score, CENTRE, goals, Linf(0.1), steps=100)
    torch.testing.assert_close(found.score, goals, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.start_score, score(CENTRE))
    same = score_to(score, CENTRE, 0.0, L2([0.1, 5.0]), steps=100, batch_size=3)
    assert same.score is not None and same.score.abs().max() < 1e-3
    assert [rung.score is not None for rung in same.rungs] == [True, True]
    with pytest.raises(ValueError, match=r"value must be one number or of shape \(4,\), got \(3,\)"):
        score_to(score, CENTRE, torch.zeros(3), L2(1.0))
    for value in (float("nan"), torch.tensor([0.0, float("inf"), 0.0, 0.0])):
        with pytest.raises(ValueError, match=r"value must be finite, got (nan|inf)"):
            score_to(score, CENTRE, value, L2(1.0))


def test_a_detector_that_is_not_fitted_is_refused() -> None:
    detector = Mahalanobis(nn.Flatten())
    for attack in (admit, evict):
        with pytest.raises(ValueError, match="Mahalanobis is not fitted; call fit"):
            attack(detector, CENTRE, L2(1.0))


@pytest.mark.parametrize(("stop", "shown"), [("x", "'x'"), ([1, 2], r"\[1, 2\]")])
def test_a_stop_that_is_no_score_is_refused_on_both_sides(stop: object, shown: str) -> None:
    for attack in (admit, evict):
        with pytest.raises(ValueError, match=rf"stop must be one number or of shape \(4,\), got {shown}$"):
            attack(linear(), CENTRE, Linf(0.1), stop=stop)


class Untouched(LinearScore):
    """No image may be scored."""

    def encode(self, x: Tensor) -> Tensor:
        raise AssertionError("an image was scored")


@pytest.mark.parametrize("attack", [admit, evict, lambda d, x, ball, **o: score_to(d, x, 0.0, ball, **o)])
def test_a_ball_without_grey_levels_is_refused_before_the_attack(attack: Any) -> None:
    with pytest.raises(ValueError, match=r"8-bit images need a ball with the box \(0, 1\), got None"):
        attack(Untouched(linear().weights), CENTRE, Linf(0.1, box=None), eight_bit=True)
