"""A detector as checks need it beside itself: in float64, and with the same draws every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gatecrash.detectors import Detector, Expected, ScoreEnsemble


class Exact(NamedTuple):
    """A detector with images in one precision, and its name."""

    detector: Detector
    x: Tensor
    precision: Literal["float64", "float32"]


def in_double(detector: Detector, x: Tensor) -> Exact:
    """A copy of the detector in float64 with the images likewise; both as they are where that does not run."""
    device = torch.device("cpu") if x.device.type == "mps" else x.device
    try:
        copy = deepcopy(detector).to(device).double().eval()
        with torch.no_grad():
            copy.judge(copy.encode(x[:2].to(device).double()))
    except (RuntimeError, TypeError, ValueError):
        return Exact(detector, x, "float32")
    return Exact(copy, x.to(device).double(), "float64")


@contextmanager
def repeatable(seed: int, device: torch.device) -> Iterator[None]:
    """The same global random numbers every time, put back afterwards, so that a random score has differences."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def redrawn(detector: Detector) -> Detector:
    """The detector, averages over draws with these begun anew, so that two evaluations draw alike."""
    if isinstance(detector, Expected):
        return Expected(detector.detector, detector.draws, detector.seed)
    if isinstance(detector, ScoreEnsemble) and averaged(detector):
        return ScoreEnsemble([redrawn(member) for member in detector.detectors])
    return detector


def averaged(detector: Detector) -> bool:
    """Whether its score is an average over draws, or its members' are."""
    return draws_in(detector) is not None


def draws_in(detector: Detector) -> int | None:
    """How many draws a score is averaged over, that of the fewest in an ensemble; None where nothing is averaged."""
    if isinstance(detector, ScoreEnsemble):
        each = [draws_in(member) for member in detector.detectors]
        return min((draws for draws in each if draws is not None), default=None)
    draws: int | None = getattr(detector, "draws", None)
    return draws
