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

    def __init__(self, device: torch.device) -> None:
        self.rows: int | None = ON_CPU if device.type == "cpu" else None

    def evaluate(self, function: Callable[[Tensor, Tensor], Evaluation], x: Tensor, rows: Tensor) -> Evaluation:
        """What a function gives for samples (B, ...) and their indices (B,).

        Raises:
            torch.OutOfMemoryError: there is no room for a single sample.
        """
        while True:
            size = len(x) if self.rows is None else self.rows
            try:
                if len(x) <= size:
                    return function(x, rows)
                return _joined([function(*part) for part in zip(x.split(size), rows.split(size), strict=True)])
            except torch.OutOfMemoryError:
                size = min(size, len(x))
                if size == 1:
                    raise
                self.rows = size // 2
            let_go(x.device)


def in_portions(function: Callable[[Tensor], T], x: Tensor, size: int | None = None) -> list[T]:
    """What a function gives for images, `size` at a time; None is all of them, and half as many when memory runs out.

    Raises:
        torch.OutOfMemoryError: there is no room for a single image.
    """
    size, done, parts = size or len(x), 0, []
    while done < len(x):
        try:
            parts.append(function(x[done : done + size]))
            done += size
            continue
        except torch.OutOfMemoryError:
            size = min(size, len(x) - done)
            if size == 1:
                raise
            size //= 2
        let_go(x.device)
    return parts


def let_go(device: torch.device) -> None:
    """Give memory back that is held for nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _joined(parts: list[Evaluation]) -> Evaluation:
    gradients = [gradient for _, gradient in parts if gradient is not None]
    return torch.cat([torch.atleast_1d(value) for value, _ in parts]), torch.cat(gradients) if gradients else None
