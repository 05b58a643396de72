"""The two-sided attack on Mahalanobis detectors: Chen et al.'s Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Unpack

from torch import Tensor

from gatecrash.attacks.registry import register
from gatecrash.attacks.score import admit, evict, scores
from gatecrash.attacks.softmax import PIXEL
from gatecrash.ball import Ball
from gatecrash.detectors.distance import Mahalanobis
from gatecrash.found import Found
from gatecrash.protocols import Latent
from gatecrash.search import SearchOptions
from gatecrash.stepper import Sign


@register("mahalanobis", aim="score", paper="Chen et al., Algorithm 2")
def attack_mahalanobis(
    detector: Mahalanobis,
    images: Tensor,
    ball: Ball,
    *,
    side: Literal["in", "out"],
    steps: int = 10,
    step: float = PIXEL,
    eight_bit: bool = False,
    **options: Unpack[SearchOptions],
) -> Found:
    """Raise the Mahalanobis distances of inliers (side "in") or lower those of outliers (side "out").

    From a random point of the ball, sign steps of ξ = 1/255 on the logit of the logistic regression over the layers'
    distances, or on their mean where the detector combines by that. The paper writes −log p and −log(1 − p), which
    are monotone in the logit, so that every step is the same; but p saturates, and the logit does not. The distances
    are those of the images as they are: the detector's input step is left out of the attack.

    Args:
        detector: a fitted Mahalanobis detector.
        images: (B, C, H, W) in [0, 1].
        ball: how far an image may be moved; the paper takes L∞ with ε = 1/255.
        side: whether the images are inliers ("in") or outliers ("out").
        steps: steps per run.
        step: ξ, in pixels.
        eight_bit: return a `RoundedFound`: images in whole grey levels inside the ball, and what that cost.
        **options: as for `search`; `stop` is a score without the input step.

    Returns:
        What was found; `found.value` is what the attack acted on, `found.score` the detector's own score, input step
        included.
    """
    if not isinstance(detector, Mahalanobis):
        raise ValueError(f"detector must be a Mahalanobis detector, got {type(detector).__name__}")
    if side not in ("in", "out"):
        raise ValueError(f"side must be 'in' or 'out', got {side!r}")
    detector.require_fitted()
    options.setdefault("random_start", True)
    attack = evict if side == "in" else admit
    found = attack(Unprocessed(detector), images, ball, steps=steps, stepper=Sign(step), eight_bit=eight_bit, **options)
    before = scores(detector, images, options.get("batch_size"))
    return found.with_measured(
        lambda rung: replace(rung, score=scores(detector, rung.x, options.get("batch_size")), start_score=before)
    )


@dataclass(frozen=True)
class Unprocessed:
    """A Mahalanobis detector without its input step."""

    detector: Mahalanobis

    def encode(self, x: Tensor) -> Latent:
        """The features of the images as they are."""
        if self.detector.encoder is None:
            raise ValueError("a Mahalanobis detector needs an encoder")
        latent: Latent = self.detector.encoder(x)
        return latent

    def judge(self, z: Latent) -> Tensor:
        """The combined distance of every sample, (B,)."""
        return self.detector.judge(z)

    def __call__(self, x: Tensor) -> Tensor:
        """The score of every image, (B,)."""
        return self.judge(self.encode(x))
