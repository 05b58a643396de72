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
from gatecrash.attacks.draws import stays
from gatecrash.attacks.rounding import RoundedFound
from gatecrash.attacks.score import scores
from gatecrash.audit.checks.cost import Meter
from gatecrash.audit.checks.exact import averaged
from gatecrash.audit.job import Job
from gatecrash.audit.plan import AttackPlan
from gatecrash.audit.run import INLIERS, Measured, attack_key
from gatecrash.audit.steps import steps_and_restarts
from gatecrash.ball import Ball
from gatecrash.bundle import Row
from gatecrash.detectors import Detector
from gatecrash.found import Found
from gatecrash.metrics import auroc
from gatecrash.protocols import Stepper
from gatecrash.speed import full_float32
from gatecrash.stepper import Apgd

Side = Literal["in", "out"]
SIDES: tuple[Side, Side] = ("in", "out")

TOLERANCE = 0.01
"""How far an AUROC may move before a check takes notice."""

BROKEN = 0.05
"""The two-sided AUROC under which a detector counts as broken."""

STILL = 1e-6
"""How far apart two scores of the same image may be by rounding, as a share of the scores' size."""

SLACK = 1e-9
"""What rounding may add to a change of AUROC."""

Status = Literal["pass", "warn", "fail"]

Shared = Literal["scores", "images"]
"""What checks may look at together: scores after the audit's attacks, and images that these return."""


class Changes(TypedDict, total=False):
    """What a check may change about the audit's attack."""

    ball: Ball
    stepper: Stepper
    steps: int
    restarts: int
    stop: Tensor
    random_start: bool
    eight_bit: bool


@dataclass(frozen=True)
class Effort:
    """How hard the audit tries: one of its attacks on a score, inside one ball."""

    attack: AttackPlan
    rung: int
    ball: Ball
    stepper: Stepper
    steps: int
    restarts: int

    @property
    def key(self) -> tuple[str, int]:
        """What tells one effort of an audit from another."""
        return attack_key(self.attack), self.rung

    @property
    def evaluations(self) -> int:
        """Scores that the attack takes of one image."""
        return self.restarts * (self.steps + 1)

    @property
    def eight_bit(self) -> bool:
        """Whether what it finds is put into whole grey levels before it is scored."""
        return self.attack.eight_bit


@dataclass(frozen=True)
class Standing:
    """The scores of a few inliers and outliers after an attack on both sides, on the CPU."""

    inside: Tensor
    outside: Tensor

    @property
    def auroc(self) -> float:
        """The probability that an outlier still scores higher than an inlier."""
        return auroc(self.inside, self.outside)

    def verdict(self, change: float) -> tuple[Status, str]:
        """Whether the AUROC may change so much, and what is to be said where so few images cannot tell.

        From 0.01 on it is too much. Where two pairs of images are as much as that, a change of no more than them may
        be chance, and is a warning.
        """
        pair = 1 / (len(self.inside) * len(self.outside))
        if change < TOLERANCE - SLACK:
            return "pass", ""
        if change <= 2 * pair + SLACK:
            return "warn", f"; that is not less than {TOLERANCE:g}, but one pair of so few images is {pair:.3f}"
        return "fail", ""

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
    every_ball: bool = True
    """Whether every ball of an attack that says something is looked at, or the most telling one."""
    meter: Meter = field(default_factory=Meter)
    """What they took so far."""
    _found: dict[tuple[str, tuple[str, int], Side], Found] = field(default_factory=dict, repr=False)
    _blocks: dict[str, list[list[Effort]]] = field(default_factory=dict, repr=False)
    _twice: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

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

    def blocks(self, title: str) -> list[list[Effort]]:
        """Every attack of the plan on a score, the strongest first, inside those of its balls that say something.

        These are the balls that leave anything unbroken, the most telling first: the largest that does not break the
        detector. Where all do, it is the smallest. Where the plan attacks no score, APGD inside the balls of its
        strongest other attack.

        Raises:
            ValueError: the plan has no attack.
        """
        if title not in self._blocks:
            if not self.job.attacks:
                raise ValueError("the plan has no attack")
            by_strength = sorted(self.job.attacks, key=strength, reverse=True)
            attacks = [attack for attack in by_strength if aims_at_score(attack)] or by_strength[:1]
            self._blocks[title] = [self._efforts(title, attack) for attack in attacks]
        return self._blocks[title]

    def _efforts(self, title: str, attack: AttackPlan) -> list[Effort]:
        rungs = attack.ball.ball().rungs
        downwards = sorted(range(len(rungs)), key=lambda rung: -rungs[rung].eps)
        areas = {rung: self.reported(title, attack, rungs[rung].eps) for rung in downwards}
        telling = [rung for rung in downwards if areas[rung] > TOLERANCE] or downwards[-1:]
        telling.sort(key=lambda rung: areas[rung] < BROKEN)
        return [effort_of(attack, rung, rungs[rung]) for rung in telling[: None if self.every_ball else 1]]

    def effort(self, title: str) -> Effort:
        """The plan's strongest attack on a score, inside the most telling of its balls."""
        return self.blocks(title)[0][0]

    @property
    def looks(self) -> list[tuple[str, Effort]]:
        """Every detector with every attack on its score and every ball looked at."""
        return [(title, effort) for title in self.job.detectors for block in self.blocks(title) for effort in block]

    @property
    def heads(self) -> list[tuple[str, Effort]]:
        """Every detector with every attack on its score, inside the most telling ball of each."""
        return [(title, block[0]) for title in self.job.detectors for block in self.blocks(title)]

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

    def push(self, title: str, effort: Effort, side: Side, images: Tensor, **changes: Unpack[Changes]) -> Found:
        """An attack of the audit on some images of one side, changed as the options say."""
        attack = evict if side == "in" else admit
        again = changes.get("random_start", False)
        with full_float32():
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
                eight_bit=changes.get("eight_bit", effort.eight_bit),
            )

    def found(self, title: str, effort: Effort, side: Side) -> Found:
        """What an attack of the audit finds on the images looked at; done once."""
        key = title, effort.key, side
        if key not in self._found:
            self._found[key] = self.push(title, effort, side, self.images(side))
        return self._found[key]

    def standing(self, title: str, effort: Effort) -> Standing:
        """The scores after an attack of the audit: those it reports, or where it left a side alone what it finds."""
        attacked = {}
        for side in SIDES:
            reported = self.reported_scores(title, effort, side)
            attacked[side] = self.ended(title, self.found(title, effort, side)) if reported is None else reported
        return Standing(attacked["in"], attacked["out"])

    def scores(self, title: str, x: Tensor) -> Tensor:
        """The scores of images as the audit reports them, on the CPU."""
        return self.detector(title).scores(x, self.job.batch_size).cpu()

    def ended(self, title: str, found: Found) -> Tensor:
        """The scores that an attack ended with, on the CPU; random ones drawn anew, as the best of many flatters."""
        return self.scores(title, found.x) if self.redraws(title) else score_of(found)

    def searched(self, title: str, effort: Effort, side: Side) -> Tensor:
        """The scores that the search of an attack ended with, on the CPU: before its images were rounded to 8 bits."""
        found = self.found(title, effort, side)
        if not isinstance(found, RoundedFound) or found.rounding is None:
            return self.ended(title, found)
        value = found.rounding.value_before.cpu()
        return -value if side == "in" else value

    def twice(self, title: str) -> tuple[Tensor, Tensor]:
        """The clean scores of all images looked at, and the same once more; done once."""
        if title not in self._twice:
            x = torch.cat([self.inliers, self.outliers])
            first, second = (scores(self.detector(title), x, self.job.batch_size) for _ in range(2))
            self._twice[title] = first, second
        return self._twice[title]

    def random(self, title: str) -> bool:
        """Whether a score is drawn anew every time, averaged over draws or not."""
        return averaged(self.detector(title)) or not stays(*self.twice(title), STILL)

    def redraws(self, title: str) -> int:
        """The further evaluations per image that `ended` takes: one where a score is an average over draws."""
        return int(averaged(self.detector(title)))

    def afterwards(self, title: str, effort: Effort) -> int:
        """The evaluations per image that follow an attack: random scores drawn anew, and two beside rounded images."""
        return self.redraws(title) + 2 * effort.eight_bit

    def clean(self, title: str) -> Standing:
        """The scores of the images looked at before any attack."""
        inside, *outside = (self.measured.clean[title, name][rows] for name, rows in self.places.items())
        return Standing(inside, torch.cat(outside))

    def reported_scores(self, title: str, effort: Effort, side: Side) -> Tensor | None:
        """The scores that the audit reports for the images looked at; None where it did not attack their score."""
        parts = []
        for name in [INLIERS] if side == "in" else self.job.outliers:
            outcome = self.measured.attacked.get((title, attack_key(effort.attack), name, effort.rung))
            if outcome is None or not aims_at_score(effort.attack):
                return None
            parts.append(outcome.scores[self.places[name]])
        return torch.cat(parts)

    def unbroken(self, title: str, effort: Effort) -> int:
        """The images that a stronger attack could still win, as far as is known before the shared attacks are made."""
        if any(self._waits(run) for run in self._unreported(title, effort)):
            return self.count
        standing = self.standing(title, effort)
        return sum(len(standing.unbroken(side)) for side in SIDES)

    def attack_price(self, shared: Shared) -> int:
        """The passes that the attacks still to be made will take, whose scores or images checks look at together."""
        runs = (
            [run for look in self.looks for run in self._unreported(*look)]
            if shared == "scores"
            else [(title, effort, side) for title, effort in self.heads for side in SIDES]
        )
        return sum(
            self.passes[title] * len(self.images(side)) * (effort.evaluations + self.afterwards(title, effort))
            for title, effort, side in runs
            if self._waits((title, effort, side))
        )

    def _unreported(self, title: str, effort: Effort) -> list[tuple[str, Effort, Side]]:
        return [(title, effort, side) for side in SIDES if self.reported_scores(title, effort, side) is None]

    def _waits(self, run: tuple[str, Effort, Side]) -> bool:
        title, effort, side = run
        return (title, effort.key, side) not in self._found


def effort_of(attack: AttackPlan, rung: int, ball: Ball) -> Effort:
    """An attack of a plan inside one of its balls; APGD on the score for one that does not aim at that."""
    stepper = stepper_for(ball, attack.step) if attack.step and aims_at_score(attack) else Apgd()
    return Effort(attack, rung, ball, stepper, *steps_and_restarts(attack))


def spread_rows(count: int, wanted: int) -> Tensor:
    """At most `wanted` of `count` rows, evenly spread, since neighbours in a data set are often alike."""
    wanted = min(count, wanted)
    return torch.arange(wanted) * count // max(wanted, 1)


def strength(attack: AttackPlan) -> tuple[bool, bool, bool, int, float]:
    """What makes one attack stronger evidence than another: its aim, its sides, its work, its ball."""
    steps, restarts = steps_and_restarts(attack)
    suite = attack.name == "worst_case"
    return aims_at_score(attack), len(attack.sides) == 2, suite, steps * restarts, attack.ball.ball().eps


def aims_at_score(attack: AttackPlan) -> bool:
    """Whether an attack's objective is the detector's own score."""
    return attack.name in ("admit", "evict", "worst_case")


def score_of(found: Found) -> Tensor:
    """The scores of an attack on a score, on the CPU."""
    if found.score is None:
        raise ValueError("the attack reports no score")
    return found.score.cpu()


def stronger(side: Side, first: Tensor, second: Tensor) -> Tensor:
    """The score that is better for the attacker, image by image."""
    return torch.maximum(first, second) if side == "in" else torch.minimum(first, second)
