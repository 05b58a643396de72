"""Detectors that fit mixtures of Gaussians: the scores from the equations, and what happens to sparse classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from gatecrash.detectors.base import Detector
from gatecrash.detectors.density import GMM, MixtureDetector, ZhengHong
from gatecrash.encoder import Encoder
from gatecrash.mixture import CovarianceName, fit_mixture
from gatecrash.protocols import leaves
from small_models import Affine, SmallNet, as_images, blank, one_thread, squares, trained_net  # noqa: F401

NAMES: list[CovarianceName] = list(get_args(CovarianceName))
every = pytest.mark.parametrize("covariance", NAMES)
both = pytest.mark.parametrize("kind", [GMM, ZhengHong])


def density_of(z: Tensor, mean: Tensor, root: Tensor) -> float:
    """N(z; μ, Σ) with Σ⁻¹ = R Rᵀ, from the definition."""
    precision = (root @ root.T) if root.ndim == 2 else torch.diag(root.square().expand(len(z)))
    gap = z - mean
    volume = torch.linalg.det(precision / (2 * math.pi)).sqrt()
    return float(volume * torch.exp(-0.5 * gap @ precision @ gap))


def likelihood_of(z: Tensor, weights: Tensor, means: Tensor, roots: Tensor, covariance: CovarianceName) -> float:
    """Σ_k π_k N(z; μ_k, Σ_k), component by component: equation (5)."""
    return sum(
        float(weight) * density_of(z, mean, roots if covariance == "tied" else roots[k])
        for k, (weight, mean) in enumerate(zip(weights, means, strict=True))
    )


def hidden(network: SmallNet, x: Tensor) -> Tensor:
    with torch.no_grad():
        z: Tensor = network.hidden(network.maps(x))
    return z


def images(count: int, seed: int) -> Tensor:
    return torch.cat([squares(count, seed, torch.float64)[0], blank(3, seed, torch.float64)])


@every
def test_gmm_is_bits_per_dimension_of_the_equation(covariance: CovarianceName) -> None:
    network = trained_net(0, torch.float64)
    detector = GMM(network, layers="hidden", components=3, covariance=covariance, floor=1e-3)
    detector.fit(squares(60, 0, torch.float64)[0])
    x = squares(9, 3, torch.float64)[0]
    likelihoods = [likelihood_of(z, *detector.mixture.tensors, covariance) for z in hidden(network, x)]
    expected = torch.tensor([-math.log2(value) / 5 for value in likelihoods]).to(x)
    torch.testing.assert_close(detector.scores(x), expected, rtol=1e-6, atol=1e-6)
    nats = torch.tensor([math.log(value) for value in likelihoods]).to(x)
    torch.testing.assert_close(detector.log_likelihood(detector.encode(x)), nats, rtol=1e-6, atol=1e-6)


@every
def test_zheng_hong_is_the_surprise_under_the_predicted_class(covariance: CovarianceName) -> None:
    network = trained_net(0, torch.float64)
    detector = ZhengHong(network, layers="hidden", components=2, covariance=covariance, floor=1e-3)
    detector.fit(squares(60, 0, torch.float64)[0])
    x = squares(9, 3, torch.float64)[0]
    features, labels = hidden(network, x), network(x).argmax(dim=1)
    assert len(labels.unique()) == 3
    expected = [
        -math.log(likelihood_of(z, detector.weights[c], detector.means[c], detector.roots[c], covariance))
        for z, c in zip(features, labels.tolist(), strict=True)
    ]
    torch.testing.assert_close(detector.scores(x), torch.tensor(expected).to(x), rtol=1e-6, atol=1e-6)


@every
@both
@pytest.mark.parametrize("layers", ["hidden", ["maps", "hidden"]], ids=str)
def test_the_gradient_is_that_of_finite_differences(
    kind: type[MixtureDetector], covariance: CovarianceName, layers: str | list[str]
) -> None:
    network = trained_net(0, torch.float64)
    detector = kind(network, layers=layers, components=2, covariance=covariance, floor=1e-3)
    detector.fit(squares(60, 0, torch.float64)[0])
    assert torch.autograd.gradcheck(detector, (images(4, 3).requires_grad_(),), eps=1e-6, rtol=1e-5, atol=1e-5)


def test_one_spherical_component_is_the_closed_form() -> None:
    z = torch.rand(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    detector = GMM(Affine(2.0), components=1, covariance="spherical", floor=0.0).fit(as_images(z))
    variance = (2 * z).var(dim=0, correction=0).mean()
    distance = (2 * z - 2 * z.mean(dim=0)).square().sum(dim=1) / variance
    expected = 0.5 * (distance / 6 + math.log(2 * math.pi * variance)) / math.log(2)
    torch.testing.assert_close(detector.scores(as_images(z)), expected)


def test_every_class_learns_from_what_is_predicted_to_be_of_it() -> None:
    network = trained_net(0, torch.float64)
    x = torch.cat([squares(60, 0, torch.float64)[0], blank(20, 5, torch.float64)])
    detector = ZhengHong(network, layers="hidden", components=2, floor=1e-3).fit((x, torch.zeros(80, dtype=torch.long)))
    features, labels = hidden(network, x), network(x).argmax(dim=1)
    for label in range(3):
        mixture, convergence = fit_mixture(features[labels == label], 2, floor=1e-3)
        torch.testing.assert_close(detector.means[label], mixture.means, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(detector.roots[label], mixture.roots, rtol=1e-6, atol=1e-6)
        assert bool(detector.converged[label]) == convergence.converged
    assert detector.own.all()


@every
def test_a_class_with_few_samples_has_fewer_components_and_one_with_hardly_any_those_of_all(
    covariance: CovarianceName,
) -> None:
    network = trained_net(0, torch.float64)
    x, y = squares(90, 0, torch.float64)
    kept = torch.cat([(y == 0).nonzero()[:30], (y == 1).nonzero()[:10], (y == 2).nonzero()[:9]]).squeeze(1)
    x, y = x[kept], y[kept]
    assert torch.equal(network(x).argmax(dim=1), y)
    detector = ZhengHong(network, layers="hidden", components=3, covariance=covariance, floor=1e-3).fit(x)
    assert detector.own.tolist() == [True, True, False]
    assert (detector.weights > 0).sum(dim=1).tolist() == [3, 1, 3]
    everything, _ = fit_mixture(hidden(network, x), 3, covariance, floor=1e-3)
    rare = squares(30, 8, torch.float64)[0][2::3]
    expected = -everything.log_prob(hidden(network, rare))
    torch.testing.assert_close(detector.scores(rare), expected, rtol=1e-6, atol=1e-6)
    x = images(6, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    assert gradient.isfinite().all()


def test_how_em_went_is_reported_and_saved(tmp_path: Path) -> None:
    network, x = trained_net(), squares(60)[0]
    detector = GMM(network, layers="hidden", components=3, restarts=4, floor=1e-3).fit(x)
    features = hidden(network, x)
    _, expected = fit_mixture(features, 3, restarts=4, floor=1e-3)
    assert (detector.convergence.steps, detector.convergence.restart) == (expected.steps, expected.restart)
    assert detector.convergence.converged
    assert detector.convergence.log_likelihoods == pytest.approx(expected.log_likelihoods, rel=1e-5)
    detector.save(tmp_path / "gmm.safetensors")
    assert GMM.load(tmp_path / "gmm.safetensors", network).convergence == detector.convergence
    assert not GMM(network, layers="hidden", components=3, steps=1).fit(x).convergence.converged


def test_asking_how_em_went_before_fitting_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"GMM is not fitted; call fit\(inliers\)"):
        _ = GMM(trained_net()).convergence


@both
def test_labels_make_no_difference(kind: type[MixtureDetector]) -> None:
    x, y = squares(60)
    first, second = (kind(trained_net(), layers="hidden", components=2).fit(data) for data in (x, (x, y.flip(0))))
    assert torch.equal(first.scores(x), second.scores(x))


@both
@pytest.mark.parametrize("layer", [None, "maps", ["hidden"], ["maps", "hidden"]], ids=str)
def test_the_tapped_layers_are_in_the_file(
    kind: type[MixtureDetector], layer: str | list[str] | None, tmp_path: Path
) -> None:
    path, network, x = tmp_path / "detector.safetensors", trained_net(), squares(60)[0]
    detector = kind(Encoder(network, layer), components=2, floor=1e-3).fit(x)
    detector.save(path)
    for tapped in (None, "head", ["maps", "hidden"]):
        assert torch.equal(Detector.load(path, Encoder(network, tapped)).scores(x), detector.scores(x))


@both
def test_an_option_out_of_range_is_refused_at_once(kind: type[MixtureDetector]) -> None:
    for options, message in (
        ({"components": 0}, "components must be at least 1, got 0"),
        ({"covariance": "ful"}, "unknown covariance 'ful'; did you mean 'full'"),
        ({"floor": -1e-6}, "floor must not be negative"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(trained_net(), **options)


@pytest.mark.parametrize("shape", [(5,), (3, 4), ()])
def test_features_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    network = trained_net()
    gmm = GMM(network, layers="hidden", components=2).fit(squares(60)[0])
    with pytest.raises(ValueError, match=r"^features must be of shape \(B, 5\), as those of the fit were, got "):
        gmm.judge(torch.rand(shape))
    with pytest.raises(ValueError, match=r"^features must be of shape \(B, 5\)"):
        gmm.log_likelihood(torch.rand(shape))
    own = ZhengHong(network, layers="hidden", components=2).fit(squares(60)[0])
    with pytest.raises(ValueError, match=r"^features must be of shape \(B, 5\)"):
        own.judge((torch.rand(shape), torch.rand(3, 3)))


def test_several_layers_are_fitted_as_one_vector() -> None:
    network, x = trained_net(), squares(90)[0]
    taps = Encoder(network, ["maps", "hidden"])
    mixture, _ = fit_mixture(torch.cat(leaves(taps(x)), dim=1).detach(), 3, steps=5)
    detector = GMM(taps, components=3, steps=5).fit(x)
    torch.testing.assert_close(detector.means, mixture.means.float())
    torch.testing.assert_close(detector.roots, mixture.roots.float())


def test_more_components_than_inliers_are_refused() -> None:
    with pytest.raises(ValueError, match="61 components need at least as many samples, got 60"):
        GMM(trained_net(), components=61).fit(squares(60)[0])
