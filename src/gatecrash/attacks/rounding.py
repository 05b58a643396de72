"""Attacked images as 8-bit images, still inside the ball, and what the rounding cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gatecrash.attacks.options import check_ball, check_counts
from gatecrash.ball import Ball, Linf
from gatecrash.found import Found
from gatecrash.images import check_images, check_pair
from gatecrash.protocols import Objective
from gatecrash.stepper import choose

LEVELS = 255

_SLACK = 5e-7
"""How much of a pixel a grid point may lie outside: half of what a ball forgives, the rest is for float32."""


@dataclass(frozen=True)
class Rounded:
    """8-bit images and what they cost the attack."""

    x: Tensor
    """(B, C, H, W), whole grey levels divided by 255."""
    inside: Tensor
    """(B,), whether x lies in the ball; False where no 8-bit image does, and x is then the one nearest to the start."""
    value: Tensor
    """(B,), the objective at x."""
    value_before: Tensor
    """(B,), the objective before rounding."""

    @property
    def cost(self) -> Tensor:
        """What rounding took from the attack, (B,); negative where it happened to help."""
        return self.value - self.value_before

    @property
    def pixels(self) -> Tensor:
        """The images as uint8."""
        return (self.x * LEVELS).round().to(torch.uint8)


@dataclass(frozen=True)
class RoundedFound(Found):
    """What a search found and, where 8-bit images were asked for, what rounding it cost: `x` is then the rounded."""

    rounding: Rounded | None = None

    @property
    def cost(self) -> Tensor | None:
        """What rounding took from the attack, (B,), in units of the objective."""
        return None if self.rounding is None else self.rounding.cost


def in_8bit(
    found: Found, ball: Ball, objective: Objective, *, stop: float | Tensor | None, batch_size: int | None
) -> Found:
    """What a search found, in whole grey levels: images, values and success, inside the ball, are the rounded ones'."""

    def of(rung: Found, around: Ball) -> RoundedFound:
        rounded = to_8bit(rung.x, rung.start, around, objective, batch_size=batch_size)
        limit = rung.start_value if stop is None else torch.as_tensor(stop).to(rounded.value)
        success = rounded.value < limit if stop is None else rounded.value <= limit
        success = success & rounded.inside
        told = vars(rung) | {"x": rounded.x, "value": rounded.value, "success": success, "lower_rungs": ()}
        told["evaluations"] = rung.evaluations + 2  # of the rounded image, and of the image before
        return RoundedFound(**told, rounding=rounded)

    rungs = tuple(of(rung, around) for rung, around in zip(found.rungs, ball.rungs, strict=True))
    largest = rungs[ball.ladder.index(ball.eps)]
    return largest if len(rungs) == 1 else replace(largest, lower_rungs=rungs)


def to_8bit(x: Tensor, start: Tensor, ball: Ball, objective: Objective, *, batch_size: int | None = None) -> Rounded:
    """The attacked images in whole grey levels, rounded so that they stay inside the ball.

    In L∞ every pixel goes to the nearest level within ε of its start. In L2 all pixels go to the nearest level; then,
    until the image is inside, pixels go back one level towards their start, those first that it takes least far from
    where the attack had put them.

    The 8-bit image nearest to the start decides whether there is one inside at all: it is the only one in small
    balls, the start itself where that is 8-bit, and it is returned with `inside` False where it too lies outside.

    Args:
        x: (B, C, H, W) in [0, 1], what an attack found: `found.x`.
        start: the centres of the balls: `found.start`.
        ball: where x must stay; of a list of eps, the largest.
        objective: what the attack made small, for the cost: `LowerScore(detector)` or any other.
        batch_size: evaluate this many images at a time.

    Raises:
        ValueError: x and start are no images of one shape, the ball's box is not (0, 1), or the batch size is none.
        TypeError: the ball or the objective is none.
    """
    check_images(x, "x")
    check_images(start, "start")
    check_pair(start, x)
    check_ball(ball)
    check_box(ball)
    check_counts(batch_size=batch_size)
    check_objective(objective)
    exact = torch.float64 if x.device.type != "mps" else torch.float32
    levels, centre = (LEVELS * images.detach().to(exact) for images in (x, start))
    if isinstance(ball, Linf):
        reach = LEVELS * (ball.eps + _SLACK)
        grid = levels.round().clamp((centre - reach).ceil(), (centre + reach).floor())
    else:
        grid = _pulled_back(levels.flatten(1), centre.flatten(1), LEVELS * (ball.eps + _SLACK), x.dtype).view_as(x)
    home = centre.round()
    possible = ball.contains((home / LEVELS).to(x), start, slack=_SLACK)
    grid = choose(possible, grid, home)
    rounded = (grid / LEVELS).to(x)
    value, before = (_values(objective, images, batch_size) for images in (rounded, x.detach()))
    return Rounded(rounded, ball.contains(rounded, start), value, before)


def check_box(ball: Ball) -> None:
    """Raises a ValueError unless the ball's box is the one that the grey levels fill."""
    if ball.box != (0.0, 1.0):
        raise ValueError(f"8-bit images need a ball with the box (0, 1), got {ball.box}")


def check_objective(objective: object) -> None:
    """Raises a TypeError for what is no function of images and rows, a detector for one."""
    if not callable(objective) or isinstance(objective, type) or hasattr(objective, "judge"):
        given = f"the class {objective.__name__}" if isinstance(objective, type) else type(objective).__name__
        raise TypeError(f"objective must be what the attack made small, such as LowerScore(detector), got {given}")


def _pulled_back(levels: Tensor, centre: Tensor, reach: float, dtype: torch.dtype) -> Tensor:
    """Levels (B, D) rounded, then as many pixels one level nearer to home as it takes to come within reach."""
    grid, home = levels.round(), centre.round()
    while True:
        # Measured as the images will be: on a large flat image the rounding of k/255 in float32 adds up.
        placed = LEVELS * (grid / LEVELS).to(dtype).to(grid)
        excess = (placed - centre).square().sum(dim=1, keepdim=True) - reach**2
        nearer = grid + (home - grid).sign()
        if not bool(((excess > 0) & (nearer != grid)).any()):
            return grid
        saved = (grid - centre).square() - (nearer - centre).square()
        harm = (nearer - levels).abs() - (grid - levels).abs()
        order = harm.masked_fill(nearer == grid, torch.inf).argsort(dim=1)
        saved_before = saved.gather(1, order).cumsum(dim=1) - saved.gather(1, order)
        moved = torch.zeros_like(saved, dtype=torch.bool).scatter(1, order, saved_before < excess)
        grid = torch.where(moved, nearer, grid)


def _values(objective: Objective, x: Tensor, batch_size: int | None) -> Tensor:
    """The objective at every image, (B,), in the images' dtype, without gradients."""
    rows = torch.arange(len(x), device=x.device).split(batch_size or len(x))
    with torch.no_grad():
        return torch.cat([objective(x[part], part) for part in rows]).to(x.dtype)
