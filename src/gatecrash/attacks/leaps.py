"""Leaps across valleys, with gradients and without, for scores with more valleys than starts can visit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatecrash.attacks.radii import Radii
from gatecrash.protocols import State, Walk
from gatecrash.stepper import choose, gradient_of, spread

LOOKS = 4
"""Gradients on the way of one leap."""

TRIES = 5
"""Points tried after them."""


@dataclass(frozen=True)
class Leaps:
    """Carries pixels to the far side of the ball, those for which the way there leads down in the end.

    A gradient tells what a pixel gains by a small change, which keeps it in its valley. The mean of the gradients along
    the way from the best point to another tells what it gains by the whole way, exactly where every pixel has a term
    of its own in the score. The pixels are ranked by that gain, in L2 by the gain for the radius it takes, and the
    first of them leap: all that gain, then fewer, then one. Where no gradient tells anything, the rank is random.

    A leap aims at the far side and at random points in turn, with ever fewer of the pixels.
    """

    needs_gradient = True

    def begin(self, walk: Walk) -> State:
        """The best point so far; where the way begins, where it leads, and the sum of the gradients on it."""
        nowhere = {"origin": walk.x, "goal": walk.x, "slope": torch.zeros_like(walk.x)}
        return {"best": walk.x, "best_value": walk.value, **nowhere}

    def move(self, walk: Walk, state: State) -> Tensor:
        """To the next look on the way, or after the last to the best of the points tried."""
        keep(walk.x, walk.value, state)
        leap, look = divmod(walk.step, LOOKS + 1)
        if look == 0:
            state["origin"], state["goal"] = state["best"], self._goal(walk, state["best"], leap)
            state["slope"] = torch.zeros_like(walk.x)
        else:
            state["slope"] = state["slope"] + gradient_of(walk)
        if look < LOOKS:
            return state["origin"].lerp(state["goal"], (look + 0.5) / LOOKS)
        rank, count = self._ranking(walk, state)
        for number in range(TRIES):
            first = (rank < count ** (1 - number / (TRIES - 1))).view_as(walk.x)
            tried = walk.ball.project(torch.where(first, state["goal"], state["origin"]), walk.centre)
            keep(tried, walk.evaluate(tried), state)
        return state["best"]

    def _goal(self, walk: Walk, point: Tensor, leap: int) -> Tensor:
        """For some pixels the far end of what they can reach, or any point of it; the others stay."""
        low, high = reach(walk)
        goal = low.lerp(high, walk.uniform()) if leap % 2 else farther(point, low, high)
        return torch.where(walk.uniform() < 0.5 ** (leap // 2), goal, point)

    def _ranking(self, walk: Walk, state: State) -> tuple[Tensor, Tensor]:
        """The place of every pixel, 0 for the one that gains most, (B, D), and how many gain, (B, 1)."""
        origin, goal = state["origin"], state["goal"]
        gain = -state["slope"] * (goal - origin)
        if (walk.ball.unit if isinstance(walk.ball, Radii) else walk.ball).norm == "l2":
            taken = (goal - walk.centre).square() - (origin - walk.centre).square()
            gain = gain / taken.clamp_min(1e-6)
        gain = gain.nan_to_num(0).flatten(1)
        blind = (gain == 0).all(dim=1, keepdim=True)
        gain = torch.where(blind, (walk.uniform() * (goal != origin)).flatten(1), gain)
        return gain.argsort(dim=1, descending=True).argsort(dim=1), (gain > 0).sum(dim=1, keepdim=True).to(gain.dtype)


@dataclass(frozen=True)
class Flips:
    """Carries random pixels to the far side of the ball and keeps what is better, without a gradient.

    In turn pixels anywhere go to the far end of what they can reach, and the pixels of a window all to one end, as in
    a Square search. There are ever fewer of them, a single one in the end.

    Args:
        share: how many of the pixels at first.
    """

    share: float = 0.5
    needs_gradient = False

    def begin(self, walk: Walk) -> State:
        """The best point so far."""
        return {"best": walk.x, "best_value": walk.value}

    def move(self, walk: Walk, state: State) -> Tensor:
        """The best point with some pixels elsewhere."""
        keep(walk.x, walk.value, state)
        best, numbers, (low, high) = state["best"], walk.uniform(), reach(walk)
        share = self.share * (self.share * best[0].numel()) ** (-walk.step / walk.steps)
        if walk.step % 2:
            end = torch.where(numbers[:, :, -1:, -1:] < 0.5, low, high)
            return torch.where(windows(numbers, share), end, best)
        return torch.where(numbers < share, farther(best, low, high), best)


def keep(x: Tensor, value: Tensor, state: State) -> None:
    """Make these points the best ones where they are."""
    better = value < state["best_value"]
    state["best"] = choose(better, x, state["best"])
    state["best_value"] = torch.where(better, value, state["best_value"])


def reach(walk: Walk) -> tuple[Tensor, Tensor]:
    """The least and the largest value of every pixel in the ball and the box when it moves alone."""
    radius = spread(walk.ball.radius, walk.centre) if isinstance(walk.ball, Radii) else walk.ball.eps
    return walk.ball.clamp(walk.centre - radius), walk.ball.clamp(walk.centre + radius)


def farther(point: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Of two ends the one that is farther away, pixel by pixel."""
    return torch.where(high - point > point - low, high, low)


def windows(numbers: Tensor, share: float) -> Tensor:
    """A mask (B, 1, H, W) of a window per sample with a share of the pixels, at least one; the numbers place it."""
    height, width = numbers.shape[-2:]
    rows = max(1, round(height * share**0.5))
    columns = min(width, max(1, round(share * height * width / rows)))
    places = numbers.flatten(1)
    top, left = (spread(places[:, i % places.shape[1]], numbers) for i in range(2))
    y = torch.arange(height, device=numbers.device).view(-1, 1) - (top * (height - rows + 1)).floor()
    x = torch.arange(width, device=numbers.device) - (left * (width - columns + 1)).floor()
    mask: Tensor = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    return mask
