"""A bundle made up without any model: scores drawn from normal distributions, rows computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatecrash.bundle import Bundle, Check, Pictures, Row, Side
from gatecrash.metrics import mape, summary


class Attack(NamedTuple):
    """An attack of a made-up audit: by how much the attacked outliers' scores lie above the inliers'."""

    name: str
    side: Side
    norm: str
    eps: float
    gap: float
    collides: bool = False


COLLIDE = Attack("collide of features", "out", "l2", 5.0, gap=0.0, collides=True)
WEAK = Attack("admit", "out", "linf", 4 / 255, gap=2.0)
STRONG = Attack("worst_case", "both", "linf", 8 / 255, gap=-4.0)

CHECKS: list[Check] = [
    {"name": "inside the ball", "status": "pass", "sentence": "Every image is within ε and inside [0, 1]."},
    {"name": "more steps", "status": "warn", "sentence": "Twice the steps lower the AUROC by another 0.02."},
]
MANIFEST = {"seed": 0, "device": "cpu", "versions": {"torch": "2.15.0"}, "hashes": {"model": "ab" * 32}}


def make_bundle(
    folder: Path,
    *,
    detectors: Sequence[str] = ("msp", "energy"),
    outliers: Sequence[str] = ("digits", "noise"),
    attacks: Sequence[Attack] = (COLLIDE, STRONG),
    count: int = 60,
    clean_gap: float = 3.0,
    plan: str = "seed: 0\n",
    checks: Sequence[Check] = CHECKS,
    pictures: Sequence[Pictures] = (),
    edit: Mapping[str, float] | None = None,
) -> Bundle:
    """A finished bundle; `edit` puts a value in place of the first clean outlier's score of a detector."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    samples: list[dict[str, Any]] = []
    for detector in detectors:
        inliers = _scores(count, 0.0, generator)
        samples += _samples(detector, None, "fashion:test", "in", inliers, inliers)
        evicted = {}
        for attack in attacks:
            evicted[attack] = inliers + 1 if attack.side == "both" else inliers
            if attack.side == "both":
                samples += _samples(detector, attack, "fashion:test", "in", inliers, evicted[attack])
        for name in outliers:
            clean = _scores(count, clean_gap, generator)
            if edit and detector in edit:
                clean[0] = edit[detector]
            samples += _samples(detector, None, name, "out", clean, clean)
            rows.append(_row(detector, name, None, inliers, clean))
            for attack in attacks:
                found = _scores(count, attack.gap, generator)
                samples += _samples(detector, attack, name, "out", clean, found)
                rows.append(_row(detector, name, attack, evicted[attack], found))
    bundle = Bundle(folder)
    bundle.write_plan(plan)
    bundle.write_samples(samples)
    bundle.write_results(rows, checks, MANIFEST)
    if pictures:
        bundle.write_pictures(pictures)
    return bundle


def make_pictures(
    count: int = 2, channels: int = 1, size: int = 28, dimensions: int = 32, title: str = "fundus, collided"
) -> Pictures:
    """Made-up collisions whose largest change is 0.02."""
    generator = torch.Generator().manual_seed(1)
    target, start = torch.rand(2, count, channels, size, size, generator=generator) * 0.9 + 0.05
    change = 0.02 * (2 * torch.rand(start.shape, generator=generator) - 1)
    change.view(count, -1)[:, 0] = 0.02
    z_target, z_start = torch.randn(2, count, dimensions, generator=generator)
    z_found = z_target + 0.001 * torch.randn(count, dimensions, generator=generator)
    return Pictures(
        title=title,
        attack="collide of features",
        norm="l2",
        eps=5.0,
        target=target,
        start=start,
        found=start + change,
        z_target=z_target,
        z_start=z_start,
        z_found=z_found,
        mape=mape(z_found, z_target).tolist(),
        distance=change.flatten(1).norm(dim=1).tolist(),
        target_distance=(target - start).flatten(1).norm(dim=1).tolist(),
        names=["boot", "shirt", "bag"][:count],
    )


def _scores(count: int, mean: float, generator: torch.Generator) -> Tensor:
    return torch.randn(count, generator=generator, dtype=torch.float64) + mean


def _row(detector: str, outliers: str, attack: Attack | None, inliers: Tensor, scores: Tensor) -> Row:
    numbers = summary(inliers[~inliers.isnan()], scores[~scores.isnan()])
    row: dict[str, Any] = {
        "detector": detector,
        "inliers": "fashion:test",
        "outliers": outliers,
        "attack": attack.name if attack else "none",
        "side": attack.side if attack else "none",
        "norm": attack.norm if attack else None,
        "eps": attack.eps if attack else None,
        "steps": 100 if attack else None,
        "restarts": 1 if attack else None,
        **numbers,
    }
    if attack and attack.collides:
        row |= {"mape_median": 0.0002, "mape_p90": 0.001, "target_distance_median": 22.5}
    return row


def _samples(
    detector: str, attack: Attack | None, name: str, role: str, clean: Tensor, attacked: Tensor
) -> list[dict[str, Any]]:
    collides = attack is not None and attack.collides
    return [
        {
            "detector": detector,
            "attack": attack.name if attack else "none",
            "side": role if attack else "none",
            "norm": attack.norm if attack else None,
            "eps": attack.eps if attack else None,
            "set": name,
            "role": role,
            "index": index,
            "clean_score": float(clean[index]),
            "attacked_score": float(attacked[index]),
            "mape": 10 ** (-4 + index / len(clean)) if collides else None,
            "target_index": index if collides else None,
            "target_distance": 22.5 if collides else None,
        }
        for index in range(len(clean))
    ]
