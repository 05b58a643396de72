"""Samples evaluated in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

NUMBERS = 2**20
"""The numbers that these samples have at most: six images of 224 pixels."""

STORED = 2**29
"""Bytes that a CPU stores at once for a gradient. A deep network's hundreds of layers of a large batch are fetched from
the system and given back in every pass, which takes several times as long as the same images in smaller portions."""

LARGEST = 2**25
"""Bytes of the largest of these tensors: glibc never keeps the memory of a larger one for the next."""


class Portions:
    """Evaluates samples in portions that fit into memory; no value depends on the portion that its sample is in.

    All samples are one portion until memory runs out; then portions are halved until they fit, and stay so. A CPU's
    memory does not run out before the process is killed, so there it has run out once more than `STORED` is stored.

    Args:
        device: where the samples are.
        rows: the most samples at once.
        gradient: whether they are mostly evaluated for a gradient.
    """

    def __init__(self, device: torch.device, rows: int | None = None, *, gradient: bool = True) -> None:
        self.rows, self.gradient = rows, gradient
        self.on_cpu = device.type == "cpu"
        self._fitting = 1
        """The samples of the largest portion known to fit on a CPU."""

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
        most = self._most(x.numel() // max(1, count)) if self.on_cpu else count
        while done < count:
            size = min(self.rows or count, most, count - done)
            these = (x, *further) if size == count else [tensor[done : done + size] for tensor in (x, *further)]
            try:
                parts.append(self._watched(function, these) if self._is_new(size) else function(*these))
                done += size
                continue
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.rows = size // 2
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
        return parts

    def _most(self, numbers: int) -> int:
        """How many samples of so many numbers a CPU evaluates at once at most."""
        return max(1, min(ON_CPU if self.gradient else SCORED_ON_CPU, NUMBERS // max(1, numbers)))

    def _is_new(self, size: int) -> bool:
        """Whether it is still to be seen that so many samples fit on a CPU."""
        return self.on_cpu and size > self._fitting and current_pace() == "plain"

    def _watched(self, function: Callable[..., T], these: Sequence[Tensor]) -> T:
        """What a function gives for one portion.

        Raises:
            torch.OutOfMemoryError: for a gradient it would store too much.
        """
        storage = Storage(len(these[0]))
        try:
            with saved_tensors_hooks(storage.take, storage.give):
                found = function(*these)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # such as torch.func's, whose derivatives cannot be watched
            found = function(*these)
        self._fitting = len(these[0]) if storage.bytes else self._fitting
        return found


class Storage:
    """What is stored for a gradient, counted: each piece of memory once, and no parameters."""

    def __init__(self, samples: int) -> None:
        self.samples, self.bytes = samples, 0
        self._known = set[int]()

    def take(self, tensor: Tensor) -> Tensor:
        """One tensor more, without its history: with it, an output that is stored would hold itself for ever.

        Raises:
            torch.OutOfMemoryError: it is too large, or the last too many.
        """
        memory, origin = tensor.untyped_storage(), tensor._base if tensor._is_view() else tensor
        of_samples = tensor.grad_fn is not None or tensor.shape[:1] == (self.samples,)
        if of_samples and not isinstance(origin, nn.Parameter) and memory.data_ptr() not in self._known:
            self._known.add(memory.data_ptr())
            self.bytes += memory.nbytes()
            if self.bytes > STORED or memory.nbytes() > LARGEST:
                raise torch.OutOfMemoryError(f"{self.samples} samples are more than a CPU is to evaluate at once")
        return tensor.detach()

    @staticmethod
    def give(tensor: Tensor) -> Tensor:
        """The tensor again."""
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
