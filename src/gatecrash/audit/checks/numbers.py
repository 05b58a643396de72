"""Checks that a score is one number: the same when an image is scored twice, and in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from gatecrash.attacks.draws import apart, stays
from gatecrash.audit.checks.evidence import SIDES, STILL, Effort, Evidence, Standing
from gatecrash.audit.checks.exact import draws_in, in_double
from gatecrash.audit.checks.registry import Finding, check, per_attack, per_detector
from gatecrash.detectors import Detector
from gatecrash.portions import in_portions
from gatecrash.speed import full_float32

STEADY, UNSTEADY = 0.1, 0.3
"""How far the same image's averaged score may vary, in standard deviations of the clean ones, before a warning and
before the check fails."""

DRIFT = 0.01
"""The change of a score, in standard deviations of the clean ones, that comes from too little precision."""


@check("deterministic", price=lambda evidence: 2 * evidence.count * sum(evidence.passes.values()))
def deterministic(evidence: Evidence) -> Finding:
    """The same image has the same score, or gradients are averaged over draws."""

    def look(title: str) -> Finding:
        detector = evidence.detector(title)
        draws = draws_in(detector)
        if draws == 1:
            return Finding("fail", f"{title}: one draw is no average; let it have more: draws=16")
        first, second = evidence.twice(title)
        if draws is not None:
            return varying(title, draws, first, second, clean_spread(evidence, title))
        far = float(apart(first, second).max())
        if not stays(first, second, STILL):
            return Finding(
                "fail",
                f"{title}: the same image scores differently twice, by up to {far:.2g} of the scores' size; its "
                "gradients must be averaged over draws: Expected(detector, draws=16)",
            )
        return Finding("pass", f"{title}: {len(first)} images scored twice differ by {far:.2g}", far)

    return per_detector(evidence, look)


def varying(title: str, draws: int, first: Tensor, second: Tensor, spread: float) -> Finding:
    """Whether an average over draws still varies from one scoring to the next, beside the spread of clean scores.

    Noise of a tenth of the spread takes at most 0.002 from an AUROC, and of three tenths 0.01.
    """
    same = first == second  # infinite ones too
    share = float(torch.where(same, 0.0, first - second).square().mean().sqrt()) / 2**0.5 / spread
    words = (
        f"{title}: scores and gradients are averaged over {draws} draws, and scored again the same {len(first)} images "
        f"vary by {share:.2g} of the clean scores' spread"
    )
    if not share <= UNSTEADY:
        return Finding("fail", f"{words}; let it have more draws, and let them be averaged: Expected(detector, draws)")
    return Finding("warn" if share > STEADY else "pass", words, share)


def clean_spread(evidence: Evidence, title: str) -> float:
    """The standard deviation of a detector's clean scores, of all sets together, infinite ones left out."""
    clean = torch.cat([evidence.measured.clean[key] for key in evidence.measured.clean if key[0] == title]).double()
    return float(clean[clean.isfinite()].std().nan_to_num().clamp_min(torch.finfo(torch.float32).tiny))


def drift_price(evidence: Evidence) -> int:
    """Every image scored as the audit does and exactly, and two to see whether that can be done."""
    return (2 * evidence.count + 2) * sum(evidence.passes[title] for title, _ in evidence.heads)


@check("precision_drift", price=drift_price, attack="images")
def precision_drift(evidence: Evidence) -> Finding:
    """What the attack returned has the same score in float64."""

    def look(title: str, effort: Effort) -> Finding:
        if evidence.random(title):
            return Finding("warn", f"{title}: its score is random, which hides what precision alone would change")
        inliers, outliers = (evidence.found(title, effort, side).x for side in SIDES)
        reported = Standing(evidence.scores(title, inliers), evidence.scores(title, outliers))
        exact, precision = exactly(evidence.detector(title), inliers, outliers, evidence.job.batch_size)
        spread = clean_spread(evidence, title)
        drift = torch.cat([(reported.scores(side).double() - exact.scores(side)).abs() for side in SIDES]) / spread
        far, (status, remark) = float(drift.quantile(0.95)), reported.verdict(abs(reported.auroc - exact.auroc))
        words = (
            f"{title}: scored again in {precision}, the attacked AUROC is {exact.auroc:.3f} instead of "
            f"{reported.auroc:.3f} in {effort.ball}, and 95 % of scores move by less than {far:.2g} of the clean "
            "scores' spread"
        )
        return Finding("fail", words) if far > DRIFT else Finding(status, words + remark, far)

    return per_attack(evidence.heads, look)


def exactly(detector: Detector, inliers: Tensor, outliers: Tensor, batch_size: int) -> tuple[Standing, str]:
    """The scores of inliers and outliers in float64 where the detector can do that, else in float32; which it was."""
    with torch.autocast(inliers.device.type, enabled=False), full_float32():
        judge, x, precision = in_double(detector, torch.cat([inliers, outliers]))
        with torch.no_grad():
            parts = in_portions(lambda batch: judge.judge(judge.encode(batch)), x, batch_size)
        exact = torch.cat(parts).cpu().double()
    return Standing(exact[: len(inliers)], exact[len(inliers) :]), precision
