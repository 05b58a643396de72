"""Densities of standardised features: the scale counts, and constants are no obstacle."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatecrash.densities import MAF, VAE, load_density, save_density, train_density
from gatecrash.densities.standardised import Standardised
from gatecrash.fitting import Recipe, seeded
from small_models import one_thread  # noqa: F401


class Normal(Standardised):
    """A standard normal, so that the whole is a normal with the data's mean and deviation."""

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(dim=1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_likelihood_is_of_the_features_as_they_came() -> None:
    x = torch.tensor([[0.0, 10.0], [4.0, 11.0]], dtype=torch.float64)
    model = Normal((2,)).double()
    model.standardise(x)
    assert model.mean.tolist() == [2.0, 10.5] and model.deviation.tolist() == [2.0, 0.5]
    exact = torch.distributions.Normal(model.mean, model.deviation).log_prob(x).sum(dim=1)
    torch.testing.assert_close(model(x), exact)
    assert float(model(x)[0]) == pytest.approx(-math.log(2 * math.pi) - 1)


def test_the_scale_of_the_features_only_shifts_the_likelihood() -> None:
    x = numbers(50, 3)
    small, large = Normal((3,)).double(), Normal((3,)).double()
    small.standardise(x)
    large.standardise(1000 * x)
    torch.testing.assert_close(small(x) - large(1000 * x), torch.full((50,), 3 * math.log(1000)).double())


def test_features_that_never_change_are_scaled_as_the_others_are() -> None:
    x = 3 * numbers(100, 4)
    x[:, 1], x[:, 2] = 7.0, 1e-6 * x[:, 0]
    model = Normal((4,)).double()
    model.standardise(x)
    spread = x.std(dim=0, correction=0)
    typical = float(spread.square().mean().sqrt())
    assert model.deviation.tolist() == pytest.approx([float(spread[0]), typical, typical, float(spread[3])])
    assert model(x).isfinite().all()


def test_a_single_sample_and_all_constant_features_are_no_obstacle() -> None:
    model = Normal((3,)).double()
    model.standardise(torch.full((1, 3), 5.0, dtype=torch.float64))
    assert model.mean.tolist() == 3 * [5.0] and model.deviation.tolist() == 3 * [1.0]


@pytest.mark.parametrize("kind", [VAE, MAF])
def test_training_bears_constant_features(kind: type[Standardised]) -> None:
    x = numbers(60, 4).float()
    x[:, 2] = 1.0
    with seeded(0):
        model = kind((4,))
    history = train_density(model, x, Recipe(5, 20, "adamw", lr=0.01, weight_decay=0.0))
    assert math.isfinite(history[-1]["loss"])
    moved = x.clone()
    moved[:, 2] = 5.0
    assert (model(moved) < model(x)).all()


def test_what_is_known_from_all_samples_outlives_the_first_batch() -> None:
    model = Normal((2,)).double()
    model.standardise(numbers(100, 2))
    kept = model.mean.clone()
    model.begin(numbers(5, 2, seed=1))
    assert torch.equal(model.mean, kept)
    fresh = Normal((2,)).double()
    fresh.begin(numbers(5, 2, seed=1))
    torch.testing.assert_close(fresh.mean, numbers(5, 2, seed=1).mean(dim=0))


@pytest.mark.parametrize("kind", [VAE, MAF])
def test_a_bundle_holds_the_scale(kind: type[Standardised], tmp_path: Path) -> None:
    x = (5 + 3 * numbers(10, 3)).float()
    model = kind((3,)).eval()
    model.standardise(x)
    save_density(model, tmp_path / "bundle")
    again = load_density(tmp_path / "bundle")
    assert torch.equal(again(x), model(x))
    assert again.options == model.options


@pytest.mark.parametrize("kind", [VAE, MAF])
def test_images_are_no_feature_vectors(kind: type[Standardised]) -> None:
    with pytest.raises(ValueError, match=rf"a {kind.__name__} is of feature vectors of shape \(D,\), got \(1, 6, 6\)"):
        kind((1, 6, 6))
    with pytest.raises(ValueError, match=r"of samples of shape \(3,\), got \(4,\)"):
        kind((3,))(torch.zeros(2, 4))
