"""What is watched while a network learns: sums for the log, and the first number that is not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gatecrash.fitting.step import Outcome


class NotFinite(ValueError):
    """A loss, a gradient or a weight is infinite or NaN; the message says since which batch."""


class Watch:
    """The sums of one epoch, kept on the device and looked at every so many batches: a look waits for the device.

    Args:
        epoch: counted from 0.
        every: batches from one look to the next; 1 finds what is not finite before it reaches the weights.
        kept: what the message says is left of the run when a number is not finite.
    """

    def __init__(self, epoch: int, every: int, kept: str = "") -> None:
        self.epoch, self.every, self.kept = epoch, every, kept
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        """Images by the name of a sum."""
        self.note = ""
        self._unseen: list[tuple[int, str, Tensor]] = []

    def add(self, number: int, size: int, outcome: Outcome) -> None:
        """What came of a batch, counted from 0, of so many images.

        Raises:
            NotFinite: it is time to look, and a loss or a gradient was not finite.
        """
        for name, value in {"loss": outcome.loss, **outcome.facts}.items():
            whole = torch.full_like(value, size, dtype=torch.float32, requires_grad=False)  # filled there, so no wait
            count = outcome.counts.get(name, whole)
            part = value.detach() * count
            self.sums[name] = self.sums[name] + part if name in self.sums else part
            self.counts[name] = self.counts[name] + count if name in self.counts else count
        self._unseen.append((number, "loss", outcome.loss.detach()))
        if (number + 1) % self.every == 0:
            self.look()

    def add_gradient(self, number: int, length: Tensor) -> None:
        """The length of a batch's gradient."""
        self._unseen.append((number, "gradient", length.detach()))

    @property
    def means(self) -> dict[str, Tensor]:
        """The means so far; NaN where there was no image for one."""
        return {name: value / self.counts[name] for name, value in self.sums.items()}

    def look(self) -> None:
        """Wait for the device and read what it found.

        Raises:
            NotFinite: a loss or a gradient was not finite; it names the first batch.
        """
        unseen, self._unseen = self._unseen, []
        means = self.means
        tensors = [value for _, _, value in unseen] + list(means.values())
        if not tensors:
            return
        numbers = torch.stack([tensor.float() for tensor in tensors]).tolist()
        for (batch, what, _), value in zip(unseen, numbers, strict=False):
            if not math.isfinite(value):
                raise NotFinite(self.sentence(f"the {what} is {value} in", batch))
        shown = zip(means, numbers[len(unseen) :], strict=True)
        self.note = ", ".join(f"{name} {value:.3g}" for name, value in shown if not math.isnan(value))

    def after(self, what: str, number: int) -> str:
        """The message for what is found after so many batches of the epoch."""
        return self.sentence(f"{what} after", number - 1) if number else self.sentence(f"{what} before", 0)

    def sentence(self, what: str, batch: int) -> str:
        """The message for a number that is not finite; the batch is counted from 0."""
        return f"{what} batch {batch + 1} of epoch {self.epoch + 1}{self.kept}. A smaller lr, or clip, may help"
