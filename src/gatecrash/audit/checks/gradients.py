"""The check that a gradient flows from the score to the pixels, and is the score's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatecrash.audit.checks.evidence import Evidence
from gatecrash.audit.checks.exact import in_double, redrawn, repeatable
from gatecrash.audit.checks.registry import Finding, check, per_detector
from gatecrash.ball import normalised
from gatecrash.detectors import Detector
from gatecrash.search import generator_for
from gatecrash.speed import full_float32

FEW = 0.05
"""The share of images that may have no gradient, or one that rounding spoils, before the check fails."""

CONTRADICTED = 0.25
"""The share whose gradient differences may contradict: near a kink, or where a sign flips, the two differ rightly."""

WRONG = 0.05
"""The relative difference from finite differences at which a gradient counts as wrong."""

LOST = 0.25
"""The relative difference from the gradient in float64 at which rounding has spoilt one."""

STEPS = {"float64": (1e-5, 1e-7, 1e-8), "float32": (3e-3,)}
"""The steps of differences, each for images that the one before contradicts: a derivative is a limit."""

GUARD, TELLS = 100, 4
"""By how many times the rounding of a score a difference of two may be off, and from how many on it tells anything."""

BESIDE = 1e-3
"""How far from an image, in every pixel at most, its gradient is looked at."""

PROBED = 16
"""Images whose gradient is compared with finite differences."""


def gradient_price(evidence: Evidence) -> int:
    """One gradient at every image, and beside some four, and their scores for differences in two directions."""
    scored = 4 + 4 * len(STEPS["float64"])
    return sum(evidence.passes.values()) * (evidence.count + 2 + scored * min(PROBED, evidence.count))


@check("gradient_flows", price=gradient_price)
def gradient_flows(evidence: Evidence) -> Finding:
    """Every image has a gradient, where attacks start, and beside it is what finite differences give."""

    def look(title: str) -> Finding:
        detector, seed = evidence.detector(title), evidence.job.seed
        images = torch.cat([evidence.inliers, evidence.outliers])
        gradient = gradient_at(detector, images, evidence.job.batch_size)
        if gradient is None:
            return Finding("fail", f"{title}: no gradient reaches the pixels; look for detach(), no_grad() or numpy")
        start = started(detector, images, gradient, seed)
        words = f"{title}: {start.none:.0%} of {len(images)} images have no gradient{start.remarks}"
        if start.none > FEW:
            return Finding("fail", f"{words} (a saturated or constant score)")
        if start.broken > FEW:
            return Finding("fail", f"{words} (a root, a power, a logarithm or a division at zero)")
        points = beside(images[some_rows(len(images), images.device)], seed)
        found = compared(detector, points, seed, random=evidence.random(title))
        status = "warn" if any(start) and found.status == "pass" else found.status
        return Finding(status, words + found.words, start.none + found.closeness)

    return per_detector(evidence, look)


class Start(NamedTuple):
    """The shares of images at which an attack that starts there finds nothing to follow."""

    none: float
    """The gradient is zero, at the image and beside it."""
    broken: float
    """It is NaN or infinite."""
    held: float
    """It is zero at the image, though not beside it: only an attack that starts elsewhere comes away."""

    @property
    def remarks(self) -> str:
        """What is to be said of the gradients at the images themselves, beyond that some are zero."""
        broken = f", {self.broken:.0%} one that is NaN or infinite at the image itself, where attacks start"
        held = f", {self.held:.0%} one that is zero at the image itself, which only attacks that start elsewhere leave"
        return (broken if self.broken else "") + (held if self.held else "")


def started(detector: Detector, images: Tensor, gradient: Tensor, seed: int) -> Start:
    """What the gradients (B, ...) at the images are good for; where they are zero, some points beside are looked at."""
    zero = (gradient.flatten(1) == 0).all(dim=1).nonzero().flatten()
    still, stuck = 0.0, len(zero) / len(images)
    if len(zero):
        rows = zero[some_rows(len(zero), zero.device)] if len(zero) > 1 else zero.repeat(2)  # one may be no batch
        around = gradient_at(detector, beside(images[rows], seed), len(rows))
        still = 1.0 if around is None else float((around.flatten(1) == 0).all(dim=1).float().mean())
    return Start(still * stuck, float(is_broken(gradient).float().mean()), (1 - still) * stuck)


def is_broken(gradient: Tensor) -> Tensor:
    """Whether every image's gradient has an entry that is NaN or infinite, (B,)."""
    return ~gradient.flatten(1).isfinite().all(dim=1)


def some_rows(count: int, device: torch.device) -> Tensor:
    """At most `PROBED` of so many rows, from the first to the last."""
    return torch.linspace(0, count - 1, min(PROBED, count)).round().long().to(device)


def compared(detector: Detector, x: Tensor, seed: int, *, random: bool = False) -> Finding:
    """How the gradients beside images stand the comparison with differences; the words go on with a sentence."""
    gradient = gradient_at(detector, x, len(x))
    if gradient is None:
        return Finding("fail", ", but at points beside them none reaches the pixels")
    broken = float(is_broken(gradient).float().mean())
    if broken > FEW:
        return Finding("fail", f", {broken:.0%} of {len(x)} one that is NaN or infinite beside the image")
    probe = probed(detector, x, gradient, seed, random=random)
    wrong, lost = float(probe.wrong.float().mean()), float(probe.lost.float().mean())
    words = f", {wrong:.0%} of {len(x)} have one that finite differences in {probe.precision} contradict"
    words += "" if random else f", and {lost:.0%} one that rounding spoils"
    if wrong > CONTRADICTED:
        excused = detector.card.gradient == "omitted" or probe.precision != "float64"
        return Finding("warn" if excused else "fail", f"{words} (part of the score is detached, or rounded inside)")
    if lost > FEW:
        exact = probe.lost_in_full(detector, x)
        if exact <= FEW:
            return Finding("warn", f"{words}, as TF32 does; without it, allow_tf32 = False, {exact:.0%}")
        return Finding("fail", f"{words} (a saturated score)")
    unsure = float(probe.unsure.float().mean())
    words += f"; for {unsure:.0%} they cannot tell, since the score jumps or is rounded" if unsure else ""
    return Finding("warn" if wrong + unsure > CONTRADICTED else "pass", words, wrong + lost)


def gradient_at(detector: Detector, x: Tensor, batch_size: int) -> Tensor | None:
    """The gradient of the score at every image, or None where none reaches the pixels."""
    return scored_at(detector, x, batch_size)[1]


def scored_at(detector: Detector, x: Tensor, batch_size: int) -> tuple[Tensor, Tensor | None]:
    """The score of every image, (B,), and its gradient there, or None where none reaches the pixels."""
    values, gradients = [], []
    for batch in x.split(batch_size):
        with torch.enable_grad():
            leaf = batch.detach().requires_grad_()
            value = detector.judge(detector.encode(leaf))
            total = value.sum()
            gradient = torch.autograd.grad(total, leaf, allow_unused=True)[0] if value.requires_grad else None
        values.append(value.detach())
        gradients.append(gradient)
    found = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(values), torch.cat(found) if len(found) == len(gradients) else None


def beside(x: Tensor, seed: int) -> Tensor:
    """Points at random beside images, so far inside the box that differences to either side stay in it.

    In an image itself whole regions may be of one grey, over which max-pooling ties: there the gradient is that of one
    side, and a difference the mean of both.
    """
    uniform = torch.rand(x.shape, generator=generator_for(seed, x.device), device=x.device, dtype=x.dtype)
    return x.clamp(2 * BESIDE, 1 - 2 * BESIDE) + BESIDE * (2 * uniform - 1)


class Probe(NamedTuple):
    """How the gradient of every image, (B,), stands the comparison with a more exact one."""

    wrong: Tensor
    """It is not what central differences give."""
    unsure: Tensor
    """Those differences come to nothing that it could be compared with."""
    lost: Tensor
    """In the precision of the search it is another than in float64."""
    precision: str
    gradient: Tensor
    """(B, ...), the exact one."""

    def lost_in_full(self, detector: Detector, x: Tensor) -> float:
        """The share of images whose gradient is another than the exact one also where no float32 is rounded to TF32."""
        with full_float32():
            searched = gradient_at(detector, x, len(x))
        return 1.0 if searched is None else float(is_lost(searched, self.gradient).float().mean())


def is_lost(gradient: Tensor, exact: Tensor) -> Tensor:
    """Whether every image's gradient is another than the exact one, (B,)."""
    difference = (gradient.to(exact) - exact).flatten(1).norm(dim=1)
    lost: Tensor = difference > LOST * exact.flatten(1).norm(dim=1)
    return lost


def probed(detector: Detector, x: Tensor, searched: Tensor, seed: int, *, random: bool = False) -> Probe:
    """The gradient (B, ...) that a search would follow, compared with differences and with itself in float64.

    The differences are taken along the gradient, where a wrong one shows most, and along a random direction, where a
    missing part shows. Of a random score, averaged over draws or not, all evaluations have the same draws, and since
    those in float64 are others than in float32, rounding is not judged.
    """
    judge, points, precision = in_double(detector, x)
    size = 1 if random else len(points)  # how many images there are decides what is drawn for each

    def value(at: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([drawn.judge(drawn.encode(part)) for part, drawn in alike(judge, at, size, seed)])

    def exact(at: Tensor) -> Tensor:
        return value(at).to(at.dtype)

    found = [scored_at(drawn, part, size) for part, drawn in alike(judge, points, size, seed)]
    gradients = [gradient for _, gradient in found if gradient is not None]
    if len(gradients) < len(found):
        raise ValueError("no gradient reaches the pixels in float64")
    score, gradient = torch.cat([value for value, _ in found]), torch.cat(gradients)
    source = generator_for(seed, points.device)
    anywhere = torch.randn(points.shape, generator=source, device=points.device, dtype=points.dtype)
    rounding = torch.finfo(score.dtype).eps * score.to(points.dtype).abs()
    wrong = unsure = torch.zeros(len(x), dtype=torch.bool, device=points.device)
    for direction in (normalised(gradient), normalised(anywhere)):
        slope = (gradient * direction).flatten(1).sum(dim=1)
        otherwise, untold = contradicted(exact, points, direction, slope, rounding, STEPS[precision])
        wrong, unsure = wrong | otherwise, unsure | untold
    return Probe(wrong, unsure & ~wrong, is_lost(searched, gradient) & (not random), precision, gradient)


def alike(detector: Detector, x: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Detector]]:
    """Parts of so many images, each with the detector as it draws at the beginning."""
    for part in x.split(size):
        with repeatable(seed, x.device):
            yield part, redrawn(detector)


def contradicted(
    value: Callable[[Tensor], Tensor],
    points: Tensor,
    direction: Tensor,
    slope: Tensor,
    rounding: Tensor,
    steps: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Whether central differences along a direction are other than the slope, (B,), and whether they do not tell, (B,).

    A long step may cross a jump, as where a sign flips, beside which the slope is right: whoever the first contradicts
    is judged by the shortest at which rounding leaves something of the difference. It contradicts the slope when it is
    the same as at the step before; one that crosses a jump grows. What rounding explains at the first tells nothing.
    """
    left = torch.arange(len(points), device=points.device)
    steady = torch.full((len(points),), len(steps) == 1, device=points.device)
    agrees, moved, excused = (torch.zeros_like(steady) for _ in range(3))
    before = torch.full_like(slope, torch.nan)
    for step in steps:
        there, along = points[left], step * direction[left]
        measured = (value(there + along) - value(there - along)) / (2 * step)
        near, off = WRONG * torch.maximum(slope[left].abs(), measured.abs()), (slope[left] - measured).abs()
        tells = (TELLS * rounding[left] / step <= near) & ((measured != 0) | ~moved[left])
        if step == steps[0]:
            agrees[left] = off <= near
            excused[left] = off <= near + GUARD * rounding[left] / step
        else:
            agrees[left] = torch.where(tells, off <= near, agrees[left])
            steady[left] = torch.where(tells, (measured - before[left]).abs() <= near, steady[left])
        moved[left] |= measured != 0
        before[left] = measured
        if step == steps[0]:
            left = left[~agrees]
        if len(left) == 0:
            break
    return ~agrees & steady & ~excused, ~agrees & (~steady | excused)
