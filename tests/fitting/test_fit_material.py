from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fit_toys import material
from torch import Tensor

from gatecrash.fitting import Material, Recipe
from gatecrash.fitting.batches import Batches
from gatecrash.fitting.material import OutlierStream

CPU = torch.device("cpu")


def numbered(count: int, per_image: float = 2.0) -> Material:
    """Outliers that are their own number."""
    data = material()
    return Material(data.x, data.y, torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1), per_image)


def taken(stream: OutlierStream, number: int, rank: int = 0, world: int = 1) -> list[int]:
    outliers = stream.take(number, 4, rank, world)
    assert outliers is not None
    return [int(value) for value in outliers.flatten()]


@pytest.mark.parametrize("count", [5, 8, 21])
def test_every_outlier_comes_once_before_any_comes_again(count: int) -> None:
    stream = OutlierStream(numbered(count), seed=3)
    endless = [value for number in range(2 * count) for value in taken(stream, number)]
    assert len(endless) == 16 * count
    for turn in range(16):
        assert sorted(endless[turn * count : (turn + 1) * count]) == list(range(count))
    assert endless[:count] != endless[count : 2 * count]


def test_any_place_of_the_stream_can_be_taken_at_once() -> None:
    data = numbered(21)
    walked = OutlierStream(data, seed=3)
    in_order = [taken(walked, number) for number in range(40)]
    assert [taken(OutlierStream(data, seed=3), number) for number in (39, 0, 17)] == [in_order[i] for i in (39, 0, 17)]
    assert [taken(walked, number) for number in (5, 30, 1)] == [in_order[i] for i in (5, 30, 1)]
    assert taken(OutlierStream(data, seed=4), 0) != in_order[0]


def test_processes_share_the_outliers_of_a_batch() -> None:
    stream = OutlierStream(numbered(21, per_image=1.75), seed=0)
    shares = [taken(stream, 6, rank, 3) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 2, 2]
    assert Counter(value for share in shares for value in share) == Counter(taken(stream, 6))


def test_no_outliers_is_none() -> None:
    assert OutlierStream(material(), seed=0).take(0, 4, 0, 1) is None


@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_shows_every_image_once_in_batches_that_differ_by_one(world: int) -> None:
    data, recipe = material(22), Recipe(epochs=2, batch_size=8, seed=5)
    orders: list[list[int]] = []
    for epoch in range(2):
        parts = [list(Batches(data, recipe, CPU, rank, world).of(epoch)) for rank in range(world)]
        whole = [torch.cat([batch.rows for batch in batches]) for batches in zip(*parts, strict=True)]
        assert [len(rows) for rows in whole] == [8, 7, 7]
        assert [Batches(data, recipe, CPU).size(number) for number in range(3)] == [8, 7, 7]
        assert sorted(torch.cat(whole).tolist()) == list(range(22))
        for batch in parts[0]:
            assert torch.equal(batch.x, data.x[batch.rows])
            assert torch.equal(batch.y, data.y[batch.rows])
        orders.append(torch.cat(whole).tolist())
    assert orders[0] != orders[1]


def test_the_balance_makes_every_outlier_count_the_same() -> None:
    """Σ over processes of share·balance·(1 / own outliers) must be one over all outliers, for each of them."""
    data, recipe, world = material(7, outliers=9), Recipe(epochs=1, batch_size=7), 3
    all_outliers = 14
    for rank in range(world):
        (batch,) = Batches(data, recipe, CPU, rank, world).of(0)
        assert batch.outliers is not None
        share = len(batch.x) / 7
        assert share * batch.balance / len(batch.outliers) == pytest.approx(1 / all_outliers)
    (alone,) = Batches(data, recipe, CPU).of(0)
    assert alone.balance == 1.0


def test_augmentation_changes_inliers_and_outliers_by_the_seed_of_the_step() -> None:
    def shift(x: Tensor, random: torch.Generator) -> Tensor:
        return x + torch.rand(len(x), 1, 1, 1, generator=random)

    plain = material(6, outliers=12)
    moved = Material(plain.x, plain.y, plain.outliers, augment=shift)
    recipe = Recipe(epochs=1, batch_size=6)
    first, again = (next(Batches(moved, recipe, CPU).of(0)) for _ in range(2))
    bare = next(Batches(plain, recipe, CPU).of(0))
    later = next(Batches(moved, recipe, CPU).of(1))
    assert first.outliers is not None and again.outliers is not None and bare.outliers is not None
    offsets = torch.cat([first.x - bare.x, first.outliers - bare.outliers])
    torch.testing.assert_close(offsets, offsets[:, :, :1, :1].expand_as(offsets))
    assert len(set(offsets[:, 0, 0, 0].tolist())) == 18
    assert torch.equal(first.x, again.x) and torch.equal(first.outliers, again.outliers)
    assert not torch.equal(later.x - plain.x[later.rows], first.x - bare.x)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"y": torch.zeros(3)}, "a label for every image, got 3 for 22"),
        ({"x": torch.zeros(0, 1, 4, 4), "y": torch.zeros(0)}, "got 0 for 0"),
        ({"outliers": torch.zeros(0, 1, 4, 4)}, "at least one outlier"),
        ({"outliers_per_image": 0.0}, "outliers_per_image must be positive, got 0"),
    ],
)
def test_material_that_nothing_can_be_learnt_from_is_refused(parts: dict[str, Any], message: str) -> None:
    data = material()
    with pytest.raises(ValueError, match=message):
        Material(**{"x": data.x, "y": data.y, **parts})


def test_a_batch_smaller_than_the_number_of_processes_is_refused() -> None:
    with pytest.raises(
        ValueError, match="4 processes need batches of at least 4 images, got 22 images in batches of 3"
    ):
        Batches(material(22), Recipe(epochs=1, batch_size=3), CPU, 0, 4)
