"""Checks of how hard the search tries: would another step, restart, ball or kind of search have found more?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from gatecrash.attacks.classifier import stepper_for
from gatecrash.audit.checks.evidence import BROKEN, SIDES, Changes, Effort, Evidence, Side, Standing, score_of, stronger
from gatecrash.audit.checks.registry import Finding, check, per_attack, per_detector
from gatecrash.ball import Linf
from gatecrash.detectors import Certified
from gatecrash.found import Found
from gatecrash.metrics import auroc
from gatecrash.stepper import Apgd, Square

FEW = 0.1
"""The share of images on which one step may get further than many."""

FREE = Linf(1.0)
"""A ball as large as the box."""

UNBOUNDED_STEPS = 20
"""The least number of steps when the ball is as large as the box."""

REFUTED = 1e-3
"""By how much an attacked AUROC is below a certified one where it is no rounding."""


def doubled_steps(evidence: Evidence) -> int:
    """The price of twice the steps for whatever is unbroken."""
    return priced(evidence, lambda effort: effort.restarts * (2 * effort.steps + 1))


def doubled_restarts(evidence: Evidence) -> int:
    """The price of as many restarts again, and of the start."""
    return priced(evidence, lambda effort: effort.evaluations + 1)


@check("steps_suffice", price=doubled_steps, attack="scores")
def steps_suffice(evidence: Evidence) -> Finding:
    """Doubling the steps changes the AUROC by less than 0.01."""

    def look(title: str, effort: Effort) -> Finding:
        before = evidence.standing(title, effort)
        found = more(evidence, title, effort, before, steps=2 * effort.steps)
        after = improved(before, found)
        return compared(title, f"{2 * effort.steps} steps instead of {effort.steps}", before, after, effort)

    return per_attack(evidence.looks, look)


@check("restarts_suffice", price=doubled_restarts, attack="scores")
def restarts_suffice(evidence: Evidence) -> Finding:
    """Doubling the restarts changes the AUROC by less than 0.01."""

    def look(title: str, effort: Effort) -> Finding:
        before = evidence.standing(title, effort)
        found = more(evidence, title, effort, before, random_start=True)
        after = improved(before, found)
        return compared(title, f"{2 * effort.restarts} runs instead of {effort.restarts}", before, after, effort)

    return per_attack(evidence.looks, look)


@check("black_box_not_stronger", price=lambda evidence: priced(evidence, lambda e: e.evaluations), attack="scores")
def black_box_not_stronger(evidence: Evidence) -> Finding:
    """A gradient-free search with as many evaluations is not stronger, on the images that the attack left unbroken."""

    def look(title: str, effort: Effort) -> Finding:
        before = evidence.standing(title, effort)
        found = more(evidence, title, effort, before, stepper=Square(), steps=effort.evaluations - 1 or 1, restarts=1)
        after = replaced(before, found)
        gain = before.auroc - after.auroc
        words = (
            f"{title}: without gradients a search reaches AUROC {after.auroc:.3f} in {effort.evaluations} evaluations "
            f"per image, the attack {before.auroc:.3f} ({looked_at(before, effort)})"
        )
        status, remark = before.verdict(gain)
        if status == "fail":
            remark = "; it is stronger, so the gradients mislead (gradient masking)"
        return Finding(status, words + remark, gain)

    return per_attack(evidence.looks, look)


def single_step(evidence: Evidence) -> int:
    """The price of one step for every image: the score of its start and of its end."""
    return sum(
        evidence.passes[title] * evidence.count * 2 * (1 + evidence.redraws(title)) for title, _ in evidence.heads
    )


@check("iterative_beats_single", price=single_step, attack="images")
def iterative_beats_single(evidence: Evidence) -> Finding:
    """Many steps get further than one step of the ball's full size, before either is rounded to whole grey levels."""

    def look(title: str, effort: Effort) -> Finding:
        if effort.steps * effort.restarts == 1:
            return Finding("fail", f"{title}: the audit's attack takes a single step, so there is nothing to beat it")
        many, one = [], []
        for side in SIDES:
            single = stepper_for(effort.ball, effort.ball.eps)
            start = evidence.images(side)
            found = evidence.push(title, effort, side, start, stepper=single, steps=1, restarts=1, eight_bit=False)
            one.append(gain_of(side, evidence.ended(title, found), found))
            again = evidence.searched(title, effort, side)
            many.append(gain_of(side, stronger(side, evidence.standing(title, effort).scores(side), again), found))
        iterated, once = torch.cat(many), torch.cat(one)
        if not bool((torch.maximum(iterated, once) > 0).any()):
            return Finding("fail", f"{title}: neither one step nor {effort.steps} change any score (gradient masking)")
        # Where one step is the exact optimum, as on a linear score, many steps can only equal it up to rounding.
        further = once > iterated + 1e-3 * iterated.abs().median()
        share = float(further.float().mean())
        words = (
            f"{title}: {effort.steps} steps get further than one on {float((iterated > once).float().mean()):.0%} of "
            f"{len(once)} images, less far on {share:.0%} ({effort.ball})"
        )
        if share > FEW:
            return Finding("fail", f"{words} (gradient masking, or steps that are too small)")
        return Finding("pass", words, share)

    return per_attack(evidence.heads, look)


def unbounded_price(evidence: Evidence) -> int:
    """The price of the attack without a limit."""
    return sum(
        evidence.passes[title] * evidence.count * (unbounded_steps(evidence.effort(title)) + 1)
        for title in evidence.job.detectors
    )


@check("unbounded_breaks", price=unbounded_price, attack="own")
def unbounded_breaks(evidence: Evidence) -> Finding:
    """With the ball as large as the box, the two-sided AUROC falls under 0.05, unless there is a certificate."""

    def look(title: str) -> Finding:
        clean, effort = evidence.clean(title), evidence.effort(title)
        steps = unbounded_steps(effort)
        ended = {
            side: score_of(
                evidence.push(
                    title,
                    effort,
                    side,
                    evidence.images(side),
                    ball=FREE,
                    stepper=Apgd(),
                    steps=steps,
                    restarts=1,
                    stop=clean.limit(side),
                    eight_bit=False,
                )
            )
            for side in SIDES
        }
        after, detector = Standing(ended["in"], ended["out"]), evidence.detector(title)
        words = (
            f"{title}: with every pixel free, {steps} steps take the two-sided AUROC from {clean.auroc:.3f} to "
            f"{after.auroc:.3f} ({len(clean.inside)} + {len(clean.outside)} images)"
        )
        proven = None
        if isinstance(detector, Certified):
            proven = auroc(after.inside, detector.score_bound(evidence.outliers, FREE.eps, "linf").cpu())
            if after.auroc < proven - REFUTED:
                return Finding("fail", f"{words}, and its certificate proves {proven:.3f}, so it is wrong")
        if after.auroc < BROKEN:
            return Finding("pass", words, after.auroc)
        words += f", not under {BROKEN:g}"
        if proven is not None:
            if proven >= BROKEN:
                return Finding(
                    "pass",
                    f"{words}, as its certificate explains: no attack on these outliers comes under {proven:.3f}",
                    after.auroc,
                )
            words += f", and its certificate, which proves {proven:.3f}, does not explain it"
        return Finding("fail", f"{words}: the attack does not reach this detector")

    return per_detector(evidence, look)


def unbounded_steps(effort: Effort) -> int:
    """The audit's steps, or what a ball of that size needs at least."""
    return max(effort.steps, UNBOUNDED_STEPS)


Ended = dict[Side, tuple[Tensor, Tensor]]
"""Of every side the rows that were attacked, and the scores they ended with."""


def more(evidence: Evidence, title: str, effort: Effort, before: Standing, **changes: Unpack[Changes]) -> Ended:
    """Another attack on what is unbroken of every side.

    The others are left alone, and an image leaves once it has passed every image of the other side: what it could
    gain beyond that does not change the AUROC. In whole grey levels it goes on to the end, since rounding may take back
    a score that has only just passed.
    """
    ended: Ended = {}
    for side in SIDES:
        rows = before.unbroken(side)
        if len(rows):
            images = evidence.images(side)[rows]
            if not effort.eight_bit:
                changes["stop"] = before.limit(side)
            ended[side] = rows, evidence.ended(title, evidence.push(title, effort, side, images, **changes))
    return ended


def improved(before: Standing, found: Ended) -> Standing:
    """The better of two attacks for every image."""
    sides = {side: before.scores(side).clone() for side in SIDES}
    for side, (rows, ended) in found.items():
        sides[side][rows] = stronger(side, sides[side][rows], ended)
    return Standing(sides["in"], sides["out"])


def replaced(before: Standing, found: Ended) -> Standing:
    """The second attack alone, on the images that it was made on."""
    sides = {side: before.scores(side).clone() for side in SIDES}
    for side, (rows, ended) in found.items():
        sides[side][rows] = ended
    return Standing(sides["in"], sides["out"])


def compared(title: str, what: str, before: Standing, after: Standing, effort: Effort) -> Finding:
    """Whether a stronger attack found more."""
    gain = before.auroc - after.auroc
    status, remark = before.verdict(gain)
    words = f"{title}: {what} take the AUROC from {before.auroc:.3f} to {after.auroc:.3f} ({looked_at(before, effort)})"
    return Finding(status, words + remark, gain)


def looked_at(standing: Standing, effort: Effort) -> str:
    """On how many images, and in which ball."""
    return f"{len(standing.inside)} + {len(standing.outside)} images, {effort.ball}"


def gain_of(side: Side, ended: Tensor, found: Found) -> Tensor:
    """How far scores have moved from the start's in the attacker's direction, (B,)."""
    if found.start_score is None:
        raise ValueError("the attack reports no score")
    start = found.start_score.cpu()
    return ended - start if side == "in" else start - ended


def priced(evidence: Evidence, evaluations: Callable[[Effort], int]) -> int:
    """The passes of some evaluations per image, on all images that are unbroken."""
    return sum(
        evidence.passes[title]
        * evidence.unbroken(title, effort)
        * (evaluations(effort) + evidence.afterwards(title, effort))
        for title, effort in evidence.looks
    )
