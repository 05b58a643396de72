"""A check of the data: the same image on two sides of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from gatecrash.audit.checks.evidence import Evidence
from gatecrash.audit.checks.registry import Finding, check, worst

SMALL = 8
"""The side of the thumbnails on which near duplicates are looked for."""

ALIKE = 0.02
"""The root mean square difference of two thumbnails of one picture."""

SAME = 0.05
"""The root mean square difference of two pictures whose thumbnails are alike; noise differs by more."""

FEW = 0.01
"""The share of near duplicates, in which large data sets abound, that is worth a warning only."""

CHUNK = 1024


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
    x, other = x.detach().cpu(), other.detach().cpu()
    exact = exact_duplicates(x, other)
    near = near_duplicates(x, other) & ~exact
    same, alike = int(exact.sum()), int(near.sum())
    words = f"{same} of {len(x)} {first} are among the {second}, and {alike} nearly"
    if same or alike > FEW * len(x):
        return Finding("fail", words)
    return Finding("warn" if alike else "pass", words)


def exact_duplicates(x: Tensor, other: Tensor) -> Tensor:
    """Whether every image of x is, in 8 bits, one of the others, (N,)."""
    known = {image.numpy().tobytes() for image in in_bytes(other)}
    return torch.tensor([image.numpy().tobytes() in known for image in in_bytes(x)], dtype=torch.bool)


def in_bytes(x: Tensor) -> Tensor:
    """Images in 8 bits."""
    return (255 * x).round().byte()


def near_duplicates(x: Tensor, other: Tensor) -> Tensor:
    """Whether every image of x differs little from the one of the others that is nearest as a thumbnail, (N,)."""
    small = thumbnails(other)
    width = math.sqrt(small.shape[1])
    found = []
    for chunk in x.split(CHUNK):
        apart, nearest = torch.cdist(thumbnails(chunk), small).min(dim=1)
        difference = (chunk - other[nearest]).flatten(1).square().mean(dim=1).sqrt()
        found.append((apart / width < ALIKE) & (difference < SAME))
    return torch.cat(found)


def thumbnails(x: Tensor) -> Tensor:
    """Images made small by averaging, one vector each, (N, D)."""
    size = (min(SMALL, x.shape[-2]), min(SMALL, x.shape[-1]))
    return adaptive_avg_pool2d(x, size).flatten(1)
