"""Images that are in two sets, as they are or nearly."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from gatecrash.images import check_images

SMALL = 8
"""The side of the thumbnails on which near duplicates are looked for."""

ALIKE = 0.02
"""The root mean square difference of two thumbnails of one picture."""

SAME = 0.05
"""The root mean square difference of two pictures whose thumbnails are alike; noise differs by more."""

CORRELATED = 0.995
"""The correlation of two pictures, every channel less its mean, that are one at another brightness or contrast."""

FLAT = 0.02
"""The standard deviation under which a thumbnail has no detail to be told by."""

CHUNK = 1024

_COMPARISONS = 2**25
"""How many pairs of thumbnails are compared at once; 128 MiB."""

_ROUNDING = 1e-4
"""How far the mean of a thumbnail may be off."""


def refuse_overlap(outliers: Tensor, inliers: Tensor) -> None:
    """Raises a ValueError with both counts when an outlier is one of the inliers, as it is or nearly.

    Args:
        outliers: (N, C, H, W) in [0, 1].
        inliers: (M, C, H, W) in [0, 1]; of another shape than the outliers they share no image.
    """
    check_images(outliers, "outliers")
    check_images(inliers, "inliers")
    same, alike = (int(found.sum()) for found in overlap(outliers, inliers))
    if same or alike:
        raise ValueError(
            f"{same} of {len(outliers)} outliers are among the inliers, and {alike} nearly; no model can both accept "
            "and reject them: leave out those that gatecrash.data.duplicates.overlap(outliers, inliers) finds"
        )


def overlap(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Whether every image of x is one of the others, and whether it nearly is and no more, (N,) each."""
    if x.shape[1:] != other.shape[1:]:
        return torch.zeros(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool)
    exact = exact_duplicates(x, other)
    return exact, (near_duplicates(x, other) | retouched(x, other)) & ~exact


def exact_duplicates(x: Tensor, other: Tensor) -> Tensor:
    """Whether every image of x is, in 8 bits, one of the others, (N,)."""
    known = set(_digests(other))
    return torch.tensor([digest in known for digest in _digests(x)], dtype=torch.bool)


def near_duplicates(x: Tensor, other: Tensor) -> Tensor:
    """Whether every image of x differs little from the one of the others that is nearest as a thumbnail, (N,).

    Thumbnails whose means are further apart than `ALIKE` are so themselves, by Cauchy and Schwarz. With both sets in
    the order of the means, a few images of x are therefore compared with a short stretch of the others.
    """
    found = torch.zeros(len(x), dtype=torch.bool)
    if not len(x) or not len(other):
        return found
    small, others = thumbnails(x.detach()), thumbnails(other.detach()).to(x.device)
    levels, places = others.mean(dim=1).sort()
    others = others[places]
    norms = others.square().sum(dim=1)
    for rows in small.mean(dim=1).argsort().split(max(1, min(CHUNK, _COMPARISONS // len(others)))):
        part = small[rows]
        ends = part[[0, -1]].mean(dim=1) + torch.tensor([-1, 1], device=part.device) * (ALIKE + _ROUNDING)
        first, last = torch.searchsorted(levels, ends).tolist()
        if first == last:
            continue
        # |a − b|² without |a|², which is the same for all b.
        apart = torch.addmm(norms[first:last], part, others[first:last].T, alpha=-2)
        nearest = first + apart.argmin(dim=1)
        alike = (part - others[nearest]).square().mean(dim=1).sqrt() < ALIKE
        rows, nearest = rows[alike], places[nearest[alike]].to(other.device)
        found[rows.cpu()] = (_difference(x[rows], other[nearest].to(x.device)) < SAME).cpu()
    return found


def retouched(x: Tensor, other: Tensor) -> Tensor:
    """Whether every image of x is one of the others at another brightness or contrast, mirrored or not, (N,).

    Shifted and cropped images are not found.
    """
    found = torch.zeros(len(x), dtype=torch.bool)
    if not len(x) or not len(other):
        return found
    others = _details(thumbnails(other.detach()).to(x.device), x.shape[1])
    for rows in torch.arange(len(x)).split(max(1, min(CHUNK, _COMPARISONS // len(others)))):
        for part in (x[rows].detach(), x[rows].detach().flip(-1)):
            small = _details(thumbnails(part), x.shape[1])
            likest, nearest = (small @ others.T).max(dim=1)
            # Thumbnails differ less than their pictures do, as a rule: whoever is not alike as one is not looked at.
            alike = (likest >= CORRELATED - _ROUNDING).nonzero().flatten()
            pair = (part[alike], other[nearest[alike].to(other.device)].detach().to(x.device))
            detail, wanted = (_details(images.flatten(1).float(), x.shape[1], flat=0.0) for images in pair)
            found[rows[alike.cpu()]] |= ((detail * wanted).sum(dim=1) >= CORRELATED).cpu()
    return found


def _details(flattened: Tensor, channels: int, flat: float = FLAT) -> Tensor:
    """Vectors (N, D) with every channel less its mean, at unit length; zero for what is as good as flat."""
    apart = flattened.unflatten(1, (channels, -1))
    apart = (apart - apart.mean(dim=2, keepdim=True)).flatten(1)
    length = apart.norm(dim=1, keepdim=True)
    enough = length > flat * apart.shape[1] ** 0.5
    return torch.where(enough, apart / length.clamp_min(1e-12), torch.zeros_like(apart))


def thumbnails(x: Tensor) -> Tensor:
    """Images made small by averaging, one vector each, (N, D)."""
    size = (min(SMALL, x.shape[-2]), min(SMALL, x.shape[-1]))
    return torch.cat([adaptive_avg_pool2d(chunk, size).flatten(1).float() for chunk in x.split(CHUNK)])


def in_bytes(x: Tensor) -> Tensor:
    """Images in 8 bits."""
    return (255 * x).round().byte()


def _difference(x: Tensor, other: Tensor) -> Tensor:
    return (x - other).detach().flatten(1).square().mean(dim=1).sqrt()


def _digests(x: Tensor) -> Iterator[bytes]:
    """16 bytes for every image, which two that differ in 8 bits do not share."""
    for chunk in x.detach().split(CHUNK):
        for image in in_bytes(chunk).cpu().numpy():
            yield blake2b(image.tobytes(), digest_size=16).digest()
