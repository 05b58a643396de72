"""The smallest perturbation that crosses a detector's threshold, per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from gatecrash.attacks.averaged import Averaged
from gatecrash.attacks.draws import drawn, draws_of, looked_at
from gatecrash.attacks.leaps import Flips, Leaps
from gatecrash.attacks.options import check_counts, check_side
from gatecrash.attacks.radii import Radii
from gatecrash.attacks.score import require_fitted, scores
from gatecrash.ball import BALLS, Ball
from gatecrash.found import Found
from gatecrash.images import check_images
from gatecrash.metrics import threshold_at_tpr
from gatecrash.objective import LowerScore, RaiseScore
from gatecrash.protocols import Detector, State, Stepper, Walk
from gatecrash.search import check_level, generator_for, search
from gatecrash.stepper import Apgd, choose

DOUBTS = (1.0, 0.5, 1.0, 0.25)
"""How often an answer is doubted at most; where there is none, the shares of the whole box that are looked through."""

SURE = 0.97
"""The share of a radius inside which nothing should cross."""

OTHERS: tuple[Stepper, ...] = (Averaged(0.1, 0.01), Apgd(), Averaged(), Apgd(), Averaged(0.05, 0.05, memory=0), Apgd())
"""The attacks that doubt an answer, from the image itself at first, then from random points."""

CLEAR = 4.0
"""By how many standard errors a randomised detector's mean score must be across."""

LEAPS, FLIPS = 30, 50
"""The steps of a search by leaps with gradients, and of one without."""


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
    soon as it crosses. A search that fails proves nothing, so the answer is then doubted: other attacks from other
    starts look inside 97 % of the radius, or in the whole box where none was found, and leaps across valleys from the
    best of their points. Where one of them crosses the bisection goes on from there, with leaps where it took
    them. The distances are of points that were found, so upper bounds of the smallest ones.

    What a search finds is scored once more, as `predict` does: a score of another batch, or of convolutions that a GPU
    rounds to TF32, may lie on the other side of a threshold that is as near.

    A randomised detector crosses by luck sooner or later. So what a search found is evaluated anew, several times, and
    is across where the mean of these is, by four times its standard error.

    Args:
        detector: any detector, fitted; its exact score is attacked.
        images: (B, C, H, W) in [0, 1].
        norm: "l2" or "linf".
        threshold: the score above which an image is rejected, as `predict` does.
        side: "out": outliers, across at or below the threshold; "in": inliers, across above it.
        steps: steps of the search in one round.
        rounds: rounds of a bisection at most; growing to the whole box takes nine.
        tolerance: a bisection ends when the radius is known to this share of itself.
        batch_size: search this many samples at a time; None is all at once.

    Raises:
        ValueError: an option is off, or the images are none.
    """
    require_fitted(detector)
    check_images(images)
    check_side(side)
    check_counts(steps=steps, rounds=rounds, batch_size=batch_size)
    if not (isinstance(tolerance, Real) and 0 < tolerance < 1):
        raise ValueError(f"tolerance must lie in (0, 1), got {tolerance!r}")
    check_level("threshold", threshold)
    limit = torch.as_tensor(threshold, dtype=images.dtype, device=images.device)
    above = torch.nextafter(limit, torch.full_like(limit, torch.inf))
    aim = _Aim(LowerScore(detector), 1.0, limit) if side == "out" else _Aim(RaiseScore(detector), -1.0, -above)
    draws, few = draws_of(detector, images, batch_size), looked_at(images)
    exact = aim.sign * scores(detector, images, batch_size)
    across = (exact <= aim.stop) & (draws == 1)
    aim = replace(aim, draws=draws, slack=slack_of(aim, images[few], exact[few]))
    size = batch_size or len(images)
    batches = zip(images.detach().split(size), across.split(size), strict=True)
    parts = [_Hunt(aim, part, BALLS[norm], steps, there).run(rounds, tolerance) for part, there in batches]
    found = Minimal(*(torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])))
    found.evaluations[:] += 1
    found.evaluations[few] += 3  # by which it was seen whether scores are drawn, and how they are rounded
    return found


@dataclass(frozen=True)
class _Aim:
    """What is made small, minus the score where `sign` is −1, and the value from which on a sample is across."""

    objective: LowerScore | RaiseScore
    sign: float
    stop: Tensor
    draws: int = 1
    """How many draws of a score decide whether it is."""
    slack: float = 0.0
    """By how much a search is to go beyond, since its scores may be rounded otherwise."""

    def judged(self, found: Found, slack: Tensor) -> Found:
        """The same with what a score is outside the search, `slack` (B,) being how far off it may be there."""
        return self.scored_anew(found, slack) if self.draws == 1 else self.drawn_anew(found)

    def scored_anew(self, found: Found, slack: Tensor) -> Found:
        """The same with the scores that the detector gives what crossed, or may have."""
        likely, value = found.value <= self.stop + slack, found.value.clone()
        rows = likely.nonzero().flatten()
        if len(rows):
            value[rows] = (self.sign * scores(self.objective.detector, found.x[rows], None)).to(value)
        evaluations = found.evaluations + likely.to(found.evaluations)
        return replace(found, value=value, success=likely & (value <= self.stop), evaluations=evaluations)

    def drawn_anew(self, found: Found) -> Found:
        """The same with what a randomised score is at least, whatever draws the search was lucky with."""
        value = self.sign * drawn(self.objective.detector, found.x, self.draws, None)
        spread = value.std(dim=0)
        spread = torch.maximum(spread, spread.mean())  # that of few draws is too small now and then
        value = value.mean(dim=0) + CLEAR * spread / self.draws**0.5
        return replace(found, value=value, success=value <= self.stop, evaluations=found.evaluations + self.draws)


def slack_of(aim: _Aim, few: Tensor, exact: Tensor) -> float:
    """How far scores in a search are from those outside it: the median of a few images', and a little rounding."""
    with torch.no_grad():
        searched = aim.objective(few, torch.arange(len(few), device=few.device))
    apart = (searched - exact).abs().nan_to_num(0, 0, 0)
    return float(apart.median() + 4 * torch.finfo(exact.dtype).eps * aim.stop.abs().nan_to_num(0, 0, 0))


class _Hunt:
    """The same for one batch: `low` is a radius in which the search failed, `high` the distance of the nearest find.

    `point` is that find or, where there is none, the point of the least `value`; `best` is the best point of the looks
    in which `best_value` was found. A sample is `rugged` when it took leaps to find an answer wrong. A search may end
    when it is beyond the threshold by `slack`, and a sample is `misled` when its last one crossed by rounding alone.
    """

    def __init__(self, aim: _Aim, start: Tensor, kind: type[Ball], steps: int, across: Tensor) -> None:
        self.aim, self.start, self.kind, self.steps = aim, start, kind, steps
        self.measure = kind(1.0)
        self.farthest = self.measure.distance(start, (start < 0.5).to(start))
        self.box = kind(float(self.farthest.max()))
        never = torch.full_like(self.farthest, torch.inf)
        self.low, self.high = torch.zeros_like(never), torch.where(across, 0, never)
        self.point, self.value = start.clone(), never.clone()
        self.best, self.best_value = start.clone(), never.clone()
        self.slack = torch.full_like(never, aim.slack)
        self.rugged, self.misled = (torch.zeros_like(never, dtype=torch.bool) for _ in range(2))
        self.evaluations = torch.zeros_like(self.farthest, dtype=torch.long)
        self.generator, self.luck = (generator_for(seed, start.device) for seed in (0, 1))

    def run(self, rounds: int, tolerance: float) -> Minimal:
        """Bisect, doubt, and bisect what the doubt was right about."""
        self._bisect(rounds, tolerance)
        doubted = (self.high > 0).nonzero().flatten()
        for number in range(len(DOUBTS)):
            doubted = self._doubt(doubted, number)
            self._bisect(rounds, tolerance)
        return Minimal(self.point, self.start, self.high, self.evaluations)

    def _bisect(self, rounds: int, tolerance: float) -> None:
        for _ in range(rounds):
            rows = ((self.low < (1 - tolerance) * self.high) & (self.low < self.farthest)).nonzero().flatten()
            if len(rows) == 0:
                break
            growing = torch.minimum((2 * self.low).maximum(self.farthest / 255), self.farthest)
            radius = torch.where(self.high.isinf(), growing, (self.low + self.high) / 2)
            left = self._look(rows, radius, Apgd(), self.point, self.steps)
            smooth, rugged = left[~self.rugged[left]], left[self.rugged[left]]
            left = torch.cat([smooth, self._leap(rugged, radius, self.point)])
            left = left[~self.misled[left]]
            self.low[left] = radius[left]

    def _doubt(self, rows: Tensor, number: int) -> Tensor:
        """Look well inside these answers with other attacks, then by leaps; the rows to be doubted again.

        Those are the ones that were wrong, to be bisected anew, and those without an answer, where only leaps look
        from the second time on.
        """
        before, lost = self.high.clone(), self.high.isinf()
        radius = torch.where(lost, DOUBTS[number] * self.farthest, SURE * self.high)
        self.best_value.fill_(torch.inf)
        left = rows[~lost[rows]] if number else rows
        for turn, stepper in enumerate(OTHERS):
            if len(left) == 0:
                break
            uniform = torch.rand(self.start.shape, generator=self.generator, device=self.generator.device)
            anywhere = Radii(self.kind, radius, self.box.box).random_start(self.start, uniform.to(self.start))
            left = self._look(left, radius, stepper, anywhere if turn else self.start, 3 * self.steps)
        left = rows[self.high[rows] == before[rows]]
        self._leap(left, radius, self.best)
        wrong = self.high < before
        self.rugged[left] |= wrong[left]
        self.low[wrong] = 0
        return rows[(wrong | self.high.isinf())[rows]]

    def _leap(self, rows: Tensor, radius: Tensor, point: Tensor) -> Tensor:
        """Search by leaps, with gradients and then without; the rows where nothing was found."""
        self.best_value.fill_(torch.inf)
        left = self._look(rows, radius, Leaps(), point, LEAPS)
        return self._look(left, radius, Flips(), self.best, FLIPS)

    def _look(self, rows: Tensor, radius: Tensor, stepper: Stepper, point: Tensor, steps: int) -> Tensor:
        """Search inside balls of these radii from these points, and keep what is found; the rows where nothing was."""
        if len(rows) == 0:
            return rows
        found = search(
            self.aim.objective,
            self.start[rows],
            self.box,
            stepper=Within(stepper, self.kind, radius[rows], point[rows]),
            steps=steps + 1,
            stop=self.aim.stop - self.slack[rows] if self.aim.draws == 1 else None,  # else luck would end it
            generator=self.luck,
            precision="float32",  # the balls may be smaller than what half precision tells apart
        )
        claimed, found = found, self.aim.judged(found, self.slack[rows])
        misled = (claimed.value <= self.aim.stop) & ~found.success & (self.aim.draws == 1)
        self.misled[rows] = misled
        self.slack[rows] = torch.where(misled, 2 * (found.value - claimed.value), self.slack[rows])
        self.evaluations[rows] += found.evaluations
        better = found.value < self.best_value[rows]
        self.best[rows] = choose(better, found.x, self.best[rows])
        self.best_value[rows] = torch.where(better, found.value, self.best_value[rows])
        nearer = found.success | (self.high[rows].isinf() & (found.value < self.value[rows]))
        self.point[rows] = choose(nearer, found.x, self.point[rows])
        self.value[rows] = torch.where(nearer, found.value, self.value[rows])
        reached = self.measure.distance(found.x, self.start[rows])
        self.high[rows] = torch.where(found.success, reached, self.high[rows])
        return rows[~found.success]


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
