from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from gatecrash.data import ImageSet
from gatecrash.data import balance as balance_module
from gatecrash.data.balance import balanced, balanced_set

LABELS = torch.tensor([2, 7, 2, 4, 7, 2, 2, 4, 2])
"""Five of class 2, two of class 4, two of class 7."""


def pictures() -> Tensor:
    return torch.rand(9, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def darker(x: Tensor, generator: Generator) -> Tensor:
    """A change by which every copy still tells its original."""
    return x / 2


def test_small_classes_are_filled_and_their_originals_come_first() -> None:
    x, y = balanced(pictures(), LABELS, 6)
    assert torch.equal(y.bincount(minlength=8), torch.tensor([0, 0, 6, 0, 6, 0, 0, 6]))
    assert torch.equal(x[:9], pictures())
    assert torch.equal(y[:9], LABELS)
    assert y[9:].tolist() == [2, 4, 4, 4, 4, 7, 7, 7, 7]
    assert x.shape == (18, 3, 12, 12)
    assert not (x[9:, None] == x[None, :9]).flatten(2).all(dim=2).any()


def test_copies_are_changed_originals_of_their_class_and_all_get_their_turn() -> None:
    x, y = balanced(pictures(), LABELS, 300, darker)
    distances = torch.cdist(2 * x[9:].flatten(1), pictures().flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    apart, origin = distances.min(dim=1)
    assert apart.max() < 1e-5
    assert torch.equal(LABELS[origin], y[9:])
    assert (origin.bincount(minlength=9) > 30).all()


def test_a_large_class_is_cut_down_in_order_and_without_repeats() -> None:
    x, y = balanced(pictures(), LABELS, 3)
    assert y.bincount(minlength=8).tolist() == [0, 0, 3, 0, 3, 0, 0, 3]
    rows = [int((pictures() == image).flatten(1).all(dim=1).nonzero()) for image in x[:7]]
    assert rows == sorted(set(rows))
    assert torch.equal(LABELS[rows], y[:7])
    chosen = {tuple(balanced(pictures(), LABELS, 3, seed=seed)[0][:7].flatten().tolist()) for seed in range(20)}
    assert len(chosen) > 5


def test_the_seed_alone_determines_the_copies() -> None:
    before = torch.get_rng_state()
    first = balanced(pictures(), LABELS, 6, seed=1)[0]
    assert torch.equal(balanced(pictures(), LABELS, 6, seed=1)[0], first)
    assert not torch.equal(balanced(pictures(), LABELS, 6, seed=2)[0], first)
    assert torch.equal(torch.get_rng_state(), before)


def test_pieces_are_put_together_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = balanced(pictures(), LABELS, 20, darker)
    sizes: list[int] = []

    def noted(x: Tensor, generator: Generator) -> Tensor:
        sizes.append(len(x))
        return darker(x, generator)

    monkeypatch.setattr(balance_module, "CHUNK", 4)
    pieces = balanced(pictures(), LABELS, 20, noted)
    assert torch.equal(pieces[0], whole[0])
    assert torch.equal(pieces[1], whole[1])
    assert sizes == [4] * 12 + [3]


def test_a_source_is_balanced_with_a_note() -> None:
    images = ImageSet(pictures(), LABELS, "signs", ["a", "b"], ["resized"])
    found = balanced_set(images, 6, seed=3)
    x, y = balanced(pictures(), LABELS, 6, seed=3)
    assert torch.equal(found.x, x)
    assert found.y is not None
    assert torch.equal(found.y, y)
    assert (found.name, found.classes) == ("signs", ["a", "b"])
    assert found.notes == ["resized", "9 images → 6 of every class, 18 in all"]
    assert images.notes == ["resized"]


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ValueError, match="per_class must be at least 1, got 0"):
        balanced(pictures(), LABELS, 0)
    with pytest.raises(ValueError, match=r"labels must be whole numbers of shape \(9,\)"):
        balanced(pictures(), LABELS[:3], 5)
    with pytest.raises(ValueError, match="signs has no labels, so its classes cannot be balanced"):
        balanced_set(ImageSet(pictures(), None, "signs"), 5)
