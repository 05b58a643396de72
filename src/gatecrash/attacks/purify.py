"""Purification of features: moved to where they are likelier, by the same search in latent space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from typing import Unpack

import torch
from torch import Tensor

from gatecrash.attacks.options import check_ball, check_counts
from gatecrash.ball import Ball, Linf
from gatecrash.found import Found
from gatecrash.portions import in_portions
from gatecrash.search import SearchOptions, search
from gatecrash.stepper import Langevin

_EVERYWHERE = 1e30
"""A radius that no feature comes to: the paper has no ball."""


def purify(
    judge: Callable[[Tensor], Tensor],
    features: Tensor,
    *,
    step: float = 0.1,
    pull: float = 0.0,
    steps: int = 100,
    ball: Ball | None = None,
    **options: Unpack[SearchOptions],
) -> Found:
    """Move features to where their score is lower, without losing sight of where they came from.

    Equations (8) and (9) of the generative models' paper, Appendix B: gradient descent with learning rate ε on
    BPD(F) + ν‖F − F_ref‖², 100 steps. It returns the last point, as `keep="last"` does here; the default is the best.

    Args:
        judge: z → score (B,), higher = less likely: a density's bits per dimension, a detector's `judge`.
        features: F_ref, (B, ...).
        step: ε, which multiplies the gradient itself; the paper takes 0.1 and 0.01.
        pull: ν, how strongly the features are held back; the paper takes 0, 0.01, 0.1 and 1.
        steps: gradient steps.
        ball: how far features may move, with box=None; None is any distance, as in the paper.
        **options: as for `search`; `stop` is in units of the objective, the score with the pull's share.

    Returns:
        What was found; `found.score` is the score of the purified features.

    Raises:
        ValueError: `step` is not above 0, `pull` is negative, the ball has a box, or the features are not floats or
            none.
    """
    if not callable(judge):
        raise TypeError(f"judge must be a function of features, such as a detector's judge, got {judge!r}")
    if not isinstance(pull, Real):
        raise ValueError(f"pull must be a number, got {pull!r}")
    if not (isinstance(step, Real) and 0 < step < inf):
        raise ValueError(f"step must be a number above 0, got {step!r}")
    if not pull >= 0:
        raise ValueError(f"pull must not be negative, got {pull:g}")
    if ball is not None:
        check_ball(ball)
    if ball is not None and ball.box is not None:
        raise ValueError(f"features have no box: give the ball box=None, got {ball} with {ball.box}")
    if not isinstance(features, Tensor):
        raise ValueError(f"features must be a tensor of floats, (B, ...), got {features!r}")
    if not (features.is_floating_point() and features.ndim >= 2):
        raise ValueError(f"features must be floats of shape (B, ...), got {features.dtype} {tuple(features.shape)}")
    if features.numel() == 0:
        raise ValueError(f"features must hold at least one sample, got shape {tuple(features.shape)}")
    check_counts(steps=steps, batch_size=options.get("batch_size"))
    found = search(
        Likelier(judge, features.detach(), pull),
        features,
        ball or Linf(_EVERYWHERE, box=None),
        stepper=Langevin(step, noise=0.0),
        steps=steps,
        **options,
    )

    def measured(rung: Found) -> Found:
        score, start_score = (_scores(judge, z, options.get("batch_size")) for z in (rung.x, rung.start))
        return replace(rung, score=score, start_score=start_score)

    return found.with_measured(measured)


def _scores(judge: Callable[[Tensor], Tensor], z: Tensor, batch_size: int | None) -> Tensor:
    """The scores of features batch by batch, (B,), without gradients."""
    with torch.no_grad():
        return torch.cat(in_portions(judge, z, batch_size))


@dataclass(frozen=True)
class Likelier:
    """score(z) + ν‖z − z_ref‖², equation (8)."""

    judge: Callable[[Tensor], Tensor]
    reference: Tensor
    pull: float

    def __call__(self, z: Tensor, rows: Tensor) -> Tensor:
        """The value of every sample, (B,)."""
        score = self.judge(z)
        if score.shape != (len(z),):
            raise ValueError(f"judge must give one score per sample, ({len(z)},), got {tuple(score.shape)}")
        if z.requires_grad and not score.requires_grad:
            raise ValueError(
                "judge has no gradient with respect to the features; look for detach(), no_grad() or numpy in it"
            )
        return score + self.pull * (z - self.reference[rows]).square().flatten(1).sum(dim=1)
