"""Audits that take a fraction of a second: brighter is more out-of-distribution, and detectors that are wrong about it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.audit.checks import Evidence
from gatecrash.audit.job import Job, as_set
from gatecrash.audit.main import attack_plans
from gatecrash.audit.rows import rows_of
from gatecrash.audit.run import Measured, measure
from gatecrash.audit.work import Work
from gatecrash.detectors import Card, Detector
from gatecrash.encoder import Encoder
from gatecrash.protocols import Latent, leaves
from small_models import SIDE

EPS = 0.1
BOTH = {"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": EPS}, "steps": 10}


class Pixels(nn.Module):
    """Pixels as features, and how many images it has seen, its copies included."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The features (B, 36)."""
        Pixels.seen += len(x)
        return self.scale * x.flatten(1)


class Brightness(Detector):
    """τ is the mean pixel: an L∞ ball moves it by exactly eps."""

    card = Card(paper="none", year=2000, reads="features")

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__(Pixels() if network is None else network)

    def judge(self, z: Latent) -> Tensor:
        """The mean pixel, (B,)."""
        return leaves(z)[0].mean(dim=1)


def levels(low: float, high: float, count: int = 16, seed: int = 0) -> Tensor:
    """Images whose mean pixels lie evenly between two levels, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.linspace(low, high, count).view(-1, 1, 1, 1)
    noise = torch.rand(count, 1, SIDE, SIDE, generator=generator) - 0.5
    return means + 0.1 * (noise - noise.mean(dim=(1, 2, 3), keepdim=True))


def finished(
    detector: Detector, attacks: list[dict[str, Any]] | None = None, inliers: Tensor | None = None, **sets: Tensor
) -> tuple[Job, Measured, list[Any]]:
    """An audit of one detector: its job, what was measured, and its rows. `sets`: outliers, fit, fit_outliers."""
    encoder = next(part for part in detector.modules() if isinstance(part, Encoder))
    job = Job(
        plan="",
        detectors={"sick": detector},
        encoder=encoder.at(None),
        features=encoder,
        inliers=as_set(levels(0.2, 0.5) if inliers is None else inliers, "dark"),
        outliers={"bright": as_set(sets.get("outliers", levels(0.5, 0.8, seed=1)), "bright")},
        attacks=attack_plans([BOTH] if attacks is None else attacks),
        device=torch.device("cpu"),
        fit=as_set(sets["fit"], "fit") if "fit" in sets else None,
        fit_outliers=as_set(sets["fit_outliers"], "fit outliers") if "fit_outliers" in sets else None,
    )
    with TemporaryDirectory() as folder:
        measured = measure(job, Work(Path(folder), 0))
    return job, measured, rows_of(job, measured)


def evidence_for(
    detector: Detector, attacks: list[dict[str, Any]] | None = None, inliers: Tensor | None = None, **sets: Tensor
) -> Evidence:
    """What checks look at after such an audit, whatever it costs."""
    job, measured, rows = finished(detector, attacks, inliers, **sets)
    return Evidence(job, measured, rows, size=16, planted=32, passes={"sick": 1}, allowance=float("inf"))
