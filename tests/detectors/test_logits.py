from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from gatecrash.detectors import MSP, ODIN, Detector, Energy, MaxLogit, OutlierExposureScore
from gatecrash.detectors.logits import max_softmax
from gatecrash.encoder import Encoder
from small_models import Affine, as_images, blank, one_thread, squares, trained_net  # noqa: F401

SCALES = pytest.mark.parametrize("scale", [1.0, 40.0, 5000.0])


def pixels(count: int = 6, classes: int = 5, seed: int = 0) -> Tensor:
    """Images (N, 1, 1, K) that `Affine` takes for logits."""
    return as_images(torch.rand(count, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def logsumexp(logits: list[float], temperature: float = 1.0) -> float:
    return max(logits) / temperature + math.log(sum(math.exp((logit - max(logits)) / temperature) for logit in logits))


def assert_scores(detector: Detector, x: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(detector.scores(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


# Each score against its equation


@SCALES
def test_msp_is_minus_the_largest_probability(scale: float) -> None:
    x = pixels()
    assert_scores(MSP(Affine(scale)), x, [-max(softmax(row)) for row in (scale * x.flatten(1)).tolist()])


@SCALES
def test_maxlogit_is_minus_the_largest_logit(scale: float) -> None:
    x = pixels()
    assert_scores(MaxLogit(Affine(scale)), x, [-max(row) for row in (scale * x.flatten(1)).tolist()])


@SCALES
@pytest.mark.parametrize("temperature", [0.5, 1.0, 7.0])
def test_energy_is_minus_the_scaled_logsumexp(scale: float, temperature: float) -> None:
    x = pixels()
    expected = [-temperature * logsumexp(row, temperature) for row in (scale * x.flatten(1)).tolist()]
    assert_scores(Energy(Affine(scale), temperature=temperature), x, expected)


@SCALES
def test_oe_is_the_mean_log_probability(scale: float) -> None:
    x = pixels()
    expected = [sum(logit - logsumexp(row) for logit in row) / len(row) for row in (scale * x.flatten(1)).tolist()]
    assert_scores(OutlierExposureScore(Affine(scale)), x, expected)


@SCALES
@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_odin_without_a_step_is_msp_at_a_temperature(scale: float, temperature: float) -> None:
    x = pixels()
    expected = [-max(softmax(row, temperature)) for row in (scale * x.flatten(1)).tolist()]
    assert_scores(ODIN(Affine(scale), temperature=temperature, magnitude=0.0), x, expected)


# The step of ODIN


@pytest.mark.parametrize(("temperature", "magnitude"), [(1000.0, 0.0014), (3.0, 0.2)])
def test_odin_steps_towards_confidence_where_the_step_is_known(temperature: float, magnitude: float) -> None:
    # With z = s·x the gradient of log S is s/T·(1[k = top] − p_k): up at the top, down elsewhere, and never clamped.
    x = pixels()
    x[0, 0, 0, 2] = 1.0
    rows = x.flatten(1).tolist()
    moved = [[value + (magnitude if value == max(row) else -magnitude) for value in row] for row in rows]
    expected = [-max(softmax([9.0 * value for value in row], temperature)) for row in moved]
    assert_scores(ODIN(Affine(9.0), temperature=temperature, magnitude=magnitude), x, expected)


def test_odin_steps_along_the_sign_that_finite_differences_give() -> None:
    network, temperature, magnitude = trained_net(dtype=torch.float64), 5.0, 0.03
    x = torch.cat([squares(3, 3, torch.float64)[0], blank(3, 4, torch.float64)])

    def log_confidence(image: Tensor) -> float:
        return math.log(max(softmax(network(image[None])[0].tolist(), temperature)))

    expected = []
    for image in x:
        moved = image.clone()
        for row, column in product(range(6), range(6)):
            nudge = torch.zeros_like(image)
            nudge[0, row, column] = 1e-5
            slope = log_confidence(image + nudge) - log_confidence(image - nudge)
            moved[0, row, column] += math.copysign(magnitude, slope)
        expected.append(-max(softmax(network(moved[None])[0].tolist(), temperature)))
    assert_scores(ODIN(network, temperature=temperature, magnitude=magnitude), x, expected)


def test_the_gradient_of_odin_is_that_at_the_moved_point() -> None:
    network = trained_net(dtype=torch.float64)
    detector = ODIN(network, temperature=5.0, magnitude=0.03)
    x = squares(5, 3, torch.float64)[0].requires_grad_()
    confidence = (network(x) / 5.0).log_softmax(dim=1).amax(dim=1)
    step = 0.03 * torch.autograd.grad(confidence.sum(), x)[0].sign()
    frozen = -(network(x + step) / 5.0).softmax(dim=1).amax(dim=1)
    (expected,) = torch.autograd.grad(frozen.sum(), x)
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-15)


# The largest softmax probability


@pytest.mark.parametrize("gap", [0.0, 0.1, 5.0, 16.0])
def test_max_softmax_is_the_largest_entry_of_softmax(gap: float) -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 3] += gap
    expected = logits.softmax(dim=1).amax(dim=1)
    torch.testing.assert_close(max_softmax(logits), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(max_softmax(logits.float()), expected.float(), rtol=1e-6, atol=0)


def test_max_softmax_of_equal_logits_is_one_over_their_number() -> None:
    assert torch.equal(max_softmax(torch.full((2, 4), 123.0)), torch.full((2,), 0.25))


def gradient_of(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), logits)[0]


@pytest.mark.parametrize("gap", [30.0, 60.0])
def test_max_softmax_has_the_right_gradient_in_float32_where_softmax_has_none(gap: float) -> None:
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    logits[:, 2] += gap
    logits.requires_grad_()
    exact = logits.detach().double()
    others = (exact - exact[:, 2:3]).exp()
    others[:, 2] = 0
    # dp/dz_j = −p·p_j, and at the top the sum of those with the sign turned round.
    expected = -others / (1 + others.sum(dim=1, keepdim=True)) ** 2
    expected[:, 2] = -expected.sum(dim=1)
    torch.testing.assert_close(gradient_of(max_softmax(logits), logits).double(), expected, rtol=1e-5, atol=0)
    assert not gradient_of(logits.softmax(dim=1).amax(dim=1), logits)[:, 2].any()


# What is read, and what is refused


@pytest.mark.parametrize("kind", [MSP, MaxLogit, Energy, OutlierExposureScore, ODIN])
def test_the_networks_output_is_read_whatever_layer_the_encoder_taps(kind: type[Detector]) -> None:
    network, x = trained_net(), squares(5, 3)[0]
    plain = kind(Encoder(network, mean=[0.3], std=[0.7]))
    tapped = kind(Encoder(network, ["maps", "hidden"], mean=[0.3], std=[0.7]))
    assert torch.equal(tapped.scores(x), plain.scores(x))
    assert not torch.equal(plain.scores(x), kind(network).scores(x))


@pytest.mark.parametrize("kind", [MSP, MaxLogit, Energy, OutlierExposureScore, ODIN])
def test_an_output_that_is_no_row_of_logits_is_an_error_that_says_so(kind: type[Detector]) -> None:
    with pytest.raises(ValueError, match=r"expected logits of shape \(B, K\), got \(2, 1, 6, 6\)"):
        kind(nn.Identity())(squares(2)[0])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("kind", [Energy, ODIN])
def test_a_temperature_must_be_positive(kind: type[Detector], temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive, got"):
        kind(trained_net(), temperature=temperature)


def test_a_step_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match=r"magnitude must not be negative, got -0\.01"):
        ODIN(trained_net(), magnitude=-0.01)
