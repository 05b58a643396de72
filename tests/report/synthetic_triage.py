"""A triage's bundle made up without any model: scores drawn from normal distributions, rows computed from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch

from gatecrash.bundle import TRIAGE_SAMPLES, Bundle, Check, PurifiedRow, TriageRow
from gatecrash.metrics import aupr_in, aupr_out, auroc, detection_error, fpr_at_tpr, mann_whitney

CLASSES = 3
WRONG = 0.2
CHECKS: list[Check] = [
    {"name": "mistakes_suffice", "status": "pass", "sentence": "16 of 80 test images are classified wrongly."},
    {"name": "adversaries_fool", "status": "warn", "sentence": "fgsm 2/255 fools hardly anybody."},
]
MANIFEST = {"seed": 0, "data": {"inliers": {"source": "fashion:test", "n": 80}}, "versions": {"torch": "2.15.0"}}


class Attack(NamedTuple):
    """An attack of a made-up triage: its title, norm and eps, and by how much it raises the scores."""

    title: str
    norm: str
    eps: float
    gap: float


FGSM = Attack("fgsm 2/255", "linf", 2 / 255, 1.0)
BIM = Attack("bim 0.5", "l2", 0.5, -0.5)


def make_triage(
    folder: Path,
    *,
    detectors: Sequence[str] = ("msp", "gmm"),
    attacks: Sequence[Attack] = (FGSM, BIM),
    outliers: Sequence[str] = ("digits", "noise"),
    count: int = 80,
    repeats: int = 3,
    mistakes: bool = True,
    fooled_only: bool = False,
    purified: Sequence[PurifiedRow] | None = None,
    plan: str = "seed: 0\n",
    checks: Sequence[Check] = CHECKS,
    manifest: Mapping[str, Any] = MANIFEST,
    edit: Mapping[str, float] | None = None,
) -> Bundle:
    """A finished triage; `edit` puts a value in place of the last outlier's score of a detector, in the samples only."""
    draw = np.random.default_rng(0)
    label = draw.integers(0, CLASSES, count)
    wrong = np.arange(count) < (WRONG * count if mistakes else 0)
    predicted = (label + wrong) % CLASSES
    attacked = (label + (np.arange(count) % 4 > 0)) % CLASSES
    scores: dict[tuple[int, str, str], np.ndarray] = {}
    for repeat in range(repeats):
        for number, detector in enumerate(detectors):
            clean = draw.normal(size=count) + (2.0 - number) * wrong
            scores[repeat, detector, "inliers"] = clean
            for attack in attacks:
                scores[repeat, detector, attack.title] = clean + attack.gap + 0.3 * draw.normal(size=count)
            for name in outliers:
                scores[repeat, detector, name] = draw.normal(size=count) + 1.0 + 2 * number
    fooled = ~wrong & (attacked != label) if fooled_only else None
    rows = []
    for task, against, attack in _tasks(attacks, outliers, mistakes=mistakes):
        for detector in detectors:
            sides = [_sides(scores, n, detector, task, against, wrong, fooled) for n in range(repeats)]
            rows.append(_row(detector, task, against, attack, sides))
    if edit:
        for detector, value in edit.items():
            for name in outliers:
                scores[0, detector, name][-1] = value
    bundle = Bundle(folder)
    bundle.write_plan(plan)
    given = {"inliers": predicted, **{attack.title: attacked for attack in attacks}}
    roles = {"inliers": "in", **{attack.title: "adversarial" for attack in attacks}}
    bundle.write_samples(
        pa.concat_tables(
            [TRIAGE_SAMPLES.empty_table()]
            + [
                _table(detector, repeat, name, roles.get(name, "out"), values, given.get(name), label)
                for (repeat, detector, name), values in scores.items()
            ]
        )
    )
    accuracies = {name: float((found == label).mean()) for name, found in given.items()}
    bundle.write_triage(
        {
            "schema": 1,
            "kind": "triage",
            "accuracy": {**accuracies, "held_out": 0.875},
            "rows": rows,
            "purified": list(make_grid(detectors[-1:], repeats) if purified is None else purified),
            "checks": list(checks),
            "manifest": dict(manifest),
        }
    )
    return bundle


def make_grid(detectors: Sequence[str], repeats: int = 3) -> list[PurifiedRow]:
    """A made-up grid of purification, whose best point on validation images is the third of four."""
    found = [(0.1, 0.0, 0.871, 0.79), (0.1, 1.0, 0.874, 0.8), (0.01, 0.0, 0.879, 0.8028), (0.01, 1.0, 0.876, 0.81)]
    return [
        {
            "detector": detector,
            "step": step,
            "pull": pull,
            "repeats": repeats,
            "validation_before": 0.875,
            "validation_after": validation,
            "validation_std": 0.0012,
            "test_before": 0.8,
            "test_after": test,
            "test_std": 0.0034,
        }
        for detector in detectors
        for step, pull, validation, test in found
    ]


def _tasks(
    attacks: Sequence[Attack], outliers: Sequence[str], *, mistakes: bool
) -> Iterator[tuple[str, str, Attack | None]]:
    if mistakes:
        yield "mistakes", "mistakes", None
    for attack in attacks:
        yield "adversarial", attack.title, attack
    for name in outliers:
        yield "outliers", name, None


def _sides(
    scores: Mapping[tuple[int, str, str], np.ndarray],
    repeat: int,
    detector: str,
    task: str,
    against: str,
    wrong: np.ndarray,
    fooled: np.ndarray | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    clean = scores[repeat, detector, "inliers"]
    if task == "mistakes":
        return torch.from_numpy(clean[~wrong]), torch.from_numpy(clean[wrong])
    other = scores[repeat, detector, against]
    if task == "adversarial" and fooled is not None:
        return torch.from_numpy(clean[fooled]), torch.from_numpy(other[fooled])
    return torch.from_numpy(clean), torch.from_numpy(other.copy())


def _row(
    detector: str,
    task: str,
    against: str,
    attack: Attack | None,
    sides: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> TriageRow:
    repeats = len(sides)
    per_repeat = [_numbers(task, *both, threshold=0.5 + repeat) for repeat, both in enumerate(sides)]
    row: dict[str, Any] = {
        "detector": detector,
        "task": task,
        "against": against,
        "norm": attack.norm if attack else None,
        "eps": attack.eps if attack else None,
        "n_in": len(sides[0][0]),
        "n_out": len(sides[0][1]),
        "repeats": repeats,
    }
    for name in per_repeat[0]:
        values = np.array([numbers[name] for numbers in per_repeat])
        row[name] = float(np.median(values) if name == "p" else values.mean())
        if name not in ("p", "u"):
            row[f"{name}_std"] = float(values.std(ddof=1)) if repeats > 1 else 0.0
    row["per_repeat"] = per_repeat
    if attack:
        row["accuracy"] = 0.25
    return cast(TriageRow, row)


def _numbers(task: str, inside: torch.Tensor, outside: torch.Tensor, *, threshold: float) -> dict[str, float]:
    above = [(side > threshold).double() for side in (inside, outside)]
    numbers = {
        "auroc": auroc(inside, outside),
        "aupr_in": aupr_in(inside, outside),
        "aupr_out": aupr_out(inside, outside),
        "fpr95": fpr_at_tpr(inside, outside),
        "detection_error": detection_error(inside, outside),
        "threshold": threshold,
        "rejected_in": float(above[0].mean()),
        "rejected_out": float(above[1].mean()),
    }
    if task == "mistakes":
        test = mann_whitney(inside, outside)
        hits, alarms = float(above[1].sum()), float(above[0].sum())
        numbers |= {
            "u": test.u,
            "p": test.p,
            "precision": hits / max(hits + alarms, 1),
            "recall": float(above[1].mean()),
            "validated_precision": 0.111 + threshold / 10,
            "validated_recall": 0.222 + threshold / 10,
        }
    return numbers


def _table(
    detector: str,
    repeat: int,
    name: str,
    role: str,
    scores: np.ndarray,
    predicted: np.ndarray | None,
    label: np.ndarray,
) -> pa.Table:
    count = len(scores)
    columns = {
        "detector": pa.repeat(detector, count),
        "repeat": pa.repeat(repeat, count),
        "set": pa.repeat(name, count),
        "role": pa.repeat(role, count),
        "index": pa.array(np.arange(count)),
        "score": pa.array(scores, from_pandas=False),
        "predicted": pa.array(np.zeros(count, dtype=np.int64) if predicted is None else predicted),
        "label": pa.nulls(count) if role == "out" else pa.array(label),
    }
    return pa.table([columns[field.name].cast(field.type) for field in TRIAGE_SAMPLES], schema=TRIAGE_SAMPLES)
