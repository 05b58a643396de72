"""The tables of an audit: a row per detector, pair of sets and attack, and a row per image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gatecrash.audit.job import Job
from gatecrash.audit.plan import AttackPlan
from gatecrash.audit.run import INLIERS, Measured, Outcome, attack_key
from gatecrash.bundle import Row, Side
from gatecrash.detectors import Certified
from gatecrash.metrics import auroc, fpr_at_threshold, summary, threshold_at_tpr


def rows_of(job: Job, measured: Measured) -> list[Row]:
    """Every detector on every pair of sets: clean, then after each attack on each side."""
    return [
        row
        for title in job.detectors
        for outliers in job.outliers
        for row in [clean_row(job, measured, title, outliers), *attacked_rows(job, measured, title, outliers)]
    ]


def clean_row(job: Job, measured: Measured, title: str, outliers: str) -> Row:
    """The detector before any attack."""
    inside, outside = measured.clean[title, INLIERS], measured.clean[title, outliers]
    return row_of(job, title, outliers, inside, outside, inside, side="none")


def attacked_rows(job: Job, measured: Measured, title: str, outliers: str) -> Iterator[Row]:
    """The detector after each attack of the plan, each eps, each side."""
    clean_in, clean_out = measured.clean[title, INLIERS], measured.clean[title, outliers]
    for attack in job.attacks:
        for number, eps in enumerate(attack.ball.ball().ladder):
            found_in = measured.attacked.get((title, attack_key(attack), INLIERS, number))
            found_out = measured.attacked.get((title, attack_key(attack), outliers, number))
            sides: list[Side] = []
            if found_out is not None:
                sides.append("out")
            if found_in is not None:
                sides.append("in")
            if found_in is not None and found_out is not None:
                sides.append("both")
            for side in sides:
                inside = found_in.scores if found_in is not None and side != "out" else clean_in
                outside = found_out.scores if found_out is not None and side != "in" else clean_out
                row = row_of(job, title, outliers, inside, outside, clean_in, side=side, attack=attack, eps=eps)
                row["clean_auroc"] = auroc(clean_in, clean_out)
                if found_out is not None and side != "in":
                    add_collision_facts(row, found_out)
                if side == "out":
                    add_certificate(row, job, attack.ball.norm, eps, clean_in)
                yield row


def row_of(
    job: Job,
    title: str,
    outliers: str,
    inside: Tensor,
    outside: Tensor,
    clean_in: Tensor,
    *,
    side: Side,
    attack: AttackPlan | None = None,
    eps: float | None = None,
) -> Row:
    """One row from the scores of both sets."""
    numbers = summary(inside, outside)
    return {
        "detector": title,
        "inliers": job.inliers.name,
        "outliers": outliers,
        "attack": "none" if attack is None else attack.title,
        "side": side,
        "norm": None if attack is None else attack.ball.norm,
        "eps": eps,
        "steps": None if attack is None or attack.name == "worst_case" else attack.steps,
        "restarts": None if attack is None or attack.name == "worst_case" else attack.restarts,
        "auroc": numbers["auroc"],
        "auroc_ci": numbers["auroc_ci"],
        "aupr_in": numbers["aupr_in"],
        "aupr_out": numbers["aupr_out"],
        "fpr95": numbers["fpr95"],
        "detection_error": numbers["detection_error"],
        "n_in": numbers["n_in"],
        "n_out": numbers["n_out"],
        "fpr95_out_positive": numbers["fpr95_out_positive"],
        "fpr95_frozen": fpr_at_threshold(outside, threshold_at_tpr(clean_in)),
    }


def add_collision_facts(row: Row, outcome: Outcome) -> None:
    """How close the latents came and how far the targets were, for collisions."""
    if outcome.mape is not None and bool(outcome.mape.isfinite().all()):
        row["mape_median"] = float(outcome.mape.quantile(0.5))
        row["mape_p90"] = float(outcome.mape.quantile(0.9))
    if outcome.target_distance is not None:
        row["target_distance_median"] = float(outcome.target_distance.quantile(0.5))


def add_certificate(row: Row, job: Job, norm: str, eps: float, clean_in: Tensor) -> None:
    """What no attack on the outliers comes below, where the detector has a proof of that."""
    detector = job.detectors[row["detector"]]
    if isinstance(detector, Certified):
        images = job.outliers[row["outliers"]].x
        least = detector.score_bound(images.to(job.device), eps, "linf" if norm == "linf" else "l2")
        row["certified_auroc"] = auroc(clean_in, least.to(clean_in))


def sample_rows(job: Job, measured: Measured) -> Iterator[dict[str, Any]]:
    """A row per image and attack, the clean scores first."""
    for (title, name), scores in measured.clean.items():
        still = torch.zeros(len(scores))
        clean = Outcome(scores, still, still, still.long(), still.long() + 1, None, None, None)
        yield from image_rows(clean, scores, detector=title, attack="none", side="none", norm=None, eps=None, set=name)
    for attack in job.attacks:
        for number, eps in enumerate(attack.ball.ball().ladder):
            for title in job.detectors:
                for name in (INLIERS, *job.outliers):
                    outcome = measured.attacked.get((title, attack_key(attack), name, number))
                    if outcome is not None:
                        side = "in" if name == INLIERS else "out"
                        about = {"attack": attack.title, "side": side, "norm": attack.ball.norm, "eps": eps}
                        yield from image_rows(outcome, measured.clean[title, name], detector=title, set=name, **about)


def image_rows(outcome: Outcome, clean: Tensor, **about: Any) -> Iterator[dict[str, Any]]:
    """The rows of one attack on one set."""
    role = "in" if about["set"] == INLIERS else "out"
    nothing = [None] * len(clean)
    columns = {
        "clean_score": clean.tolist(),
        "attacked_score": outcome.scores.tolist(),
        "l2": outcome.l2.tolist(),
        "linf": outcome.linf.tolist(),
        "steps": outcome.steps.tolist(),
        "evaluations": outcome.evaluations.tolist(),
        "mape": nothing if outcome.mape is None else outcome.mape.tolist(),
        "target_index": nothing if outcome.target_index is None else outcome.target_index.tolist(),
        "target_distance": nothing if outcome.target_distance is None else outcome.target_distance.tolist(),
    }
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        yield about | {"role": role, "index": index} | dict(zip(columns, values, strict=True))
