"""Samples evaluated in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

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
            if x.device.type == "cuda":
                torch.cuda.empty_cache()


def _joined(parts: list[Evaluation]) -> Evaluation:
    gradients = [gradient for _, gradient in parts if gradient is not None]
    return torch.cat([torch.atleast_1d(value) for value, _ in parts]), torch.cat(gradients) if gradients else None
