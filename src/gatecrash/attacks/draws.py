"""Whether a detector draws random numbers, and what its score is then: a mean over draws of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from gatecrash.attacks.score import scores
from gatecrash.protocols import Detector

FRESH = 8
"""Evaluations that a randomised detector's score is the mean of."""

FEW = 8
"""Images that are scored twice to see whether that is the same."""


def draws_of(detector: Detector, images: Tensor, batch_size: int | None) -> int:
    """How many draws a score of this detector is to be the mean of: one where images score the same twice."""
    first, second = (scores(detector, images[looked_at(images)], batch_size) for _ in range(2))
    return 1 if stays(first, second, 1e-5) else FRESH


def stays(first: Tensor, second: Tensor, rounding: float) -> bool:
    """Whether the same images have the same scores twice, but for rounding, as a share of the scores' size."""
    return bool((apart(first, second) <= rounding).all())


def looked_at(images: Tensor) -> Tensor:
    """The rows that are scored twice, from the first to the last: images may be in an order."""
    return torch.linspace(0, len(images) - 1, min(FEW, len(images))).round().long().to(images.device)


def apart(first: Tensor, second: Tensor) -> Tensor:
    """How far scores of the same images are apart, as a share of the size of those that are finite, (B,).

    The same infinity twice is no difference, and infinity beside a number an infinite one.
    """
    finite = first[first.isfinite()].abs()
    size = finite.mean() if len(finite) else first.new_ones(())
    return torch.where(first == second, 0.0, (first - second).abs() / size.clamp_min(torch.finfo(first.dtype).tiny))


def drawn(detector: Detector, images: Tensor, draws: int, batch_size: int | None) -> Tensor:
    """So many draws of every image's score, (draws, B)."""
    return torch.stack([scores(detector, images, batch_size) for _ in range(draws)])
