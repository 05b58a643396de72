"""Detectors that are a mean: ensembles of scores, and randomised detectors averaged over draws."""

import pytest
import torch
from torch import Tensor, nn

from gatecrash import L2, Ball, Linf, Sign, admit, evict
from gatecrash.attacks.expectation import Expected
from gatecrash.detectors import Card, Detector, Mahalanobis, ScoreEnsemble, build

X = torch.full((4, 3, 8, 8), 0.5)


def direction(seed: int) -> Tensor:
    return torch.randn(192, generator=torch.Generator().manual_seed(seed))


class Linear(Detector):
    """τ = w·x."""

    card = Card(paper="none", year=2000, reads="pixels")

    def __init__(self, weights: Tensor) -> None:
        super().__init__(nn.Flatten())
        self.register_buffer("normal", weights)

    def judge(self, z: Tensor) -> Tensor:
        return z @ self.normal


class Noisy(Linear):
    """τ = (w + σn)·x with a fresh n for every image and draw, from torch's global random numbers."""

    def __init__(self, weights: Tensor, noise: float, *, in_judge: bool = False) -> None:
        super().__init__(weights)
        self.noise, self.in_judge = noise, in_judge

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1) if self.in_judge else self.shaken(x.flatten(1))

    def shaken(self, z: Tensor) -> Tensor:
        return z * (self.normal + self.noise * torch.randn_like(z))

    def judge(self, z: Tensor) -> Tensor:
        return (self.shaken(z) if self.in_judge else z).sum(dim=1)


def dual_norm(weights: Tensor, ball: Ball) -> Tensor:
    return weights.abs().sum() if isinstance(ball, Linf) else weights.norm()


@pytest.mark.parametrize("ball", [L2(0.5), Linf(0.03)])
def test_an_ensemble_is_attacked_through_its_mean_score(ball: Ball) -> None:
    """Fort, 2.7: the optimum is that of the mean of the weights, which neither member's own attack reaches."""
    one, other = direction(0), direction(1)
    ensemble, mean = ScoreEnsemble([Linear(one), Linear(other)]), (one + other) / 2
    reach = ball.eps * dual_norm(mean, ball)
    low, high = admit(ensemble, X, ball, steps=200), evict(ensemble, X, ball, steps=200)
    torch.testing.assert_close(low.score, X.flatten(1) @ mean - reach, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(high.score, X.flatten(1) @ mean + reach, rtol=1e-4, atol=1e-4)
    for weights in (one, other):
        alone = admit(Linear(weights), X, ball, steps=200)
        assert (ensemble(alone.x) > low.score + 0.1 * reach).all()


@pytest.mark.parametrize("in_judge", [False, True])
def test_the_mean_score_has_the_mean_and_a_variance_that_falls_with_the_draws(in_judge: bool) -> None:
    """One draw has the variance σ²‖x‖²."""
    weights = direction(0)
    x = X[:1].expand(400, -1, -1, -1)
    exact, spread = float(X[0].flatten() @ weights), float(X[0].norm())
    for draws in (1, 4, 64):
        scores = Expected(Noisy(weights, 1.0, in_judge=in_judge), draws=draws)(x)
        assert float(scores.std()) == pytest.approx(spread / draws**0.5, rel=0.15)
        assert float(scores.mean()) == pytest.approx(exact, abs=4 * spread / (400 * draws) ** 0.5)


def test_the_gradient_is_the_mean_of_the_draws_gradients() -> None:
    weights = direction(0)
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Expected(Noisy(weights, 1.0), draws=400)(x).sum(), x)
    error = gradient.flatten(1) - weights
    assert float(error.std()) == pytest.approx(1 / 20, rel=0.1)


def test_an_attack_on_one_draw_goes_astray_and_on_the_mean_it_converges() -> None:
    """Signs of w + σn with σ = 4 are right for little more than half of the pixels; of the mean over 256, for most."""
    weights = direction(0)
    optimum = X.flatten(1) @ weights - 0.03 * weights.abs().sum()
    gaps = []
    for draws in (1, 16, 256):
        detector = Expected(Noisy(weights, 4.0), draws=draws)
        found = admit(detector, X, Linf(0.03), stepper=Sign(0.03), steps=1, keep="last")
        gaps.append(float((found.x.flatten(1) @ weights - optimum).mean() / (2 * 0.03 * weights.abs().sum())))
    assert gaps[0] > 0.3 > gaps[1] > gaps[2]
    assert gaps[2] < 0.05
    many = admit(Expected(Noisy(weights, 1.0), draws=64), X, Linf(0.03), steps=100, keep="last")
    torch.testing.assert_close(
        many.x.flatten(1) @ weights, optimum, rtol=0, atol=0.05 * float(weights.abs().sum()) * 0.06
    )


def test_draws_are_fresh_every_time_and_follow_from_the_seed() -> None:
    first, same, other = (Expected(Noisy(direction(0), 1.0), draws=3, seed=seed) for seed in (5, 5, 6))
    one, two = first(X), first(X)
    assert not torch.equal(one, two) and len(set(one.tolist())) == 4
    assert torch.equal(one, same(X)) and torch.equal(two, same(X))
    assert not torch.equal(one, other(X))


def test_the_global_random_numbers_are_neither_used_nor_touched() -> None:
    torch.manual_seed(1)
    one = Expected(Noisy(direction(0), 1.0))(X)
    after = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(one, Expected(Noisy(direction(0), 1.0))(X))
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))


def test_a_detector_without_randomness_is_itself() -> None:
    detector = Linear(direction(0))
    for draws in (1, 5):
        expected = Expected(detector, draws=draws)
        torch.testing.assert_close(expected(X), detector(X))
        assert expected.draws == draws


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draws must be a whole number of at least 1, got 2\.5"):
        Expected(Linear(direction(0)), draws=2.5)
    with pytest.raises(ValueError, match="draws must be a whole number of at least 1, got 0"):
        Expected(Linear(direction(0)), draws=0)
    with pytest.raises(ValueError, match="Expected averages a detector over draws, got a Flatten"):
        Expected(nn.Flatten())
    with pytest.raises(ValueError, match="its spec needs `members`"):
        build({"name": "expected", "options": {}}, nn.Flatten())
    with pytest.raises(ValueError, match="Mahalanobis is not fitted"):
        admit(Expected(Mahalanobis(nn.Flatten())), X, L2(1.0))
