"""The strongest perturbation we know, per sample: a suite of attacks, the best of which counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gatecrash.attacks.options import check_ball, check_counts, check_side
from gatecrash.attacks.registry import register
from gatecrash.attacks.rounding import check_box
from gatecrash.attacks.score import require_fitted
from gatecrash.attacks.suite import Budget, Side, Suite, WorstCase
from gatecrash.ball import Ball
from gatecrash.images import check_images
from gatecrash.protocols import Detector
from gatecrash.search import check_level, check_start, generator_for

BUDGETS = {
    "quick": Budget(
        steps=30,
        restarts=1,
        starts=0,
        averaged=1,
        hops=0,
        surrogate_steps=20,
        targets=1,
        collision_steps=20,
        square_steps=50,
        falling=30,
    ),
    "standard": Budget(
        steps=100,
        restarts=2,
        starts=12,
        averaged=6,
        hops=6,
        surrogate_steps=50,
        targets=3,
        collision_steps=50,
        square_steps=200,
        falling=400,
    ),
    "thorough": Budget(
        steps=200,
        restarts=4,
        starts=24,
        averaged=12,
        hops=16,
        surrogate_steps=100,
        targets=9,
        collision_steps=100,
        square_steps=1000,
        falling=800,
    ),
}


@register("worst_case", aim="score", paper="a suite; Croce & Hein 2020 for APGD, Andriushchenko et al. 2020 for Square")
def worst_case(
    detector: Detector,
    images: Tensor,
    ball: Ball,
    side: Side,
    budget: Literal["quick", "standard", "thorough"] = "standard",
    *,
    others: Tensor | None = None,
    stop: float | Tensor | None = None,
    generator: torch.Generator | int | None = None,
    batch_size: int | None = None,
    eight_bit: bool = False,
) -> WorstCase:
    """The strongest perturbation that a suite of attacks finds, per sample; there is nothing to tune.

    In turn: APGD on the score itself, in long runs and from many random points; steps along mean gradients, for scores
    with kinks, plain ones, small and, where the score is of more than logits, larger, and falling ones; where the
    detector's card says that the gradient is not exact, the score from simpler versions of every image (few greys,
    blurred), moved into the ball; where it reads logits, APGD on surrogates that do not saturate (log-odds, margin,
    spread of the logits) and towards each of the likeliest classes; transfer from the score without preprocessing where
    it has one; collision with the nearest latents of `others`; a gradient-free Square search; and the score once more
    from the best point of all: with some pixels drawn anew, with halved steps, along mean gradients, with falling
    steps. Whatever an attack follows, its points are ranked by the detector's own score.

    The best of many values of a randomised detector is the luckiest. What each attack found is therefore evaluated
    anew, several times, before it is compared, and once more before it is reported. Follow the mean of a detector's
    draws: `worst_case(Expected(detector, draws=16), …)`.

    Args:
        detector: any detector, fitted.
        images: (B, C, H, W) in [0, 1].
        ball: how far an image may be moved; with a list of eps, each starts from what the one before found. Its box
            must lie in [0, 1], where detectors take images.
        side: "out" lowers the score of outliers, "in" raises that of inliers.
        budget: how much work.
        others: images of the other side to collide with: inliers for "out", outliers for "in".
        stop: a score; a sample that has crossed it is left alone by the attacks that follow.
        generator: a generator or a seed.
        batch_size: attack this many samples at a time.
        eight_bit: return images in whole grey levels inside the ball; `found.cost` is what that took from the attack.

    Returns:
        What was found; `found.score` is the detector's score, `found.winner` the attack behind it.

    Raises:
        ValueError: the images are none, the detector is not fitted, or an option is off.
        TypeError: the ball is none.
    """
    require_fitted(detector)
    check_images(images)
    check_ball(ball)
    if ball.box is None or ball.box[0] < 0 or ball.box[1] > 1:
        raise ValueError(f"the suite needs a ball with a box in [0, 1], such as the default (0, 1), got {ball}")
    if eight_bit:
        check_box(ball)
    check_start(images, ball)
    check_side(side)
    check_counts(batch_size=batch_size)
    if not isinstance(budget, str) or budget not in BUDGETS:
        raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {budget!r}")
    if stop is not None:
        check_level("stop", stop, len(images))
    if others is not None:
        check_images(others, "others")
        if others.shape[1:] != images.shape[1:]:
            raise ValueError(
                f"others must be of the images' shape {tuple(images.shape[1:])}, got {tuple(others.shape[1:])}"
            )
    source = generator_for(generator, images.device)
    rungs: dict[int, WorstCase] = {}
    order = sorted(range(len(ball.ladder)), key=lambda i: ball.ladder[i])
    warm = None
    for i in order:
        suite = Suite(detector, images, ball.rungs[i], side, BUDGETS[budget], others, stop, source, batch_size)
        rungs[i] = suite.run(warm)
        warm = rungs[i].x
        if eight_bit:
            rungs[i] = suite.rounded(rungs[i])
    last = rungs[order[-1]]
    return last if len(order) == 1 else replace(last, lower_rungs=tuple(rungs[i] for i in range(len(order))))
