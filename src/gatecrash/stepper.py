"""How a search moves: sign, normalised, Adamax, APGD, Langevin and Square steps, and the schedules of their size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from gatecrash.ball import L2, normalised, waits
from gatecrash.fused import fused
from gatecrash.protocols import State, Walk
from gatecrash.registry import Registry, unknown

ScheduleName = Literal["constant", "cosine", "linear", "halving"]

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "halving": lambda done: 0.5 ** math.floor(-math.log2(1 - done)),
}
"""The step's size as a share of its first, by the share of the steps already taken, in [0, 1).

`halving` halves whenever half of what was left is done: after 1/2, 3/4, 7/8, … of the steps.
"""

STEPPERS: Registry[type] = Registry("stepper")


def scheduled(size: float, schedule: str, walk: Walk) -> float:
    """The size of the next step."""
    return size * SCHEDULES[schedule](walk.step / walk.steps)


def check_options(step: float | None, schedule: str, share: float = 1.0) -> None:
    """Raises a ValueError for a step or share that is no positive number or a schedule that does not exist."""
    if step is not None:
        check_positive("step", step)
    check_positive("share", share)
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise ValueError(unknown("schedule", schedule, list(SCHEDULES)))


def check_positive(name: str, value: object) -> None:
    """Raises a ValueError unless it is a positive number."""
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be positive, got {float(value):g}")


def gradient_of(walk: Walk) -> Tensor:
    """The gradient of a walk whose stepper asked for one."""
    if walk.gradient is None:
        raise ValueError("this stepper needs a gradient, and the search computed none")
    return walk.gradient


@STEPPERS.register("sign")
@dataclass(frozen=True)
class Sign:
    """x − α·sign(g); the step is in pixels (Fort 2022: 3e-4), or without one a share of ε."""

    step: float | None = None
    schedule: ScheduleName = "constant"
    share: float = 0.1
    needs_gradient = True

    def __post_init__(self) -> None:
        check_options(self.step, self.schedule, self.share)

    def begin(self, walk: Walk) -> State:
        """Nothing to remember."""
        return {}

    def move(self, walk: Walk, state: State) -> Tensor:
        """One step against the gradient's sign."""
        size = self.share * walk.ball.eps if self.step is None else self.step
        sign = gradient_of(walk).sign()
        return torch.add(walk.x, sign, alpha=-scheduled(size, self.schedule, walk), out=sign)


@STEPPERS.register("normalised")
@dataclass(frozen=True)
class Normalised:
    """x − α·g/‖g‖; the step is the Euclidean length of a move, or without one a share of ε."""

    step: float | None = None
    schedule: ScheduleName = "constant"
    share: float = 0.1
    needs_gradient = True

    def __post_init__(self) -> None:
        check_options(self.step, self.schedule, self.share)

    def begin(self, walk: Walk) -> State:
        """Nothing to remember."""
        return {}

    def move(self, walk: Walk, state: State) -> Tensor:
        """One step of fixed length against the gradient."""
        size = self.share * walk.ball.eps if self.step is None else self.step
        return walk.x - scheduled(size, self.schedule, walk) * normalised(gradient_of(walk))


@STEPPERS.register("adamax")
@dataclass(frozen=True)
class Adamax:
    """Adamax on the ball's direction of the gradient (normalised for L2, its sign for L∞): Liang et al.'s Algorithm 1.

    Adamax scales every pixel on its own, which finds a collision inside the ball fastest, but on the surface of an L2
    ball comes to rest beside the constrained optimum. So the last part of a run, `straight` of it, takes steps of the
    same length along the running mean itself; 0 is the paper's Adamax throughout.

    Args:
        step: α, in pixels; None is the paper's ε/100.
        schedule: how the step shrinks.
        straight: the share of the run, at its end, that goes straight.
        betas: how fast the running mean and the running maximum forget.
    """

    step: float | None = None
    schedule: ScheduleName = "cosine"
    straight: float = 0.5
    betas: tuple[float, float] = (0.9, 0.999)
    needs_gradient = True

    def __post_init__(self) -> None:
        check_options(self.step, self.schedule)
        if not 0 <= self.straight <= 1:
            raise ValueError(f"straight must be a share from 0 to 1, got {self.straight:g}")

    def begin(self, walk: Walk) -> State:
        """The running mean and the running maximum of the direction."""
        return {"mean": torch.zeros_like(walk.x), "largest": torch.zeros_like(walk.x)}

    def move(self, walk: Walk, state: State) -> Tensor:
        """One Adamax step, with the first moment's bias corrected."""
        size = scheduled(walk.ball.eps / 100 if self.step is None else self.step, self.schedule, walk)
        rate = walk.x.new_full((), size / (1 - self.betas[0] ** (walk.step + 1)))  # else every step would be compiled
        straight = isinstance(walk.ball, L2) and walk.step >= (1 - self.straight) * walk.steps
        held = walk.x, gradient_of(walk), state["mean"], state["largest"], rate
        moved, state["mean"], state["largest"] = _adamax(*held, self.betas, walk.ball.direction, straight)
        return moved


@fused
def _adamax(
    x: Tensor,
    gradient: Tensor,
    mean: Tensor,
    largest: Tensor,
    rate: Tensor,
    betas: tuple[float, float],
    direction_of: Callable[[Tensor], Tensor],
    straight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The point after a step, the running mean, and the running maximum."""
    direction = direction_of(gradient)
    mean = mean.lerp(direction, 1 - betas[0])
    largest = torch.maximum(largest * betas[1], direction.abs() + 1e-8)
    scaled = mean / largest
    if straight:
        scaled = normalised(mean) * spread(scaled.flatten(1).norm(dim=1), scaled)
    return x - rate * scaled, mean, largest


@STEPPERS.register("apgd")
@dataclass(frozen=True)
class Apgd:
    """Auto-PGD (Croce & Hein 2020): momentum, a step per sample that starts at 2ε and halves, restart from the best.

    At checkpoints, which come faster and faster, a sample's step is halved and the sample goes back to its best point
    when too few of the last steps were improvements (fewer than `patience` of them), or when neither the step nor
    the best value has changed since the checkpoint before.
    """

    momentum: float = 0.25
    patience: float = 0.75
    step: float | None = None
    needs_gradient = True

    def __post_init__(self) -> None:
        check_options(self.step, "constant")

    def begin(self, walk: Walk) -> State:
        """The best point so far, the point before, and what the checkpoints compare."""
        size = 2 * walk.ball.eps if self.step is None else self.step
        return {
            "before": walk.x,
            "before_value": walk.value,
            "best": walk.x,
            "best_value": walk.value,
            "best_gradient": gradient_of(walk),
            "size": torch.full_like(walk.value, size),
            "improvements": torch.zeros_like(walk.value),
            "checked_value": walk.value,
            "halved": torch.zeros_like(walk.value, dtype=torch.bool),
        }

    def move(self, walk: Walk, state: State) -> Tensor:
        """One step with momentum, from the current point or, after a failed check, from the best."""
        x, gradient = walk.x, gradient_of(walk)
        better = walk.value < state["best_value"]
        state["best"] = choose(better, x, state["best"])
        state["best_gradient"] = choose(better, gradient, state["best_gradient"])
        state["best_value"] = torch.where(better, walk.value, state["best_value"])
        state["improvements"] = state["improvements"] + (walk.value < state["before_value"])
        if since := checkpoints(walk.steps).get(walk.step):
            stuck = self._check(state, since)
            x, gradient = choose(stuck, state["best"], x), choose(stuck, state["best_gradient"], gradient)
            state["before"] = choose(stuck, x, state["before"])
        ahead = x - spread(state["size"], x) * walk.ball.direction(gradient)
        moved = x + self._share(walk) * (walk.ball.project(ahead, walk.centre) - x)
        following = moved + (1 - self._share(walk)) * (x - state["before"])
        state["before"], state["before_value"] = x, walk.value
        return following

    def _share(self, walk: Walk) -> float:
        return 1.0 if walk.step == 0 else 1 - self.momentum

    def _check(self, state: State, since: int) -> Tensor:
        oscillates = state["improvements"] < self.patience * since
        stalls = ~state["halved"] & (state["best_value"] >= state["checked_value"])
        stuck = oscillates | stalls
        state["size"] = torch.where(stuck, state["size"] / 2, state["size"])
        state["improvements"] = torch.zeros_like(state["improvements"])
        state["checked_value"] = state["best_value"]
        state["halved"] = stuck
        return stuck


@STEPPERS.register("langevin")
@dataclass(frozen=True)
class Langevin:
    """x − α·g + σ·n with n standard normal: samples from exp(−objective) (JEM: α = 1, σ = 0.01).

    A coordinate whose step would not be finite, because α is too large for the objective, stays where it is.
    """

    step: float = 1.0
    noise: float = 0.01
    schedule: ScheduleName = "constant"
    needs_gradient = True

    def __post_init__(self) -> None:
        check_options(self.step, self.schedule)
        if self.noise < 0:
            raise ValueError(f"noise must not be negative, got {self.noise:g}")

    def begin(self, walk: Walk) -> State:
        """Nothing to remember."""
        return {}

    def move(self, walk: Walk, state: State) -> Tensor:
        """One step against the gradient itself, with noise."""
        step = scheduled(self.step, self.schedule, walk)
        moved = walk.x - step * gradient_of(walk) + self.noise * walk.normal()
        return torch.where(moved.isfinite(), moved, walk.x)


@STEPPERS.register("square")
@dataclass(frozen=True)
class Square:
    """Square attack (Andriushchenko et al. 2020): no gradient; a random window is changed, and kept if that helped.

    In L∞ the window's pixels are set to ±ε around the centre, one sign per channel, after a first try with vertical
    stripes; in L2 a random bump of length ε is added there. The window's share of the image starts at `share`, and
    halves on the paper's schedule.
    """

    share: float = 0.8
    needs_gradient = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share:g}")

    def begin(self, walk: Walk) -> State:
        """The best point so far."""
        return {"kept": walk.x, "kept_value": walk.value}

    def move(self, walk: Walk, state: State) -> Tensor:
        """A new proposal beside the best point."""
        better = walk.value < state["kept_value"]
        state["kept"] = choose(better, walk.x, state["kept"])
        state["kept_value"] = torch.where(better, walk.value, state["kept_value"])
        numbers = walk.uniform()
        linf = walk.ball.norm == "linf"
        if walk.step == 0 and linf:
            return walk.centre + walk.ball.eps * (2 * (numbers[:, :, :1] < 0.5) - 1)
        height, width = walk.x.shape[-2:]
        side = max(1, round(math.sqrt(self.share * _shrinkage(walk.step / walk.steps) * height * width)))
        window = _windows(numbers.flatten(1), min(side, height), min(side, width), height, width)
        signs = 2.0 * (numbers[:, :, -1:, -1:] < 0.5) - 1
        if linf:
            return torch.where(window, walk.centre + walk.ball.eps * signs, state["kept"])
        bump = window * signs * (0.5 + numbers)
        length = spread(bump.flatten(1).norm(dim=1).clamp_min(1e-12), bump)
        return state["kept"] + walk.ball.eps * bump / length


def _shrinkage(done: float) -> float:
    """How much smaller the windows are after a share of the steps: halved at the paper's marks for 10,000 steps."""
    marks = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    return 0.5 ** sum(done > mark for mark in marks)


def _windows(numbers: Tensor, side_y: int, side_x: int, height: int, width: int) -> Tensor:
    """A mask (B, 1, H, W) with one window per sample, placed by two uniform numbers each."""
    top = (numbers[:, 0] * (height - side_y + 1)).floor().view(-1, 1, 1, 1)
    left = (numbers[:, 1 % numbers.shape[1]] * (width - side_x + 1)).floor().view(-1, 1, 1, 1)
    y = torch.arange(height, device=numbers.device).view(1, 1, -1, 1)
    x = torch.arange(width, device=numbers.device).view(1, 1, 1, -1)
    return (y >= top) & (y < top + side_y) & (x >= left) & (x < left + side_x)


@cache
def checkpoints(steps: int) -> dict[int, int]:
    """The steps at which APGD looks back, each with the number of steps since the one before."""
    positions, gap = [0.0, 0.22], 0.22
    while positions[-1] < 1:
        gap = max(gap - 0.03, 0.06)
        positions.append(positions[-1] + gap)
    marks = sorted({math.ceil(round(position * steps, 6)) for position in positions if position < 1})
    return {mark: mark - before for before, mark in pairwise(marks)}


def spread(values: Tensor, like: Tensor) -> Tensor:
    """One value per sample, shaped to multiply with a batch."""
    return values.view(-1, *[1] * (like.ndim - 1))


def choose(mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`first` for the samples where the mask (B,) holds, `second` for the others; either itself where that is all."""
    if waits(mask):
        return torch.where(spread(mask, first), first, second)
    rows = mask.nonzero().flatten()
    if 2 * len(rows) > len(mask):  # the fewer rows there are to copy, the better
        first, second, rows = second, first, (~mask).nonzero().flatten()
    return second.index_copy(0, rows, first[rows].to(second.dtype)) if len(rows) else second
