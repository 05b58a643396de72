"""A check of the data: the same image on two sides of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gatecrash.audit.checks.evidence import Evidence
from gatecrash.audit.checks.registry import Finding, check, worst
from gatecrash.data.duplicates import overlap

FEW = 0.01
"""The share of near duplicates, in which large data sets abound, that is worth a warning only."""


@check("leakage")
def leakage(evidence: Evidence) -> Finding:
    """No image is an outlier and an inlier, or in the test and in what detectors were fitted on."""
    return worst([shared(*pair) for pair in pairs(evidence)], "pairs of sets")


def pairs(evidence: Evidence) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    """The pairs of sets that must not share an image."""
    job = evidence.job
    fitted = {"fit set": job.fit, "held-out inliers": job.held_out, "fit outliers": job.fit_outliers}
    learnt = {name: images.x for name, images in fitted.items() if images is not None}
    for title, outliers in job.outliers.items():
        yield f"outliers {title}", outliers.x, "inliers", job.inliers.x
        for name, x in learnt.items():
            yield f"outliers {title}", outliers.x, name, x
    for name, x in learnt.items():
        yield "inliers", job.inliers.x, name, x


def shared(first: str, x: Tensor, second: str, other: Tensor) -> Finding:
    """How many images of the first set are in the second, as they are or nearly."""
    if x.shape[1:] != other.shape[1:]:
        return Finding("pass", f"{first} and {second} differ in shape, so they share no image")
    same, alike = (int(found.sum()) for found in overlap(x, other))
    words = f"{same} of {len(x)} {first} are among the {second}, and {alike} nearly"
    if same or alike > FEW * len(x):
        return Finding("fail", words)
    return Finding("warn" if alike else "pass", words)
