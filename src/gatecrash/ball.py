"""The balls an attack may move in: L2(eps) and Linf(eps) around the starting images, inside the pixel box [0, 1]."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from gatecrash.fused import fused
from gatecrash.images import extremes
from gatecrash.registry import Registry
from gatecrash.speed import current_pace

BALLS: Registry[type[Ball]] = Registry("norm")

_NEWTON, _FAST = 8, 3
"""Iterations of the L2 projection at most, and at a fast pace.

Every one of them lies inside the ball, and few boxes need over four. After two, a picture's nearest point is seldom
further away than 1e-5 of the radius.
"""


class Ball(ABC):
    """All points within `eps` of a centre in one norm, and inside `box` (None: no box, for latent space).

    `eps` may be a list: a search then runs along it from small to large, each started from the one before. `ball.eps`
    is its largest value and `ball.rungs` the single balls in the order of the list.

    Raises:
        ValueError: an eps is not a positive number, or the box is empty.
    """

    norm: ClassVar[str]

    def __init__(self, eps: float | Sequence[float], box: tuple[float, float] | None = (0.0, 1.0)) -> None:
        rungs: Sequence[Any] = eps if isinstance(eps, Sequence) and not isinstance(eps, str) else (eps,)
        try:
            ladder = tuple(_number(rung) for rung in rungs)
        except (TypeError, ValueError):
            raise ValueError(f"eps must be a positive number or a list of them, got {eps!r}") from None
        if not ladder:
            raise ValueError("eps must be positive, got an empty list")
        for rung in ladder:
            if not (rung > 0 and math.isfinite(rung)):
                raise ValueError(f"eps must be positive, got {rung:g}")
        if box is not None and not _is_box(box):
            raise ValueError(f"box must be (low, high) with low < high, got {box}")
        self.ladder = ladder
        self.eps = max(ladder)
        self.box = None if box is None else (float(box[0]), float(box[1]))

    @property
    def rungs(self) -> list[Ball]:
        """One ball per eps, in the order given."""
        return [type(self)(eps, self.box) for eps in self.ladder]

    @abstractmethod
    def distance(self, x: Tensor, centre: Tensor) -> Tensor:
        """Distance of every sample from its centre, (B,)."""

    @abstractmethod
    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        """The nearest points of ball and box; `centre` must lie in the box."""

    def projection(self, centre: Tensor) -> Callable[[Tensor], Tensor]:
        """`project` for one centre and many points: what depends on the centre alone is computed once.

        The function may write into the points it is given.
        """
        return partial(self.project, centre=centre)

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """The gradient as a step of unit length in this norm: its sign, or divided by its length; zero stays zero."""

    def random_start(self, centre: Tensor, uniform: Tensor) -> Tensor:
        """A random point of ball and box: ±eps in every coordinate, from `uniform` in [0, 1), then projected."""
        return self.project(self.scattered(centre, uniform), centre)

    def scattered(self, centre: Tensor, uniform: Tensor) -> Tensor:
        """The same before it is projected."""
        return torch.add(centre, uniform - 0.5, alpha=2 * self.eps)

    def clamp(self, x: Tensor) -> Tensor:
        """The points moved into the box, where there is one."""
        return x if self.box is None else x.clamp(*self.box)

    def contains(self, x: Tensor, centre: Tensor, slack: float = 1e-6) -> Tensor:
        """Whether every sample lies in ball and box, (B,), measured in float64 where the device has it."""
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        if self.box is None:  # latents have any size, and rounding goes with it
            slack *= max(1.0, float(centre.abs().max()), self.eps)
        inside = self._within(x, centre, slack, exact)
        if self.box is not None and (waits(x) or not all_between(x, *self.box)):
            low, high = (bound.to(exact) for bound in (x.flatten(1).amin(dim=1), x.flatten(1).amax(dim=1)))
            inside &= (low >= self.box[0] - slack) & (high <= self.box[1] + slack)
        return inside

    def _within(self, x: Tensor, centre: Tensor, slack: float, exact: torch.dtype) -> Tensor:
        """Whether every sample is at most eps away, (B,)."""
        return self.distance(x.to(exact), centre.to(exact)) <= self.eps + slack

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.ladder, self.box))

    def __repr__(self) -> str:
        eps = f"{self.eps:g}" if len(self.ladder) == 1 else "[" + ", ".join(f"{rung:g}" for rung in self.ladder) + "]"
        box = "" if self.box == (0.0, 1.0) else f", box={self.box}"
        return f"{type(self).__name__}({eps}{box})"


def _number(value: Any) -> float:
    """A number as a float.

    Raises:
        TypeError: it is none, as a bool or a string is none.
    """
    if isinstance(value, bool | str):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _is_box(box: Any) -> bool:
    """Whether these are two numbers, the first of them smaller."""
    try:
        low, high = box
    except (TypeError, ValueError):
        return False
    return isinstance(low, Real) and isinstance(high, Real) and bool(low < high)


@BALLS.register("linf")
class Linf(Ball):
    """Every pixel may change by at most eps."""

    norm = "linf"

    def distance(self, x: Tensor, centre: Tensor) -> Tensor:
        """The largest change of a pixel, (B,)."""
        return distance(x, centre, "linf")

    def _within(self, x: Tensor, centre: Tensor, slack: float, exact: torch.dtype) -> Tensor:
        if self.box is not None and not waits(x):
            # A difference of two numbers of the box is rounded by far less than the slack.
            most = self.eps + slack / 2
            if all_between(x - centre, -most, most):
                return torch.ones(len(x), dtype=torch.bool)
        return super()._within(x, centre, slack, exact)

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        """The nearest points of ball and box, by clamping twice."""
        return self.clamp(x.clamp(centre - self.eps, centre + self.eps))

    def projection(self, centre: Tensor) -> Callable[[Tensor], Tensor]:
        """One clamp between bounds that have the box in them, in place, as long as `project` is the one above."""
        if type(self).project is not _CLAMPING_TWICE:
            return super().projection(centre)
        low, high = centre - self.eps, centre + self.eps
        if self.box is not None:
            low, high = low.clamp_(*self.box), high.clamp_(*self.box)
        return partial(Tensor.clamp_, min=low, max=high)

    def direction(self, gradient: Tensor) -> Tensor:
        """The sign of the gradient."""
        return gradient.sign()


_CLAMPING_TWICE = Linf.project
"""What `Linf.projection` does faster; a ball that projects in another way is taken at its word."""


@BALLS.register("l2")
class L2(Ball):
    """The Euclidean length of the change is at most eps."""

    norm = "l2"

    def distance(self, x: Tensor, centre: Tensor) -> Tensor:
        """The Euclidean length of the change, (B,)."""
        return distance(x, centre, "l2")

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        """The nearest points of ball and box together.

        With d = x − centre the answer is centre + clip(√t·d, box − centre) for one t in (0, 1]. The squared length of
        that is Σ min(t·d², b²), b the room a pixel has: concave and piecewise linear in t, so that Newton's method
        from the left never leaves the ball and ends after finitely many steps.
        """
        if self.box is not None:
            # A radius, one number or a column of them, is a tensor: else every one would be compiled.
            eps = self.eps if isinstance(self.eps, Tensor) else x.new_full((), self.eps)
            error = self._unit(centre) * max(abs(bound) for bound in self.box)
            plain = current_pace() == "plain"
            count, early = (_NEWTON if plain else _FAST), plain and not waits(x)
            return _into_ball_and_box(x, centre, eps, error, *self.box, count, early)
        d = (x - centre).flatten(1)
        # Of every sample's own coordinates, so that no sample's numbers depend on another.
        largest = centre.flatten(1).abs().amax(dim=1, keepdim=True) + self.eps
        rounding = (self._unit(centre) * largest + 1e-7 * self.eps).clamp(max=self.eps / 2)
        lengths = d.square().sum(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        return centre + (((self.eps - rounding) ** 2 / lengths).clamp(max=1).sqrt() * d).view_as(x)

    def direction(self, gradient: Tensor) -> Tensor:
        """The gradient divided by its Euclidean length."""
        return normalised(gradient)

    @staticmethod
    def _unit(centre: Tensor) -> float:
        """How far a sum may be rounded away when every coordinate is rounded outwards, for coordinates up to 1."""
        return torch.finfo(centre.dtype).eps / 2 * math.sqrt(centre[0].numel())


@fused
def _into_ball_and_box(
    x: Tensor, centre: Tensor, eps: Tensor, rounding: float, low: float, high: float, count: int, early: bool
) -> Tensor:
    """`L2.project` with a box, by `count` iterations; `early` ends when nothing changes any more: the host looks."""
    budget = (eps - torch.minimum(rounding + 1e-7 * eps, eps / 2)).square()
    d, flat, tiny = (x - centre).flatten(1), centre.flatten(1), torch.finfo(x.dtype).tiny
    squares = d.square()
    room = torch.where(d > 0, high - flat, flat - low).square()
    t = (budget / squares.sum(dim=1, keepdim=True).clamp_min(tiny)).clamp(max=1)
    for _ in range(count):
        clipped = t * squares >= room
        fixed = torch.where(clipped, room, 0).sum(dim=1, keepdim=True)
        free = torch.where(clipped, 0, squares).sum(dim=1, keepdim=True)
        before = t
        t = torch.maximum(t, ((budget - fixed) / free.clamp_min(tiny)).clamp(max=1))
        if early and torch.equal(t, before):
            break
    return (centre + (t.sqrt() * d).view_as(x)).clamp(low, high)


def waits(tensor: Tensor) -> bool:
    """Whether the host must wait before it can look at a value: on the CPU a look costs nothing."""
    return tensor.device.type != "cpu"


def all_between(x: Tensor, low: float, high: float) -> bool:
    """Whether all numbers lie between two, by one look at them; NaN does not."""
    least, most = extremes(x)
    return low <= least and most <= high


def distance(x: Tensor, other: Tensor, norm: str) -> Tensor:
    """Distance of two batches sample by sample, (B,), in `norm`: "l2" or "linf"."""
    difference = (x - other).flatten(1)
    if norm == "l2":
        length: Tensor = torch.linalg.vector_norm(difference, dim=1)
        return length
    check_norm(norm)
    return difference.abs_().amax(dim=1)


def check_norm(norm: object) -> None:
    """Raises a ValueError unless it is the name of a norm."""
    if norm not in ("l2", "linf"):
        raise ValueError(f"norm must be 'l2' or 'linf', got {norm!r}")


def normalised(gradient: Tensor) -> Tensor:
    """Every sample's gradient divided by its Euclidean length, in which no square underflows."""
    flat = gradient.flatten(1)
    if flat.device.type == "cuda":  # which is fast in float64, and slow in reading once more
        exact = torch.linalg.vector_norm(flat, dim=1, keepdim=True, dtype=torch.float64)
        return (flat * torch.where(exact > 0, 1 / exact.clamp_min(1e-37), 0).to(flat.dtype)).view_as(gradient)
    scaled = flat / flat.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    unit: Tensor = torch.where(length > 0, scaled / length.clamp_min(1e-12), 0)
    return unit.view_as(gradient)
