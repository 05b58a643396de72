"""What checks look at: a finished audit, and a few of its images attacked once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from gatecrash.attacks import admit, evict
from gatecrash.attacks.classifier import stepper_for
from gatecrash.attacks.worst_case import BUDGETS
from gatecrash.audit.checks.cost import Meter
from gatecrash.audit.job import Job
from gatecrash.audit.plan import AttackPlan
from gatecrash.audit.run import INLIERS, Measured, attack_key
from gatecrash.ball import Ball
from gatecrash.bundle import Row
from gatecrash.detectors import Detector
from gatecrash.found import Found
from gatecrash.metrics import auroc
from gatecrash.protocols import Stepper
from gatecrash.stepper import Apgd

Side = Literal["in", "out"]
SIDES: tuple[Side, Side] = ("in", "out")

TOLERANCE = 0.01
"""How far an AUROC may move before a check takes notice."""


class Changes(TypedDict, total=False):
    """What a check may change about the audit's attack."""

    ball: Ball
    stepper: Stepper
    steps: int
    restarts: int
    stop: Tensor
    random_start: bool


@dataclass(frozen=True)
class Effort:
    """How hard the audit tries: its strongest attack on a score, inside one ball."""

    attack: AttackPlan
    rung: int
    ball: Ball
    stepper: Stepper
    steps: int
    restarts: int

    @property
    def evaluations(self) -> int:
        """Scores that the attack takes of one image."""
        return self.restarts * (self.steps + 1)


@dataclass(frozen=True)
class Standing:
    """The scores of a few inliers and outliers after an attack on both sides."""

    inside: Tensor
    outside: Tensor

    @property
    def auroc(self) -> float:
        """The probability that an outlier still scores higher than an inlier."""
        return auroc(self.inside, self.outside)

    @property
    def tolerance(self) -> float:
        """The change of AUROC that says nothing: 0.01, or two pairs of images where that is more."""
        return max(TOLERANCE, 2 / (len(self.inside) * len(self.outside))) + 1e-9

    def scores(self, side: Side) -> Tensor:
        """The scores of one side."""
        return self.inside if side == "in" else self.outside

    def unbroken(self, side: Side) -> Tensor:
        """The rows of one side that a stronger attack could still push past an image of the other."""
        left = self.inside <= self.outside.max() if side == "in" else self.outside >= self.inside.min()
        return left.nonzero().flatten()

    def limit(self, side: Side) -> Tensor:
        """The score past which an image of this side has passed every image of the other."""
        edge = (self.outside.max() if side == "in" else self.inside.min()).cpu()
        return torch.nextafter(edge, torch.full_like(edge, torch.inf if side == "in" else -torch.inf))


@dataclass(frozen=True)
class Evidence:
    """A finished audit, and a few of its images on which checks make attacks of their own."""

    job: Job
    measured: Measured
    rows: Sequence[Row]
    size: int
    """Inliers looked at, and outliers."""
    planted: int
    """Images for which a point is planted."""
    passes: dict[str, int]
    """Network passes that one score of each detector takes."""
    allowance: float
    """Network passes that all checks together may take."""
    meter: Meter = field(default_factory=Meter)
    """What they took so far."""
    _found: dict[tuple[str, Side], Found] = field(default_factory=dict, repr=False)
    _efforts: dict[str, Effort] = field(default_factory=dict, repr=False)

    @property
    def left(self) -> float:
        """Network passes that may still be taken."""
        return self.allowance - self.meter.passes

    @cached_property
    def places(self) -> dict[str, Tensor]:
        """The rows of every set that are looked at, evenly spread; the outlier sets share `size` among them."""
        share = -(-self.size // len(self.job.outliers))
        rows = {INLIERS: spread_rows(len(self.job.inliers), self.size)}
        left = self.size
        for name, images in self.job.outliers.items():
            rows[name] = spread_rows(len(images), min(share, left))
            left -= len(rows[name])
        return rows

    @cached_property
    def inliers(self) -> Tensor:
        """The inliers looked at, on the job's device."""
        return self.job.inliers.x[self.places[INLIERS]].to(self.job.device)

    @cached_property
    def outliers(self) -> Tensor:
        """The outliers looked at, on the job's device."""
        parts = [images.x[self.places[name]] for name, images in self.job.outliers.items()]
        return torch.cat(parts).to(self.job.device)

    def images(self, side: Side) -> Tensor:
        """The images of one side."""
        return self.inliers if side == "in" else self.outliers

    @property
    def count(self) -> int:
        """Images looked at, both sides together."""
        return len(self.inliers) + len(self.outliers)

    def detector(self, title: str) -> Detector:
        """A detector by its name in tables."""
        return self.job.detectors[title]

    def effort(self, title: str) -> Effort:
        """The plan's strongest attack on a score, inside the largest of its balls that leaves anything unbroken.

        Where the plan attacks no score, APGD inside the ball of its strongest other attack.

        Raises:
            ValueError: the plan has no attack.
        """
        if title not in self._efforts:
            self._efforts[title] = self._effort(title)
        return self._efforts[title]

    def _effort(self, title: str) -> Effort:
        if not self.job.attacks:
            raise ValueError("the plan has no attack")
        attack = max(self.job.attacks, key=strength)
        ladder = attack.ball.ball().ladder
        downwards = sorted(range(len(ladder)), key=lambda rung: -ladder[rung])
        rung = next(
            (rung for rung in downwards if self.reported(title, attack, ladder[rung]) > TOLERANCE), downwards[-1]
        )
        ball = attack.ball.ball().rungs[rung]
        stepper = stepper_for(ball, attack.step) if attack.step and aims_at_score(attack) else Apgd()
        return Effort(attack, rung, ball, stepper, *steps_and_restarts(attack))

    def reported(self, title: str, attack: AttackPlan, eps: float) -> float:
        """The highest AUROC that the audit reports for a detector, an attack and an eps, over all outlier sets."""
        return max(
            (
                row["auroc"]
                for row in self.rows
                if (row["detector"], row["attack"], row["norm"], row["eps"])
                == (title, attack.title, attack.ball.norm, eps)
                and (row["side"] == "both" or len(attack.sides) == 1)
            ),
            default=1.0,
        )

    def push(self, title: str, side: Side, images: Tensor, **changes: Unpack[Changes]) -> Found:
        """The audit's attack on some images of one side, changed as the options say."""
        effort = self.effort(title)
        attack = evict if side == "in" else admit
        again = changes.get("random_start", False)
        return attack(
            self.detector(title),
            images,
            changes.get("ball", effort.ball),
            stepper=changes.get("stepper", effort.stepper),
            steps=changes.get("steps", effort.steps),
            restarts=changes.get("restarts", effort.restarts),
            stop=changes.get("stop"),
            random_start=again,
            # Another seed for random starts, or they would repeat those of the attack that they are compared with.
            generator=self.job.seed + again,
            batch_size=self.job.batch_size,
        )

    def found(self, title: str, side: Side) -> Found:
        """What the audit's attack finds on the images looked at; done once."""
        if (title, side) not in self._found:
            self._found[title, side] = self.push(title, side, self.images(side))
        return self._found[title, side]

    def standing(self, title: str) -> Standing:
        """The scores after the audit's attack: what it finds here, or what it reports, whichever is worse."""
        attacked = {}
        for side in SIDES:
            found, reported = score_of(self.found(title, side)), self.reported_scores(title, side)
            attacked[side] = found if reported is None else stronger(side, found, reported.to(found))
        return Standing(attacked["in"], attacked["out"])

    def reported_scores(self, title: str, side: Side) -> Tensor | None:
        """The scores that the audit reports for the images looked at; None where it did not attack their score."""
        effort = self.effort(title)
        parts = []
        for name in [INLIERS] if side == "in" else self.job.outliers:
            outcome = self.measured.attacked.get((title, attack_key(effort.attack), name, effort.rung))
            if outcome is None or not aims_at_score(effort.attack):
                return None
            parts.append(outcome.scores[self.places[name]])
        return torch.cat(parts)

    def unbroken(self, title: str) -> int:
        """The images that a stronger attack could still win, as far as is known before the shared attack was made."""
        if all((title, side) in self._found for side in SIDES):
            standing = self.standing(title)
        else:
            inside, outside = (self.reported_scores(title, side) for side in SIDES)
            if inside is None or outside is None:
                return self.count
            standing = Standing(inside, outside)
        return sum(len(standing.unbroken(side)) for side in SIDES)

    @property
    def attack_price(self) -> int:
        """The passes that the shared attacks still to be made will take."""
        return sum(
            self.passes[title] * len(self.images(side)) * self.effort(title).evaluations
            for title in self.job.detectors
            for side in SIDES
            if (title, side) not in self._found
        )


def spread_rows(count: int, wanted: int) -> Tensor:
    """At most `wanted` of `count` rows, evenly spread, since neighbours in a data set are often alike."""
    wanted = min(count, wanted)
    return torch.arange(wanted) * count // max(wanted, 1)


def strength(attack: AttackPlan) -> tuple[bool, bool, bool, int, float]:
    """What makes one attack stronger evidence than another: its aim, its sides, its work, its ball."""
    steps, restarts = steps_and_restarts(attack)
    suite = attack.name == "worst_case"
    return aims_at_score(attack), len(attack.sides) == 2, suite, steps * restarts, attack.ball.ball().eps


def steps_and_restarts(attack: AttackPlan) -> tuple[int, int]:
    """Steps per run and runs per image; of a suite those of its attack on the score."""
    if attack.name == "worst_case":
        budget = BUDGETS[attack.budget or "standard"]
        return budget.steps, budget.restarts
    return attack.steps, attack.restarts


def aims_at_score(attack: AttackPlan) -> bool:
    """Whether an attack's objective is the detector's own score."""
    return attack.name in ("admit", "evict", "worst_case")


def score_of(found: Found) -> Tensor:
    """The scores of an attack on a score."""
    if found.score is None:
        raise ValueError("the attack reports no score")
    return found.score


def stronger(side: Side, first: Tensor, second: Tensor) -> Tensor:
    """The score that is better for the attacker, image by image."""
    return torch.maximum(first, second) if side == "in" else torch.minimum(first, second)
