"""Samples evaluated in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gatecrash.speed import current_pace

T = TypeVar("T")

Evaluation: TypeAlias = tuple[Tensor, Tensor | None]
"""The values (B,) of some samples and, where asked for, the gradients at them."""

ON_CPU, SCORED_ON_CPU = 512, 64
"""Samples that a CPU evaluates at once at most, for a gradient and else."""

NUMBERS, FIRST = 2**20, 2**18
"""The numbers that these samples have at most, six images of 224 pixels, and those of a first portion."""

STORED = 2**29
"""Bytes that a CPU stores at once for a gradient. A deep network's hundreds of layers of a large batch are fetched from
the system and given back in every pass, which takes several times as long as the same images in smaller portions."""

LARGEST = 2**25
"""Bytes of the largest of these tensors: glibc never keeps the memory of a larger one for the next."""


class Portions:
    """Evaluates samples in portions that fit into memory; no value depends on the portion that its sample is in.

    All samples are one portion until memory runs out; then portions are halved until they fit, and stay so. A CPU's
    memory does not run out before the process is killed, and is slow long before. So there it is counted what a first,
    small portion stores for a gradient, and the next ones are as large as that allows.

    Args:
        device: where the samples are.
        rows: the most samples at once.
        gradient: whether they are mostly evaluated for a gradient.
    """

    def __init__(self, device: torch.device, rows: int | None = None, *, gradient: bool = True) -> None:
        self.rows = rows
        self.on_cpu = device.type == "cpu"
        self.most = ON_CPU if gradient else SCORED_ON_CPU
        """The samples that a CPU evaluates at once at most."""
        self._known = False
        """Whether that takes into account what they store for a gradient."""

    def evaluate(self, function: Callable[[Tensor, Tensor], Evaluation], x: Tensor, rows: Tensor) -> Evaluation:
        """What a function gives for samples (B, ...) and their indices (B,).

        Raises:
            torch.OutOfMemoryError: there is no room for a single sample.
        """
        parts = self.run(function, x, rows)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def run(self, function: Callable[..., T], x: Tensor, *further: Tensor) -> list[T]:
        """What a function gives for portions of samples, and of whatever else there is one of for each."""
        count, done, parts = len(x), 0, list[T]()
        while done < count:
            size = self._size(count - done, x.numel() // count)
            these = (x, *further) if size == count else [tensor[done : done + size] for tensor in (x, *further)]
            try:
                parts.append(function(*these) if self._known or not self.on_cpu else self._watched(function, these))
                done += size
                continue
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.rows = size // 2
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
        return parts

    def _size(self, left: int, numbers: int) -> int:
        """How many of the samples left, of so many numbers each, are the next portion."""
        limit = min(self.rows or left, left)
        if not self.on_cpu:
            return limit
        most = max(2, min(self.most, (NUMBERS if self._known else FIRST) // max(1, numbers)))
        if limit <= most:
            return limit
        size = -(-left // -(-left // most))  # in portions alike
        return size + 1 if left - size == 1 else size  # some networks take one image for no batch

    def _watched(self, function: Callable[..., T], these: Sequence[Tensor]) -> T:
        """What a function gives for one portion; what it stores for a gradient tells how large the next may be."""
        size = len(these[0])
        storage = Storage(size)
        try:
            with saved_tensors_hooks(storage.take, storage.give) if current_pace() == "plain" else nullcontext():
                found = function(*these)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # such as torch.func's, whose derivatives cannot be watched
            found = function(*these)
            storage.bytes, self.most = storage.bytes or 1, min(self.most, size)
        if storage.bytes:
            fitting = min(STORED * size // storage.bytes, LARGEST * size // max(1, storage.largest))
            self.most, self._known = max(2, min(self.most, fitting)), True
        return found


class Storage:
    """What is stored for a gradient, counted: each piece of memory once, and no parameters."""

    def __init__(self, samples: int) -> None:
        self.samples, self.bytes, self.largest = samples, 0, 0
        self._seen = set[int]()

    def take(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """A tensor to store, and how often it was written to.

        It comes without its history: with it, an output that is stored would hold itself for ever.
        """
        version = None if tensor.is_inference() else tensor._version
        origin = tensor._base if tensor._is_view() else tensor
        if (
            tensor.layout == torch.strided
            and not isinstance(origin, nn.Parameter)
            and tensor.numel() % self.samples == 0
        ):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self._seen:
                self._seen.add(memory.data_ptr())
                size = min(memory.nbytes(), tensor.numel() * tensor.element_size())
                self.bytes, self.largest = self.bytes + size, max(self.largest, size)
        return tensor.detach(), version

    @staticmethod
    def give(stored: tuple[Tensor, int | None]) -> Tensor:
        """The tensor again.

        Raises:
            RuntimeError: it was written to in the meantime, as autograd itself says.
        """
        tensor, version = stored
        if version is not None and tensor._version != version:
            raise RuntimeError("a tensor that a gradient needs has been modified by an inplace operation")
        return tensor


def in_portions(function: Callable[[Tensor], T], x: Tensor, size: int | None = None) -> list[T]:
    """What a function gives for images, `size` at a time; None is as many as fit, and fewer when memory runs out.

    Raises:
        torch.OutOfMemoryError: there is no room for a single image.
    """
    return Portions(x.device, size, gradient=False).run(function, x)


def _joined(parts: list[Evaluation]) -> Evaluation:
    gradients = [gradient for _, gradient in parts if gradient is not None]
    return torch.cat([torch.atleast_1d(value) for value, _ in parts]), torch.cat(gradients) if gradients else None
