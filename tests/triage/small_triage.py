"""Triages that take about a second, of a classifier of squares some of whose labels are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.bundle import Bundle
from gatecrash.detectors import GMM, MSP, Detector, Mahalanobis
from gatecrash.encoder import Encoder
from small_models import blank, squares, trained_net

FGSM: dict[str, Any] = {"name": "fgsm", "eps": [0.1, "64/255"]}
BIM: dict[str, Any] = {"name": "bim", "norm": "l2", "eps": 0.8, "steps": 3}


def mislabelled(count: int = 60, seed: int = 1, every: int = 4) -> tuple[Tensor, Tensor]:
    """Squares; the label of every fourth is wrong, so that the classifier makes that many mistakes."""
    images, labels = squares(count, seed=seed)
    labels[::every] = (labels[::every] + 1) % 3
    return images, labels


def detectors_of(network: nn.Module | None = None, components: int = 4) -> dict[str, Detector]:
    """One detector with a seed, one that needs labels, one that needs nothing; none is fitted."""
    network = trained_net() if network is None else network
    features = Encoder(network, "hidden")
    return {
        "GMM": GMM(features, components=components, steps=3),
        "distance": Mahalanobis(features),
        "msp": MSP(Encoder(network)),
    }


def small_triage(out: Path, detectors: Any = None, **changes: Any) -> tuple[Any, Bundle]:
    """A triage with two repeats, what it returned and its bundle; arguments of `gate.triage` can be replaced."""
    options: dict[str, Any] = {
        "inliers": mislabelled(),
        "fit": squares(90, seed=2),
        "held_out": mislabelled(40, seed=3),
        "outliers": {"blank": blank(15)},
        "adversarial": [FGSM, BIM],
        "repeats": 2,
        "batch_size": 25,
    }
    results = gate.triage(detectors or detectors_of(), **options | changes, out=out)
    return results, Bundle(out)


def column(bundle: Bundle, name: str, **wanted: Any) -> Tensor:
    """A column of the samples that have some values in others, in the order of the images."""
    rows = [row for row in bundle.samples().to_pylist() if all(row[key] == value for key, value in wanted.items())]
    dtype = torch.float64 if name == "score" else torch.int64
    return torch.tensor([row[name] for row in sorted(rows, key=lambda row: row["index"])], dtype=dtype)


def row_of(results: Any, detector: str, against: str) -> dict[str, Any]:
    """The one row of a detector against something."""
    [row] = [row for row in results["rows"] if (row["detector"], row["against"]) == (detector, against)]
    return dict(row)
