"""The threshold above which an input is sent to a human: chosen by cross-validation."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """How well "above the threshold" finds what should be found."""

    precision: float
    """Of those above, the share that should be; 1 where none is above."""
    recall: float
    """Of those that should be above, the share that is; 1 where there are none."""

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True)
class Threshold:
    """A threshold, and what it reached on images that had no part in choosing it."""

    value: float
    validated: Rates


def rates(scores: Tensor, wanted: Tensor, threshold: float) -> Rates:
    """Precision and recall of `scores > threshold` (N,) for what is wanted, (N,) bool."""
    above = scores.double() > threshold  # a float32 would round the threshold up to the score above it
    hits = int((above & wanted).sum())
    precision = hits / int(above.sum()) if bool(above.any()) else 1.0
    recall = hits / int(wanted.sum()) if bool(wanted.any()) else 1.0
    return Rates(precision, recall)


def share_above(scores: Tensor, threshold: float) -> float:
    """The share of scores (N,) above a threshold."""
    return float((scores.double() > threshold).double().mean())


def best_threshold(scores: Tensor, wanted: Tensor) -> float:
    """The threshold with the highest F1, halfway between two scores; the highest such threshold among equals."""
    order = scores.argsort(descending=True)
    ranked, hits = scores[order].double(), wanted[order].double().cumsum(0)
    places = torch.arange(1, len(ranked) + 1, dtype=torch.float64)
    f1 = 2 * hits / (places + wanted.sum())
    f1[:-1][ranked[1:] == ranked[:-1]] = -1.0  # a threshold cannot lie between equal scores
    best = int(f1.argmax())
    lowest = float(ranked[best])
    return between(lowest, float(ranked[best + 1]) if best + 1 < len(ranked) else lowest - max(1.0, abs(lowest)))


def between(upper: float, lower: float) -> float:
    """A finite number halfway between two others and below the upper one; either may be infinite."""
    upper, lower = (min(max(value, -sys.float_info.max), sys.float_info.max) for value in (upper, lower))
    middle = upper / 2 + lower / 2
    return middle if lower <= middle < upper else lower


def choose_threshold(scores: Tensor, wanted: Tensor, folds: int = 5, seed: int = 0) -> Threshold:
    """The median of the thresholds that are best on all folds but one, with the rates on the folds left out.

    Args:
        scores: (N,), higher = more suspicious.
        wanted: (N,) bool, those that should be found.
        folds: at most the number of those that should be found, and at least 2.
        seed: of the split, which spreads both kinds evenly.

    Raises:
        ValueError: fewer than two of either kind, fewer than two folds, not one score per image, or one is NaN.
    """
    if scores.ndim != 1 or scores.shape != wanted.shape:
        raise ValueError(f"scores and wanted must both be (N,), got {tuple(scores.shape)} and {tuple(wanted.shape)}")
    if bool(scores.isnan().any()):
        raise ValueError("scores must not hold NaN")
    if folds < 2:
        raise ValueError(f"folds must be at least 2, got {folds}")
    scores, wanted = scores.detach().double().cpu(), wanted.detach().bool().cpu()
    few = min(int(wanted.sum()), int((~wanted).sum()))
    if few < 2:
        raise ValueError(f"a threshold needs at least 2 images of either kind, got {few}")
    folds = min(folds, few)
    generator = torch.Generator().manual_seed(seed)
    fold = torch.empty(len(scores), dtype=torch.long)
    for kind in (wanted, ~wanted):
        shuffled = kind.nonzero().flatten()[torch.randperm(int(kind.sum()), generator=generator)]
        fold[shuffled] = torch.arange(len(shuffled)) % folds
    chosen = [best_threshold(scores[fold != i], wanted[fold != i]) for i in range(folds)]
    left_out = [rates(scores[fold == i], wanted[fold == i], value) for i, value in enumerate(chosen)]
    return Threshold(
        value=float(torch.tensor(chosen, dtype=torch.float64).quantile(0.5)),
        validated=Rates(
            precision=sum(r.precision for r in left_out) / folds, recall=sum(r.recall for r in left_out) / folds
        ),
    )
