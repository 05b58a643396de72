"""Purification of features, on densities whose gradient descent has a closed form."""

import math

import pytest
import torch
from torch import Tensor

from gatecrash import L2, Linf
from gatecrash.attacks.purify import purify
from gatecrash.detectors import Mahalanobis
from gatecrash.protocols import Latent
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

CURVATURE = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def gaussian(z: Tensor) -> Tensor:
    """−log-likelihood up to a constant: ½ Σ h_i (z_i − μ_i)²."""
    return 0.5 * (CURVATURE * (z - MEAN).square()).sum(dim=1)


def mixture(z: Tensor) -> Tensor:
    """Bits per dimension of two spherical Gaussians."""
    means = torch.tensor([[-2.0, 0.0, 0.0], [2.0, 1.0, 0.0]], dtype=z.dtype)
    log_p = -0.5 * (z[:, None] - means).square().sum(dim=2) - 1.5 * math.log(2 * math.pi)
    return -(log_p.logsumexp(dim=1) - math.log(2)) / (3 * math.log(2))


def features(count: int = 6) -> Tensor:
    return 3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("pull", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [1, 7, 100])
def test_on_a_gaussian_every_iterate_is_known(pull: float, steps: int) -> None:
    """Equation (9) contracts by 1 − ε(h + 2ν) per step towards (hμ + 2νz₀) / (h + 2ν)."""
    z = features()
    found = purify(gaussian, z, step=0.05, pull=pull, steps=steps, keep="last")
    fixed = (CURVATURE * MEAN + 2 * pull * z) / (CURVATURE + 2 * pull)
    expected = fixed + (1 - 0.05 * (CURVATURE + 2 * pull)) ** steps * (z - fixed)
    torch.testing.assert_close(found.x, expected)
    torch.testing.assert_close(found.score, gaussian(expected))
    torch.testing.assert_close(found.start_score, gaussian(z))
    torch.testing.assert_close(found.value, gaussian(expected) + pull * (expected - z).square().sum(dim=1))


@pytest.mark.parametrize("pull", [0.0, 0.01])
def test_on_a_mixture_it_is_the_papers_loop(pull: float) -> None:
    reference = features()
    z = reference.clone()
    for _ in range(100):
        point = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(mixture(point).sum(), point)
        z = z - 0.1 * (gradient + 2 * pull * (z - reference))
    found = purify(mixture, reference, pull=pull)
    torch.testing.assert_close(found.x, z)
    assert (found.score < found.start_score).all()
    assert found.evaluations.tolist() == [101] * 6


@pytest.mark.parametrize("ball", [L2(0.5, box=None), Linf(0.2, box=None)])
def test_in_a_ball_the_features_stop_at_its_border(ball: L2 | Linf) -> None:
    z = torch.tensor([[5.0, -1.0, 2.0]], dtype=torch.float64)
    found = purify(gaussian, z, step=0.05, ball=ball)
    torch.testing.assert_close(found.x, z - torch.tensor([[ball.eps, 0.0, 0.0]]), rtol=1e-5, atol=1e-5)


def test_the_best_point_is_never_worse_than_the_start() -> None:
    diverging = purify(gaussian, features(), step=0.5)
    last = purify(gaussian, features(), step=0.5, keep="last")
    assert (diverging.value <= diverging.start_value).all()
    assert (last.value > last.start_value).any()


def test_samples_that_reach_the_stop_rest_there() -> None:
    found = purify(mixture, features(), stop=1.7, steps=1000)
    assert found.success.all() and (found.score <= 1.7).all()
    assert len(set(found.steps.tolist())) > 1


def test_a_detectors_judge_serves_and_misjudged_features_are_admitted() -> None:
    detector = Mahalanobis(trained_net(), layers="hidden").fit(squares(60)).calibrate(squares(30, 5)[0])
    z = detector.encode(blank(8))
    assert isinstance(z, Tensor) and detector.threshold is not None

    def judge(latent: Latent) -> Tensor:
        return detector.judge(latent)

    steepest = float(detector.per_layer[0].whiten.square().sum(dim=0).max())  # the largest eigenvalue of Σ⁻¹
    found = purify(judge, z.detach(), step=0.5 / steepest, steps=300, batch_size=3)
    assert (found.start_score > detector.threshold).all() and (found.score <= detector.threshold).all()
    torch.testing.assert_close(found.score, detector.judge(found.x))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="pull must not be negative, got -1"):
        purify(gaussian, features(), pull=-1.0)
    for step in ("a", 0.0, float("inf")):
        with pytest.raises(ValueError, match="step must be a number above 0, got"):
            purify(gaussian, features(), step=step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pull must be a number, got 'a'"):
        purify(gaussian, features(), pull="a")
    with pytest.raises(TypeError, match="judge must be a function of features, such as a detector's judge, got 3"):
        purify(3, features())
    with pytest.raises(ValueError, match=r"features must be a tensor of floats, \(B, ...\), got \[1, 2\]"):
        purify(gaussian, [1, 2])
    with pytest.raises(ValueError, match=r"give the ball box=None, got L2\(1\)"):
        purify(gaussian, features(), ball=L2(1.0))
    with pytest.raises(ValueError, match=r"features must be floats of shape \(B, ...\), got torch.int64 \(2, 3\)"):
        purify(gaussian, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"features must hold at least one sample, got shape \(0, 3\)"):
        purify(gaussian, torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"judge must give one score per sample, \(4,\), got \(4, 3\)"):
        purify(lambda z: z, torch.rand(4, 3))
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        purify(gaussian, features(), batch_size=0)


def test_a_learning_rate_far_too_large_leaves_finite_features() -> None:
    features = torch.ones(3, 4)
    found = purify(lambda z: 1e6 * z.square().sum(dim=1), features, step=1.0, steps=100, keep="last")
    assert found.x.isfinite().all()
    assert (found.x.abs() > 1e6).all()  # it did diverge, and says so by where it ended


def test_a_judge_without_a_gradient_is_told_whatever_the_pull() -> None:
    for pull in (0.0, 0.1):
        with pytest.raises(ValueError, match="has no gradient"):
            purify(lambda z: z.detach().sum(dim=1), torch.rand(3, 10), pull=pull, steps=2)
