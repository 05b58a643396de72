"""What a search found, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gatecrash.ball import distance


@dataclass(frozen=True)
class Trajectory:
    """What the search would have returned after every step: row t is the state after t steps, (steps + 1, B) each."""

    value: Tensor
    l2: Tensor
    linf: Tensor


@dataclass(frozen=True)
class Found:
    """What a search found, sample by sample."""

    x: Tensor
    """(B, ...), inside ball and box."""
    value: Tensor
    """(B,), the objective there; with `measure=False`, one step before."""
    start: Tensor
    """(B, ...), where the search started: the centre of the ball."""
    start_value: Tensor
    """(B,), the objective there; with `measure=False`, where the run began."""
    success: Tensor
    """(B,), whether `value` reached `stop`; without a `stop`, whether it is below `start_value`."""
    steps: Tensor
    """(B,), the steps taken, over all restarts."""
    evaluations: Tensor
    """(B,), how often the objective was evaluated; with a list of eps, for this one."""
    trajectory: Trajectory | None = None
    """With `record=True`: value and both distances, of the restart that won; on the way of a mixed run, its pace's."""
    score: Tensor | None = None
    """(B,), the detector's score at x: attacks on a score only."""
    start_score: Tensor | None = None
    """(B,), the detector's score at the start: attacks on a score only."""
    mape: Tensor | None = None
    """(B,), mean|z′ − z| / max|z|: collisions only."""
    lower_rungs: tuple[Found, ...] = field(default=(), repr=False)
    """For a list of eps: what was found for each, in the order of the list."""

    def distance(self, norm: Literal["l2", "linf"]) -> Tensor:
        """How far every sample is from its start, (B,)."""
        return distance(self.x, self.start, norm)

    @property
    def rungs(self) -> tuple[Found, ...]:
        """What was found for every eps of a list, in its order; for a single eps, this alone."""
        return self.lower_rungs or (self,)

    def with_measured(self, measure: Callable[[Found], Found]) -> Found:
        """The same with `measure` applied here and to every rung."""
        return replace(measure(self), lower_rungs=tuple(measure(rung) for rung in self.lower_rungs))


def joined(parts: list[Found]) -> Found:
    """What was found in consecutive batches as one."""
    if len(parts) == 1:
        return parts[0]

    def both(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    trajectories = [part.trajectory for part in parts if part.trajectory is not None]
    return Found(
        x=both("x"),
        value=both("value"),
        start=both("start"),
        start_value=both("start_value"),
        success=both("success"),
        steps=both("steps"),
        evaluations=both("evaluations"),
        trajectory=Trajectory(
            *(torch.cat([getattr(t, name) for t in trajectories], dim=1) for name in ("value", "l2", "linf"))
        )
        if trajectories
        else None,
        lower_rungs=tuple(joined([part.lower_rungs[i] for part in parts]) for i in range(len(parts[0].lower_rungs))),
    )


def reordered(found: Found, order: Tensor) -> Found:
    """The same samples in another order."""
    parts = {name: part[order] for name, part in vars(found).items() if isinstance(part, Tensor)}
    way = found.trajectory
    trajectory = None if way is None else Trajectory(way.value[:, order], way.l2[:, order], way.linf[:, order])
    rungs = tuple(reordered(rung, order) for rung in found.lower_rungs)
    return replace(found, **parts, trajectory=trajectory, lower_rungs=rungs)
