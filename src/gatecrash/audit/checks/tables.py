"""Checks of what the audit reports: rows that cannot be right, or that say less than they seem to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gatecrash.audit.checks.evidence import SIDES, TOLERANCE, Effort, Evidence, Status, aims_at_score
from gatecrash.audit.checks.registry import Finding, check, counted, per_attack, worst
from gatecrash.audit.run import attack_key
from gatecrash.ball import distance
from gatecrash.bundle import Row

SEPARATED = 0.8
"""The clean AUROC from which a fall to 0.5 says something."""

FEW, MANY = 0.01, 0.1
"""The shares of a collision's targets that its ball may hold before the check warns, and before it fails.

An outlier whose target is in the ball becomes an inlier for nothing, which takes up to half its share from the AUROC.
"""

SLACK = 1e-6
"""How far outside its ball rounding may leave an image."""


@check("monotone_in_eps")
def monotone_in_eps(evidence: Evidence) -> Finding:
    """The AUROC under an attack on the score does not rise from no attack to the smallest eps, nor from eps to eps.

    That holds among attacks of as many steps and restarts, and among the strongest at every eps, however many they
    take: a larger ball holds whatever was found in a smaller one.
    """
    titles = {attack.title for attack in evidence.job.attacks if aims_at_score(attack)}
    alike: dict[tuple[object, ...], list[Row]] = {}
    strongest: dict[tuple[object, ...], dict[float, Row]] = {}
    for row in evidence.rows:
        if row["attack"] in titles:
            kind = (row["detector"], row["outliers"], row["attack"], row["side"], row["norm"])
            alike.setdefault((*kind, row["steps"], row["restarts"]), []).append(row)
            rungs = strongest.setdefault(kind, {})
            best = rungs.setdefault(row["eps"] or 0.0, row)
            rungs[row["eps"] or 0.0] = lowest([best, row])
    if not alike:
        return Finding("warn", "No attack of the plan is on a score, so there is no AUROC to follow along eps")
    ladders = list(alike.values())
    several = [list(rungs.values()) for rungs in strongest.values() if len({effort_in(r) for r in rungs.values()}) > 1]
    return worst([along(ladder) for ladder in ladders + several], "ladders of eps")


def along(ladder: Sequence[Row]) -> Finding:
    """One attack on one pair of sets from no attack to its largest eps."""
    ladder = sorted(ladder, key=lambda row: row["eps"] or 0.0)
    first = ladder[0]
    clean = first | {"eps": 0.0, "auroc": first.get("clean_auroc", 1.0)}
    before, after = max(pairwise([clean, *ladder]), key=lambda pair: pair[1]["auroc"] - pair[0]["auroc"])
    rise = after["auroc"] - before["auroc"]
    words = (
        f"{first['detector']} on {first['outliers']}, {first['attack']} {first['side']}: AUROC {before['auroc']:.3f} "
        f"at {first['norm']} {before['eps']:g} and {after['auroc']:.3f} at {after['eps']:g}"
    )
    if rise <= TOLERANCE:
        return Finding("pass", words, rise)
    if effort_in(before) != effort_in(after):
        effort = f"{counted(after['steps'] or 0, 'step')} in {counted(after['restarts'] or 0, 'run')}"
        return Finding("fail", f"{words}; a larger ball must not be weaker: it needs more than {effort}")
    return Finding("fail", f"{words}; a larger ball must not be weaker: look at projection and step size")


def effort_in(row: Row) -> tuple[int | None, int | None]:
    """The steps and restarts of a row."""
    return row["steps"], row["restarts"]


@check("both_sides")
def both_sides(evidence: Evidence) -> Finding:
    """Of every detector and set of outliers, attacks on inliers, on outliers and on both are reported, and reach it."""
    aimed = {attack.title for attack in evidence.job.attacks if aims_at_score(attack)}
    findings = []
    for title in evidence.job.detectors:
        reads = evidence.detector(title).card.reads
        for outliers in evidence.job.outliers:
            rows = [row for row in evidence.rows if (row["detector"], row["outliers"]) == (title, outliers)]
            missing = [side for side in ("in", "out", "both") if side not in {row["side"] for row in rows}]
            if missing:
                findings.append(Finding("fail", f"{title} on {outliers}: no attack on side {' or '.join(missing)}"))
            else:
                findings.append(reached([row for row in rows if row["side"] != "none"], aimed, reads))
    return worst(findings, "pairs of detector and outliers")


def reached(rows: Sequence[Row], aimed: Collection[str], reads: str) -> Finding:
    """Whether what attacks both sides of a detector and a set of outliers moves the score.

    An attack on the score does. Another, such as that on the softmax, does where it gets at least as far on both sides
    as an attack on the score gets on one; where none gets anywhere, it has to read what the detector reads.

    Args:
        rows: the rows of all attacks, of every side.
        aimed: the attacks that aim at the score.
        reads: what the detector reads, by its card.
    """
    on_score = [row for row in rows if row["attack"] in aimed]
    sides = {row["side"] for row in on_score}
    who = f"{rows[0]['detector']} on {rows[0]['outliers']}"
    if "both" in sides:
        return Finding("pass", f"{who}: attacks in, out and both are reported")
    both = lowest([row for row in rows if row["side"] == "both"])
    words = f"{who}: both sides are attacked by {both['attack']} alone, AUROC {both['auroc']:.3f}"
    alone = lowest(on_score) if on_score else None
    if alone is None or alone["auroc"] > alone.get("clean_auroc", 1.0) - TOLERANCE:
        if reads in ("logits", "scores"):
            return Finding("pass", words)
        return Finding("warn", f"{words}, which reads logits, and the detector {reads}; add admit, side: both")
    words += f", and its score by {alone['attack']} on side {alone['side']}, AUROC {alone['auroc']:.3f}"
    if both["auroc"] <= alone["auroc"] + TOLERANCE:
        return Finding("pass", words)
    status: Status = "warn" if {"in", "out"} <= sides else "fail"
    return Finding(status, f"{words}, which {both['attack']} falls short of: attack its score with admit, side: both")


def lowest(rows: Sequence[Row]) -> Row:
    """The row of the lowest AUROC."""
    return min(rows, key=lambda row: row["auroc"])


@check("collision_is_real")
def collision_is_real(evidence: Evidence) -> Finding:
    """Detectors told the sets apart before the collision, and its targets lie outside the ball."""
    constant = [title for title in evidence.job.detectors if is_constant(evidence, title)]
    if constant:
        return Finding("fail", f"{', '.join(constant)}: the score is constant, which gives AUROC 0.5 for nothing")
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in evidence.rows:
        if row["attack"].startswith("collide"):
            groups.setdefault((row["attack"], row["outliers"], row["eps"] or 0.0), []).append(row)
    if not groups:
        return Finding("pass", "No score is constant, and the plan has no collision")
    held = targets_held(evidence)
    return worst([collided(rows, held[kind]) for kind, rows in groups.items()], "collisions")


def targets_held(evidence: Evidence) -> dict[tuple[str, str, float], float]:
    """The share of targets inside the ball, of every collision by its name, set of outliers and eps."""
    held: dict[tuple[str, str, float], float] = {}
    for attack in evidence.job.attacks:
        for rung, eps in enumerate(attack.ball.ball().ladder):
            for (_, key, name, number), outcome in evidence.measured.attacked.items():
                if (key, number) == (attack_key(attack), rung) and outcome.target_distance is not None:
                    share = float((outcome.target_distance <= eps).float().mean())
                    held[attack.title, name, eps] = max(share, held.get((attack.title, name, eps), 0.0))
    return held


def collided(rows: Sequence[Row], held: float = 0.0) -> Finding:
    """One collision with one set of outliers, as all detectors see it; `held` is the share of targets in the ball."""
    first, eps = rows[0], rows[0]["eps"] or 0.0
    ratio = first.get("target_distance_median", 0.0) / eps
    told = {row["detector"]: row.get("clean_auroc", 0.0) for row in rows}
    weak = {title: area for title, area in told.items() if area < SEPARATED}
    words = f"{first['attack']} from {first['outliers']}: the targets are {ratio:.3g} eps away"
    if ratio <= 1:
        return Finding("fail", f"{words}, so the ball holds them")
    if held > MANY:
        return Finding("fail", f"{words} in the median, but the ball holds {held:.0%} of them")
    apart = {row["detector"]: row["mape_median"] for row in rows if "mape_median" in row}
    if apart:
        furthest = max(apart, key=apart.__getitem__)
        where = f", the largest, of {furthest}," if len(set(apart.values())) > 1 else ""
        words += f", the median MAPE{where} is {apart[furthest]:.2g}"
    words += f", the ball holds {held:.1%} of the targets" if held else ""
    if weak:
        before = ", ".join(f"{title} {area:.3f}" for title, area in weak.items())
        words += f", but the clean AUROC was under {SEPARATED:g} for {before}, so 0.5 says little there"
        return Finding("fail" if len(weak) == len(told) else "warn", words)
    words += f", and the clean AUROC was at least {min(told.values()):.3f}"
    return Finding("warn" if held > FEW else "pass", words, 1 / ratio)


def is_constant(evidence: Evidence, title: str) -> bool:
    """Whether a detector gives every clean image the same score."""
    scores = torch.cat([part for (owner, _), part in evidence.measured.clean.items() if owner == title])
    return bool(scores.max() == scores.min())


def too_far(evidence: Evidence) -> Finding | None:
    """An image that is outside its ball by the audit's own measure; None where none is."""
    for attack in evidence.job.attacks:
        for rung, eps in enumerate(attack.ball.ball().ladder):
            for (title, key, name, number), outcome in evidence.measured.attacked.items():
                if (key, number) == (attack_key(attack), rung):
                    far = float((outcome.l2 if attack.ball.norm == "l2" else outcome.linf).max())
                    if far > eps + SLACK:
                        return Finding(
                            "fail",
                            f"{title} on {name}, {attack.title}: an image is {far:.4g} from its start in "
                            f"{attack.ball.norm}, and eps is {eps:.4g}; is eps in normalised units?",
                        )
    return None


@check("pixel_budget", attack="images", free=too_far)
def pixel_budget(evidence: Evidence) -> Finding:
    """Every image is inside its ball and the box: as the audit measured it, and measured again on images at hand."""
    measured = too_far(evidence)
    if measured is not None:
        return measured

    def look(title: str, effort: Effort) -> Finding:
        ball = effort.ball
        returned = [evidence.found(title, effort, side) for side in SIDES]
        x = torch.cat([exact(found.x) for found in returned])
        start = torch.cat([exact(evidence.images(side)) for side in SIDES])
        far, over = float(distance(x, start, ball.norm).max()), float((x - x.clamp(0, 1)).abs().max())
        rounded = float(distance((255 * x).round() / 255, start, ball.norm).max())
        words = (
            f"{title}: {len(x)} attacked images are at most {far:.4g} from their start in {ball.norm}, eps being "
            f"{ball.eps:.4g}, and after rounding to 8 bits {rounded:.4g}"
        )
        if over > SLACK:
            return Finding("fail", f"{words}; they leave the box [0, 1] by {over:.2g}")
        if far > ball.eps + SLACK:
            return Finding("fail", f"{words}: outside the ball")
        return Finding("pass", words, far / ball.eps)

    return per_attack(evidence.heads, look)


def exact(x: Tensor) -> Tensor:
    """The images in float64, on the CPU, where every device's images can be measured."""
    return x.detach().cpu().double()
