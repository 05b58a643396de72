"""Checks of the path from pixels to score: does a gradient flow, is it the score's, is the score one number?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gatecrash.attacks.score import scores
from gatecrash.audit.checks.evidence import SIDES, Effort, Evidence, Standing, aims_at_score
from gatecrash.audit.checks.registry import Finding, check, per_attack, per_detector
from gatecrash.ball import normalised
from gatecrash.detectors import Detector, Expected
from gatecrash.objective import Entropy, LowerScore
from gatecrash.portions import in_portions
from gatecrash.protocols import Objective
from gatecrash.search import generator_for, search
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

FOLLOWED = 4
"""Images whose trajectory is followed."""

TRAJECTORY = 8
"""Steps of that trajectory at most."""

FOLLOWS = 0.9
"""The rank correlation with the objective from which the score counts as attacked."""

DRIFT = 0.01
"""The change of a score, in standard deviations of the clean ones, that comes from too little precision."""


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
        found = compared(detector, beside(images[some_rows(len(images), images.device)], seed), seed)
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


def compared(detector: Detector, x: Tensor, seed: int) -> Finding:
    """How the gradients beside images stand the comparison with differences; the words go on with a sentence."""
    gradient = gradient_at(detector, x, len(x))
    if gradient is None:
        return Finding("fail", ", but at points beside them none reaches the pixels")
    broken = float(is_broken(gradient).float().mean())
    if broken > FEW:
        return Finding("fail", f", {broken:.0%} of {len(x)} one that is NaN or infinite beside the image")
    probe = probed(detector, x, gradient, seed)
    wrong, lost = float(probe.wrong.float().mean()), float(probe.lost.float().mean())
    words = f", {wrong:.0%} of {len(x)} have one that finite differences in {probe.precision} contradict"
    words += "" if averaged(detector) else f", and {lost:.0%} one that rounding spoils"
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


@check("score_is_attacked", price=lambda e: sum(e.passes.values()) * 2 * FOLLOWED * (TRAJECTORY + 1), attack="own")
def score_is_attacked(evidence: Evidence) -> Finding:
    """Along the attack's trajectory the deployed score follows the objective, and an attack on the score is there."""
    on_score = any(aims_at_score(attack) for attack in evidence.job.attacks)
    by_softmax = not on_score and any(attack.name == "softmax" for attack in evidence.job.attacks)

    def look(title: str) -> Finding:
        detector = evidence.detector(title)
        objective: Objective = (
            Entropy(evidence.job.output) if by_softmax else lambda x, rows: LowerScore(redrawn(detector))(x, rows)
        )
        effort = evidence.effort(title)
        recorded = Recorded(objective, evidence.job.seed)
        few = evidence.outliers[: min(FOLLOWED, evidence.job.batch_size)]
        steps = min(effort.steps, TRAJECTORY)
        search(recorded, few, effort.ball, stepper=effort.stepper, steps=steps, generator=evidence.job.seed)

        def deployed(x: Tensor) -> Tensor:
            with repeatable(evidence.job.seed, x.device), torch.no_grad():
                score: Tensor = redrawn(detector)(x)
                return score

        follows = recorded.followed_by(deployed)
        if len(follows) == 0:
            return Finding("warn", f"{title}: the objective did not move in {steps} steps, so nothing could follow it")
        middle = float(follows.median())
        aim = "the softmax's entropy" if by_softmax else "its score"
        words = (
            f"{title}: the median rank correlation of what is attacked, {aim}, and its deployed score is {middle:.3f}"
        )
        if middle < FOLLOWS:
            return Finding("fail", f"{words} over {len(follows)} trajectories; another thing is attacked than deployed")
        if not on_score:
            return Finding("warn", f"{words}, but no attack of the plan is on the score itself; add admit, side: both")
        return Finding("pass", f"{words} over {len(follows)} trajectories", -middle)

    return per_detector(evidence, look)


@check("deterministic", price=lambda evidence: 2 * evidence.count * sum(evidence.passes.values()))
def deterministic(evidence: Evidence) -> Finding:
    """The same image has the same score, or gradients are averaged over draws."""

    def look(title: str) -> Finding:
        detector = evidence.detector(title)
        x = torch.cat([evidence.inliers, evidence.outliers])
        draws = getattr(detector, "draws", None)
        if draws == 1:
            return Finding("fail", f"{title}: one draw is no average; let it have more: draws=16")
        if draws is not None:
            return Finding("pass", f"{title}: scores and gradients are averaged over {draws} draws")
        first, second = (scores(detector, x, evidence.job.batch_size) for _ in range(2))
        size = first.abs().mean().clamp_min(torch.finfo(first.dtype).tiny)
        apart = float((first - second).abs().max() / size)
        if apart > 1e-6:
            return Finding(
                "fail",
                f"{title}: the same image scores differently twice, by up to {apart:.2g} of the scores' size; its "
                "gradients must be averaged over draws: Expected(detector, draws=16)",
            )
        return Finding("pass", f"{title}: {len(x)} images scored twice differ by {apart:.2g}", apart)

    return per_detector(evidence, look)


def drift_price(evidence: Evidence) -> int:
    """Every image scored as the audit does and exactly, and two to see whether that can be done."""
    return (2 * evidence.count + 2) * sum(evidence.passes[title] for title, _ in evidence.heads)


@check("precision_drift", price=drift_price, attack="images")
def precision_drift(evidence: Evidence) -> Finding:
    """What the attack returned has the same score in float64."""

    def look(title: str, effort: Effort) -> Finding:
        if evidence.redraws(title):
            return Finding("warn", f"{title}: its score is random, which hides what precision alone would change")
        inliers, outliers = (evidence.found(title, effort, side).x for side in SIDES)
        reported = Standing(evidence.scores(title, inliers), evidence.scores(title, outliers))
        exact, precision = exactly(evidence.detector(title), inliers, outliers, evidence.job.batch_size)
        clean = torch.cat([evidence.measured.clean[key] for key in evidence.measured.clean if key[0] == title]).double()
        spread = float(clean.std().clamp_min(torch.finfo(torch.float32).tiny))
        drift = torch.cat([(reported.scores(side).double() - exact.scores(side)).abs() for side in SIDES]) / spread
        far, (status, remark) = float(drift.quantile(0.95)), reported.verdict(abs(reported.auroc - exact.auroc))
        words = (
            f"{title}: scored again in {precision}, the attacked AUROC is {exact.auroc:.3f} instead of "
            f"{reported.auroc:.3f} in {effort.ball}, and 95 % of scores move by less than {far:.2g} of the clean "
            "scores' spread"
        )
        return Finding("fail", words) if far > DRIFT else Finding(status, words + remark, far)

    return per_attack(evidence.heads, look)


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


def probed(detector: Detector, x: Tensor, searched: Tensor, seed: int) -> Probe:
    """The gradient (B, ...) that a search would follow, compared with differences and with itself in float64.

    The differences are taken along the gradient, where a wrong one shows most, and along a random direction, where a
    missing part shows. Of an average over draws, all evaluations have the same draws, and since those in float64 are
    others than in float32, rounding is not judged.
    """
    judge, points, precision = in_double(detector, x)
    size = 1 if averaged(detector) else len(points)  # how many images there are decides what is drawn for each

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
    return Probe(wrong, unsure & ~wrong, is_lost(searched, gradient) & (not averaged(detector)), precision, gradient)


def averaged(detector: Detector) -> bool:
    """Whether its score is an average over draws."""
    return getattr(detector, "draws", None) is not None


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


def exactly(detector: Detector, inliers: Tensor, outliers: Tensor, batch_size: int) -> tuple[Standing, str]:
    """The scores of inliers and outliers in float64 where the detector can do that, else in float32; which it was."""
    with torch.autocast(inliers.device.type, enabled=False), full_float32():
        judge, x, precision = in_double(detector, torch.cat([inliers, outliers]))
        with torch.no_grad():
            parts = in_portions(lambda batch: judge.judge(judge.encode(batch)), x, batch_size)
        exact = torch.cat(parts).cpu().double()
    return Standing(exact[: len(inliers)], exact[len(inliers) :]), precision


class Exact(NamedTuple):
    """A detector with images in one precision, and its name."""

    detector: Detector
    x: Tensor
    precision: Literal["float64", "float32"]


def in_double(detector: Detector, x: Tensor) -> Exact:
    """A copy of the detector in float64 with the images likewise; both as they are where that does not run."""
    device = torch.device("cpu") if x.device.type == "mps" else x.device
    try:
        copy = deepcopy(detector).to(device).double().eval()
        with torch.no_grad():
            copy.judge(copy.encode(x[:2].to(device).double()))
    except (RuntimeError, TypeError, ValueError):
        return Exact(detector, x, "float32")
    return Exact(copy, x.to(device).double(), "float64")


@contextmanager
def repeatable(seed: int, device: torch.device) -> Iterator[None]:
    """The same global random numbers every time, put back afterwards, so that a random score has differences."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def redrawn(detector: Detector) -> Detector:
    """The detector, an average over draws with these begun anew, so that two evaluations draw alike."""
    return Expected(detector.detector, detector.draws, detector.seed) if isinstance(detector, Expected) else detector


class Portion(NamedTuple):
    """Some samples, evaluated together."""

    rows: Tensor
    """Their indices in the starting batch, (B,)."""
    x: Tensor
    value: Tensor


class Recorded:
    """An objective that keeps what it was evaluated at, portion by portion; a random one draws alike at all."""

    def __init__(self, objective: Objective, seed: int) -> None:
        self.objective, self.seed = objective, seed
        self.portions: list[Portion] = []

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The objective's value, (B,)."""
        with repeatable(self.seed, x.device):
            value = self.objective(x, rows)
        self.portions.append(Portion(rows, x.detach(), value.detach()))
        return value

    def followed_by(self, score: Callable[[Tensor], Tensor]) -> Tensor:
        """The rank correlation of the objective with a score along the way of every sample that moved.

        The score is taken of the same portions, so that a random one draws for every sample as the objective did.
        """
        rows, values = (
            torch.cat(parts).cpu() for parts in zip(*[(p.rows, p.value) for p in self.portions], strict=True)
        )
        scored = torch.cat([score(portion.x) for portion in self.portions]).cpu()
        ways = [rows == row for row in rows.unique()]
        return torch.cat([rank_correlations(values[way, None], scored[way, None]) for way in ways])


def rank_correlations(objective: Tensor, score: Tensor) -> Tensor:
    """Spearman's correlation over the steps (T, B), for every image whose objective moved."""
    moved = (objective != objective[0]).any(dim=0)
    first, second = (centred_ranks(values[:, moved]) for values in (objective, score))
    length = first.norm(dim=0) * second.norm(dim=0)
    correlations: Tensor = (first * second).sum(dim=0) / length.clamp_min(1e-12)
    return correlations


def centred_ranks(values: Tensor) -> Tensor:
    """The ranks along the first dimension less their mean, ties at their mean rank."""
    below = (values[None] < values[:, None]).sum(dim=1)
    ties = (values[None] == values[:, None]).sum(dim=1)
    ranks = below + (ties + 1) / 2
    return (ranks - ranks.mean(dim=0)).double()
