"""How well scores separate outliers from inliers, how near two latents are, and how sure one may be of either.

Scores are one-dimensional float tensors, higher = more out-of-distribution, unbounded, ±inf allowed. A threshold
accepts the scores at or below it. Only order matters, so everything is counted in whole numbers on the scores' own
device: exact with ties, at any magnitude, and without float64 where the device has none.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from gatecrash.images import check_labels
from gatecrash.protocols import Latent, leaves


class RocCurve(NamedTuple):
    """The ROC curve with inliers positive, from accepting nothing to accepting all."""

    fpr: Tensor
    """(T+1,), the share of outliers accepted, ascending from 0 to 1."""
    tpr: Tensor
    """(T+1,), the share of inliers accepted, ascending from 0 to 1."""
    thresholds: Tensor
    """(T+1,), −inf for the point that accepts nothing, then the T distinct scores."""


class PrCurve(NamedTuple):
    """The precision-recall curve with inliers positive, from accepting nothing to accepting all."""

    precision: Tensor
    """(T+1,), the share of inliers among what is accepted; 1 where nothing is."""
    recall: Tensor
    """(T+1,), the share of inliers accepted, ascending from 0 to 1."""
    thresholds: Tensor
    """(T+1,), −inf for the point that accepts nothing, then the T distinct scores."""


class UTest(NamedTuple):
    """The outcome of a Mann-Whitney U test."""

    u: float
    """Pairs in which the first sample is the larger, a tie counting one half."""
    p: float
    """The two-sided p-value."""


class Summary(TypedDict):
    """The numbers a row of results holds about one set of inliers and one of outliers, fractions in [0, 1]."""

    auroc: float
    auroc_ci: list[float]
    aupr_in: float
    aupr_out: float
    fpr95: float
    detection_error: float
    fpr95_out_positive: float
    n_in: int
    n_out: int


def auroc(inliers: Tensor, outliers: Tensor) -> float:
    """The probability that an outlier scores higher than an inlier, a tie counting one half.

    Args:
        inliers: (N,), scores.
        outliers: (M,), scores.

    Raises:
        ValueError: a set of scores is empty, not one-dimensional, not float or holds NaN, or the two devices differ.
            The same holds for every function here that takes scores.
    """
    inliers, outliers = _check_both(inliers, outliers)
    _, inside, outside = _tally(inliers, outliers)
    return int((outside * _doubled_ranks(inside)).sum()) / (2 * len(inliers) * len(outliers))


def aupr_in(inliers: Tensor, outliers: Tensor) -> float:
    """The average precision with inliers (N,) positive and outliers (M,) negative: Σ (R_t − R_{t−1}) P_t."""
    _, hits, false_alarms = _accepted(*_check_both(inliers, outliers))
    hits, false_alarms = hits.cpu().double(), false_alarms.cpu().double()
    gains = hits.diff(prepend=hits.new_zeros(1))
    return float((gains * hits / (hits + false_alarms)).sum() / hits[-1])


def aupr_out(inliers: Tensor, outliers: Tensor) -> float:
    """The average precision with outliers (M,) positive and inliers (N,) negative."""
    inliers, outliers = _check_both(inliers, outliers)
    return aupr_in(-outliers, -inliers)


def threshold_at_tpr(inliers: Tensor, tpr: float = 0.95) -> float:
    """The smallest of the scores (N,) that at least the share `tpr` of them does not exceed.

    Raises:
        ValueError: also when `tpr` is not in (0, 1].
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr must lie in (0, 1], got {tpr}")
    inliers = _check_scores(inliers, "inliers")
    count = len(inliers)
    # The quotients themselves are compared, because tpr * count may land just above the whole number it stands for.
    index = bisect_left(range(1, count + 1), tpr, key=lambda accepted: accepted / count)
    return float(inliers.sort().values[index])


def fpr_at_threshold(outliers: Tensor, threshold: float) -> float:
    """The share of outliers (M,) that a given threshold accepts.

    With the threshold of clean inliers and the scores of attacked outliers this is the frozen FPR95.

    Raises:
        ValueError: also when the threshold is NaN.
    """
    if math.isnan(threshold):
        raise ValueError("threshold must be a number, got nan")
    outliers = _check_scores(outliers, "outliers")
    # In float64, because a tensor of float32 would round a threshold of float64 before comparing.
    return int((outliers.cpu().double() <= threshold).sum()) / len(outliers)


def fpr_at_tpr(inliers: Tensor, outliers: Tensor, tpr: float = 0.95) -> float:
    """The share of outliers (M,) accepted when the share `tpr` of inliers (N,) is accepted; inliers are positive.

    Raises:
        ValueError: also when `tpr` is not in (0, 1].
    """
    inliers, outliers = _check_both(inliers, outliers)
    return fpr_at_threshold(outliers, threshold_at_tpr(inliers, tpr))


def fpr_at_tpr_out_positive(inliers: Tensor, outliers: Tensor, tpr: float = 0.95) -> float:
    """The share of inliers (N,) rejected when the share `tpr` of outliers (M,) is rejected; outliers are positive.

    This is the FPR95 of OpenOOD and pytorch-ood, another number than `fpr_at_tpr` from the same scores.

    Raises:
        ValueError: also when `tpr` is not in (0, 1].
    """
    inliers, outliers = _check_both(inliers, outliers)
    return fpr_at_tpr(-outliers, -inliers, tpr)


def detection_error(inliers: Tensor, outliers: Tensor) -> float:
    """The smallest ½(1 − TPR) + ½FPR over all thresholds, in [0, ½], for inliers (N,) and outliers (M,)."""
    inliers, outliers = _check_both(inliers, outliers)
    n_in, n_out = len(inliers), len(outliers)
    # Accepting nothing errs by ½, as accepting all does, so the distinct scores are thresholds enough.
    _, hits, false_alarms = _accepted(inliers, outliers)
    return int(((n_in - hits) * n_out + false_alarms * n_in).min()) / (2 * n_in * n_out)


def roc_curve(inliers: Tensor, outliers: Tensor) -> RocCurve:
    """The ROC curve of inliers (N,) against outliers (M,), inliers positive, in the scores' dtype and on their device.

    With straight lines between its points, ties included, the area under it is the AUROC.
    """
    thresholds, hits, false_alarms = _accepted(*_check_both(inliers, outliers))
    return RocCurve(
        fpr=pad(false_alarms.to(thresholds) / len(outliers), (1, 0)),
        tpr=pad(hits.to(thresholds) / len(inliers), (1, 0)),
        thresholds=pad(thresholds, (1, 0), value=-math.inf),
    )


def pr_curve(inliers: Tensor, outliers: Tensor) -> PrCurve:
    """The precision-recall curve of inliers (N,) against outliers (M,), in the scores' dtype and on their device.

    Inliers are positive; `pr_curve(-outliers, -inliers)` is the curve with outliers positive.
    """
    thresholds, hits, false_alarms = _accepted(*_check_both(inliers, outliers))
    return PrCurve(
        precision=pad(hits.to(thresholds) / (hits + false_alarms).to(thresholds), (1, 0), value=1.0),
        recall=pad(hits.to(thresholds) / len(inliers), (1, 0)),
        thresholds=pad(thresholds, (1, 0), value=-math.inf),
    )


def mape(latent: Latent, target: Latent) -> Tensor:
    """How far each latent is from its target's, mean|z′ − z| / max|z|, shape (B,).

    The tensors of a tuple count as one long vector per sample. Where the target's latent is all zero the value is inf,
    or 0 when the two are equal.

    Args:
        latent: z′, a tensor (B, ...) or a tuple of them.
        target: z, with the same shapes.

    Raises:
        ValueError: the shapes differ, a sample has no entries, or a latent holds NaN or ±inf.
    """
    shapes, wanted = ([tuple(leaf.shape) for leaf in leaves(z)] for z in (latent, target))
    if shapes != wanted:
        raise ValueError(f"latent and target must have the same shapes, got {shapes} and {wanted}")
    reached, z = _one_vector(latent, "latent"), _one_vector(target, "target")
    error = (reached - z).abs().mean(dim=1)
    return torch.where(error == 0, 0.0, error / z.abs().amax(dim=1))


def ece(probabilities: Tensor, labels: Tensor, bins: int = 10) -> float:
    """The expected calibration error: the gap between confidence and accuracy, averaged over equal-width bins.

    Confidence is the largest probability, and bin m holds those in ((m − 1)/bins, m/bins], as in Guo et al., ICML 2017.

    Args:
        probabilities: (N, K), each row a distribution, as softmax gives it.
        labels: (N,), whole numbers in [0, K).
        bins: how many bins.

    Raises:
        ValueError: the probabilities are not distributions, the labels do not fit them, or there is no bin.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    _check_probabilities(probabilities)
    count, classes = probabilities.shape
    check_labels(labels, count, "probabilities")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels must lie in [0, {classes}), got {int(labels.min())} to {int(labels.max())}")
    confidence, predicted = probabilities.detach().cpu().max(dim=1)
    # The edges have the dtype of the confidences, so that a confidence of 0.3 lies on the edge 3/10 in float32 too.
    edges = torch.arange(1, bins, dtype=confidence.dtype) / bins
    gaps = (predicted == labels.cpu()).double() - confidence.double()
    return float(torch.bincount(torch.bucketize(confidence, edges), weights=gaps).abs().sum() / count)


def mann_whitney(a: Tensor, b: Tensor) -> UTest:
    """The two-sided Mann-Whitney U test of `a` (N,) against `b` (M,).

    The p-value is the normal approximation with corrections for ties and continuity. It keeps its relative accuracy
    down to 1e-307 and is 0 where it is too small for a float.
    """
    a, b = _check_both(a, b, ("a", "b"))
    pairs, total = len(a) * len(b), len(a) + len(b)
    _, of_a, of_b = _tally(a, b)
    u = int((of_a * _doubled_ranks(of_b)).sum()) / 2
    tied = of_a + of_b
    ties = sum(count**3 - count for count in tied[tied > 1].tolist())
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return UTest(u, 1.0)
    z = (abs(u - pairs / 2) - 0.5) / math.sqrt(variance)
    return UTest(u, min(1.0, math.erfc(z / math.sqrt(2))))


def bootstrap_interval(
    metric: Callable[[Tensor, Tensor], float],
    inliers: Tensor,
    outliers: Tensor,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval (low, high) of any metric of inliers (N,) and outliers (M,).

    The two sets are resampled independently. The draws depend on the seed alone, not on the device, and leave the
    global random state as it was.

    Raises:
        ValueError: also when `level` is not in (0, 1) or there is no resample.
    """
    _check_level(level)
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    inliers, outliers = _check_both(inliers, outliers)
    generator = torch.Generator().manual_seed(seed)

    def resampled(scores: Tensor) -> Tensor:
        rows = torch.randint(len(scores), (len(scores),), generator=generator)
        return scores[rows.to(scores.device)]

    values = [metric(resampled(inliers), resampled(outliers)) for _ in range(resamples)]
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.tensor(values, dtype=torch.float64).quantile(tails).tolist()
    return low, high


def delong_interval(inliers: Tensor, outliers: Tensor, level: float = 0.95) -> tuple[float, float]:
    """DeLong's interval (low, high) for the AUROC of inliers (N,) and outliers (M,), within [0, 1].

    The variance comes from each score's rank among the other set, in O(N log N), as in Sun and Xu (2014). Where it is
    zero, at perfect separation for one, the interval is the AUROC itself. A single inlier or outlier says nothing of
    the variance, and the interval is then (0, 1).

    Raises:
        ValueError: also when `level` is not in (0, 1).
    """
    _check_level(level)
    inliers, outliers = _check_both(inliers, outliers)
    n_in, n_out = len(inliers), len(outliers)
    if min(n_in, n_out) < 2:
        return 0.0, 1.0
    area = auroc(inliers, outliers)
    inside, outside = (counts.cpu() for counts in _tally(inliers, outliers)[1:])
    wins = (_doubled_ranks(inside).double() / (2 * n_in)).repeat_interleave(outside)
    losses = (_doubled_ranks(outside).double() / (2 * n_out)).repeat_interleave(inside)
    spread = math.sqrt(float(wins.var() / n_out + losses.var() / n_in))
    reach = -NormalDist().inv_cdf((1 - level) / 2) * spread
    return max(0.0, area - reach), min(1.0, area + reach)


def summary(inliers: Tensor, outliers: Tensor) -> Summary:
    """All that a row of results says about inliers (N,) and outliers (M,); `auroc_ci` is DeLong's at 95 %."""
    inliers, outliers = _check_both(inliers, outliers)
    return Summary(
        auroc=auroc(inliers, outliers),
        auroc_ci=list(delong_interval(inliers, outliers)),
        aupr_in=aupr_in(inliers, outliers),
        aupr_out=aupr_out(inliers, outliers),
        fpr95=fpr_at_tpr(inliers, outliers),
        detection_error=detection_error(inliers, outliers),
        fpr95_out_positive=fpr_at_tpr_out_positive(inliers, outliers),
        n_in=len(inliers),
        n_out=len(outliers),
    )


def _tally(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct scores (T,), ascending, and how often each occurs in the first and in the second set, int64."""
    # Not searchsorted: it starts threads for a few hundred scores, and a bootstrap on a busy machine waits for them.
    distinct, places = torch.unique(torch.cat((first, second)), return_inverse=True)
    counts = (torch.bincount(part, minlength=len(distinct)) for part in places.tensor_split([len(first)]))
    return distinct, *counts


def _accepted(inliers: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct scores (T,), ascending, and how many inliers and outliers each accepts as a threshold, int64."""
    thresholds, inside, outside = _tally(inliers, outliers)
    return thresholds, inside.cumsum(0), outside.cumsum(0)


def _doubled_ranks(counts: Tensor) -> Tensor:
    """Twice the number of scores below each distinct one (T,), a tie counting one half: whole numbers, int64."""
    return 2 * counts.cumsum(0) - counts


def _one_vector(z: Latent, name: str) -> Tensor:
    """A latent as one vector per sample, (B, D), float32 or wider and without its history."""
    parts = [leaf.detach() for leaf in leaves(z)]
    if not parts or any(part.ndim == 0 for part in parts) or len({len(part) for part in parts}) > 1:
        raise ValueError(f"{name} must have one row per sample, got shapes {[tuple(part.shape) for part in parts]}")
    flat = _at_least_float32(torch.cat([part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], dim=1))
    if flat.shape[1] == 0:
        raise ValueError(
            f"{name} must hold at least one number per sample, got {[tuple(part.shape) for part in parts]}"
        )
    bad = (~flat.isfinite()).any(dim=1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"{name} must be finite; found NaN or inf in {len(bad)} of {len(flat)} samples, first at index {bad[0]}"
        )
    return flat


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _check_scores(scores: object, name: str) -> Tensor:
    """The scores, detached and at least float32, when they can be ranked."""
    if not isinstance(scores, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor of scores, got {type(scores).__name__}")
    if scores.ndim != 1:
        hint = "; use scores.flatten()" if scores.numel() == max(scores.shape, default=1) else ""
        raise ValueError(f"{name} must be one-dimensional, one score per image, got shape {tuple(scores.shape)}{hint}")
    if len(scores) == 0:
        raise ValueError(f"{name} must hold at least one score, got none")
    if not scores.is_floating_point():
        raise ValueError(
            f"{name} must be float scores, got {str(scores.dtype).removeprefix('torch.')}; convert: scores.double()"
        )
    bad = scores.isnan().nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{name} must not hold NaN; found {len(bad)} of {len(scores)}, first at index {bad[0]}")
    return _at_least_float32(scores.detach()).contiguous()


def _check_both(
    first: object, second: object, names: tuple[str, str] = ("inliers", "outliers")
) -> tuple[Tensor, Tensor]:
    """Two sets of scores, checked, in the wider of their dtypes."""
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.device != second.device:
        raise ValueError(f"{names[0]} and {names[1]} must be on one device, got {first.device} and {second.device}")
    a, b = _check_scores(first, names[0]), _check_scores(second, names[1])
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")


def _check_probabilities(probabilities: object) -> None:
    """Raises a ValueError unless `probabilities` is (N, K) with a distribution in every row."""
    if not isinstance(probabilities, Tensor) or probabilities.ndim != 2 or not probabilities.is_floating_point():
        came = (
            f"{tuple(probabilities.shape)} {str(probabilities.dtype).removeprefix('torch.')}"
            if isinstance(probabilities, Tensor)
            else type(probabilities).__name__
        )
        raise ValueError(f"probabilities must be a float tensor of shape (N, K), got {came}")
    if probabilities.numel() == 0:
        raise ValueError(f"probabilities must hold at least one row and class, got shape {tuple(probabilities.shape)}")
    low, total = float(probabilities.min()), probabilities.detach().float().sum(dim=1)
    # One per cent covers softmax in bfloat16; the comparison is written so that NaN fails it.
    if not (low >= 0 and bool(((total - 1).abs() < 0.01).all())):
        raise ValueError(
            f"probabilities must be at least 0 and sum to 1 in every row, got a minimum of {low:.4g} and sums from "
            f"{float(total.min()):.4g} to {float(total.max()):.4g}; logits need softmax first"
        )
