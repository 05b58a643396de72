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
    first, second = (scores(detector, images[:FEW], batch_size) for _ in range(2))
    same = (first - second).abs() <= 1e-5 * first.abs().mean()  # but for rounding
    return 1 if bool(same.all()) else FRESH


def drawn(detector: Detector, images: Tensor, draws: int, batch_size: int | None) -> Tensor:
    """So many draws of every image's score, (draws, B)."""
    return torch.stack([scores(detector, images, batch_size) for _ in range(draws)])
