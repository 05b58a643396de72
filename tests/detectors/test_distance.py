from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from gatecrash.detectors import Detector, Mahalanobis, RelativeMahalanobis
from gatecrash.detectors.distance import Weighting
from gatecrash.encoder import Encoder
from small_models import Affine, SmallNet, as_images, blank, one_thread, squares, trained_net  # noqa: F401

Array = npt.NDArray[np.float64]

WEIGHTINGS = pytest.mark.parametrize("weighting", ["samples", "classes"])
BOTH_KINDS = pytest.mark.parametrize("kind", [Mahalanobis, RelativeMahalanobis])
BOTH = ["maps", "hidden"]


# A slow reference, from the equations


def covariance(z: Array, y: list[int], weighting: Weighting) -> Array:
    """The shared covariance, sample by sample; "classes" is the plain mean of every class's own."""
    per_class = {}
    for label in sorted(set(y)):
        members = [z[i] for i in range(len(z)) if y[i] == label]
        mean = sum(members) / len(members)
        per_class[label] = sum(np.outer(row - mean, row - mean) for row in members), len(members)
    if weighting == "classes":
        return sum(total / count for total, count in per_class.values()) / len(per_class)
    return sum(total for total, _ in per_class.values()) / len(z)


def nearest_class(z: Array, y: list[int], points: Array, weighting: Weighting = "samples") -> Array:
    """min_k (z − μ_k)ᵀ Σ⁻¹ (z − μ_k) of every point, by the inverse of Σ and a loop over classes."""
    inverse = np.linalg.inv(covariance(z, y, weighting))
    means = [np.mean([z[i] for i in range(len(z)) if y[i] == label], axis=0) for label in set(y)]
    return np.array([min((point - mean) @ inverse @ (point - mean) for mean in means) for point in points])


def relative(z: Array, y: list[int], points: Array, weighting: Weighting = "samples") -> Array:
    """min_k MD_k − MD_0."""
    return nearest_class(z, y, points, weighting) - nearest_class(z, [0] * len(y), points)


def clusters(counts: tuple[int, ...] = (30, 12, 7), width: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (N, D) in [0, 1] of unequal classes, each of its own shape, and labels (N,)."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for label, count in enumerate(counts):
        mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, width, generator=generator, dtype=torch.float64)
        parts.append(0.3 + 0.2 * label + 0.04 * noise @ mixing / width**0.5)
    z, y = torch.cat(parts), torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert z.min() > 0
    assert z.max() < 1
    return z, y


def points(count: int = 9, width: int = 4, seed: int = 1) -> Tensor:
    return torch.rand(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features(network: SmallNet, x: Tensor, layer: str) -> Array:
    """A layer of the network, its maps averaged over places."""
    with torch.no_grad():
        maps = network.maps(x)
        z = network.hidden(maps) if layer == "hidden" else maps.mean(dim=(2, 3))
    return z.numpy()


def assert_scores(detector: Detector, x: Tensor, expected: Array, rtol: float = 1e-7) -> None:
    torch.testing.assert_close(detector.scores(x), torch.from_numpy(expected), rtol=rtol, atol=rtol)


# One layer


@WEIGHTINGS
def test_mahalanobis_is_the_distance_that_the_inverse_covariance_gives(weighting: Weighting) -> None:
    (z, y), new = clusters(), points()
    detector = Mahalanobis(Affine(), weighting=weighting).fit((as_images(z), y))
    assert_scores(detector, as_images(new), nearest_class(z.numpy(), y.tolist(), new.numpy(), weighting))


@WEIGHTINGS
def test_relative_mahalanobis_is_less_the_distance_to_all_classes_as_one(weighting: Weighting) -> None:
    (z, y), new = clusters(), points()
    detector = RelativeMahalanobis(Affine(), weighting=weighting).fit((as_images(z), y))
    assert_scores(detector, as_images(new), relative(z.numpy(), y.tolist(), new.numpy(), weighting))


@BOTH_KINDS
def test_the_two_weightings_differ_where_the_classes_do(kind: type[Detector]) -> None:
    (z, y), new = clusters(), as_images(points())
    samples, classes = (
        kind(Affine(), weighting=weighting).fit((as_images(z), y)) for weighting in ("samples", "classes")
    )
    assert ((samples.scores(new) / classes.scores(new) - 1).abs() > 0.05).any()


def test_the_mean_distance_of_the_training_set_to_its_own_classes_is_the_rank() -> None:
    # E (z − μ_y)ᵀ Σ⁻¹ (z − μ_y) = tr(Σ⁻¹Σ) = D, and with one class the nearest is the own one.
    z = clusters((40,), width=5)[0]
    detector = Mahalanobis(Affine()).fit((as_images(z), torch.zeros(40, dtype=torch.long)))
    assert detector.scores(as_images(z)).mean() == pytest.approx(5, rel=1e-9)


@BOTH_KINDS
def test_with_one_class_nothing_is_relative(kind: type[Detector]) -> None:
    z, new = clusters((40,))[0], as_images(points())
    scores = kind(Affine()).fit((as_images(z), torch.full((40,), 6))).scores(new)
    assert bool((scores.abs() < 1e-8).all()) == (kind is RelativeMahalanobis)


@BOTH_KINDS
def test_the_score_does_not_depend_on_the_features_units(kind: type[Detector]) -> None:
    (z, y), new = clusters(), as_images(points())
    small, large = (kind(Affine(scale)).fit((as_images(z), y)).scores(new) for scale in (1e-4, 300.0))
    torch.testing.assert_close(small, large, rtol=1e-7, atol=1e-7)


# Labels and order


@BOTH_KINDS
@pytest.mark.parametrize("names", [(3, 7, 9), (-5, 0, 10**12)], ids=["gaps", "negative and huge"])
def test_labels_may_be_any_whole_numbers(kind: type[Detector], names: tuple[int, ...]) -> None:
    z, y = clusters()
    renamed = torch.tensor(names)[y]
    plain, other = (kind(Affine()).fit((as_images(z), labels)) for labels in (y, renamed))
    assert torch.equal(plain.scores(as_images(points())), other.scores(as_images(points())))


@BOTH_KINDS
@WEIGHTINGS
def test_the_order_of_the_images_does_not_matter(kind: type[Detector], weighting: Weighting) -> None:
    (z, y), new = clusters(), as_images(points())
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(2))
    first, second = (
        kind(Affine(), weighting=weighting).fit((as_images(z[rows]), y[rows])) for rows in (torch.arange(len(z)), order)
    )
    torch.testing.assert_close(second.scores(new), first.scores(new), rtol=1e-9, atol=1e-9)


# Features without full rank


@BOTH_KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_unit_is_ignored(kind: type[Detector], dtype: torch.dtype) -> None:
    (z, y), new = clusters(), points()
    dead, moved = torch.full((len(z), 1), 0.37), torch.linspace(0, 1, len(new))[:, None]
    without = kind(Affine(dtype=dtype)).fit((as_images(z), y))
    detector = kind(Affine(dtype=dtype)).fit((as_images(torch.cat([z[:, :2], dead, z[:, 2:]], dim=1)), y))
    scores = detector.scores(as_images(torch.cat([new[:, :2], moved, new[:, 2:]], dim=1)))
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(scores, without.scores(as_images(new)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_more_dimensions_than_samples_the_pseudo_inverse_is_used(dtype: torch.dtype) -> None:
    (z, y), new = clusters((9, 6, 5), width=40), points(width=40)
    assert z.shape == (20, 40)
    detector = Mahalanobis(Affine(dtype=dtype)).fit((as_images(z), y))
    inverse = np.linalg.pinv(covariance(z.numpy(), y.tolist(), "samples"), rcond=1e-9, hermitian=True)
    means = [z[y == label].mean(dim=0).numpy() for label in range(3)]
    expected = np.array([min((p - mean) @ inverse @ (p - mean) for mean in means) for p in new.numpy()])
    assert np.linalg.matrix_rank(inverse) == 17
    assert_scores(detector, as_images(new), expected, rtol=1e-2 if dtype == torch.float32 else 1e-7)


def test_a_direction_of_small_variance_counts_as_the_equation_says() -> None:
    generator = torch.Generator().manual_seed(0)
    deviations = torch.full((64,), 0.05, dtype=torch.float64)
    deviations[0] /= 100
    z = 0.5 + deviations * torch.randn(200, 64, generator=generator, dtype=torch.float64).clamp(-4, 4)
    new = points(width=64)
    detector = Mahalanobis(Affine()).fit((as_images(z), torch.zeros(200, dtype=torch.long)))
    assert_scores(detector, as_images(new), nearest_class(z.numpy(), [0] * 200, new.numpy()), rtol=1e-7)


@BOTH_KINDS
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
    ],
)
def test_features_that_never_vary_are_an_error_that_says_so(kind: type[Detector], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="the features do not vary at all"):
        kind(Affine(dtype=dtype)).fit((torch.full((60, 1, 1, 4), 0.1, dtype=dtype), torch.arange(60) % 3))


# Precision


def test_float32_distances_are_right_where_classes_are_thousands_of_deviations_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    z = (torch.tensor([0.1, 0.5, 0.9])[y, None] + 1e-4 * torch.randn(60, 4, generator=generator)).float()
    exact = Mahalanobis(Affine()).fit((as_images(z), y)).scores(as_images(z))
    scores = Mahalanobis(Affine(dtype=torch.float32)).fit((as_images(z), y)).scores(as_images(z))
    assert scores.min() >= 0
    torch.testing.assert_close(scores, exact, rtol=0.01, atol=0.01)


@BOTH_KINDS
def test_float32_scores_agree_with_float64(kind: type[Detector]) -> None:
    x, y = squares(60)
    new = torch.cat([squares(9, 3)[0], blank(9, 4)])
    single, double = (
        kind(trained_net(dtype=dtype), layers="hidden").fit((x, y)).scores(new)
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-2)


@BOTH_KINDS
def test_a_network_without_parameters_fitted_in_float32_scores_float64(kind: type[Detector]) -> None:
    (z, y), new = clusters(), as_images(points())
    detector = kind(nn.Flatten()).fit((as_images(z).float(), y))
    torch.testing.assert_close(detector.scores(new), detector.scores(new.float()).double(), rtol=1e-3, atol=1e-3)


# Several layers


def test_several_layers_are_averaged() -> None:
    network, (x, y) = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)
    new = torch.cat([squares(5, 3, torch.float64)[0], blank(5, 4, torch.float64)])
    for kind, reference in ((Mahalanobis, nearest_class), (RelativeMahalanobis, relative)):
        per_layer = [
            reference(features(network, x, layer), y.tolist(), features(network, new, layer)) for layer in BOTH
        ]
        assert_scores(kind(network, layers=BOTH).fit((x, y)), new, np.mean(per_layer, axis=0))
        assert_scores(kind(Encoder(network, "maps")).fit((x, y)), new, per_layer[0])


@BOTH_KINDS
def test_maps_kept_whole_are_flattened(kind: type[Detector]) -> None:
    network, (x, y) = trained_net(), squares(60)
    flat, whole = (kind(Encoder(network, "maps", pool=pool)).fit((x, y)) for pool in ("flatten", None))
    assert flat.encode(x).shape == (60, 16)
    assert torch.equal(whole.scores(x), flat.scores(x))


# The step


def nearest_by_layer(network: SmallNet, training: tuple[Tensor, Tensor], x: Tensor, layer: str) -> Array:
    images, labels = training
    return nearest_class(features(network, images, layer), labels.tolist(), features(network, x, layer))


def moved_closer(network: SmallNet, training: tuple[Tensor, Tensor], x: Tensor, layer: str, eta: float) -> Tensor:
    """x − η·sign(∇M), pixel by pixel, the sign that of a finite difference."""
    moved = x.clone()
    for row, column in product(range(6), range(6)):
        nudge = torch.zeros_like(x)
        nudge[:, 0, row, column] = 1e-6
        up, down = (nearest_by_layer(network, training, x + sign * nudge, layer) for sign in (1, -1))
        moved[:, 0, row, column] -= eta * torch.from_numpy(np.sign(up - down))
    return moved


@pytest.mark.parametrize("eta", [0.0014, 0.05])
def test_every_layer_is_judged_on_the_step_that_brings_it_closer(eta: float) -> None:
    network, training = trained_net(dtype=torch.float64), squares(30, 0, torch.float64)
    x = torch.cat([squares(2, 3, torch.float64)[0], blank(2, 4, torch.float64)])
    steps = {layer: moved_closer(network, training, x, layer, eta) for layer in BOTH}
    assert not torch.equal(steps["maps"], steps["hidden"])
    expected = np.mean([nearest_by_layer(network, training, steps[layer], layer) for layer in BOTH], axis=0)
    detector = Mahalanobis(network, layers=BOTH, magnitude=eta).fit(training)
    assert detector.magnitude == eta
    assert_scores(detector, x, expected, rtol=1e-6)


def test_the_gradient_with_a_step_is_that_at_the_moved_points() -> None:
    network, training = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)
    still = Mahalanobis(network, layers=BOTH).fit(training)
    stepping = Mahalanobis(network, layers=BOTH, magnitude=0.03).fit(training)
    x = squares(4, 3, torch.float64)[0].requires_grad_()
    expected = torch.zeros_like(x)
    for layer in range(2):
        distance = still.distances(still.encode(x))[:, layer]
        step = -0.03 * torch.autograd.grad(distance.sum(), x)[0].sign()
        distance = still.distances(still.encode(x + step))[:, layer]
        expected += torch.autograd.grad(distance.sum(), x)[0] / 2
    (gradient,) = torch.autograd.grad(stepping(x).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


# The combination by logistic regression, and the choice of the step


def faint(count: int, seed: int) -> Tensor:
    """Outliers that resemble inliers: squares at a third of their brightness above the noise."""
    x = squares(count, seed, torch.float64)[0]
    return torch.where(x > 0.4, x - 0.5 + 0.35, x)


def logistic_reference(inside: Array, outside: Array) -> tuple[LogisticRegression, Array, Array]:
    """scikit-learn's regression on distances (N, L) in units of their standard deviation; outliers are class 1."""
    both = np.concatenate([inside, outside])
    centre, scale = both.mean(axis=0), both.std(axis=0, ddof=1)
    labels = [0] * len(inside) + [1] * len(outside)
    return LogisticRegression(max_iter=1000).fit((both - centre) / scale, labels), centre, scale


def test_the_logistic_combination_is_the_decision_function_of_the_regression() -> None:
    network, training = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)
    held_out, outliers = squares(40, 1, torch.float64)[0], faint(25, 2)
    new = torch.cat([squares(5, 3, torch.float64)[0], faint(5, 4), blank(5, 4, torch.float64)])
    inside, outside, there = (
        np.stack([nearest_by_layer(network, training, x, layer) for layer in BOTH], axis=1)
        for x in (held_out, outliers, new)
    )
    model, centre, scale = logistic_reference(inside, outside)
    detector = Mahalanobis(network, layers=BOTH, combine="logistic")
    detector.fit(training, held_out=held_out, outliers=outliers)
    assert_scores(detector, new, model.decision_function((there - centre) / scale), rtol=1e-5)


def fpr95(inside: list[float], outside: list[float]) -> float:
    """The share of outliers accepted at the lowest threshold that accepts 95 % of the inliers, counted."""
    for threshold in sorted(inside):
        if sum(score <= threshold for score in inside) >= 0.95 * len(inside):
            return sum(score <= threshold for score in outside) / len(outside)
    raise AssertionError


@pytest.mark.parametrize("combine", ["mean", "logistic"])
@pytest.mark.parametrize("magnitudes", [(0.0, 0.02, 0.2), (0.2, 0.0, 0.02)])
def test_of_several_magnitudes_the_one_with_the_lowest_fpr95_is_taken(
    combine: Any, magnitudes: tuple[float, ...]
) -> None:
    network, training = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)
    data = {"held_out": squares(60, 1, torch.float64)[0], "outliers": faint(60, 2)}
    alone = {
        eta: Mahalanobis(network, layers=BOTH, magnitude=eta, combine=combine).fit(training, **data)
        for eta in magnitudes
    }
    rates = {
        eta: fpr95(one.scores(data["held_out"]).tolist(), one.scores(data["outliers"]).tolist())
        for eta, one in alone.items()
    }
    best = min(magnitudes, key=lambda eta: rates[eta])
    assert sorted(rates.values())[0] < sorted(rates.values())[1]
    chosen = Mahalanobis(network, layers=BOTH, magnitude=magnitudes, combine=combine).fit(training, **data)
    assert chosen.magnitude == best
    new = squares(9, 3, torch.float64)[0]
    torch.testing.assert_close(chosen.scores(new), alone[best].scores(new), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"combine": "logistic"}, "combine='logistic'"), ({"magnitude": [0.0, 0.01]}, "a list of magnitudes")],
)
@pytest.mark.parametrize("given", [(), ("held_out",), ("outliers",)], ids=["neither", "held_out", "outliers"])
def test_options_that_need_more_data_say_so(options: dict[str, Any], named: str, given: tuple[str, ...]) -> None:
    detector = Mahalanobis(trained_net(), layers=BOTH, **options)
    with pytest.raises(ValueError, match=f"{named} needs held-out inliers and outliers"):
        detector.fit(squares(12), **{name: blank(6) for name in given})
    assert not detector.fitted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combine": "max"}, "combine must be 'mean' or 'logistic', got 'max'"),
        ({"weighting": "none"}, "weighting must be 'samples' or 'classes', got 'none'"),
        ({"magnitude": -0.1}, r"magnitude must not be negative or an empty list, got -0\.1"),
        ({"magnitude": [0.1, -0.1]}, "magnitude must not be negative or an empty list"),
        ({"magnitude": []}, "magnitude must not be negative or an empty list"),
        ({"layers": "hiden"}, "SmallNet has no layer 'hiden'; did you mean 'hidden'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mahalanobis(trained_net(), **options)
    if "magnitude" not in options and "combine" not in options:
        with pytest.raises(ValueError, match=message):
            RelativeMahalanobis(trained_net(), **options)


def test_magnitudes_may_come_from_linspace() -> None:
    detector = Mahalanobis(trained_net(), magnitude=np.linspace(0, 0.004, 21))
    assert len(detector.magnitudes) == 21


def test_a_magnitude_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="magnitude"):
        Mahalanobis(trained_net(), magnitude=math.nan)
