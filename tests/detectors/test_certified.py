from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gatecrash.attacks import admit, collide, score_to, worst_case
from gatecrash.ball import L2, Ball, Linf
from gatecrash.data.drawn import checkerboard, noise
from gatecrash.detectors import CCU, MSP, ScoreEnsemble
from gatecrash.detectors.certified import APART, log_excess, log_posterior, whitening
from gatecrash.encoder import Encoder
from gatecrash.mixture import Mixture
from small_models import Affine, as_images, blank, fragile_net, one_thread, squares, trained_net

assert one_thread

DOUBLE = torch.float64


def fitted(dtype: torch.dtype = torch.float32, **options: Any) -> CCU:
    detector = CCU(trained_net(dtype=dtype), **{"components": 3, **options})
    return detector.fit(squares(60, 0, dtype), outliers=blank(30, 2, dtype))


def by_hand(odds: float = 1.0, score: Literal["excess", "confidence"] = "confidence") -> CCU:
    """Two pixels, a metric that doubles the first, one Gaussian inside and one outside, logits = 3·pixels."""
    detector = CCU(Affine(3.0), components=1, odds=odds, score=score)
    detector.shape, detector.classes = torch.tensor([1, 1, 2]), torch.tensor(2)
    detector.centre = torch.tensor([0.5, 0.5], dtype=DOUBLE)
    detector.whiten = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=DOUBLE)
    detector.stretch = torch.tensor(2.0, dtype=DOUBLE)
    one, means = torch.ones(1, dtype=DOUBLE), torch.tensor([[0.2, 0.0]], dtype=DOUBLE)
    detector.take(Mixture(one, means, 10 * one, "spherical"), Mixture(one, -means, 4 * one, "spherical"))
    return detector


def normal(x: Tensor, mean: list[float], sigma: float) -> float:
    square = sum((float(a) - b) ** 2 for a, b in zip(x, mean, strict=True))
    return math.exp(-square / (2 * sigma**2)) / (2 * math.pi * sigma**2)


# The score


@pytest.mark.parametrize("odds", [1.0, 0.2])
def test_the_confidence_is_the_papers_equation_written_out(odds: float) -> None:
    for first, second in ((0.6, 0.5), (0.4, 0.7), (0.9, 0.1)):
        white = torch.tensor([2 * (first - 0.5), second - 0.5])
        inside, outside = normal(white, [0.2, 0.0], 0.1), normal(white, [-0.2, 0.0], 0.25)
        softmax = max(math.exp(3 * first), math.exp(3 * second)) / (math.exp(3 * first) + math.exp(3 * second))
        confidence = (inside * softmax + odds * outside / 2) / (inside + odds * outside)
        x = as_images(torch.tensor([[first, second]], dtype=DOUBLE))
        assert float(by_hand(odds)(x).detach()) == pytest.approx(-math.log(confidence), rel=1e-9)
        assert float(by_hand(odds, "excess")(x).detach()) == pytest.approx(-math.log(confidence - 0.5), rel=1e-7)


def test_both_scores_put_images_in_one_order() -> None:
    x = torch.cat([squares(20, 5, DOUBLE)[0], blank(10, 6, DOUBLE), 0.5 * squares(20, 7, DOUBLE)[0]])
    options: dict[str, Any] = {"ridge": 1.0, "floor": 0.05}
    first, second = (fitted(DOUBLE, score=score, **options).scores(x) for score in ("excess", "confidence"))
    assert torch.equal(first.argsort(), second.argsort())
    torch.testing.assert_close((-first).exp() + 1 / 3, (-second).exp())


def test_the_excess_over_uniform_is_exact_where_subtraction_is_not() -> None:
    z = torch.tensor([[4.0, 1.0, 0.0], [1e-9, 0.0, 0.0], [50.0, 0.0, -3.0]], dtype=DOUBLE)
    expected = [math.log(math.exp(4) / (math.exp(4) + math.e + 1) - 1 / 3), math.log(2e-9 / 9), math.log(2 / 3)]
    torch.testing.assert_close(log_excess(z), torch.tensor(expected, dtype=DOUBLE), rtol=1e-8, atol=1e-12)
    assert bool(log_excess(torch.zeros(1, 3)).isfinite())


def test_a_posterior_sums_to_one_and_is_uniform_outside() -> None:
    z = torch.tensor([[2.0, -1.0, 0.3]], dtype=DOUBLE).repeat(4, 1)
    log_odds = torch.tensor([-1e6, -3.0, 0.5, 1e6], dtype=DOUBLE)
    p = log_posterior(z, log_odds).exp()
    torch.testing.assert_close(p.sum(dim=1), torch.ones(4, dtype=DOUBLE))
    torch.testing.assert_close(p[0], torch.full((3,), 1 / 3, dtype=DOUBLE))
    torch.testing.assert_close(p[3], z[3].softmax(dim=0))


def test_far_away_the_confidence_is_that_of_chance_and_the_score_still_has_a_gradient() -> None:
    x = noise(6, 1, 6, torch.Generator().manual_seed(0))
    assert torch.equal(fitted(score="confidence").scores(x), torch.full((6,), math.log(3)))
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fitted()(point).sum(), point)
    assert float(gradient.flatten(1).norm(dim=1).min()) > 1e3
    assert bool(gradient.isfinite().all())


def test_among_inliers_it_is_the_softmax() -> None:
    x = squares(20, 5, DOUBLE)[0]
    detector = fitted(DOUBLE, score="confidence")
    torch.testing.assert_close((-detector.scores(x)).exp(), -MSP(trained_net(dtype=DOUBLE)).scores(x))


# The fit


def test_the_metric_whitens_and_its_stretch_is_its_largest_singular_value() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 5, generator=generator, dtype=DOUBLE) @ torch.randn(5, 5, generator=generator, dtype=DOUBLE)
    centre, whiten, stretch = whitening(x + 3, 1e-9)
    white = (x + 3 - centre) @ whiten
    torch.testing.assert_close(white.T @ white / 500, torch.eye(5, dtype=DOUBLE))
    assert float(stretch) == pytest.approx(float(torch.linalg.matrix_norm(whiten, 2)), rel=1e-12)
    for ridge in (0.1, 1.0):
        _, whiten, stretch = whitening(x, ridge)
        largest = torch.linalg.eigvalsh(torch.cov(x.T, correction=0))[-1]
        assert float(stretch) == pytest.approx(float((ridge * largest).rsqrt()), rel=1e-9)


@pytest.mark.parametrize("width", [3, 40])
def test_the_stretch_is_no_smaller_than_that_of_the_rounded_matrix(width: int) -> None:
    """With fewer rows than columns too, where most variances are what the ridge makes them."""
    x = torch.rand(20, width, generator=torch.Generator().manual_seed(1))
    metric = whitening(x, 1e-6)
    assert float(metric.stretch) >= float(torch.linalg.matrix_norm(metric.whiten.double(), 2))


def test_variances_outside_are_four_times_the_largest_inside_or_more() -> None:
    detector = fitted()
    least = APART * detector.in_roots[detector.in_weights > 0].double().pow(-2).max()
    variances = detector.out_roots.double().pow(-2)
    assert bool((variances >= least * (1 - 1e-6)).all())
    wide = CCU(trained_net(), components=2).fit(squares(60), outliers=torch.rand(60, 1, 6, 6))
    assert bool((wide.out_roots.double().pow(-2) > 5 * wide.in_roots.double().pow(-2).max()).any())


def test_the_classifier_is_kept_and_labels_are_not_needed() -> None:
    net = trained_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with_labels, without = (
        CCU(net, components=3).fit(data, outliers=blank(30, 2)) for data in (squares(60), squares(60)[0])
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    x = squares(5, 9)[0]
    assert torch.equal(with_labels.scores(x), without.scores(x))


def test_a_bundle_gives_the_mixtures_and_is_not_fitted_again(tmp_path: Path) -> None:
    net, x = trained_net(), torch.cat([squares(5, 3)[0], blank(5, 4)])
    first = CCU(net, components=3, odds=0.3).fit(squares(60), outliers=blank(30, 2)).calibrate(squares(20, 5)[0])
    first.save(tmp_path / "ccu.safetensors")
    for place in (tmp_path, tmp_path / "ccu.safetensors"):
        taken = CCU(net, bundle=str(place))
        assert taken.fitted and not taken.to_fit() and taken.threshold is None
        assert torch.equal(taken.fit(x).scores(x), first.scores(x))
        taken.save(tmp_path / "again.safetensors")
        assert torch.equal(CCU.load(tmp_path / "again.safetensors", net).scores(x), first.scores(x))
    MSP(net).save(tmp_path / "msp.safetensors")
    CCU(net).save(tmp_path / "unfitted.safetensors")
    for name in ("msp", "unfitted"):
        with pytest.raises(ValueError, match=rf"{name}.safetensors holds no mixtures of a fitted CCU"):
            CCU(net, bundle=str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(ValueError, match="there is no saved detector at"):
        CCU(net, bundle=str(tmp_path / "nowhere"))
    with pytest.raises(
        ValueError, match="a bundle has its mixtures and odds; leave out components, odds, or the bundle"
    ):
        CCU(net, bundle=str(tmp_path), odds=7.0, components=3)
    assert CCU(net, bundle=str(tmp_path), score="confidence").score == "confidence"


def test_another_metric_is_noticed_however_it_comes() -> None:
    detector, x = fitted(), blank(4)
    first = detector.scores(x)
    other = CCU(trained_net(), components=3).fit(squares(45, 8), outliers=blank(20, 9))
    detector.load_state_dict(other.state_dict())  # in place
    second = detector.scores(x)
    assert torch.equal(second, other.scores(x)) and not torch.equal(second, first)
    detector.fit(squares(60), outliers=blank(30, 2))
    assert torch.equal(detector.scores(x), first)
    with torch.inference_mode():
        inside = fitted().scores(x)
    assert torch.equal(inside, first)


# The proof


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_bound_of_a_toy_is_the_one_written_out(norm: Literal["l2", "linf"]) -> None:
    detector, radius = by_hand(0.5), 0.03
    x = as_images(torch.tensor([[0.7, 0.45]], dtype=DOUBLE))
    reach = 2 * radius * (math.sqrt(2) if norm == "linf" else 1)
    near, far = math.hypot(0.4 - 0.2, -0.05) - reach, math.hypot(0.4 + 0.2, -0.05) + reach
    inside = math.exp(-((near / 0.1) ** 2) / 2) / 0.1**2
    outside = math.exp(-((far / 0.25) ** 2) / 2) / 0.25**2
    expected = (inside + 0.5 * outside / 2) / (inside + 0.5 * outside)
    assert float(detector.confidence_bound(x, radius, norm)) == pytest.approx(expected, rel=1e-9)
    assert float(detector.score_bound(x, radius, norm)) == pytest.approx(-math.log(expected), rel=1e-9)
    assert float(by_hand(0.5, "excess").score_bound(x, radius, norm)) == pytest.approx(-math.log(expected - 0.5))


def random_points(x: Tensor, ball: Ball, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [ball.random_start(x, torch.rand(x.shape, generator=generator, dtype=x.dtype)) for _ in range(count)]


@pytest.mark.parametrize(
    ("ball", "score"),
    [(Linf(0.002), "excess"), (Linf(0.02), "confidence"), (L2(0.1), "excess"), (L2(2.0), "confidence")],
    ids=repr,
)
def test_no_point_that_attacks_find_is_above_the_bound(ball: Ball, score: Literal["excess", "confidence"]) -> None:
    detector = fitted(DOUBLE, score=score, ridge=0.05, floor=0.02)
    inliers = squares(8, 5, DOUBLE)[0]
    x = torch.cat([inliers[:4], blank(4, 6, DOUBLE), 0.6 * inliers[4:], noise(4, 1, 6, torch.Generator()).double()])
    bound = detector.confidence_bound(x, ball.eps, ball.norm)
    least = detector.score_bound(x, ball.eps, ball.norm)
    found = [
        worst_case(detector, x, ball, "out", "quick", others=inliers).x,
        admit(detector, x, ball, steps=30).x,
        score_to(detector, x, 0.0, ball, steps=20).x,
        collide(detector.encode, x, inliers.repeat(2, 1, 1, 1), ball, steps=20).x,
        *random_points(x, ball, 20),
        x,
    ]
    for points in found:
        logits = detector.encode(points)[1]
        confidence = log_posterior(logits, detector.log_odds(points)).amax(dim=1).exp()
        assert bool((confidence <= bound + 1e-9).all())
        assert bool((detector.scores(points) >= least - 1e-9 * least.abs().clamp_min(1)).all())
    assert bool((bound >= 1 / 3 - 1e-12).all()) and bool((bound <= 1).all())


def test_a_broken_bound_would_be_seen() -> None:
    """With a metric that claims to stretch nothing, the attack gets above the bound: the test above can fail."""
    detector = fitted(DOUBLE, ridge=0.05, floor=0.02)
    x = 0.72 * squares(12, 5, DOUBLE)[0]
    detector.stretch = torch.zeros((), dtype=DOUBLE)
    found = admit(detector, x, Linf(0.05), steps=50)
    assert bool((found.score < detector.score_bound(x, 0.05, "linf")).any())


def far_outliers(count: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "noise": noise(count, 1, size, generator),
        "checkerboard": checkerboard(count, 1, size, generator, fields=8),
    }


def smooth(count: int, seed: int) -> Tensor:
    """Inliers (N, 1, 8, 8) that vary slowly, and a little noise, which every camera has."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 1, 3, 3, generator=generator)
    fine = nn.functional.interpolate(coarse, size=8, mode="bicubic", align_corners=True)
    return (fine + 0.03 * torch.randn(count, 1, 8, 8, generator=generator)).clamp(0, 1)


def test_far_away_the_bound_is_near_chance_and_grows_with_the_radius() -> None:
    inliers = smooth(400, 0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    detector = CCU(net, components=5).fit(inliers, outliers=torch.rand(100, 1, 8, 8))
    for name, x in far_outliers(10, 8).items():
        assert float(detector.confidence_bound(x, 8 / 255, "linf").max()) < 1 / 3 + 1e-3, name
        assert float(detector.confidence_bound(x, 0.2, "l2").max()) < 1 / 3 + 1e-3, name
        bounds = torch.stack([detector.log_odds_bound(x, radius) for radius in (0.0, 0.1, 0.5, 2.0)])
        assert bool((bounds.diff(dim=0) > 0).all())
        torch.testing.assert_close(bounds[0], detector.log_odds(x).double())
    assert float(detector.confidence_bound(smooth(20, 1), 0.0).min()) > 0.99


# Mistakes


def test_the_card_asks_for_outliers_and_so_does_that_of_an_ensemble() -> None:
    assert CCU.card.fit == "inliers and outliers"
    assert ScoreEnsemble([CCU(trained_net())]).card.fit == "inliers and outliers"


def test_mistakes_are_named() -> None:
    net = trained_net()
    for options, message in (
        ({"components": 0}, "components must be at least 1, got 0"),
        ({"odds": 0.0}, "odds must be positive, got 0"),
        ({"score": "energy"}, "score must be one of excess, confidence, got 'energy'"),
        ({"ridge": 0.0}, r"ridge must be in \(0, 1\], got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            CCU(net, **options)
    detector = CCU(net, components=3)
    with pytest.raises(ValueError, match=r"CCU learns from outliers too: fit\(inliers, outliers=...\)"):
        detector.fit(squares(60))
    with pytest.raises(ValueError, match=r"is not fitted; call fit\(inliers, outliers=outliers\) before scoring"):
        detector.confidence_bound(blank(2), 0.1)
    with pytest.raises(ValueError, match="100 components need at least as many samples, got 60"):
        CCU(net).fit(squares(60), outliers=blank(200))
    with pytest.raises(ValueError, match="3 components need at least as many samples, got 2"):
        detector.fit(squares(60), outliers=blank(2))
    with pytest.raises(ValueError, match="there are no outliers to learn from"):
        detector.fit(squares(60), outliers=[])
    with pytest.raises(ValueError, match="the inliers are all the same image"):
        detector.fit(torch.full((10, 1, 6, 6), 0.3), outliers=blank(30))
    with pytest.raises(ValueError, match=r"fitted on images of shape \(1, 6, 6\), got \(1, 4, 9\)"):
        detector.fit(squares(60), outliers=torch.rand(30, 1, 4, 9))
    with pytest.raises(ValueError, match="at least 2 classes, got 1"):
        CCU(nn.Sequential(nn.Flatten(), nn.Linear(36, 1)), components=3).fit(squares(60), outliers=blank(30))
    with pytest.raises(ValueError, match="images of 12675 numbers are too large"):
        whitening(torch.zeros(2, 12675), 1e-6)


def test_a_bound_of_nothing_is_refused() -> None:
    detector, x = fitted(), blank(3)
    with pytest.raises(ValueError, match="norm must be 'l2' or 'linf', got 'l1'"):
        detector.confidence_bound(x, 0.1, "l1")
    for radius in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="radius must not be negative"):
            detector.confidence_bound(x, radius)
    with pytest.raises(ValueError, match=r"fitted on images of shape \(1, 6, 6\), got \(1, 6, 5\)"):
        detector.confidence_bound(x[..., :5], 0.1)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        detector.confidence_bound(2 * x + 1, 0.1)


def test_a_network_that_gives_nan_is_named() -> None:
    x, y = squares(12)
    holed = x.clone()
    holed[5, 0, 5, 5] = 1.0
    with pytest.raises(ValueError, match="NaN or infinity, first in batch 1"):
        CCU(fragile_net(), components=3).fit([(holed[:4], y[:4]), (holed[4:], y[4:])], outliers=blank(30))
    detector = CCU(fragile_net(), components=3).fit(squares(60), outliers=blank(30))
    with pytest.raises(ValueError, match="is NaN, first in batch 1"):
        detector.scores(holed, batch_size=4)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 1), (3, 4, 5), (1, 1, 7)])
def test_images_of_any_shape_and_a_batch_of_one(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 3))
    inliers = 0.5 + 0.05 * torch.randn(50, *shape, generator=generator)
    outliers = torch.rand(50, *shape, generator=generator)
    detector = CCU(Encoder(net), components=2).fit(inliers.clamp(0, 1), outliers=outliers)
    x = outliers[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    assert gradient.shape == x.shape and bool(gradient.isfinite().all())
    assert (
        float(detector.confidence_bound(x.detach(), 0.01)) >= float((-detector.scores(x.detach())).exp()) + 1 / 3 - 1e-6
    )
