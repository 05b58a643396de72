"""Chen et al.'s Algorithm 2 against the algorithm written out, with the probability and without the input step."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from gatecrash import Linf
from gatecrash.attacks import ATTACKS
from gatecrash.attacks.mahalanobis import attack_mahalanobis
from gatecrash.detectors import MSP, Mahalanobis
from small_models import Affine, as_images, blank, one_thread, squares, trained_net  # noqa: F401

Side = Literal["in", "out"]


def logistic(magnitude: float = 0.01) -> Mahalanobis:
    """Two layers, combined by a logistic regression, with an input step; in float64, so that no sign is in doubt."""
    detector = Mahalanobis(
        trained_net(dtype=torch.float64), layers=["maps", "hidden"], magnitude=magnitude, combine="logistic"
    )
    images, labels = squares(60, dtype=torch.float64)
    return detector.fit(
        (images, labels),
        held_out=squares(30, 1, torch.float64)[0],
        outliers=blank(30, 2, torch.float64),
    )


def distances(detector: Mahalanobis, x: Tensor) -> Tensor:
    """min_k (z − μ_k)ᵀ Σ⁻¹ (z − μ_k) per layer, of the images as they are, from features and labels alone."""
    inliers, labels = squares(60, dtype=torch.float64)
    assert detector.encoder is not None
    per_layer = []
    for features, learned in zip(detector.encoder(x), detector.encoder(inliers), strict=True):
        means = torch.stack([learned[labels == k].mean(dim=0) for k in range(3)])
        centred = learned - means[labels]
        precision = torch.linalg.pinv(centred.T @ centred / len(centred), rtol=1e-6, hermitian=True)
        gaps = features[:, None] - means
        per_layer.append(torch.einsum("bkd,de,bke->bk", gaps, precision, gaps).amin(dim=1))
    return torch.stack(per_layer, dim=1)


def algorithm_2(detector: Mahalanobis, x: Tensor, eps: float, side: Side, steps: int, step: float) -> Tensor:
    """As in the paper, from the image itself; M is minus the distance, p the probability of being an inlier."""
    delta = torch.zeros_like(x)
    for _ in range(steps):
        point = (x + delta).requires_grad_()
        p = torch.sigmoid(-(distances(detector, point) @ detector.weights + detector.bias))
        loss = -p.log() if side == "in" else -(1 - p).log()
        (gradient,) = torch.autograd.grad(loss.sum(), point)
        delta = (delta + step * gradient.sign()).clamp(-eps, eps)
        delta = (x + delta).clamp(0, 1) - x
    return x + delta


@pytest.mark.parametrize("side", ["in", "out"])
def test_every_step_is_the_papers(side: Side) -> None:
    detector = logistic()
    x = squares(8, 3, torch.float64)[0] if side == "in" else blank(8, 4, torch.float64)
    expected = algorithm_2(detector, x, 0.03, side, steps=6, step=1 / 255)
    found = attack_mahalanobis(detector, x, Linf(0.03), side=side, steps=6, random_start=False, keep="last")
    torch.testing.assert_close(found.x, expected.detach(), rtol=0, atol=1e-12)
    assert (found.x - x).abs().amax() == pytest.approx(6 / 255)


@pytest.mark.parametrize("side", ["in", "out"])
def test_it_acts_on_the_logit_of_the_unprocessed_input_and_reports_the_detectors_own_score(side: Side) -> None:
    detector = logistic(magnitude=0.002)
    x = squares(8, 3, torch.float64)[0] if side == "in" else blank(8, 4, torch.float64)
    found = attack_mahalanobis(detector, x, Linf(8 / 255), side=side)
    logit = distances(detector, found.x) @ detector.weights + detector.bias
    torch.testing.assert_close(found.value, (-logit if side == "in" else logit).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.score, detector(found.x).detach())
    torch.testing.assert_close(found.start_score, detector(x).detach())
    assert not torch.allclose(found.score, logit.detach())
    moved = found.score - found.start_score
    assert (moved > 0).all() if side == "in" else (moved < 0).all()


def test_the_logit_still_moves_where_the_probability_has_saturated() -> None:
    detector = logistic(magnitude=0.0)
    detector.bias = detector.bias - 800
    x = blank(4, 4, torch.float64)
    assert (torch.sigmoid(-detector(x)) == 1).all()
    found = attack_mahalanobis(detector, x, Linf(4 / 255), side="out")
    assert (found.value < found.start_value).all()


def test_with_one_class_and_pixels_as_features_the_closed_form_is_reached() -> None:
    """Pixels around ½ with covariance 0.05²: every one of them goes ε towards ½, or all the way."""
    generator = torch.Generator().manual_seed(0)
    white = torch.linalg.qr(torch.randn(4000, 5, generator=generator, dtype=torch.float64)).Q
    white = white - white.mean(dim=0)
    white = white @ torch.linalg.inv(torch.linalg.cholesky(white.T @ white / len(white)).T)
    features = 0.5 + 0.05 * white.clamp(-8, 8)
    detector = Mahalanobis(Affine()).fit((as_images(features), torch.zeros(4000, dtype=torch.long)))
    x = as_images(torch.tensor([[0.9, 0.5, 0.5, 0.5, 0.5], [0.7, 0.3, 0.5, 0.5, 0.5]], dtype=torch.float64))
    left = ((x - 0.5).abs() - 0.1).clamp_min(0).flatten(1)
    found = attack_mahalanobis(detector, x, Linf(0.1), side="out", steps=200, step=1e-3)
    torch.testing.assert_close(found.score, (left / 0.05).square().sum(dim=1), rtol=0.01, atol=0)


def test_the_random_start_and_the_papers_settings_are_the_default() -> None:
    detector, x = logistic(), blank(4, 4, torch.float64)
    default = attack_mahalanobis(detector, x, Linf(1 / 255), side="out")
    same = attack_mahalanobis(detector, x, Linf(1 / 255), side="out", random_start=True, steps=10, step=1 / 255)
    other = attack_mahalanobis(detector, x, Linf(1 / 255), side="out", generator=5, steps=1, step=1e-4, keep="last")
    assert torch.equal(default.x, same.x)
    assert default.evaluations.tolist() == [12] * 4
    assert ((other.x - x).abs().flatten(1).std(dim=1) > 5e-4).all()


def test_it_is_registered_and_refuses_other_detectors() -> None:
    assert ATTACKS["mahalanobis"].paper == "Chen et al., Algorithm 2"
    x = blank(2)
    with pytest.raises(ValueError, match="detector must be a Mahalanobis detector, got MSP"):
        attack_mahalanobis(MSP(trained_net()), x, Linf(0.1), side="in")
    with pytest.raises(ValueError, match="side must be 'in' or 'out', got 'left'"):
        attack_mahalanobis(logistic(), x, Linf(0.1), side="left")
    with pytest.raises(ValueError, match="Mahalanobis is not fitted"):
        attack_mahalanobis(Mahalanobis(trained_net()), x, Linf(0.1), side="in")
