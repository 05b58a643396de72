"""Checks of what the audit reports: rows that cannot be right, or that say less than they seem to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gatecrash.audit.checks.evidence import SIDES, TOLERANCE, Effort, Evidence, aims_at_score
from gatecrash.audit.checks.registry import Finding, check, per_attack, worst
from gatecrash.audit.run import attack_key
from gatecrash.ball import distance
from gatecrash.bundle import Row

SEPARATED = 0.8
"""The clean AUROC from which a fall to 0.5 says something."""

SLACK = 1e-6
"""How far outside its ball rounding may leave an image."""


@check("monotone_in_eps")
def monotone_in_eps(evidence: Evidence) -> Finding:
    """The AUROC under an attack on the score does not rise from no attack to the smallest eps, nor from eps to eps."""
    titles = {attack.title for attack in evidence.job.attacks if aims_at_score(attack)}
    ladders: dict[tuple[object, ...], list[Row]] = {}
    for row in evidence.rows:
        if row["attack"] in titles:
            kind = (row["detector"], row["outliers"], row["attack"], row["side"], row["norm"])
            ladders.setdefault((*kind, row["steps"], row["restarts"]), []).append(row)
    if not ladders:
        return Finding("warn", "No attack of the plan is on a score, so there is no AUROC to follow along eps")
    return worst([along(ladder) for ladder in ladders.values()], "ladders of eps")


def along(ladder: Sequence[Row]) -> Finding:
    """One attack on one pair of sets from no attack to its largest eps."""
    ladder = sorted(ladder, key=lambda row: row["eps"] or 0.0)
    first = ladder[0]
    path = [(0.0, first.get("clean_auroc", 1.0)), *((row["eps"] or 0.0, row["auroc"]) for row in ladder)]
    rise, (eps, before), (wider, after) = max((b[1] - a[1], a, b) for a, b in pairwise(path))
    words = (
        f"{first['detector']} on {first['outliers']}, {first['attack']} {first['side']}: AUROC {before:.3f} at "
        f"{first['norm']} {eps:g} and {after:.3f} at {wider:g}"
    )
    if rise > TOLERANCE:
        return Finding("fail", f"{words}; a larger ball must not be weaker: look at projection and step size")
    return Finding("pass", words, rise)


@check("both_sides")
def both_sides(evidence: Evidence) -> Finding:
    """For every detector and set of outliers, attacks on inliers, on outliers and on both are reported."""
    findings = []
    for title in evidence.job.detectors:
        for outliers in evidence.job.outliers:
            sides = {row["side"] for row in evidence.rows if (row["detector"], row["outliers"]) == (title, outliers)}
            missing = [side for side in ("in", "out", "both") if side not in sides]
            if missing:
                findings.append(Finding("fail", f"{title} on {outliers}: no attack on side {' or '.join(missing)}"))
            else:
                findings.append(Finding("pass", f"{title} on {outliers}: attacks in, out and both are reported"))
    return worst(findings, "pairs of detector and outliers")


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
    return worst([collided(rows) for rows in groups.values()], "collisions")


def collided(rows: Sequence[Row]) -> Finding:
    """One collision with one set of outliers, as all detectors see it."""
    first, eps = rows[0], rows[0]["eps"] or 0.0
    ratio = first.get("target_distance_median", 0.0) / eps
    told = {row["detector"]: row.get("clean_auroc", 0.0) for row in rows}
    weak = {title: area for title, area in told.items() if area < SEPARATED}
    words = f"{first['attack']} from {first['outliers']}: the targets are {ratio:.3g} eps away"
    if ratio <= 1:
        return Finding("fail", f"{words}, so the ball holds them")
    apart = {row["detector"]: row["mape_median"] for row in rows if "mape_median" in row}
    if apart:
        furthest = max(apart, key=apart.__getitem__)
        where = f", the largest, of {furthest}," if len(set(apart.values())) > 1 else ""
        words += f", the median MAPE{where} is {apart[furthest]:.2g}"
    if weak:
        before = ", ".join(f"{title} {area:.3f}" for title, area in weak.items())
        words += f", but the clean AUROC was under {SEPARATED:g} for {before}, so 0.5 says little there"
        return Finding("fail" if len(weak) == len(told) else "warn", words)
    return Finding("pass", f"{words}, and the clean AUROC was at least {min(told.values()):.3f}", 1 / ratio)


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
