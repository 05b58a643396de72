"""Attacks on a classifier's decision: FGSM, BIM and PGD, in the L∞ or the L2 ball."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from gatecrash.attacks.registry import register
from gatecrash.ball import Ball, Linf
from gatecrash.encoder import as_encoder
from gatecrash.found import Found
from gatecrash.images import check_images, check_labels
from gatecrash.objective import Misclassify
from gatecrash.protocols import Stepper
from gatecrash.search import SearchOptions, search
from gatecrash.stepper import Normalised, ScheduleName, Sign


@register("fgsm", aim="classifier", paper="Goodfellow et al., 2015")
def fgsm(network: nn.Module, images: Tensor, labels: Tensor, ball: Ball, **options: Unpack[SearchOptions]) -> Found:
    """Lead a classifier astray with one step of length ε along the gradient of its cross-entropy.

    The image after the step is returned, whether or not it raised the loss.
    """
    options.setdefault("keep", "last")
    return _attack(network, images, labels, ball, stepper_for(ball, share=1.0), steps=1, **options)


@register("bim", aim="classifier", paper="Kurakin et al., 2017")
def bim(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    ball: Ball,
    *,
    steps: int = 10,
    step: float | None = None,
    **options: Unpack[SearchOptions],
) -> Found:
    """Lead a classifier astray with many small steps from the image itself; `step` is ε/steps by default."""
    stepper = stepper_for(ball, step, share=1 / max(steps, 1))
    return _attack(network, images, labels, ball, stepper, steps=steps, **options)


@register("pgd", aim="classifier", paper="Madry et al., 2018")
def pgd(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    ball: Ball,
    *,
    steps: int = 40,
    step: float | None = None,
    **options: Unpack[SearchOptions],
) -> Found:
    """Lead a classifier astray with many steps from a random point of the ball; `step` is 2.5·ε/steps by default."""
    options.setdefault("random_start", True)
    stepper = stepper_for(ball, step, share=2.5 / max(steps, 1))
    return _attack(network, images, labels, ball, stepper, steps=steps, **options)


def _attack(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    ball: Ball,
    stepper: Stepper,
    *,
    steps: int,
    **options: Unpack[SearchOptions],
) -> Found:
    """Search for the largest cross-entropy of the true label."""
    check_images(images)
    check_labels(labels, len(images))
    least, most = torch.aminmax(labels)
    objective = Misclassify(as_encoder(network).at(None), labels.long(), (int(least), int(most)))
    return search(objective, images, ball, stepper=stepper, steps=steps, **options)


def stepper_for(
    ball: Ball, step: float | None = None, share: float = 0.1, schedule: ScheduleName = "constant"
) -> Stepper:
    """Steps of the ball's own kind: signs in L∞, normalised gradients in L2; by default a share of ε long."""
    kind = Sign if isinstance(ball, Linf) else Normalised
    return kind(step, schedule, share)
