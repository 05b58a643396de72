"""Mixtures of discretised logistics: against the equation written out, and as probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gatecrash.densities.logistic_mixture import LogisticMixture, log_bins, parameter_count
from small_models import one_thread  # noqa: F401

GREYS = torch.arange(256, dtype=torch.float64) / 127.5 - 1


def raw_numbers(count: int, channels: int, components: int, seed: int = 0, side: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        count, parameter_count(channels, components), side, side, generator=generator, dtype=torch.float64
    )


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > 0 else math.exp(value) / (1 + math.exp(value))


def slow_log_prob(raw: Tensor, x: Tensor) -> float:
    """One pixel, raw (K, 1 + 2·C + C·(C−1)/2) and x (C,), number by number."""
    channels = len(x)
    total = sum(math.exp(row[0]) for row in raw.tolist())
    likelihood = 0.0
    for row in raw.tolist():
        mass = math.exp(row[0]) / total
        couplings = iter(row[1 + 2 * channels :])
        for channel in range(channels):
            value, mean = float(x[channel]), row[1 + channel]
            for before in range(channel):
                mean += math.tanh(next(couplings)) * float(x[before])
            scale = math.exp(max(row[1 + channels + channel], -7.0))
            upper = 1.0 if value > 0.999 else sigmoid((value + 1 / 255 - mean) / scale)
            lower = 0.0 if value < -0.999 else sigmoid((value - 1 / 255 - mean) / scale)
            mass *= upper - lower
        likelihood += mass
    return math.log(likelihood)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_pixels_probability_is_that_of_the_equation(channels: int) -> None:
    raw = raw_numbers(3, channels, 4)
    x = 2 * torch.rand(3, channels, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    x[0, 0, 0, 0], x[1, -1, 1, 1] = -1.0, 1.0
    found = LogisticMixture.of(raw, channels).log_prob(x)
    assert found.shape == (3, 2, 2)
    for n in range(3):
        for i in range(2):
            for j in range(2):
                one = raw[n, :, i, j].reshape(4, -1)
                assert float(found[n, i, j]) == pytest.approx(slow_log_prob(one, x[n, :, i, j]), rel=1e-9)


def test_the_numbers_per_pixel_are_those_of_the_paper() -> None:
    assert parameter_count(3, 10) == 100
    assert parameter_count(1, 10) == 30


@pytest.mark.parametrize("sharp", [-9.0, -3.0, 0.0, 3.0])
def test_the_probabilities_of_all_grey_levels_add_up_to_one(sharp: float) -> None:
    raw = raw_numbers(1, 1, 3, side=1)
    raw[:, 2::3] += sharp
    mixture = LogisticMixture.of(raw.expand(256, -1, -1, -1), 1)
    total = mixture.log_prob(GREYS[:, None, None, None]).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-12)


def test_the_probabilities_of_all_colours_add_up_to_one() -> None:
    mixture = LogisticMixture.of(raw_numbers(1, 2, 3, side=1).expand(256 * 256, -1, -1, -1), 2)
    colours = torch.cartesian_prod(GREYS, GREYS)
    assert float(mixture.log_prob(colours[:, :, None, None]).exp().sum()) == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("log_scale", [-7.0, -2.0, 0.0, 20.0])
@pytest.mark.parametrize("mean", [-40.0, -1.0, 0.0, 3.0, 1000.0])
def test_far_from_every_mean_value_and_gradient_are_finite_in_32_bits(log_scale: float, mean: float) -> None:
    x = torch.tensor([-1.0, -0.9989, -0.5, 0.0, 0.5, 0.9989, 1.0], requires_grad=True)
    means, log_scales = torch.full_like(x, mean, requires_grad=True), torch.full_like(x, log_scale, requires_grad=True)
    values = log_bins(x, means, log_scales)
    assert values.isfinite().all() and (values <= 0).all()
    gradients = torch.autograd.grad(values.sum(), (x, means, log_scales))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_in_32_bits_the_logarithm_is_as_good_as_in_64() -> None:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None, None]
    means = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)[None, :, None]
    log_scales = torch.linspace(-7, 2, 10, dtype=torch.float64)
    exact = log_bins(x, means, log_scales)
    rough = log_bins(x.float(), means.float(), log_scales.float())
    torch.testing.assert_close(rough.double(), exact, rtol=1e-5, atol=1e-3)


def test_the_means_start_at_the_quantiles_of_the_data() -> None:
    x = torch.stack([GREYS.reshape(1, 16, 16), -GREYS.reshape(1, 16, 16) / 2], dim=1)[0][None]
    mixture = LogisticMixture.of(LogisticMixture.raw_of(x, 4)[None, :, None, None], 2)
    torch.testing.assert_close(mixture.log_weights.exp().flatten(), torch.full((4,), 0.25, dtype=torch.float64))
    expected = torch.tensor([-0.75, -0.25, 0.25, 0.75], dtype=torch.float64)
    torch.testing.assert_close(mixture.means[0, :, 0, 0, 0], expected, rtol=0, atol=0.01)
    torch.testing.assert_close(mixture.means[0, :, 1, 0, 0], expected / 2, rtol=0, atol=0.01)
    assert not mixture.couplings.any()


def test_samples_occur_as_often_as_their_probability_says() -> None:
    raw = raw_numbers(1, 2, 2, seed=3, side=1)
    mixture = LogisticMixture.of(raw.expand(40000, -1, -1, -1), 2)
    drawn = mixture.sample(torch.Generator().manual_seed(0))
    assert drawn.shape == (40000, 2, 1, 1)
    assert torch.equal(((drawn + 1) * 127.5).round() / 127.5 - 1, drawn)
    colours = torch.cartesian_prod(GREYS, GREYS)
    one = LogisticMixture.of(raw.expand(len(colours), -1, -1, -1), 2)
    chances = one.log_prob(colours[:, :, None, None]).exp()[:, 0, 0]
    for first, second in ((colours[:, 0] < -0.2, colours[:, 1] < 0.3), (colours[:, 0] > 0.999, colours[:, 1] > -2)):
        wanted = float(chances[first & second].sum())
        seen = drawn[:, :, 0, 0]
        hits = (seen[:, 0] < -0.2) & (seen[:, 1] < 0.3) if first[0] else (seen[:, 0] > 0.999)
        assert float(hits.double().mean()) == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / 40000))


def test_the_second_channels_mean_follows_the_first() -> None:
    raw = raw_numbers(1, 3, 1, side=1)
    mixture = LogisticMixture.of(raw, 3)
    x = torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64)[None, :, None, None]
    one, means = raw.flatten(), mixture.means_given(x).flatten()
    assert float(means[0]) == float(one[1])
    assert float(means[1]) == pytest.approx(float(one[2] + one[7].tanh() * 0.5))
    assert float(means[2]) == pytest.approx(float(one[3] + one[8].tanh() * 0.5 - one[9].tanh() * 0.25))
