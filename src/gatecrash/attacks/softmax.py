"""The two-sided attack on softmax-based detectors: Chen et al.'s Algorithm 1."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor, nn

from gatecrash.attacks.options import check_ball
from gatecrash.attacks.registry import register
from gatecrash.attacks.rounding import in_8bit
from gatecrash.ball import Ball
from gatecrash.encoder import as_encoder
from gatecrash.found import Found
from gatecrash.objective import Entropy, ToUniform
from gatecrash.search import SearchOptions, search
from gatecrash.stepper import Sign

PIXEL = 1 / 255


@register("softmax", aim="softmax", paper="Chen et al., Algorithm 1")
def attack_softmax(
    network: nn.Module,
    images: Tensor,
    ball: Ball,
    *,
    side: Literal["in", "out"],
    steps: int = 10,
    step: float = PIXEL,
    eight_bit: bool = False,
    **options: Unpack[SearchOptions],
) -> Found:
    """Make a classifier unsure of inliers (side "in") or sure of outliers (side "out").

    From a random point of the ball, sign steps of ξ = 1/255: on inliers against the cross-entropy to the uniform
    distribution, on outliers against the entropy of the softmax. The paper takes ε = 1/255 and 10 steps.

    Args:
        network: a classifier or `Encoder`; its output is read.
        images: (B, C, H, W) in [0, 1].
        ball: how far an image may be moved.
        side: whether the images are inliers ("in") or outliers ("out").
        steps: steps per run.
        step: ξ, in pixels.
        eight_bit: return a `RoundedFound`: images in whole grey levels inside the ball, and what that cost.
        **options: as for `search`.
    """
    if side not in ("in", "out"):
        raise ValueError(f"side must be 'in' or 'out', got {side!r}")
    check_ball(ball)
    logits = as_encoder(network).at(None)
    objective = ToUniform(logits) if side == "in" else Entropy(logits)
    options.setdefault("random_start", True)
    found = search(objective, images, ball, stepper=Sign(step), steps=steps, **options)
    if eight_bit:
        found = in_8bit(found, ball, objective, stop=options.get("stop"), batch_size=options.get("batch_size"))
    return found
