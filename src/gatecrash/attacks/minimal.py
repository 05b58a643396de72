"""The smallest perturbation that crosses a detector's threshold, per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gatecrash.attacks.radii import Radii
from gatecrash.attacks.score import require_fitted
from gatecrash.ball import BALLS, Ball
from gatecrash.images import check_images
from gatecrash.metrics import threshold_at_tpr
from gatecrash.objective import LowerScore, RaiseScore
from gatecrash.protocols import Detector, Objective, State, Stepper, Walk
from gatecrash.search import search
from gatecrash.stepper import Apgd, choose


@dataclass(frozen=True)
class Minimal:
    """The nearest points across the threshold that were found."""

    x: Tensor
    """(B, C, H, W), across the threshold; where none was found, the point that came nearest to it."""
    start: Tensor
    """(B, C, H, W), the images themselves."""
    distance: Tensor
    """(B,), how far x is from its start; 0 for an image that is across already, inf where none was found."""
    evaluations: Tensor
    """(B,), how often the score was evaluated."""

    @property
    def success(self) -> Tensor:
        """Whether a point across the threshold was found, (B,)."""
        return self.distance.isfinite()

    @property
    def median(self) -> float:
        """The radius within which half of all samples cross; inf where fewer do."""
        return threshold_at_tpr(self.distance, 0.5)

    def quantiles(self, shares: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> dict[float, float]:
        """The radius within which each share of all samples crosses; inf where fewer do."""
        return {share: threshold_at_tpr(self.distance, share) for share in shares}


def minimal(
    detector: Detector,
    images: Tensor,
    norm: Literal["l2", "linf"],
    threshold: float | Tensor,
    *,
    side: Literal["out", "in"] = "out",
    steps: int = 20,
    rounds: int = 20,
    tolerance: float = 0.005,
    batch_size: int | None = None,
) -> Minimal:
    """The smallest perturbation that carries every sample across the threshold.

    Every sample's ball grows until a point across is found in it, then its radius is bisected. Each round is one APGD
    search inside balls of the samples' own radii, started from the nearest point across, and a sample leaves it as
    soon as it crosses. The distances are of points that were found, so upper bounds of the smallest ones.

    Args:
        detector: any detector, fitted; its exact score is attacked.
        images: (B, C, H, W) in [0, 1].
        norm: "l2" or "linf".
        threshold: the score above which an image is rejected, as `predict` does.
        side: "out": outliers, across at or below the threshold; "in": inliers, across above it.
        steps: steps of the search in one round.
        rounds: rounds at most; growing to the whole box takes nine.
        tolerance: a sample is done when its radius is known to this share of itself.
        batch_size: search this many samples at a time; None is all at once.

    Raises:
        ValueError: an option is off, or the images are none.
    """
    require_fitted(detector)
    check_images(images)
    if side not in ("out", "in"):
        raise ValueError(f"side must be 'out' or 'in', got {side!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie in (0, 1), got {tolerance:g}")
    if not isinstance(threshold, int | float | Tensor) or torch.as_tensor(threshold).ndim:
        raise ValueError(f"threshold must be one number, got {threshold}; calibrate the detector for one")
    limit = torch.as_tensor(threshold, dtype=images.dtype, device=images.device)
    above = torch.nextafter(limit, torch.full_like(limit, torch.inf))
    objective, stop = (LowerScore(detector), limit) if side == "out" else (RaiseScore(detector), -above)
    parts = [
        _minimal(objective, part, BALLS[norm], stop, steps, rounds, tolerance)
        for part in images.detach().split(batch_size or len(images))
    ]
    return Minimal(*(torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])))


def _minimal(
    objective: Objective, start: Tensor, kind: type[Ball], stop: Tensor, steps: int, rounds: int, tolerance: float
) -> Minimal:
    """The same for one batch: `low` is a radius in which the search failed, `high` the distance of the nearest find."""
    measure = kind(1.0)
    farthest = measure.distance(start, (start < 0.5).to(start))
    box = kind(float(farthest.max()))
    low, high = torch.zeros_like(farthest), torch.full_like(farthest, torch.inf)
    point, evaluations = start.clone(), torch.zeros_like(farthest, dtype=torch.long)
    for _ in range(rounds):
        rows = ((low < (1 - tolerance) * high) & (low < farthest)).nonzero().flatten()
        if len(rows) == 0:
            break
        growing = torch.minimum((2 * low).maximum(farthest / 255), farthest)
        radius = torch.where(high.isinf(), growing, (low + high) / 2)[rows]
        stepper = Within(Apgd(), kind, radius, point[rows])
        # The balls may be smaller than what half precision tells apart.
        found = search(objective, start[rows], box, stepper=stepper, steps=steps + 1, stop=stop, precision="float32")
        evaluations[rows] += found.evaluations
        reached = measure.distance(found.x, start[rows])
        point[rows] = choose(found.success | high[rows].isinf(), found.x, point[rows])
        low[rows] = torch.where(found.success, low[rows], radius)
        high[rows] = torch.where(found.success, reached, high[rows])
    return Minimal(point, start, high, evaluations)


@dataclass(frozen=True)
class Within:
    """Another stepper inside a ball of every sample's own radius, from a point of its own after the first step."""

    stepper: Stepper
    kind: type[Ball]
    radius: Tensor
    """(B,), of the samples that the search begins with."""
    point: Tensor
    """(B, ...), where the other stepper begins."""

    @property
    def needs_gradient(self) -> bool:
        """As the other stepper does."""
        return self.stepper.needs_gradient

    def begin(self, walk: Walk) -> State:
        """Radius and point of every sample, so that they leave with it."""
        return {"radius": self.radius, "point": self.point}

    def move(self, walk: Walk, state: State) -> Tensor:
        """To the point at first, then as the other stepper moves in the sample's own ball."""
        own = Radii(self.kind, state["radius"], walk.ball.box)
        if walk.step == 0:
            return own.project(state.pop("point"), walk.centre)
        walk = replace(walk, ball=own, step=walk.step - 1, steps=walk.steps - 1)
        if walk.step == 0:
            state.update(self.stepper.begin(walk))
        return own.project(self.stepper.move(walk, state), walk.centre)
