"""Rows of features, read in chunks that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Rows:
    """Rows of matrices that lie side by side, some of them or all, without a copy of more than is asked for.

    Args:
        parts: matrices (N, D_i).
        members: the indices of the rows that count, (M,); None is all of them.
    """

    def __init__(self, parts: Sequence[Tensor], members: Tensor | None = None) -> None:
        self.parts, self.members = check_parts(parts), members
        self.dtype, self.device = self.parts[0].dtype, self.parts[0].device
        self.width = sum(part.shape[1] for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0]) if self.members is None else len(self.members)

    def between(self, first: int, last: int) -> Tensor:
        """Consecutive rows, (R, D); a view where it can be one."""
        if self.members is not None:
            return self._picked(self.members[first:last])
        found = [part[first:last] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def at(self, which: Tensor) -> Tensor:
        """The rows with some numbers, (R, D), a copy."""
        return self._picked(which if self.members is None else self.members[which])

    def _picked(self, which: Tensor) -> Tensor:
        found = [part[which] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class Chunks:
    """Rows about their mean, a chunk at a time."""

    def __init__(self, data: Rows, rows: int) -> None:
        self.data, self.rows, self.dtype = data, rows, data.dtype
        wide, nothing = widest(data.device), torch.zeros((), device=data.device)
        self.centre = sum((part.sum(dim=0, dtype=wide) for part in self._parts()), nothing) / len(data)
        if not bool(self.centre.isfinite().all()):
            raise ValueError("the features hold NaN or infinity")
        self.shift = self.centre.to(data.dtype)
        self.centre = self.shift.to(wide)
        self.variance = sum((part.square().sum(dim=0, dtype=wide) for part in self), nothing) / len(data)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts():
            yield part - self.shift

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Some rows, drawn without replacement; all of them, in their order, where so many are asked for."""
        if count == len(self):
            return self.data.between(0, count) - self.shift
        chosen = torch.randperm(len(self), generator=generator, device=self.data.device)[:count]
        return self.data.at(chosen).sub_(self.shift)

    def _parts(self) -> Iterator[Tensor]:
        for first in range(0, len(self), self.rows):
            yield self.data.between(first, first + self.rows)


def widest(device: torch.device) -> torch.dtype:
    """The most precise numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def cells(device: torch.device) -> int:
    """How many numbers a temporary matrix may have."""
    return 1 << 22 if device.type == "cpu" else 1 << 26


def rows_at_once(components: int, width: int, device: torch.device) -> int:
    """How many rows a chunk has."""
    return max(1, cells(device) // (components + 2 * width))


def block(z: Tensor) -> int:
    """How many components with a matrix of their own are dealt with at once, for rows z (R, D)."""
    return max(1, cells(z.device) // z.numel())


def check_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """The matrices without their history.

    Raises:
        ValueError: there is none, one is no matrix of float32 or float64, or they do not lie side by side.
    """
    found: list[Any] = list(parts) if isinstance(parts, list | tuple) else [parts]
    for part in found:
        if not isinstance(part, Tensor):
            raise ValueError(f"features must be a tensor (N, D), or several, got {type(part).__name__}")
        if part.ndim != 2 or part.dtype not in (torch.float32, torch.float64) or not part.shape[1]:
            raise ValueError(
                f"features must be float32 or float64 of shape (N, D), got {part.dtype} {tuple(part.shape)}"
            )
    if len({(len(part), part.dtype, part.device) for part in found}) != 1:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in found)
        raise ValueError(f"features in several parts must have the same rows, dtype and device, got {shapes or 'none'}")
    return [part.detach() for part in found]
