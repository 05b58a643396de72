"""Attacks on a detector's score: lower it, raise it, bring it to a value."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Unpack

import torch
from torch import Tensor, nn

from gatecrash.attacks.options import check_ball
from gatecrash.attacks.registry import register
from gatecrash.attacks.rounding import check_box, in_8bit
from gatecrash.ball import Ball
from gatecrash.found import Found
from gatecrash.images import check_images
from gatecrash.objective import LowerScore, RaiseScore, ScoreNear
from gatecrash.portions import in_portions
from gatecrash.protocols import Detector, Stepper
from gatecrash.search import SearchOptions, search
from gatecrash.speed import full_float32
from gatecrash.stepper import Adamax, Apgd


@register("admit", aim="score", paper="Fort, Section 2.1")
def admit(
    detector: Detector,
    outliers: Tensor,
    ball: Ball,
    *,
    steps: int = 100,
    stepper: Stepper | None = None,
    eight_bit: bool = False,
    **options: Unpack[SearchOptions],
) -> Found:
    """Lower the score of outliers until the detector lets them in.

    `stop` is a score: an outlier at or below it is in, and is left alone from then on. Fort's attack, 30 sign steps
    with its trajectory, is `admit(detector, x, Linf(0.009), stepper=Sign(3e-4), steps=30, keep="last", record=True)`.

    Args:
        detector: any detector; its exact score is attacked, preprocessing included.
        outliers: (B, C, H, W) in [0, 1].
        ball: how far an image may be moved.
        steps: steps per run.
        stepper: how to move; APGD by default.
        eight_bit: return a `RoundedFound`: images in whole grey levels inside the ball, and what that cost.
        **options: as for `search`.
    """
    require_fitted(detector)
    check_ball(ball)
    if eight_bit:
        check_box(ball)
    objective = LowerScore(detector)
    found = search(objective, outliers, ball, stepper=stepper or Apgd(), steps=steps, **options)
    if eight_bit:
        found = in_8bit(found, ball, objective, stop=options.get("stop"), batch_size=options.get("batch_size"))
    return found.with_measured(lambda rung: replace(rung, score=rung.value, start_score=rung.start_value))


@register("evict", aim="score", paper="Fort, Section 2.1")
def evict(
    detector: Detector,
    inliers: Tensor,
    ball: Ball,
    *,
    steps: int = 100,
    stepper: Stepper | None = None,
    eight_bit: bool = False,
    **options: Unpack[SearchOptions],
) -> Found:
    """Raise the score of inliers until the detector throws them out.

    The mirror image of `admit`: `stop` is a score, and an inlier at or above it is out. The objective, `found.value`,
    is minus the score.
    """
    require_fitted(detector)
    check_ball(ball)
    if eight_bit:
        check_box(ball)
    stop = options.get("stop")
    if isinstance(stop, Real | Tensor):  # the search refuses anything else
        options["stop"] = -stop
    objective = RaiseScore(detector)
    found = search(objective, inliers, ball, stepper=stepper or Apgd(), steps=steps, **options)
    if eight_bit:
        found = in_8bit(found, ball, objective, stop=options.get("stop"), batch_size=options.get("batch_size"))
    return found.with_measured(lambda rung: replace(rung, score=-rung.value, start_score=-rung.start_value))


@register("score_to", aim="score", paper="Liang et al., Section 2.3")
def score_to(
    detector: Detector,
    start: Tensor,
    value: float | Tensor,
    ball: Ball,
    *,
    steps: int = 100,
    stepper: Stepper | None = None,
    eight_bit: bool = False,
    **options: Unpack[SearchOptions],
) -> Found:
    """Bring the score of images to a value, one for all or one per image.

    The objective is the squared distance of the score from the value, and `stop` is in its units. The default stepper
    is annealed Adamax, which ends on the value itself rather than to either side of it. `eight_bit` as for `admit`.
    """
    require_fitted(detector)
    check_images(start, "start")
    check_ball(ball)
    if eight_bit:
        check_box(ball)
    goal = torch.as_tensor(value, dtype=start.dtype, device=start.device)
    if goal.ndim and goal.shape != start.shape[:1]:
        raise ValueError(f"value must be one number or of shape ({len(start)},), got {tuple(goal.shape)}")
    if not bool(goal.isfinite().all()):
        raise ValueError(f"value must be finite, got {float(goal[~goal.isfinite()].flatten()[0])}")
    objective = ScoreNear(detector, goal)
    found = search(objective, start, ball, stepper=stepper or Adamax(), steps=steps, **options)
    if eight_bit:
        found = in_8bit(found, ball, objective, stop=options.get("stop"), batch_size=options.get("batch_size"))
    before = scores(detector, start, options.get("batch_size"))
    return found.with_measured(
        lambda rung: replace(rung, score=scores(detector, rung.x, options.get("batch_size")), start_score=before)
    )


def scores(detector: Detector, x: Tensor, batch_size: int | None) -> Tensor:
    """The scores of images batch by batch, (B,), without gradients, as `detector.scores` computes them."""
    with torch.no_grad(), full_float32():
        return torch.cat(in_portions(detector, x, batch_size))


def require_fitted(detector: Detector) -> None:
    """Raises a TypeError for what is no detector, and a ValueError when it knows that it is not fitted."""
    if isinstance(detector, type):
        raise TypeError(f"detector must be a detector, such as {detector.__name__}(network), got its class")
    if not (hasattr(detector, "encode") and hasattr(detector, "judge")):
        given = type(detector).__name__ if isinstance(detector, nn.Module) else repr(detector)
        raise TypeError(f"detector must be a detector, such as MSP(network), got {given}")
    check = getattr(detector, "require_fitted", None)
    if check is not None:
        check()
