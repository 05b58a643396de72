"""The batches of an epoch, in an order that a seed determines, shared out among the processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gatecrash.fitting.material import Material, OutlierStream
from gatecrash.fitting.recipe import Recipe
from gatecrash.fitting.seeds import generator_of
from gatecrash.fitting.step import Batch


class Batches:
    """The batches of every epoch, one process's share of each; over all processes they differ by at most one image.

    Raises:
        ValueError: a batch has fewer images than there are processes.
    """

    def __init__(self, material: Material, recipe: Recipe, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.material, self.recipe, self.device, self.rank, self.world = material, recipe, device, rank, world
        self.count = math.ceil(len(material.x) / recipe.batch_size)
        self.outliers = OutlierStream(material, recipe.seed)
        if len(material.x) // self.count < world:
            raise ValueError(
                f"{world} processes need batches of at least {world} images, got {len(material.x)} images in batches "
                f"of {recipe.batch_size}"
            )

    def size(self, number: int) -> int:
        """Images in a batch over all processes."""
        small, larger = divmod(len(self.material.x), self.count)
        return small + (number < larger)

    def of(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, one after the other."""
        order = torch.randperm(len(self.material.x), generator=generator_of(self.recipe.seed, "order", epoch))
        for number, rows in enumerate(order.tensor_split(self.count)):
            yield self._batch(epoch, number, rows)

    def _batch(self, epoch: int, number: int, rows: torch.Tensor) -> Batch:
        recipe, material = self.recipe, self.material
        mine = rows[self.rank :: self.world]
        random = generator_of(recipe.seed, "step", epoch, number, self.rank)
        x = material.x[mine.to(material.x.device)].to(self.device)
        y = material.y[mine.to(material.y.device)].to(self.device)
        beside = self.outliers.take(epoch * self.count + number, recipe.batch_size, self.rank, self.world)
        balance = 1.0
        if beside is not None:
            beside = beside.to(self.device)
            balance = len(beside) * len(rows) / (self.outliers.count(recipe.batch_size, self.world) * len(mine))
        if material.augment is not None:
            x = material.augment(x, random)
            beside = None if beside is None else material.augment(beside, random)
        return Batch(x, y, mine, beside, epoch, recipe.epochs, random, balance, number)
