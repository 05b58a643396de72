"""Attacks on the latent: an outlier is made to collide with an inlier."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from gatecrash.attacks.neighbours import in_two_turns
from gatecrash.attacks.options import check_ball
from gatecrash.attacks.registry import register
from gatecrash.attacks.rounding import in_8bit
from gatecrash.ball import Ball
from gatecrash.encoder import as_encoder
from gatecrash.found import Found
from gatecrash.images import check_images, check_pair
from gatecrash.metrics import mape
from gatecrash.objective import MatchLatent, squared_difference
from gatecrash.portions import in_portions
from gatecrash.protocols import Encoder, Latent, Stepper, as_vector, detached, joined, leaves, rows_of
from gatecrash.search import SearchOptions, check_options, search
from gatecrash.speed import current_pace, full_float32, is_exact
from gatecrash.stepper import Adamax, ScheduleName


@register("collide", aim="latent", paper="Liang et al., Algorithm 1")
def collide(
    encoder: Encoder | nn.Module,
    start: Tensor,
    target: Tensor,
    ball: Ball,
    *,
    steps: int = 300,
    step: float | None = None,
    schedule: ScheduleName = "cosine",
    stepper: Stepper | None = None,
    neighbours: bool = False,
    eight_bit: bool = False,
    **options: Unpack[SearchOptions],
) -> Found:
    """Make images collide with others in latent space: f(x) ≅ f(target), with x near its start.

    Liang et al.'s Algorithm 1: from a random point of the ball, Adamax on the gradient of ‖f(x) − f(target)‖², divided
    by its length (L2) or as its sign (L∞), then back into ball and box. `schedule="constant"` is the paper's fixed
    step; the default anneals it, which comes several times closer at the same cost. The paper keeps the last point of
    one run: `keep="last"`.

    Args:
        encoder: images → latent; any network or `Encoder`. A detector's `encode` makes the detector itself the aim.
        start: (B, C, H, W) in [0, 1]; one image is repeated for all targets.
        target: (B, C, H, W) in [0, 1].
        ball: how far x may be from its start.
        steps: steps per run.
        step: α; None is ε/100.
        schedule: how the step shrinks.
        stepper: another way to move; then `step` and `schedule` say nothing.
        neighbours: search for every other sample first, and for the rest from the perturbation that led to the nearest
            of those targets, which comes a few percent closer; what is found for a sample then depends on the others.
        eight_bit: return a `RoundedFound`: images in whole grey levels inside the ball, and what that cost.
        **options: as for `search`.

    Returns:
        What was found; `found.mape` is mean|z′ − z| / max|z| per sample.

    Raises:
        ValueError: start and target differ in shape, or are no images.
        TypeError: encoder or ball are none.
    """
    check_images(start, "start")
    check_images(target, "target")
    if len(start) == 1:
        start = start.expand(len(target), -1, -1, -1)
    check_pair(start, target)
    check_ball(ball)
    if not callable(encoder):
        raise TypeError(f"encoder must be a network, an Encoder or a function of images, got {encoder!r}")
    check_options(start, steps, **options)  # before there is work
    network: Encoder = as_encoder(encoder) if isinstance(encoder, nn.Module) else encoder
    with full_float32():
        goal = latents(network, target, options.get("batch_size"))
    options.setdefault("random_start", True)
    objective = Remembering(network, goal)
    stepper = stepper or Adamax(step, schedule, straight=0 if schedule == "constant" else 0.5)
    if neighbours:
        if options.get("first") is not None:
            raise ValueError("with neighbours=True the first points come from there; leave out `first`")
        found = in_two_turns(partial(_some, network, goal, start, ball, stepper, steps, options), start, goal)
    else:
        found = search(objective, start, ball, stepper=stepper, steps=steps, **options)
    if eight_bit:
        found = in_8bit(found, ball, objective, stop=options.get("stop"), batch_size=options.get("batch_size"))
    with full_float32():
        return found.with_measured(
            lambda rung: replace(rung, mape=mape(objective.latents_at(rung.x, options.get("batch_size")), goal))
        )


class Remembering:
    """`MatchLatent`, which remembers the last points without a gradient, often those that are returned in the end."""

    def __init__(self, encoder: Encoder, target: Latent) -> None:
        self.encoder, self.target = encoder, target
        self.seen: tuple[Tensor, Latent] | None = None

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The squared distance of every sample's latent from its target, (B,)."""
        z = self._encoded(x)
        if not torch.is_grad_enabled() and current_pace() == "plain" and is_exact():
            self.seen = x, detached(z)
        return squared_difference(z, rows_of(self.target, rows))

    def _encoded(self, x: Tensor) -> Latent:
        """The latents of points; of one that is repeated, as the start of all is, it is computed once."""
        if len(x) <= 2 or x.requires_grad or x.stride(0) != 0:
            return self.encoder(x)
        # Two of it, since some networks take a batch of one for no batch.
        return rows_of(self.encoder(x[:2]), torch.zeros(len(x), dtype=torch.long, device=x.device))

    def latents_at(self, x: Tensor, batch_size: int | None) -> Latent:
        """The latents of points, computed only where they are not remembered."""
        if self.seen is not None and self.seen[0].shape == x.shape and torch.equal(self.seen[0], x):
            return self.seen[1]
        return latents(self.encoder, x, batch_size)


def _some(
    network: Encoder,
    goal: Latent,
    start: Tensor,
    ball: Ball,
    stepper: Stepper,
    steps: int,
    options: SearchOptions,
    rows: Tensor,
    first: Tensor | None,
) -> Found:
    """The search for some of the samples."""
    own, stop = options.copy(), options.get("stop")
    own["first"] = first
    if isinstance(stop, Tensor) and stop.ndim == 1:
        own["stop"] = stop.to(rows.device)[rows]
    return search(MatchLatent(network, rows_of(goal, rows)), start[rows], ball, stepper=stepper, steps=steps, **own)


def latents(encoder: Encoder, x: Tensor, batch_size: int | None) -> Latent:
    """The latents of images without their history, batch by batch.

    Raises:
        ValueError: the network's output is not finite; it names the first such batch.
    """
    with torch.no_grad():
        parts = in_portions(lambda batch: detached(encoder(batch)), x, batch_size)
    done = 0
    for part in parts:
        for leaf in leaves(part):
            bad = (~as_vector(leaf).isfinite()).any(dim=1).nonzero().flatten().tolist()
            if bad:
                batch = (done + bad[0]) // (batch_size or len(x))
                raise ValueError(f"the network's output has NaN or infinity, first in batch {batch}")
        done += len(leaves(part)[0])
    return joined(parts)
