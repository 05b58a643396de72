"""What is learnt from: images with labels, and outliers beside every batch, in an order that a seed determines."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gatecrash.fitting.seeds import generator_of


@dataclass(frozen=True)
class Material:
    """What is learnt from: images with labels, and outliers beside every batch."""

    x: Tensor
    y: Tensor
    outliers: Tensor | None = None
    outliers_per_image: float = 2.0
    """How many stand beside every batch, as a multiple of the recipe's batch size."""
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    """(B, C, H, W), generator → (B, C, H, W); used on inliers and outliers."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise ValueError(f"there must be a label for every image, got {len(self.y)} for {len(self.x)}")
        if self.outliers is not None and not len(self.outliers):
            raise ValueError("there must be at least one outlier, or None instead of them")
        if not 0 < self.outliers_per_image < math.inf:
            raise ValueError(f"outliers_per_image must be positive, got {self.outliers_per_image:g}")

    @property
    def settings(self) -> dict[str, object]:
        """What a resumed run must find again: the same images, labels and outliers."""
        return {
            "images": digest(self.x),
            "labels": digest(self.y),
            "outliers": None if self.outliers is None else digest(self.outliers),
            "outliers_per_image": self.outliers_per_image,
        }


def digest(tensor: Tensor) -> str:
    """A tensor's shape and the hash of its bytes."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


class OutlierStream:
    """Outliers in an endless random order, every one once before any comes again; any place of it at once."""

    def __init__(self, material: Material, seed: int) -> None:
        self.outliers, self.per_image, self.seed = material.outliers, material.outliers_per_image, seed
        self._orders: dict[int, Tensor] = {}

    def count(self, batch_size: int, world: int) -> int:
        """Outliers beside every batch, over all processes; at least one for each."""
        return max(world, round(self.per_image * batch_size))

    def take(self, number: int, batch_size: int, rank: int, world: int) -> Tensor | None:
        """The outliers beside the batch of a number, this process's share."""
        if self.outliers is None:
            return None
        count = self.count(batch_size, world)
        places = torch.arange(number * count, (number + 1) * count)[rank::world]
        rounds, rest = places // len(self.outliers), places % len(self.outliers)
        rows = torch.cat([self._order(int(turn))[rest[rounds == turn]] for turn in rounds.unique()])
        return self.outliers[rows.to(self.outliers.device)]

    def _order(self, turn: int) -> Tensor:
        if turn not in self._orders:
            self._orders = {k: order for k, order in self._orders.items() if k >= turn - 1}
            random = generator_of(self.seed, "outliers", turn)
            self._orders[turn] = torch.randperm(0 if self.outliers is None else len(self.outliers), generator=random)
        return self._orders[turn]
