from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from gatecrash.data import duplicates
from gatecrash.data.duplicates import (
    exact_duplicates,
    near_duplicates,
    overlap,
    refuse_overlap,
    retouched,
    thumbnails,
)


def pictures(count: int, seed: int, channels: int = 3, size: int = 16) -> Tensor:
    """Smooth pictures of a few levels, many of which nearly agree."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 2, 2, generator=generator).mul(4).round() / 4
    fine = 0.02 * torch.rand(count, channels, size, size, generator=generator)
    return (0.9 * interpolate(coarse, size=size, mode="bilinear") + fine).clamp(0, 1)


def noise(count: int, seed: int) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def by_hand(x: Tensor, other: Tensor) -> Tensor:
    """Near duplicates from the definition: the nearest thumbnail, and then the picture itself, all pairs compared."""
    small, others = (adaptive_avg_pool2d(y.double(), 8).flatten(1) for y in (x, other))
    apart, nearest = (small[:, None] - others[None]).square().mean(dim=2).sqrt().min(dim=1)
    difference = (x - other[nearest]).double().flatten(1).square().mean(dim=1).sqrt()
    return (apart < 0.02) & (difference < 0.05)


@pytest.mark.parametrize("comparisons", [2**25, 300, 1])
@pytest.mark.parametrize("channels", [1, 3])
def test_near_duplicates_are_those_found_by_comparing_all(
    channels: int, comparisons: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_COMPARISONS", comparisons)
    x, other = pictures(400, 1, channels), pictures(150, 2, channels)
    x[10:40] = (other[20:50] + 0.03 * torch.linspace(-1, 1, 30).view(-1, 1, 1, 1)).clamp(0, 1)
    stripes = torch.tensor([0.1, -0.1]).repeat(8)
    x[40:50] = (other[60:70] + stripes).clamp(0, 1)
    found = near_duplicates(x, other)
    assert torch.equal(found, by_hand(x, other))
    assert 15 < int(found.sum()) < 300
    assert found[20:30].all()
    assert not found[40:50].any()


def test_exact_duplicates_are_equal_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "CHUNK", 7)
    x, other = (noise(40, seed).mul(255).round() / 255 for seed in (0, 1))
    x[3], x[39] = other[17], other[0] + 0.4 / 255
    x[5] = other[6]
    x[5, 2, 3, 3] = (other[6, 2, 3, 3] + 1 / 255) % 1
    assert exact_duplicates(x.clamp(0, 1), other).nonzero().flatten().tolist() == [3, 39]


def test_an_overlap_is_either_exact_or_near() -> None:
    x, other = noise(30, 0), noise(20, 1)
    x[4], x[6] = other[5], (other[7] + 0.01).clamp(0, 1)
    exact, near = overlap(x, other)
    assert exact.nonzero().flatten().tolist() == [4]
    assert near.nonzero().flatten().tolist() == [6]


def test_overlapping_outliers_are_refused_with_both_counts() -> None:
    outliers, inliers = noise(60, 0), noise(40, 1)
    refuse_overlap(outliers, inliers)
    outliers[5:22] = inliers[:17]
    outliers[30:33] = (inliers[30:33] + 0.01).clamp(0, 1)
    with pytest.raises(ValueError, match=r"^17 of 60 outliers are among the inliers, and 3 nearly; "):
        refuse_overlap(outliers, inliers)
    exact, near = overlap(outliers, inliers)
    refuse_overlap(outliers[~(exact | near)], inliers)


def test_near_duplicates_alone_are_refused_too() -> None:
    inliers = pictures(5, 3)
    with pytest.raises(ValueError, match=r"^0 of 2 outliers are among the inliers, and 2 nearly; "):
        refuse_overlap((inliers[:2] + 0.01).clamp(0, 1), inliers)


@pytest.mark.parametrize("comparisons", [2**25, 1])
@pytest.mark.parametrize(
    "retouch",
    [
        lambda x: x.flip(-1),
        lambda x: 0.9 * x + 0.1,
        lambda x: 0.8 * x,
        lambda x: (0.7 * x + 0.1).flip(-1),
    ],
    ids=["mirrored", "brighter", "darker", "both"],
)
def test_retouched_pictures_are_found(
    retouch: Callable[[Tensor], Tensor], comparisons: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_COMPARISONS", comparisons)
    x, other = noise(30, 0), noise(20, 1)
    x[3:9] = retouch(other[10:16])
    assert retouched(x, other).nonzero().flatten().tolist() == list(range(3, 9))
    exact, near = overlap(x, other)
    assert not exact.any() and near.nonzero().flatten().tolist() == list(range(3, 9))


def test_pictures_without_detail_are_not_each_others_retouched() -> None:
    flat = torch.linspace(0, 1, 5).view(-1, 1, 1, 1).expand(-1, 3, 8, 8) + 1e-3 * noise(5, 0)
    assert not retouched(flat.clamp(0, 1), flat.flip(0).clamp(0, 1)).any()


def test_images_of_another_shape_share_nothing() -> None:
    refuse_overlap(torch.zeros(2, 1, 8, 8), torch.zeros(2, 3, 8, 8))
    assert [len(found) for found in overlap(torch.zeros(2, 1, 8, 8), torch.zeros(3, 1, 9, 9))] == [2, 2]


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"outliers must lie in \[0, 1\]"):
        refuse_overlap(torch.full((2, 3, 8, 8), 2.0), torch.zeros(2, 3, 8, 8))


def test_thumbnails_of_small_images_are_the_images() -> None:
    x = noise(3, 0)[:, :, :5, :7]
    assert torch.equal(thumbnails(x), x.flatten(1))
