"""Temperature scaling: known temperatures, a grid, and data on which no temperature is best."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatecrash.detectors import MSP, Detector
from gatecrash.detectors.calibrated import Temperature, best_temperature
from gatecrash.encoder import Encoder
from gatecrash.metrics import ece
from small_models import Affine, as_images, one_thread, squares, trained_net

assert one_thread


def sampled(count: int, classes: int = 4, sharp: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Calibrated logits (N, K) in [0, 1] after division by 10: the labels are drawn from their softmax."""
    generator = torch.Generator().manual_seed(seed)
    logits = (sharp * torch.randn(count, classes, generator=generator, dtype=torch.float64) + 5).clamp(0, 10)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)


def likelihood(logits: list[list[float]], labels: list[int], temperature: float) -> float:
    """The mean negative log-likelihood, from its equation."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        scaled = [logit / temperature for logit in row]
        total += max(scaled) + math.log(sum(math.exp(value - max(scaled)) for value in scaled)) - scaled[label]
    return total / len(labels)


def fitted(scale: float, **data: object) -> Temperature:
    """The detector on a network whose logits are scale × the pixels."""
    detector = Temperature(Affine(scale))
    detector.fit(**data)
    return detector


# The optimum


@pytest.mark.parametrize("scale", [1e-3, 0.2, 1.0, 3.0, 500.0])
def test_logits_scaled_by_a_factor_need_that_factor_as_temperature(scale: float) -> None:
    logits, labels = sampled(20000)
    once = best_temperature(logits, labels)
    assert once == pytest.approx(1, abs=0.05)
    assert best_temperature(scale * logits, labels) == pytest.approx(scale * once, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sharp", [0.5, 2.0, 4.0])
def test_no_temperature_of_a_dense_grid_is_better(sharp: float, seed: int) -> None:
    logits, labels = sampled(60, sharp=sharp, seed=seed)
    best = best_temperature(3 * logits, labels)
    rows = (3 * logits).tolist()
    values = {t: likelihood(rows, labels.tolist(), t) for t in (best * 1.01**power for power in range(-150, 151))}
    assert min(values, key=values.__getitem__) == best


def test_the_slope_is_zero_at_the_optimum_in_two_classes() -> None:
    # 3 of 4 right with every margin m: the optimum makes the confidence 3/4, so m / T = log 3.
    logits, labels = torch.tensor([[5.0, 0.0]] * 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    assert best_temperature(logits, labels) == pytest.approx(5 / math.log(3), rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        ([[4.0, -4.0], [-4.0, 4.0], [3.0, 1.0]], [0, 1, 0]),  # all right: the smaller the better
        ([[4.0, -4.0], [-4.0, 4.0], [3.0, 1.0]], [1, 0, 1]),  # all wrong: the larger the better
        ([[4.0, -4.0], [4.0, -4.0]], [0, 1]),  # no better than chance
        ([[2.0, 2.0], [1.0, 1.0]], [0, 1]),  # nothing to tell
        ([[2.0], [1.0]], [0, 0]),  # one class
    ],
)
def test_where_no_temperature_is_best_it_stays_one(logits: list[list[float]], labels: list[int]) -> None:
    assert best_temperature(torch.tensor(logits, dtype=torch.float64), torch.tensor(labels)) == 1.0


@pytest.mark.parametrize("gap", [1.0, 1e-6, 1e-15])
@pytest.mark.parametrize("size", [1.0, 1e8])
def test_a_single_error_by_a_hair_and_a_single_huge_logit_leave_it_positive_and_finite(gap: float, size: float) -> None:
    logits = torch.tensor([[4.0, -4.0, -4.0]] * 30, dtype=torch.float64)
    logits[0] = torch.tensor([0.0, gap, -4.0])
    logits[1] *= size
    temperature = best_temperature(logits, torch.zeros(30, dtype=torch.long))
    assert 0.05 < temperature < 2


# The detector


def test_the_score_is_minus_the_largest_probability_at_the_temperature() -> None:
    logits, labels = sampled(400)
    x = as_images(logits / 10)
    detector = fitted(30.0, inliers=(x, labels))
    temperature = best_temperature(3 * logits, labels)
    assert float(detector.temperature) == pytest.approx(temperature, rel=1e-9)
    expected = []
    for row in (3 * logits[:9]).tolist():
        weights = [math.exp(value / temperature) for value in row]
        expected.append(-max(weights) / sum(weights))
    torch.testing.assert_close(detector.scores(x[:9]), torch.tensor(expected, dtype=torch.float64))


def test_the_calibration_error_falls_and_is_that_of_the_metric() -> None:
    logits, labels = sampled(3000)
    detector = fitted(40.0, inliers=(as_images(logits / 10), labels))
    after = ece((4 * logits / float(detector.temperature)).softmax(dim=1), labels)
    assert float(detector.ece_before) == pytest.approx(ece((4 * logits).softmax(dim=1), labels), abs=1e-12)
    assert float(detector.ece_after) == pytest.approx(after, abs=1e-9)
    assert float(detector.ece_after) < 0.05 < 0.15 < float(detector.ece_before)


def test_held_out_images_with_labels_are_learnt_from_instead() -> None:
    first, second = sampled(300, seed=1), sampled(200, seed=2)
    inliers, held_out = ((as_images(logits / 10), labels) for logits, labels in (first, second))
    both = fitted(20.0, inliers=inliers, held_out=held_out)
    assert torch.equal(both.temperature, fitted(20.0, inliers=held_out).temperature)
    assert torch.equal(both.ece_before, fitted(20.0, inliers=held_out).ece_before)
    plain = fitted(20.0, inliers=inliers)
    assert not torch.equal(both.temperature, plain.temperature)
    assert torch.equal(fitted(20.0, inliers=inliers, held_out=held_out[0]).temperature, plain.temperature)


def test_a_classifier_without_errors_keeps_the_softmax_score() -> None:
    network, x = trained_net(), squares(30, 1)[0]
    detector = Temperature(network).fit(squares(60))
    assert float(detector.temperature) == 1
    assert torch.equal(detector.scores(x), MSP(network).scores(x))
    assert torch.equal(detector.ece_before, detector.ece_after)


def test_the_output_is_read_whatever_layer_the_encoder_taps() -> None:
    x, y = squares(60)
    y[:10] = (y[:10] + 1) % 3
    tapped, plain = (Temperature(Encoder(trained_net(), layer)).fit((x, y)) for layer in (["maps", "hidden"], None))
    assert torch.equal(tapped.scores(x), plain.scores(x))


def test_the_gradient_is_that_of_finite_differences_at_a_temperature() -> None:
    x, y = squares(60, dtype=torch.float64)
    y[:10] = (y[:10] + 1) % 3
    detector = Temperature(trained_net(dtype=torch.float64)).fit((x, y))
    assert float(detector.temperature) > 1.5
    x = x[:6].requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        low, high = (detector(x + sign * 1e-6 * direction) for sign in (-1, 1))
    expected = (gradient * direction).flatten(1).sum(dim=1)
    assert expected.abs().min() > 0
    torch.testing.assert_close((high - low) / 2e-6, expected, rtol=1e-5, atol=1e-8)


def test_half_precision_is_upcast() -> None:
    x, y = squares(60)
    y[:10] = (y[:10] + 1) % 3
    half = Temperature(trained_net().bfloat16()).fit((x, y))
    assert half.temperature.dtype == half.scores(x).dtype == torch.float32
    assert float(half.temperature) == pytest.approx(float(Temperature(trained_net()).fit((x, y)).temperature), rel=0.05)


def test_what_was_learnt_is_in_the_file(tmp_path: Path) -> None:
    x, y = squares(60)
    y[:10] = (y[:10] + 1) % 3
    network = trained_net()
    detector = Temperature(network).fit((x, y))
    detector.save(tmp_path / "detector.safetensors")
    again = Detector.load(tmp_path / "detector.safetensors", network)
    assert isinstance(again, Temperature)
    for name in ("temperature", "ece_before", "ece_after"):
        assert torch.equal(getattr(again, name), getattr(detector, name))
    assert torch.equal(again.scores(x), detector.scores(x))


def test_labels_that_the_network_does_not_have_are_refused() -> None:
    x, y = squares(12)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 1 to 3"):
        Temperature(trained_net()).fit((x, y + 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_whole_numbers_of_any_size(dtype: torch.dtype) -> None:
    x, y = squares(30)
    wanted = Temperature(trained_net()).fit((x, y))
    found = Temperature(trained_net()).fit((x, y.to(dtype)))
    assert found.temperature == wanted.temperature and found.ece_after == wanted.ece_after
