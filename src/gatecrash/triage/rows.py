"""The tables of a triage: how well every detector finds mistakes, adversarial images and outliers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gatecrash.bundle import TRIAGE_SAMPLES, PurifiedRow, TriageRow
from gatecrash.metrics import aupr_in, aupr_out, auroc, detection_error, fpr_at_tpr, mann_whitney
from gatecrash.triage.job import TriageJob
from gatecrash.triage.run import HELD_OUT, INLIERS, Findings
from gatecrash.triage.threshold import Threshold, choose_threshold, rates, share_above

Numbers = dict[str, float]

TASKS = ("mistakes", "adversarial", "outliers")


class Sorted:
    """Who is in and who is out in every task."""

    def __init__(self, job: TriageJob, findings: Findings) -> None:
        self.job, self.findings = job, findings
        self.right = {name: self._right(name) for name in (INLIERS, HELD_OUT) if name in findings.predictions}

    def _right(self, name: str) -> Tensor:
        images = self.job.inliers if name == INLIERS else self.job.held_out
        if images is None or images.y is None:
            raise ValueError(f"{name} must have labels")
        return self.findings.predictions[name] == images.y

    def fooled(self, title: str) -> Tensor:
        """The test images whose adversarial version counts, (N,) bool."""
        everyone = torch.ones(len(self.job.inliers), dtype=torch.bool)
        if not self.job.fooled_only or self.job.inliers.y is None:
            return everyone
        return self.right[INLIERS] & (self.findings.predictions[title] != self.job.inliers.y)

    def accuracy(self, name: str) -> float:
        """The classifier's accuracy on the test or validation images, or on adversarial ones by their title."""
        if name in self.right:
            return float(self.right[name].double().mean())
        labels = self.job.inliers.y
        return float("nan") if labels is None else float((self.findings.predictions[name] == labels).double().mean())

    def sides(self, task: str, against: str, title: str, number: int) -> tuple[Tensor, Tensor]:
        """The scores of those in and those out."""
        scores, inside = self.findings.scores, self.findings.scores[number, title, INLIERS]
        if task == "mistakes":
            return inside[self.right[INLIERS]], inside[~self.right[INLIERS]]
        outside = scores[number, title, against]
        if task == "adversarial":
            counts = self.fooled(against)
            return (inside[counts], outside[counts]) if self.job.fooled_only else (inside, outside)
        return inside, outside

    def threshold(self, title: str, number: int) -> Threshold | None:
        """The threshold that cross-validation chooses for mistakes; None where there are too few."""
        name = HELD_OUT if HELD_OUT in self.right else INLIERS
        wrong = ~self.right[name]
        if min(int(wrong.sum()), int((~wrong).sum())) < 2:
            return None
        return choose_threshold(self.findings.scores[number, title, name], wrong, self.job.folds, self.job.seed)


def tasks(job: TriageJob) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every task with what it is against, and what is known of that."""
    yield "mistakes", "mistakes", {"norm": None, "eps": None}
    for adversary in job.adversaries:
        yield "adversarial", adversary.title, {"norm": adversary.plan.norm, "eps": adversary.eps}
    for name in job.outliers:
        yield "outliers", name, {"norm": None, "eps": None}


def rows_of(job: TriageJob, findings: Findings) -> list[TriageRow]:
    """A row per detector and task; numbers are means over the repeats, with their standard deviations beside them."""
    groups = Sorted(job, findings)
    thresholds = {(t, n): groups.threshold(t, n) for t in job.detectors for n in job.repeats_of(t)}
    rows: list[TriageRow] = []
    for task, against, about in tasks(job):
        for title in job.detectors:
            sides = [groups.sides(task, against, title, number) for number in job.repeats_of(title)]
            if min(len(sides[0][0]), len(sides[0][1])) < 1:
                continue
            per_repeat = [
                numbers_of(task, inside, outside, thresholds[title, number])
                for number, (inside, outside) in enumerate(sides)
            ]
            if len(per_repeat) < job.repeats:  # without a seed the detector is the same in all
                per_repeat *= job.repeats
            row: dict[str, Any] = {
                "detector": title,
                "task": task,
                "against": against,
                **about,
                "n_in": len(sides[0][0]),
                "n_out": len(sides[0][1]),
                "repeats": job.repeats,
                **averaged(per_repeat),
                "per_repeat": per_repeat,
            }
            if task == "adversarial":
                row["accuracy"] = groups.accuracy(against)
            rows.append(cast(TriageRow, row))
    return rows


def numbers_of(task: str, inside: Tensor, outside: Tensor, threshold: Threshold | None) -> Numbers:
    """The numbers of one repeat."""
    numbers = {
        "auroc": auroc(inside, outside),
        "aupr_in": aupr_in(inside, outside),
        "aupr_out": aupr_out(inside, outside),
        "fpr95": fpr_at_tpr(inside, outside),
        "detection_error": detection_error(inside, outside),
    }
    if task == "mistakes":
        test = mann_whitney(inside, outside)
        # The smaller of the two statistics, as the paper has it.
        numbers |= {"u": min(test.u, len(inside) * len(outside) - test.u), "p": test.p}
    if threshold is not None:
        numbers |= {
            "threshold": threshold.value,
            "rejected_in": share_above(inside, threshold.value),
            "rejected_out": share_above(outside, threshold.value),
        }
        if task == "mistakes":
            wanted = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
            reached = rates(torch.cat([inside, outside]), wanted, threshold.value)
            numbers |= {
                "precision": reached.precision,
                "recall": reached.recall,
                "validated_precision": threshold.validated.precision,
                "validated_recall": threshold.validated.recall,
            }
    return numbers


def averaged(per_repeat: Sequence[Numbers]) -> Numbers:
    """Means, and standard deviations under NAME_std (0 for one repeat); of p the median, which is what it has."""
    found: Numbers = {}
    for name in per_repeat[0]:
        values = [numbers[name] for numbers in per_repeat]
        found[name] = statistics.median(values) if name == "p" else statistics.mean(values)
        if name not in ("p", "u"):
            found[f"{name}_std"] = deviation(values)
    return found


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0 for one value, and exactly 0 for equal ones."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def purified_rows(job: TriageJob, findings: Findings) -> list[PurifiedRow]:
    """The accuracy before and after purification for every detector and point of the grid, averaged over repeats."""
    labels = {INLIERS: job.inliers.y, HELD_OUT: None if job.held_out is None else job.held_out.y}
    groups = Sorted(job, findings)
    found: dict[tuple[str, float, float], list[dict[str, Tensor]]] = {}
    for part in findings.purified:
        found.setdefault((part.detector, part.step, part.pull), []).append(part.predictions)
    rows: list[PurifiedRow] = []
    for (title, step, pull), parts in found.items():
        row: dict[str, Any] = {"detector": title, "step": step, "pull": pull, "repeats": len(parts)}
        for name, key in ((HELD_OUT, "validation"), (INLIERS, "test")):
            y = labels[name]
            if y is not None:
                after = [float((p[name] == y).double().mean()) for p in parts]
                row[f"{key}_before"] = groups.accuracy(name)
                row[f"{key}_after"] = statistics.mean(after)
                row[f"{key}_std"] = deviation(after)
        rows.append(cast(PurifiedRow, row))
    return rows


def sample_table(job: TriageJob, findings: Findings) -> pa.Table:
    """A row per image, detector and repeat: its set, its score, and what the classifier made of it.

    A detector without a seed has rows in the first repeat alone.
    """
    roles = {INLIERS: "in", HELD_OUT: "held_out", **dict.fromkeys(job.outliers, "out")}
    tables = []
    for (number, title, name), scores in findings.scores.items():
        images = {INLIERS: job.inliers, HELD_OUT: job.held_out, **dict.fromkeys(job.outliers)}.get(name, job.inliers)
        count = len(scores)
        columns = {
            "detector": pa.repeat(title, count),
            "repeat": pa.repeat(number, count),
            "set": pa.repeat(name, count),
            "role": pa.repeat(roles.get(name, "adversarial"), count),
            "index": np.arange(count),
            "score": scores.double().numpy(),
            "predicted": findings.predictions[name].numpy(),
            "label": pa.nulls(count) if images is None or images.y is None else images.y.numpy(),
        }
        tables.append(pa.table([pa.array(columns[f.name]).cast(f.type) for f in TRIAGE_SAMPLES], schema=TRIAGE_SAMPLES))
    return pa.concat_tables(tables)
