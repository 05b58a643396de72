from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatecrash import metrics

Metric = Callable[[Tensor, Tensor], float]

SEPARATING: list[Metric] = [
    metrics.auroc,
    metrics.aupr_in,
    metrics.aupr_out,
    metrics.fpr_at_tpr,
    metrics.fpr_at_tpr_out_positive,
    metrics.detection_error,
]

grid = st.lists(st.integers(-6, 6), min_size=1, max_size=30).map(lambda values: torch.tensor(values).double())
"""Scores on few values, so that ties within a set and between two are the rule."""


def named(metric: Metric) -> str:
    return metric.__name__


def drawn(n_in: int, n_out: int, seed: int, digits: int | None = None) -> tuple[Tensor, Tensor]:
    """Overlapping normal scores, with ties where they are rounded."""
    generator = torch.Generator().manual_seed(seed)
    inliers = torch.randn(n_in, generator=generator, dtype=torch.float64)
    outliers = 1 + 1.5 * torch.randn(n_out, generator=generator, dtype=torch.float64)
    return (inliers, outliers) if digits is None else (inliers.round(decimals=digits), outliers.round(decimals=digits))


CASES = {
    "continuous": drawn(150, 230, 0),
    "tied": drawn(200, 90, 1, digits=1),
    "few values": drawn(101, 57, 2, digits=0),
    "all equal": (torch.full((7,), 3.0), torch.full((4,), 3.0)),
    "separated": (torch.arange(5.0), torch.arange(5.0, 9.0)),
    "reversed": (torch.arange(5.0, 9.0), torch.arange(5.0)),
    "one each": (torch.tensor([0.5]), torch.tensor([0.25])),
    "infinite": (torch.tensor([-math.inf, 0.0, 1.0, math.inf]), torch.tensor([-math.inf, 0.5, math.inf, math.inf])),
}

cases = pytest.mark.parametrize(("inliers", "outliers"), CASES.values(), ids=CASES.keys())


def order_of(inliers: Tensor, outliers: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Outlier labels and the dense ranks of the scores, which scikit-learn takes where it refuses ±inf."""
    labels = np.r_[np.zeros(len(inliers)), np.ones(len(outliers))]
    return labels, np.unique(torch.cat((inliers, outliers)).numpy(), return_inverse=True)[1]


def operating_points(inliers: Tensor, outliers: Tensor) -> list[tuple[float, float]]:
    """(TPR, FPR), inliers positive, at every threshold that can matter, counted one by one."""
    points = [(0.0, 0.0)]
    for threshold in sorted(set(inliers.tolist() + outliers.tolist())):
        tpr = sum(score <= threshold for score in inliers.tolist()) / len(inliers)
        fpr = sum(score <= threshold for score in outliers.tolist()) / len(outliers)
        points.append((tpr, fpr))
    return points


# AUROC


@cases
def test_auroc_is_the_share_of_pairs_in_the_right_order(inliers: Tensor, outliers: Tensor) -> None:
    inside, outside = inliers[:, None], outliers[None, :]
    twice = 2 * (outside > inside).sum() + (outside == inside).sum()
    assert metrics.auroc(inliers, outliers) == int(twice) / (2 * len(inliers) * len(outliers))
    labels, ranks = order_of(inliers, outliers)
    assert metrics.auroc(inliers, outliers) == pytest.approx(sklearn.metrics.roc_auc_score(labels, ranks), abs=1e-12)


def test_auroc_counts_a_tie_as_one_half() -> None:
    assert metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])) == 0.875


def test_auroc_of_log_likelihoods_is_not_squashed() -> None:
    inliers = torch.tensor([-10_003.0, -10_002.0, -10_001.0, -9_000.5])
    outliers = torch.tensor([-10_001.5, -9_000.0, -8_999.0])
    assert metrics.auroc(inliers, outliers) == 10 / 12


def test_auroc_tells_neighbouring_float32_scores_apart() -> None:
    million = torch.tensor(1e6)
    above = torch.nextafter(million, torch.tensor(math.inf))
    assert metrics.auroc(million.repeat(3), above.repeat(2)) == 1.0
    assert metrics.auroc(above.repeat(3), million.repeat(2)) == 0.0


def test_negative_zero_ties_with_zero() -> None:
    assert metrics.summary(torch.tensor([0.0, -0.0]), torch.tensor([-0.0]))["auroc"] == 0.5
    assert metrics.detection_error(torch.tensor([-0.0]), torch.tensor([0.0])) == 0.5


def test_auroc_of_many_scores_needs_no_table_of_pairs() -> None:
    count = 300_000  # 9e10 pairs: a table of them would not fit, nor their count in int32
    inliers = torch.arange(count).double()
    assert metrics.auroc(inliers, inliers + 0.5) == (count + 1) / (2 * count)


@given(grid, grid)
@settings(max_examples=60, deadline=None)
def test_swapping_the_sets_gives_the_complement(inliers: Tensor, outliers: Tensor) -> None:
    assert metrics.auroc(inliers, outliers) + metrics.auroc(outliers, inliers) == pytest.approx(1, abs=1e-15)
    assert metrics.auroc(inliers, outliers) == metrics.auroc(-outliers, -inliers)


# AUPR


@cases
def test_aupr_is_scikit_learns_average_precision(inliers: Tensor, outliers: Tensor) -> None:
    labels, ranks = order_of(inliers, outliers)
    average_precision = sklearn.metrics.average_precision_score
    assert metrics.aupr_out(inliers, outliers) == pytest.approx(average_precision(labels, ranks), abs=1e-12)
    assert metrics.aupr_in(inliers, outliers) == pytest.approx(average_precision(1 - labels, -ranks), abs=1e-12)


def test_aupr_on_a_worked_example() -> None:
    inliers, outliers = torch.tensor([1.0, 3.0]), torch.tensor([2.0])
    assert metrics.aupr_in(inliers, outliers) == pytest.approx(1 / 2 * 1 + 1 / 2 * 2 / 3)
    assert metrics.aupr_out(inliers, outliers) == pytest.approx(1 / 2)


# FPR at a TPR


def test_both_fpr95_conventions_on_a_worked_example() -> None:
    inliers, outliers = torch.arange(1.0, 21.0), torch.tensor([3.5, 19.0, *[30.0] * 18])
    # Inliers positive: 19 of 20 inliers lie at or below 19, and so do two of the 20 outliers.
    assert metrics.threshold_at_tpr(inliers) == 19.0
    assert metrics.fpr_at_tpr(inliers, outliers) == 2 / 20
    # Outliers positive: 19 of 20 outliers lie at or above 19, and so do the inliers 19 and 20.
    assert metrics.fpr_at_tpr_out_positive(inliers, outliers) == 2 / 20
    # One outlier moved into the inliers' lower end changes the second convention by far more than the first.
    outliers[1] = 3.0
    assert metrics.fpr_at_tpr(inliers, outliers) == 2 / 20
    assert metrics.fpr_at_tpr_out_positive(inliers, outliers) == 17 / 20


@cases
@pytest.mark.parametrize("tpr", [0.05, 0.5, 0.9, 0.95, 1.0])
def test_fpr_at_tpr_is_the_first_operating_point_that_reaches_it(inliers: Tensor, outliers: Tensor, tpr: float) -> None:
    first = next(fpr for reached, fpr in operating_points(inliers, outliers) if reached >= tpr)
    assert metrics.fpr_at_tpr(inliers, outliers, tpr) == first
    labels, ranks = order_of(inliers, outliers)
    fpr, reached, _ = sklearn.metrics.roc_curve(labels, ranks, drop_intermediate=False)
    expected = fpr[np.argmax(reached >= tpr)]
    assert metrics.fpr_at_tpr_out_positive(inliers, outliers, tpr) == pytest.approx(expected, abs=1e-12)


@given(grid, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_threshold_is_the_smallest_that_accepts_enough(inliers: Tensor, part: int, whole: int) -> None:
    tpr = min(part, whole) / max(part, whole)
    threshold = metrics.threshold_at_tpr(inliers, tpr)
    enough = [score for score in inliers.tolist() if sum((inliers <= score).tolist()) / len(inliers) >= tpr]
    assert threshold == min(enough)


def test_a_share_that_is_a_whole_number_of_inliers_needs_no_more_than_those() -> None:
    assert 0.55 * 3000 > 1650  # so that rounding the product up would ask for one inlier too many
    assert metrics.threshold_at_tpr(torch.arange(1.0, 3001.0), 0.55) == 1650
    for total in (25, 29, 400):
        inliers, counts = torch.arange(1.0, total + 1), list(range(1, total + 1))
        assert [metrics.threshold_at_tpr(inliers, count / total) for count in counts] == counts


def test_fpr_at_threshold_accepts_the_threshold_itself() -> None:
    outliers = torch.tensor([-math.inf, 0.1, 0.2, 0.3])
    assert metrics.fpr_at_threshold(outliers, float(outliers[2])) == 0.75
    assert metrics.fpr_at_threshold(outliers, -math.inf) == 0.25
    assert metrics.fpr_at_threshold(outliers, math.inf) == 1.0


def test_a_float64_threshold_is_not_rounded_to_float32() -> None:
    assert metrics.fpr_at_threshold(torch.tensor([1.0]), 1.0 - 1e-12) == 0.0
    assert metrics.fpr_at_tpr(torch.tensor([1.0 - 1e-12], dtype=torch.float64), torch.tensor([1.0])) == 0.0


def test_a_frozen_threshold_sees_an_attack_on_inliers_only_where_it_should() -> None:
    clean, attacked, outliers = torch.arange(20.0), torch.arange(20.0) + 100, torch.arange(20.0) + 50
    frozen = metrics.threshold_at_tpr(clean)
    assert (metrics.fpr_at_threshold(outliers, frozen), metrics.fpr_at_tpr(attacked, outliers)) == (0.0, 1.0)


# Detection error


@cases
def test_detection_error_is_the_least_over_all_thresholds(inliers: Tensor, outliers: Tensor) -> None:
    least = min((1 - tpr) / 2 + fpr / 2 for tpr, fpr in operating_points(inliers, outliers))
    assert metrics.detection_error(inliers, outliers) == pytest.approx(least, abs=1e-15)


def test_detection_error_weighs_the_sets_equally_whatever_their_sizes() -> None:
    inliers, outliers = torch.tensor([0.0] * 9 + [2.0]), torch.tensor([1.0, 3.0])
    assert metrics.detection_error(inliers, outliers) == pytest.approx(0.05)
    assert metrics.detection_error(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])) == 0.25


# What holds for all of them


@pytest.mark.parametrize("metric", SEPARATING, ids=named)
@given(inliers=grid, outliers=grid)
@settings(max_examples=40, deadline=None)
def test_only_the_order_of_scores_matters(metric: Metric, inliers: Tensor, outliers: Tensor) -> None:
    value = metric(inliers, outliers)
    assert metric(inliers.exp(), outliers.exp()) == value
    assert metric(inliers**3 - 1e4, outliers**3 - 1e4) == value
    assert metric(inliers.float() + 1e6, outliers.float() + 1e6) == value
    assert metric(inliers.flip(0), outliers.flip(0)) == value


@pytest.mark.parametrize("metric", SEPARATING, ids=named)
def test_the_perfect_and_the_worst_detector(metric: Metric) -> None:
    inliers, outliers = CASES["separated"]
    perfect = {"fpr_at_tpr": 0.0, "fpr_at_tpr_out_positive": 0.0, "detection_error": 0.0}
    worst = {"auroc": 0.0, "fpr_at_tpr": 1.0, "fpr_at_tpr_out_positive": 1.0, "detection_error": 0.5}
    assert metric(inliers, outliers) == perfect.get(metric.__name__, 1.0)
    if metric.__name__ in worst:
        assert metric(outliers, inliers) == worst[metric.__name__]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("metric", SEPARATING, ids=named)
def test_every_float_dtype_gives_the_value_of_its_float64_copy(metric: Metric, dtype: torch.dtype) -> None:
    inliers, outliers = (scores.to(dtype) for scores in CASES["continuous"])
    assert metric(inliers, outliers) == metric(inliers.double(), outliers.double())
    assert metric(inliers, outliers.double()) == metric(inliers.double(), outliers.double())


@pytest.mark.filterwarnings("error")
def test_strided_scores_with_a_history_are_taken_as_they_are() -> None:
    inliers, outliers = CASES["tied"]
    woven = torch.stack((inliers, torch.zeros_like(inliers)), dim=1).requires_grad_()[:, 0]
    assert metrics.summary(woven, outliers) == metrics.summary(inliers, outliers)
    assert type(metrics.auroc(woven, outliers)) is float


# Curves


@cases
def test_the_roc_curve_passes_through_every_operating_point(inliers: Tensor, outliers: Tensor) -> None:
    curve = metrics.roc_curve(inliers.double(), outliers.double())
    points = list(zip(curve.tpr.tolist(), curve.fpr.tolist(), strict=True))
    assert points == operating_points(inliers, outliers)
    assert float(torch.trapezoid(curve.tpr, curve.fpr)) == pytest.approx(metrics.auroc(inliers, outliers), abs=1e-12)
    assert curve.thresholds[1:].tolist() == sorted(set(inliers.tolist() + outliers.tolist()))
    assert curve.thresholds[0] == -math.inf


@cases
def test_the_pr_curve_is_scikit_learns(inliers: Tensor, outliers: Tensor) -> None:
    labels, ranks = order_of(inliers, outliers)
    precision, recall, thresholds = sklearn.metrics.precision_recall_curve(1 - labels, -ranks)
    curve = metrics.pr_curve(inliers, outliers)
    np.testing.assert_allclose(curve.precision, precision[::-1], atol=1e-7)
    np.testing.assert_allclose(curve.recall, recall[::-1], atol=1e-7)
    distinct = np.unique(torch.cat((inliers, outliers)).numpy())
    np.testing.assert_array_equal(curve.thresholds, [-np.inf, *distinct[-thresholds[::-1]]])


def test_curves_keep_the_dtype_of_the_scores() -> None:
    for dtype in (torch.float32, torch.float64):
        inliers, outliers = (scores.to(dtype) for scores in CASES["tied"])
        parts = (*metrics.roc_curve(inliers, outliers), *metrics.pr_curve(inliers, outliers))
        assert {part.dtype for part in parts} == {dtype}


# MAPE


def test_mape_on_a_worked_example() -> None:
    latent = torch.tensor([[1.0, -1.0], [2.0, 4.0], [0.0, 0.0], [0.0, 1.0]])
    target = torch.tensor([[1.0, -4.0], [2.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    assert metrics.mape(latent, target).tolist() == [1.5 / 4, 0.0, 0.0, math.inf]


def test_mape_is_relative_to_the_targets_latent() -> None:
    small, large = torch.tensor([[1.0]]), torch.tensor([[4.0]])
    assert (metrics.mape(small, large).item(), metrics.mape(large, small).item()) == (0.75, 3.0)


def test_mape_of_a_tuple_is_that_of_one_long_vector() -> None:
    generator = torch.Generator().manual_seed(0)

    def latent() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        maps, features, score = (torch.randn(5, *shape, generator=generator) for shape in ((3, 2, 2), (7,), ()))
        return maps, (features, score)

    reached, target = latent(), latent()
    long = [torch.cat((z[0].flatten(1), z[1][0], z[1][1][:, None]), dim=1).numpy() for z in (reached, target)]
    expected = [np.abs(a - b).mean() / np.abs(b).max() for a, b in zip(*long, strict=True)]
    np.testing.assert_allclose(metrics.mape(reached, target), expected, rtol=1e-5)


def test_mape_of_half_precision_does_not_overflow() -> None:
    latent, target = torch.full((1, 4096), -3e4).half(), torch.full((1, 4096), 6e4).half()
    assert metrics.mape(latent, target).item() == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize(
    ("latent", "target", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 3), r"same shapes, got \[\(2, 3\)\] and \[\(3, 3\)\]"),
        (torch.zeros(2, 3), (torch.zeros(2, 3), torch.zeros(2, 1)), "same shapes"),
        (
            torch.tensor([[1.0], [math.nan]]),
            torch.ones(2, 1),
            "latent must be finite.*1 of 2 samples, first at index 1",
        ),
        (torch.ones(2, 1), torch.tensor([[math.inf], [1.0]]), "target must be finite"),
        ((torch.ones(2, 1), torch.ones(3, 1)), (torch.ones(2, 1), torch.ones(3, 1)), "one row per sample"),
        (torch.tensor(1.0), torch.tensor(1.0), "one row per sample"),
        ((), (), "one row per sample"),
        (torch.ones(2, 0), torch.ones(2, 0), "at least one number per sample"),
    ],
)
def test_mape_refuses_latents_that_cannot_be_compared(latent: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.mape(latent, target)


# Calibration


def slow_ece(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    total = 0.0
    for index in range(bins):
        inside = (confidence > index / bins) & (confidence <= (index + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


@pytest.mark.parametrize("bins", [1, 7, 10, 15])
def test_ece_is_the_weighted_gap_bin_by_bin(bins: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 5, generator=generator, dtype=torch.float64)
    labels = torch.where(torch.rand(400, generator=generator) < 0.6, logits.argmax(dim=1), 0)
    probabilities = logits.softmax(dim=1)
    expected = slow_ece(probabilities.numpy(), labels.numpy(), bins)
    assert expected > 0.01
    assert metrics.ece(probabilities, labels, bins) == pytest.approx(expected, abs=1e-12)


def test_ece_on_a_worked_example() -> None:
    probabilities = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.35, 0.65], [0.45, 0.55]])
    labels = torch.tensor([0, 1, 1, 1])
    assert metrics.ece(probabilities, labels) == pytest.approx((2 * 0.45 + 0.35 + 0.45) / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(dtype: torch.dtype) -> None:
    # The first of each pair is wrong and on an edge, the second right and above it: in one bin they would cancel.
    for edge, above in ((0.6, 0.65), (0.7, 0.75), (0.8, 0.85), (0.9, 0.95)):
        probabilities = torch.tensor([[1 - edge, edge], [1 - above, above]], dtype=dtype)
        assert metrics.ece(probabilities, torch.tensor([0, 1])) == pytest.approx((edge + 1 - above) / 2)


@pytest.mark.parametrize(
    ("probabilities", "labels", "bins", "message"),
    [
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), 10, "logits need softmax first"),
        (torch.tensor([[2.0, 1.0]]), torch.tensor([0]), 10, "sums from 3 to 3"),
        (torch.tensor([[math.nan, 1.0]]), torch.tensor([0]), 10, "sum to 1"),
        (torch.tensor([0.5, 0.5]), torch.tensor([0]), 10, r"shape \(N, K\), got \(2,\) float32"),
        ([[0.5, 0.5]], torch.tensor([0]), 10, "got list"),
        (torch.zeros(0, 3), torch.zeros(0).long(), 10, "at least one row"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), 10, r"labels must be whole numbers of shape \(1,\)"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), 10, r"labels must lie in \[0, 2\), got 2 to 2"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), 10, r"labels must lie in \[0, 2\)"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0]), 0, "bins must be at least 1, got 0"),
    ],
)
def test_ece_refuses_what_is_no_distribution(probabilities: Tensor, labels: Tensor, bins: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.ece(probabilities, labels, bins)


# U test


@cases
def test_the_u_test_is_scipys(inliers: Tensor, outliers: Tensor) -> None:
    expected = scipy.stats.mannwhitneyu(inliers.double().numpy(), outliers.double().numpy(), method="asymptotic")
    tested = metrics.mann_whitney(inliers, outliers)
    assert tested.u == expected.statistic
    assert tested.p == pytest.approx(float(expected.pvalue), rel=1e-10)


@given(grid, grid)
@settings(max_examples=60, deadline=None)
def test_the_u_test_takes_sides_only_in_u(a: Tensor, b: Tensor) -> None:
    forth, back = metrics.mann_whitney(a, b), metrics.mann_whitney(b, a)
    assert (forth.u + back.u, forth.p) == (len(a) * len(b), back.p)
    assert forth.p == pytest.approx(scipy.stats.mannwhitneyu(a.numpy(), b.numpy(), method="asymptotic").pvalue)


def test_a_tiny_p_value_is_right() -> None:
    count = 900
    a, b = torch.arange(count).double(), torch.arange(count).double() + count
    z = (count**2 / 2 - 0.5) / math.sqrt(count**2 * (2 * count + 1) / 12)
    expected = math.log(2) + scipy.stats.norm.logsf(z)
    assert -700 < expected < -600
    assert math.log(metrics.mann_whitney(a, b).p) == pytest.approx(expected, rel=1e-12)


# Intervals


def slow_delong(inliers: Tensor, outliers: Tensor, level: float) -> tuple[float, float]:
    """DeLong, DeLong and Clarke-Pearson (1988) from the table of all pairs."""
    inside, outside = inliers.numpy()[None, :], outliers.numpy()[:, None]
    kernel = (outside > inside) + 0.5 * (outside == inside)
    area = kernel.mean()
    of_outliers = ((kernel.mean(axis=1) - area) ** 2).sum() / (len(outliers) - 1)
    of_inliers = ((kernel.mean(axis=0) - area) ** 2).sum() / (len(inliers) - 1)
    half = scipy.stats.norm.ppf((1 + level) / 2) * math.sqrt(of_outliers / len(outliers) + of_inliers / len(inliers))
    return max(0.0, area - half), min(1.0, area + half)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("case", ["continuous", "tied", "few values", "infinite", "all equal", "separated"])
def test_delong_is_the_interval_from_all_pairs(case: str, level: float) -> None:
    expected = slow_delong(*CASES[case], level)
    assert metrics.delong_interval(*CASES[case], level) == pytest.approx(expected, abs=1e-12)


def test_delong_is_clipped_to_what_an_auroc_can_be() -> None:
    inliers, outliers = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0, 4.0])
    low, high = metrics.delong_interval(inliers, outliers)
    assert (low < 8 / 9, high) == (True, 1.0)
    low, high = metrics.delong_interval(outliers, inliers)
    assert (low, high > 1 / 9) == (0.0, True)


def test_delong_without_variance_is_the_auroc() -> None:
    assert metrics.delong_interval(*CASES["separated"]) == (1.0, 1.0)
    assert metrics.delong_interval(*CASES["reversed"]) == (0.0, 0.0)
    assert metrics.delong_interval(*CASES["all equal"]) == (0.5, 0.5)


@pytest.mark.filterwarnings("error")
def test_delong_claims_nothing_from_a_single_score() -> None:
    assert metrics.delong_interval(torch.zeros(1), torch.arange(9.0)) == (0.0, 1.0)
    assert metrics.delong_interval(torch.arange(9.0), torch.zeros(1)) == (0.0, 1.0)


def test_delong_covers_the_true_auroc_as_often_as_it_says() -> None:
    truth = float(scipy.stats.norm.cdf(1 / math.sqrt(1 + 1.5**2)))
    intervals = [metrics.delong_interval(*drawn(80, 80, seed), level=0.9) for seed in range(600)]
    covered = sum(low <= truth <= high for low, high in intervals) / len(intervals)
    assert 0.86 < covered < 0.94  # three standard deviations of 600 tosses at 0.9


def test_the_bootstrap_agrees_with_delong() -> None:
    inliers, outliers = drawn(300, 300, 3)
    expected = metrics.delong_interval(inliers, outliers)
    assert metrics.bootstrap_interval(metrics.auroc, inliers, outliers) == pytest.approx(expected, abs=0.01)


def test_the_bootstrap_of_a_mean_is_the_normal_interval() -> None:
    inliers, outliers = drawn(400, 400, 4)

    def gap(inside: Tensor, outside: Tensor) -> float:
        return float(outside.mean() - inside.mean())

    error = math.sqrt(float(inliers.var() + outliers.var()) / 400)
    low, high = metrics.bootstrap_interval(gap, inliers, outliers, level=0.8, resamples=2000)
    expected = gap(inliers, outliers) + error * scipy.stats.norm.ppf([0.1, 0.9])
    np.testing.assert_allclose([low, high], expected, atol=0.15 * error)


def test_the_bootstrap_depends_on_its_seed_and_on_nothing_else() -> None:
    inliers, outliers = CASES["tied"]

    def interval(seed: int) -> tuple[float, float]:
        return metrics.bootstrap_interval(metrics.auroc, inliers, outliers, resamples=200, seed=seed)

    torch.manual_seed(1)
    first = interval(seed=0)
    torch.manual_seed(2)
    assert interval(seed=0) == first
    assert interval(seed=1) != first


def test_the_bootstrap_leaves_the_global_random_state_alone() -> None:
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    low, high = metrics.bootstrap_interval(metrics.fpr_at_tpr, *CASES["tied"], resamples=50)
    assert low < high
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], before_numpy)  # noqa: NPY002


def test_a_higher_level_gives_a_wider_interval_around_the_auroc() -> None:
    inliers, outliers = CASES["continuous"]

    def bootstrap(inside: Tensor, outside: Tensor, level: float) -> tuple[float, float]:
        return metrics.bootstrap_interval(metrics.auroc, inside, outside, level, resamples=200)

    for interval in (metrics.delong_interval, bootstrap):
        narrow, wide = interval(inliers, outliers, 0.5), interval(inliers, outliers, 0.99)
        assert wide[0] < narrow[0] < metrics.auroc(inliers, outliers) < narrow[1] < wide[1]


# Summary


def test_the_summary_holds_every_metric_under_its_name() -> None:
    inliers, outliers = CASES["tied"]
    assert metrics.summary(inliers, outliers) == {
        "auroc": metrics.auroc(inliers, outliers),
        "auroc_ci": list(metrics.delong_interval(inliers, outliers)),
        "aupr_in": metrics.aupr_in(inliers, outliers),
        "aupr_out": metrics.aupr_out(inliers, outliers),
        "fpr95": metrics.fpr_at_tpr(inliers, outliers, 0.95),
        "detection_error": metrics.detection_error(inliers, outliers),
        "fpr95_out_positive": metrics.fpr_at_tpr_out_positive(inliers, outliers, 0.95),
        "n_in": 200,
        "n_out": 90,
    }


# What is refused


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(0), "must hold at least one score"),
        (torch.tensor([0.0, math.nan, math.nan]), "must not hold NaN; found 2 of 3, first at index 1"),
        (torch.zeros(3, 1), r"must be one-dimensional.*got shape \(3, 1\); use scores.flatten\(\)"),
        (torch.zeros(3, 2), r"must be one-dimensional.*got shape \(3, 2\)$"),
        (torch.tensor(0.0), r"must be one-dimensional.*got shape \(\)"),
        (torch.arange(3), r"must be float scores, got int64; convert: scores.double\(\)"),
        ([0.0, 1.0], "must be a torch.Tensor of scores, got list"),
    ],
)
def test_scores_that_cannot_be_ranked_are_refused_by_name(scores: Tensor, message: str) -> None:
    fine = torch.zeros(3)
    both = (*SEPARATING, metrics.roc_curve, metrics.pr_curve, metrics.delong_interval, metrics.summary)
    for function in both:
        with pytest.raises(ValueError, match="^inliers " + message):
            function(scores, fine)
        with pytest.raises(ValueError, match="^outliers " + message):
            function(fine, scores)
    with pytest.raises(ValueError, match="^inliers " + message):
        metrics.threshold_at_tpr(scores)
    with pytest.raises(ValueError, match="^outliers " + message):
        metrics.fpr_at_threshold(scores, 0.0)
    with pytest.raises(ValueError, match="^b " + message):
        metrics.mann_whitney(fine, scores)
    with pytest.raises(ValueError, match="^outliers " + message):
        metrics.bootstrap_interval(metrics.auroc, fine, scores)


def test_scores_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="inliers and outliers must be on one device, got cpu and meta"):
        metrics.auroc(torch.zeros(3), torch.zeros(3, device="meta"))


@pytest.mark.parametrize("tpr", [0.0, 1.01, -0.5, 95, math.nan])
def test_a_tpr_outside_its_range_is_refused(tpr: float) -> None:
    for function in (metrics.fpr_at_tpr, metrics.fpr_at_tpr_out_positive):
        with pytest.raises(ValueError, match=r"tpr must lie in \(0, 1\], got"):
            function(torch.zeros(3), torch.zeros(3), tpr)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, math.nan])
def test_a_level_outside_its_range_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got"):
        metrics.delong_interval(torch.zeros(3), torch.zeros(3), level)
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got"):
        metrics.bootstrap_interval(metrics.auroc, torch.zeros(3), torch.zeros(3), level)


def test_no_resample_and_no_threshold_are_refused() -> None:
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        metrics.bootstrap_interval(metrics.auroc, torch.zeros(3), torch.zeros(3), resamples=0)
    with pytest.raises(ValueError, match="threshold must be a number, got nan"):
        metrics.fpr_at_threshold(torch.zeros(3), math.nan)
