"""Audits that take a fraction of a second, of a detector for which brighter is more out-of-distribution."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.audit.checks import Evidence
from gatecrash.audit.job import Job, as_set, encoders_in
from gatecrash.audit.main import attack_plans
from gatecrash.audit.rows import rows_of
from gatecrash.audit.run import Measured, measure
from gatecrash.audit.work import Work
from gatecrash.bundle import Row
from gatecrash.detectors import Card, Detector
from gatecrash.protocols import Latent, leaves
from small_models import SIDE, Affine

EPS = 0.1
BOTH: dict[str, Any] = {"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": EPS}, "steps": 10}


class Brightness(Detector):
    """τ is the mean pixel: an L∞ ball moves it by exactly eps."""

    card = Card(paper="none", year=2000, reads="features")

    def __init__(self) -> None:
        super().__init__(Affine(dtype=torch.float32))

    def judge(self, z: Latent) -> Tensor:
        """The mean pixel, (B,)."""
        return leaves(z)[0].mean(dim=1)


class Noisy(Brightness):
    """The same with some chance in it, by default so much that it is mostly that."""

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        self.noise = noise

    def judge(self, z: Latent) -> Tensor:
        """The mean pixel and a random number, (B,)."""
        score = super().judge(z)
        return score + self.noise * torch.randn_like(score)


class Counted(nn.Module):
    """A network, and how many images it and its copies have seen."""

    seen = 0

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """What the network gives."""
        Counted.seen += len(x)
        output: Tensor = self.network(x)
        return output


def levels(low: float, high: float, count: int = 16, seed: int = 0) -> Tensor:
    """Images whose mean pixels lie evenly between two levels, with some noise, (N, 1, 6, 6)."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.linspace(low, high, count).view(-1, 1, 1, 1)
    noise = torch.rand(count, 1, SIDE, SIDE, generator=generator) - 0.5
    return means + 0.1 * (noise - noise.mean(dim=(1, 2, 3), keepdim=True))


DARK, BRIGHT = levels(0.2, 0.5), levels(0.507, 0.807, seed=1)


def finished(
    detectors: dict[str, Detector],
    attacks: list[dict[str, Any]],
    inliers: Tensor = DARK,
    outliers: Tensor = BRIGHT,
    **learnt: Tensor,
) -> tuple[Job, Measured, list[Row]]:
    """An audit: its job, what was measured, and its rows. `learnt` are sets that detectors are fitted on."""
    further: dict[str, Any] = {name: as_set(images, name) for name, images in learnt.items()}
    encoder = next((part for detector in detectors.values() for part in encoders_in(detector)), None)
    job = Job(
        plan="",
        detectors=detectors,
        encoder=None if encoder is None else encoder.at(None),
        features=encoder,
        inliers=as_set(inliers, "dark"),
        outliers={"bright": as_set(outliers, "bright")},
        attacks=attack_plans(attacks),
        device=torch.device("cpu"),
        **further,
    )
    with TemporaryDirectory() as folder:
        measured = measure(job, Work(Path(folder), 0))
    return job, measured, rows_of(job, measured)


def evidence_for(detector: Detector, *attacks: dict[str, Any], **sets: Tensor) -> Evidence:
    """What checks look at after an audit of one detector, whatever it costs; `BOTH` is the attack when none is given."""
    job, measured, rows = finished({"it": detector}, list(attacks) or [BOTH], **sets)
    return Evidence(job, measured, rows, size=16, planted=32, passes={"it": 1}, allowance=float("inf"))
