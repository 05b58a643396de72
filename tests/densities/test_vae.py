"""The variational autoencoder: its bounds against a model whose likelihood is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gatecrash.densities import VAE, train_density
from gatecrash.fitting import Recipe, seeded
from small_models import one_thread  # noqa: F401


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(dimensions: int = 3, **options: object) -> VAE:
    with seeded(0):
        return (
            VAE((dimensions,), **{"hidden": 8, "latent": 2, "draws": 5, **options})
            .double()
            .eval()
            .requires_grad_(False)
        )


def slow_bound(model: VAE, x: Tensor, importance: bool) -> float:
    """The bound of one sample (D,), number by number."""
    standard = (x - model.mean) / model.deviation
    statistics = model.encoder(standard[None])[0]
    mean, log_variance = statistics[:2], statistics[2:]
    terms = []
    for noise in model.noise:
        z = mean + (log_variance / 2).exp() * noise
        decoded, spread = model.decoder(z[None])[0], model.log_deviation.exp()
        given = torch.distributions.Normal(decoded, spread).log_prob(standard).sum()
        prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum()
        posterior = torch.distributions.Normal(mean, (log_variance / 2).exp()).log_prob(z).sum()
        terms.append(given + prior - posterior if importance else given)
    stacked = torch.stack(terms)
    if importance:
        bound = stacked.exp().mean().log()
    else:
        posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
        prior = torch.distributions.Normal(torch.zeros(2).double(), torch.ones(2).double())
        bound = stacked.mean() - torch.distributions.kl_divergence(posterior, prior).sum()
    return float(bound - model.deviation.log().sum())


@pytest.mark.parametrize("importance", [False, True])
def test_the_bound_is_that_of_the_equation(importance: bool) -> None:
    model, x = made(importance=importance), 3 * numbers(4, 3) + 1
    model.standardise(x)
    with torch.no_grad():
        model.log_deviation.copy_(torch.tensor([-1.0, 0.0, 0.5]))
    for sample, found in zip(x, model(x), strict=True):
        assert float(found) == pytest.approx(slow_bound(model, sample, importance), rel=1e-9)


def linear_model(draws: int, importance: bool) -> tuple[VAE, float, float]:
    """x = w·z + s·ε with z ~ N(0, 1), and the exact posterior as the encoder: both bounds are then log p(x) itself."""
    model, w, s = made(1, hidden=2, latent=1, draws=draws, importance=importance), 1.5, 0.7
    gain = w / (w**2 + s**2)
    with torch.no_grad():
        for network, slope in ((model.encoder, gain), (model.decoder, w)):
            network[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
            network[0].bias.zero_()
            network[2].weight.zero_()
            network[2].weight[0] = torch.tensor([slope, -slope])
            network[2].bias.zero_()
        model.encoder[2].bias[1] = math.log(s**2 / (w**2 + s**2))
        model.log_deviation.fill_(math.log(s))
    return model, w, s


def test_with_the_exact_posterior_a_single_importance_weight_is_the_likelihood() -> None:
    model, w, s = linear_model(1, True)
    x = numbers(20, 1)
    exact = torch.distributions.Normal(0.0, math.hypot(w, s)).log_prob(x).sum(dim=1)
    torch.testing.assert_close(model(x), exact)


def test_with_the_exact_posterior_the_bound_is_the_likelihood_on_average() -> None:
    model, w, s = linear_model(20000, False)
    x = numbers(5, 1)
    exact = torch.distributions.Normal(0.0, math.hypot(w, s)).log_prob(x).sum(dim=1)
    torch.testing.assert_close(model(x), exact, rtol=0, atol=0.05)


def test_more_importance_weights_give_a_tighter_bound() -> None:
    x = 2 * numbers(50, 3)
    bounds = [float(made(draws=draws, importance=True)(x).mean()) for draws in (1, 30, 1000)]
    assert bounds[0] < bounds[1] < bounds[2]


def test_scores_are_repeatable_and_training_draws_afresh() -> None:
    model, x = made(), numbers(4, 3)
    assert torch.equal(model(x), model(x))
    state = torch.random.get_rng_state()
    model(x)
    assert torch.equal(torch.random.get_rng_state(), state)
    model.train()
    assert not torch.equal(model(x), model(x))


def test_the_noise_does_not_depend_on_the_global_generator() -> None:
    with seeded(1):
        first = VAE((3,)).noise
    with seeded(2):
        assert torch.equal(VAE((3,)).noise, first)


def test_training_finds_the_line_that_features_lie_on() -> None:
    line = numbers(400, 1) @ torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64) + 0.05 * numbers(400, 3, seed=1) + 5
    model = made(hidden=16)
    train_density(model, line, Recipe(60, 100, "adamw", lr=0.02, weight_decay=0.0))
    beside = line + torch.tensor([1.0, -1.0, 1.0]).double()
    covariance = torch.cov(line.T)
    exact = torch.distributions.MultivariateNormal(line.mean(dim=0), covariance).log_prob(line).mean()
    assert float(exact) - 1.5 < float(model(line).mean()) < float(exact) + 0.1
    assert model(beside).max() < model(line).mean() - 5


def test_the_default_sizes_are_the_papers() -> None:
    model = VAE((342,))
    shapes = [tuple(part.weight.shape) for part in (*model.encoder, *model.decoder) if hasattr(part, "weight")]
    assert shapes == [(512, 342), (256, 512), (512, 128), (342, 512)]


@pytest.mark.parametrize("options", [{"hidden": 0}, {"latent": -1}, {"draws": 0}, {"draws": 1.5}, {"hidden": True}])
def test_sizes_that_are_none_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number of at least 1"):
        VAE((3,), **options)
    with pytest.raises(ValueError, match="importance must be true or false, got 'yes'"):
        VAE((3,), importance="yes")  # type: ignore[arg-type]
