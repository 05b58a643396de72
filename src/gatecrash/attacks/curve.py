"""Perturbation curves: how AUROC falls as the perturbations grow, read off recorded attacks (Fort, Section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from gatecrash.attacks.options import check_counts
from gatecrash.attacks.score import admit, evict, require_fitted, scores
from gatecrash.ball import Linf, check_norm
from gatecrash.found import Found
from gatecrash.images import check_images
from gatecrash.metrics import auroc
from gatecrash.protocols import Detector
from gatecrash.stepper import Sign, check_positive

Norm = Literal["l2", "linf"]

_SLACK = 1e-6
"""How much short of a norm still counts as having reached it, as a ball forgives."""


@dataclass(frozen=True)
class Path:
    """How the scores of some images changed with the size of their perturbations."""

    score: Tensor
    """(T+1, B), after every step."""
    distance: Tensor
    """(T+1, B), the norm of the perturbation there."""

    @classmethod
    def of(cls, images: Found | Tensor, norm: Norm) -> Path:
        """The path of an attack on a score, recorded; or, of clean scores (B,), the path that stays where it is.

        Raises:
            ValueError: the attack was not recorded, did not start at the images, or moved something else than a score.
        """
        if isinstance(images, Tensor):
            if images.ndim != 1:
                raise ValueError(f"clean scores must be one per image, (B,), got shape {tuple(images.shape)}")
            far = torch.stack([torch.zeros_like(images), torch.full_like(images, math.inf)])
            return cls(images.repeat(2, 1), far)
        if images.trajectory is None or images.score is None:
            raise ValueError("a curve needs an attack on a score with its trajectory: record=True")
        path = images.trajectory
        distance = path.l2 if norm == "l2" else path.linf
        if bool(distance[0].any()):
            raise ValueError("a curve needs an attack that starts at the images themselves: random_start=False")
        for sign in (1, -1):
            if torch.equal(sign * images.value, images.score):
                return cls(sign * path.value, distance)
        raise ValueError("a curve needs an attack whose objective is the score or minus the score")

    @property
    def reach(self) -> Tensor:
        """The largest norm that each image came to, (B,)."""
        return self.distance.amax(dim=0)

    def at(self, norm: float) -> Tensor:
        """The scores (B,) where each image first reached the norm, by linear interpolation; NaN where it never did."""
        reached = self.distance >= norm - _SLACK
        after = reached.int().argmax(dim=0)
        before = (after - 1).clamp_min(0)
        (low, high), (first, second) = (
            [values.gather(0, step.unsqueeze(0)).squeeze(0) for step in (before, after)]
            for values in (self.distance, self.score)
        )
        share = ((norm - low) / (high - low).clamp_min(torch.finfo(low.dtype).tiny)).clamp(0, 1)
        return torch.where(reached.any(dim=0), torch.lerp(first, second, share), torch.nan)


@dataclass(frozen=True)
class CurveRow:
    """One row of a table: AUROC before the attack, at one norm, and the difference, fractions in [0, 1]."""

    at: float
    """The norm."""
    before: float
    after: float | None
    """AUROC at the norm; None where some image never reached it."""
    reached: float
    """The share of all images with a score there: they reached the norm, or were not attacked."""

    @property
    def difference(self) -> float | None:
        """What the attack changed; None where some image never reached the norm."""
        return None if self.after is None else self.after - self.before


@dataclass(frozen=True)
class Curve:
    """AUROC as a function of the size of the perturbations in one norm."""

    norm: Norm
    inliers: Path
    outliers: Path
    rows: tuple[CurveRow, ...]
    """One row per norm asked for."""

    @property
    def reach(self) -> float:
        """The largest norm that every image reached, as far as the curve goes."""
        return float(torch.cat([self.inliers.reach, self.outliers.reach]).min())

    def row(self, at: float) -> CurveRow:
        """The row of any norm."""
        return row_of(self.inliers, self.outliers, at)


def perturbation_curve(
    detector: Detector,
    inliers: Tensor,
    outliers: Tensor,
    *,
    direction: Literal["in", "out", "both"] = "in",
    norm: Norm = "linf",
    step: float = 3e-4,
    steps: int = 30,
    at: Sequence[float] = (1 / 255,),
    batch_size: int | None = None,
) -> Curve:
    """Attack a score with small sign steps and tell the AUROC at every size of the perturbations.

    Fort's attack: 30 sign steps of 3e-4 from the images themselves, no ball, the last point of every step recorded.
    The release lets pixels leave [0, 1]; here they stay inside. For his tables, outliers are led "in" and meet clean
    inliers; his Figure 1 leads inliers "out".

    Args:
        detector: any detector, fitted.
        inliers: (N, C, H, W) in [0, 1].
        outliers: (M, C, H, W) in [0, 1].
        direction: "in" lowers the scores of outliers, "out" raises those of inliers, "both" does either.
        norm: what the curve is a function of.
        step: in pixels; Figures 1, 2, 4 and 12 take 1e-4.
        steps: steps of the attack.
        at: the norms of the table's rows.
        batch_size: images at a time; None is all at once.

    Raises:
        ValueError: an option is off, or the images are none.
        TypeError: the detector is none.
    """
    require_fitted(detector)
    _check_rows(norm, at)
    check_positive("step", step)
    check_counts(steps=steps, batch_size=batch_size)
    if direction not in ("in", "out", "both"):
        raise ValueError(f"direction must be 'in', 'out' or 'both', got {direction!r}")
    check_images(inliers, "inliers")
    check_images(outliers, "outliers")
    sides = []
    for images, way in ((inliers, "out"), (outliers, "in")):
        if direction in (way, "both"):
            sides.append(Path.of(recorded(detector, images, way, step, steps, batch_size), norm))
        else:
            sides.append(Path.of(scores(detector, images, batch_size), norm))
    return curve_of(*sides, norm=norm, at=at)


def recorded(
    detector: Detector,
    images: Tensor,
    way: str,
    step: float = 3e-4,
    steps: int = 30,
    batch_size: int | None = None,
) -> Found:
    """Fort's attack, "in" or "out", with its trajectory, for any number of `curve_of` with it."""
    attack, stepper = admit if way == "in" else evict, Sign(step)
    return attack(
        detector, images, Linf(1.0), stepper=stepper, steps=steps, keep="last", record=True, batch_size=batch_size
    )


def curve_of(
    inliers: Path | Found | Tensor, outliers: Path | Found | Tensor, *, norm: Norm, at: Sequence[float] = (1 / 255,)
) -> Curve:
    """The curve of recorded attacks on either side; a side that was not attacked is its clean scores (B,)."""
    _check_rows(norm, at)
    inside, outside = (part if isinstance(part, Path) else Path.of(part, norm) for part in (inliers, outliers))
    return Curve(norm, inside, outside, tuple(row_of(inside, outside, each) for each in at))


def _check_rows(norm: object, at: object) -> None:
    """Raises a ValueError unless these are the name of a norm, and sizes in it."""
    check_norm(norm)
    if not isinstance(at, Sequence) or not all(isinstance(each, Real) and not isinstance(each, bool) for each in at):
        raise ValueError(f"at must be a list of norms, such as [1 / 255], got {at!r}")
    for each in at:
        _check_size(each)


def _check_size(at: float) -> None:
    """Raises a ValueError for the size of a perturbation that is negative or NaN."""
    if not at >= 0:
        raise ValueError(f"a norm must not be negative, got {at:g}")


def row_of(inliers: Path, outliers: Path, at: float) -> CurveRow:
    """The AUROC of two paths before the attack and at a norm."""
    _check_size(at)
    pair = inliers.at(at), outliers.at(at)
    there = ~torch.cat(pair).isnan()
    after = auroc(*pair) if bool(there.all()) else None
    return CurveRow(at, auroc(inliers.score[0], outliers.score[0]), after, float(there.float().mean()))
