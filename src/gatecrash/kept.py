"""The point that every sample would return, copied as seldom as possible."""

from __future__ import annotations

import torch
from torch import Tensor

from gatecrash.ball import waits
from gatecrash.stepper import spread

ROOM = 2**24
"""The numbers in all batches that may be remembered before what is kept of them is copied together."""


class Kept:
    """A batch of points, some of which are replaced now and then by those of another batch.

    A network as small as one matrix takes about as long as a copy of its images. So on a CPU the batches are remembered
    as they are, with what is to be taken from which, and copied together when there are too many or somebody looks.
    """

    def __init__(self, x: Tensor) -> None:
        self._batches = {0: x}
        """The batches that points are taken from, in the order of time."""
        self._which: list[int] | None = None
        """The batch that every point is in; None for the only one."""
        self._owned = False
        """Whether nobody else refers to the only batch, so that it may be written to."""

    @property
    def x(self) -> Tensor:
        """The points, (B, ...); not to be written to."""
        if self._which is not None:
            points = [self._batches[number][row] for row, number in enumerate(self._which)]
            self._batches, self._which, self._owned = {0: torch.stack(points)}, None, True
        return self._batches[0]

    def take_all(self, x: Tensor) -> None:
        """Keep another batch, which is not written to afterwards."""
        self._batches, self._which, self._owned = {0: x}, None, False

    def take(self, taken: Tensor, x: Tensor) -> None:
        """Keep the points of another batch, which is not written to afterwards, where `taken` (B,) holds."""
        if not waits(taken):
            flags = taken.tolist()
            if all(flags):
                self.take_all(x)
                return
            if not any(flags):
                return
            if 4 * x.numel() <= ROOM:
                self._remember(flags, x)
                return
        first = self._own()
        torch.where(spread(taken, x), x, first, out=first)

    def _remember(self, taken: list[bool], x: Tensor) -> None:
        if len(self._batches) * x.numel() >= ROOM:
            _ = self.x  # copies together
        number = max(self._batches) + 1
        before = self._which or [0] * len(taken)
        self._which = [number if new else old for new, old in zip(taken, before, strict=True)]
        self._batches[number] = x
        needed = set(self._which)
        self._batches = {number: batch for number, batch in self._batches.items() if number in needed}

    def _own(self) -> Tensor:
        """The only batch, as one that may be written to."""
        if not self._owned:
            self._batches[0], self._owned = self._batches[0].clone(), True
        return self._batches[0]
