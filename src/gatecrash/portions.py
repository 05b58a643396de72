"""Samples evaluated in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Evaluation: TypeAlias = tuple[Tensor, Tensor | None]
"""The values (B,) of some samples and, where asked for, the gradients at them."""

ON_CPU = 512
"""Samples that a CPU evaluates at once: more would take memory, and no less time."""


class Portions:
    """Evaluates samples in portions that fit into memory; no value depends on the portion that its sample is in.

    A CPU has portions of a fixed size. Elsewhere all samples are one portion until memory runs out; then portions are
    halved until they fit, and stay so.
    """

    def __init__(self, device: torch.device, rows: int | None = None) -> None:
        self.rows = rows or (ON_CPU if device.type == "cpu" else None)

    def evaluate(self, function: Callable[[Tensor, Tensor], Evaluation], x: Tensor, rows: Tensor) -> Evaluation:
        """What a function gives for samples (B, ...) and their indices (B,).

        Raises:
            torch.OutOfMemoryError: there is no room for a single sample.
        """
        parts = self.run(function, x, rows)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def run(self, function: Callable[..., T], x: Tensor, *further: Tensor) -> list[T]:
        """What a function gives for portions of samples, and of whatever else there is one of for each."""
        done, parts = 0, []
        while done < len(x):
            size = min(self.rows or len(x), len(x) - done)
            try:
                parts.append(function(*(tensor[done : done + size] for tensor in (x, *further))))
                done += size
                continue
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.rows = size // 2
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
        return parts


def in_portions(function: Callable[[Tensor], T], x: Tensor, size: int | None = None) -> list[T]:
    """What a function gives for images, `size` at a time; None is all of them, and half as many when memory runs out.

    Raises:
        torch.OutOfMemoryError: there is no room for a single image.
    """
    return Portions(x.device, size or len(x)).run(function, x)


def _joined(parts: list[Evaluation]) -> Evaluation:
    gradients = [gradient for _, gradient in parts if gradient is not None]
    return torch.cat([torch.atleast_1d(value) for value, _ in parts]), torch.cat(gradients) if gradients else None
