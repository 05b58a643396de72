"""Doubts about a triage: too few mistakes, attacks that fool nobody, images on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from gatecrash.audit.checks.leakage import shared
from gatecrash.audit.checks.registry import Finding, Status, in_words, sentence, worst
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
    doubts: dict[str, Callable[[], Finding]] = {
        "mistakes_suffice": lambda: mistakes_suffice(groups),
        "adversaries_fool": lambda: adversaries_fool(job, groups),
        "threshold_is_held_out": lambda: threshold_is_held_out(groups),
        "leakage": lambda: leakage(job),
    }
    found = {name: looked(look) for name, look in doubts.items()}
    return [{"name": name, "status": f.status, "sentence": sentence(f.words)} for name, f in found.items()]


def looked(look: Callable[[], Finding]) -> Finding:
    """What a check found; an error inside it is a failure that says so, and the run is not lost for it."""
    try:
        return look()
    except Exception as error:
        return Finding("fail", f"The check could not be done: {in_words(error)}")


def mistakes_suffice(groups: Sorted) -> Finding:
    """There are enough mistakes, and enough that are none, to tell detectors apart by them."""
    right = groups.right[INLIERS]
    wrong = int((~right).sum())
    words = f"{wrong} of {len(right)} test images are classified wrongly"
    if wrong == 0 or wrong == len(right):
        return Finding("fail", f"{words}, so there is nothing to tell apart")
    if min(wrong, len(right) - wrong) < FEW:
        return Finding("warn", f"{words}; with fewer than {FEW} of either kind an AUROC says little")
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
        status: Status = "fail" if after > before else "warn" if after >= HARMLESS * before else "pass"
        seen.append(Finding(status, words, closeness=after))
    return worst(seen, "attacks")


def threshold_is_held_out(groups: Sorted) -> Finding:
    """The threshold comes from other images than those it is judged on."""
    name, noun = (HELD_OUT, "validation") if HELD_OUT in groups.right else (INLIERS, "test")
    right = groups.right[name]
    wrong = int((~right).sum())
    if min(wrong, len(right) - wrong) < 2:
        return Finding("warn", f"No threshold was chosen: {wrong} of {len(right)} {noun} images are mistakes")
    if name == INLIERS:
        return Finding("warn", "There are no held-out images, so the threshold was chosen on the test images")
    return Finding("pass", f"Chosen on {len(right)} validation images, {wrong} of them mistakes")


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
