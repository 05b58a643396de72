"""Doubts about a triage: too few mistakes, attacks that fool nobody, images on both sides."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gatecrash.audit.checks.leakage import shared
from gatecrash.audit.checks.registry import Finding, Status, sentence, worst
from gatecrash.bundle import Check
from gatecrash.triage.job import TriageJob
from gatecrash.triage.rows import Sorted
from gatecrash.triage.run import HELD_OUT, INLIERS, Findings

FEW = 20
"""Mistakes below which an AUROC says little."""

HARMLESS = 0.9
"""An attack that leaves this share of the accuracy fools hardly anybody."""


def run_checks(job: TriageJob, findings: Findings) -> list[Check]:
    """How every doubt came out."""
    groups = Sorted(job, findings)
    found = {
        "mistakes_suffice": mistakes_suffice(groups),
        "adversaries_fool": adversaries_fool(job, groups),
        "threshold_is_held_out": threshold_is_held_out(groups),
        "leakage": leakage(job),
    }
    return [{"name": name, "status": f.status, "sentence": sentence(f.words)} for name, f in found.items()]


def mistakes_suffice(groups: Sorted) -> Finding:
    """There are enough mistakes to tell detectors apart by them."""
    right = groups.right[INLIERS]
    wrong = int((~right).sum())
    words = f"{wrong} of {len(right)} test images are classified wrongly"
    if wrong == 0 or wrong == len(right):
        return Finding("fail", f"{words}, so there is nothing to tell apart")
    if wrong < FEW:
        return Finding("warn", f"{words}; with fewer than {FEW} an AUROC says little")
    return Finding("pass", words)


def adversaries_fool(job: TriageJob, groups: Sorted) -> Finding:
    """Every attack on the classifier lowers its accuracy."""
    before = groups.accuracy(INLIERS)
    if not job.adversaries:
        return Finding("pass", "The plan has no adversarial images")
    seen = []
    for adversary in job.adversaries:
        after = groups.accuracy(adversary.title)
        words = f"{adversary.title} takes the accuracy from {before:.3f} to {after:.3f}"
        status: Status = "fail" if after > before else "warn" if after > HARMLESS * before else "pass"
        seen.append(Finding(status, words, closeness=after))
    return worst(seen, "attacks")


def threshold_is_held_out(groups: Sorted) -> Finding:
    """The threshold comes from other images than those it is judged on."""
    if HELD_OUT in groups.right:
        wrong = int((~groups.right[HELD_OUT]).sum())
        if wrong < 2:
            return Finding("warn", f"Only {wrong} validation images are classified wrongly, too few for a threshold")
        return Finding("pass", f"Chosen on {len(groups.right[HELD_OUT])} validation images, {wrong} of them mistakes")
    return Finding("warn", "The plan has no data.held_out, so the threshold was chosen on the test images themselves")


def leakage(job: TriageJob) -> Finding:
    """No image is an outlier and an inlier, or in the test and in what detectors were fitted on."""
    return worst([shared(*pair) for pair in pairs(job)] or [Finding("pass", "There is one set of images")], "pairs")


def pairs(job: TriageJob) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    """The pairs of sets that must not share an image."""
    learnt = {"fit set": job.fit, "held-out inliers": job.held_out, "fit outliers": job.fit_outliers}
    for name, images in learnt.items():
        if images is not None:
            yield "inliers", job.inliers.x, name, images.x
    for title, outliers in job.outliers.items():
        yield f"outliers {title}", outliers.x, "inliers", job.inliers.x
        for name, images in learnt.items():
            if images is not None:
                yield f"outliers {title}", outliers.x, name, images.x
