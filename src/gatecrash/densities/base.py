"""The contract of a model of the data: how likely a sample is, and how many dimensions that is spread over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from gatecrash.registry import Registry

DENSITIES: Registry[type[Density]] = Registry("density")

M = TypeVar("M", bound="Density")


def register(name: str) -> Callable[[type[M]], type[M]]:
    """A decorator that enters a density under its name in bundles."""

    def enter(density: type[M]) -> type[M]:
        DENSITIES.register(name)(density)
        density.name = name
        return density

    return enter


class Density(nn.Module, ABC):
    """A model of samples of one shape: images (C, H, W) in [0, 1], or feature vectors (D,).

    Args:
        shape: of one sample.
        **options: the subclass's own options, as JSON can hold them; a bundle keeps them.
    """

    name: ClassVar[str] = ""

    def __init__(self, shape: Sequence[int], **options: Any) -> None:
        super().__init__()
        if not shape or any(side < 1 for side in shape):
            raise ValueError(f"the shape of a sample must be sides of at least 1, got {list(shape)}")
        self.shape, self.options = tuple(shape), options

    @property
    def dimensions(self) -> int:
        """How many numbers a sample has."""
        return math.prod(self.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert as any module does, but never to half precision: what was learnt would be rounded away."""

        def whole(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        super()._apply(whole, recurse)  # type: ignore[no-untyped-call]
        return self

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """How likely every sample of (B, *shape) is, (B,): its log-likelihood in nats, or what is learnt instead of it.

        Training makes the mean of this large. Every random number in it comes from torch's global generator, which the
        fit loop seeds; in eval mode nothing is random.
        """

    def bits_per_dimension(self, x: Tensor) -> Tensor:
        """−log₂ p / D of every sample, (B,)."""
        log_likelihood: Tensor = self(x)
        return log_likelihood / (-math.log(2) * self.dimensions)

    def begin(self, x: Tensor) -> None:
        """Set from the first batch what a density takes from data before it learns; nothing by default."""

    def check(self, x: Tensor) -> None:
        """Raises a ValueError when samples have another shape than the density's."""
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"this {type(self).__name__} is of samples of shape {self.shape}, got {tuple(x.shape[1:])}"
            )
