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
        self._batches = [x]
        self._which: Tensor | None = None
        """(B,), the batch that every point is in; None for the only one."""
        self._owned = False
        """Whether nobody else refers to the first batch, so that it may be written to."""

    @property
    def x(self) -> Tensor:
        """The points, (B, ...); not to be written to."""
        if self._which is not None:
            points = [self._batches[number][row] for row, number in enumerate(self._which.tolist())]
            self._batches, self._which, self._owned = [torch.stack(points)], None, True
        return self._batches[0]

    def take_all(self, x: Tensor) -> None:
        """Keep another batch, which is not written to afterwards."""
        self._batches, self._which, self._owned = [x], None, False

    def take(self, taken: Tensor, x: Tensor) -> None:
        """Keep the points of another batch, which is not written to afterwards, where `taken` (B,) holds."""
        if not waits(taken):
            count = int(taken.count_nonzero())
            if count == len(x):
                self.take_all(x)
            if count in (0, len(x)):
                return
            if 4 * x.numel() <= ROOM:
                self._remember(taken, x)
                return
        first = self._own()
        torch.where(spread(taken, x), x, first, out=first)

    def _remember(self, taken: Tensor, x: Tensor) -> None:
        if len(self._batches) * x.numel() >= ROOM:
            _ = self.x  # copies together
        before = 0 if self._which is None else self._which
        self._which = torch.where(taken, len(self._batches), before)
        self._batches.append(x)

    def _own(self) -> Tensor:
        """The first batch, as one that may be written to."""
        if not self._owned:
            self._batches[0], self._owned = self._batches[0].clone(), True
        return self._batches[0]
