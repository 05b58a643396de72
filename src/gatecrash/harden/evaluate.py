"""What hardening bought and what it cost: accuracy and detection, clean and attacked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import Tensor

from gatecrash.attacks import attack_softmax, pgd
from gatecrash.audit.job import build_detector, labelled
from gatecrash.ball import Linf
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector, fit_all
from gatecrash.encoder import Encoder
from gatecrash.harden.plan import EvaluationPlan
from gatecrash.metrics import auroc, detection_error, fpr_at_tpr
from gatecrash.objective import single


class HardenRow(TypedDict):
    """One line of the table: a model, a detector on it and a set of outliers; fractions in 0..1."""

    method: str
    accuracy: float
    pgd_accuracy: float
    detector: str
    outliers: str
    auroc: float
    fpr95: float
    detection_error: float
    attacked_auroc: float
    attacked_fpr95: float
    attacked_detection_error: float


def evaluated(
    title: str,
    encoder: Encoder,
    features: Encoder | None,
    plan: EvaluationPlan,
    train: ImageSet,
    test: ImageSet,
    outliers: Mapping[str, ImageSet],
    seed: int,
    *,
    exposed: ImageSet | None,
    folder: Path,
) -> list[HardenRow]:
    """The lines of one model; detectors that need outliers learn from those that training was exposed to.

    The attack is Chen et al.'s Algorithm 1 on both sides: inliers are led to a uniform softmax, outliers to a sure one.
    """
    detectors = {part.title: build_detector(part, encoder, features, folder) for part in plan.detectors}
    fit_all(list(detectors.values()), labelled(train), outliers=None if exposed is None else exposed.x)
    clean = accuracy(encoder, test, plan.batch_size)
    attacked = pgd_accuracy(encoder, test, plan, seed)
    led_out = softmax_attacked(encoder, test.x, plan, "in", seed)
    led_in = {name: softmax_attacked(encoder, images.x, plan, "out", seed) for name, images in outliers.items()}
    rows: list[HardenRow] = []
    for name, detector in detectors.items():
        inside, inside_moved = (scores(detector, x, plan) for x in (test.x, led_out))
        for against, images in outliers.items():
            outside, outside_moved = (scores(detector, x, plan) for x in (images.x, led_in[against]))
            rows.append(
                {
                    "method": title,
                    "accuracy": clean,
                    "pgd_accuracy": attacked,
                    "detector": name,
                    "outliers": against,
                    "auroc": auroc(inside, outside),
                    "fpr95": fpr_at_tpr(inside, outside),
                    "detection_error": detection_error(inside, outside),
                    "attacked_auroc": auroc(inside_moved, outside_moved),
                    "attacked_fpr95": fpr_at_tpr(inside_moved, outside_moved),
                    "attacked_detection_error": detection_error(inside_moved, outside_moved),
                }
            )
    return rows


def accuracy(encoder: Encoder, images: ImageSet, batch_size: int) -> float:
    """The share of images whose class the network gets right."""
    if images.y is None:
        raise ValueError(f"{images.name} has no labels")
    with torch.no_grad():
        predicted = [single(encoder(x.to(encoder.device))).argmax(dim=1).cpu() for x in images.x.split(batch_size)]
    return float((torch.cat(predicted) == images.y).double().mean())


def pgd_accuracy(encoder: Encoder, images: ImageSet, plan: EvaluationPlan, seed: int) -> float:
    """The same after PGD on every image."""
    if images.y is None:
        raise ValueError(f"{images.name} has no labels")
    x, y = images.x.to(encoder.device), images.y.to(encoder.device)
    found = pgd(encoder, x, y, Linf(plan.pgd_eps), steps=plan.pgd_steps, generator=seed, batch_size=plan.batch_size)
    return accuracy(encoder, ImageSet(found.x.cpu(), images.y, images.name), plan.batch_size)


def softmax_attacked(
    encoder: Encoder, x: Tensor, plan: EvaluationPlan, side: Literal["in", "out"], seed: int
) -> Tensor:
    """The images after the attack on the softmax."""
    found = attack_softmax(
        encoder,
        x.to(encoder.device),
        Linf(plan.eps),
        side=side,
        steps=plan.steps,
        step=plan.step,
        generator=seed,
        batch_size=plan.batch_size,
    )
    return found.x


def scores(detector: Detector, x: Tensor, plan: EvaluationPlan) -> Tensor:
    """A detector's scores of images, in main memory."""
    return detector.scores(x, plan.batch_size).cpu()
