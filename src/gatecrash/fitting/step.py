"""What a network learns from a batch: the shape of a step, of what it is given and of what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """What one step learns from, on the device of the network."""

    x: Tensor
    """(B, C, H, W) in [0, 1], augmented."""
    y: Tensor
    """(B,)."""
    rows: Tensor
    """(B,), where the images stand in the training set."""
    outliers: Tensor | None
    """(M, C, H, W), where there are outliers to be exposed to."""
    epoch: int
    epochs: int
    generator: torch.Generator
    """Random numbers of this step, the same however often it is done; on the CPU."""
    balance: float = 1.0
    """What the mean over these outliers counts beside the mean over these inliers, so that over several processes every
    inlier and every outlier counts the same; 1 where the process has its fair share of both."""
    number: int = 0
    """Its place in the epoch, counted from 0."""


@dataclass(frozen=True)
class Outcome:
    """What one step comes to."""

    loss: Tensor
    """(), the mean over the batch."""
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    """Means over the batch that are worth a column in the log: accuracy, the attack's success."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """By a fact's name, the images that it is the mean over, (), where those are not the whole batch."""


class Step(Protocol):
    """What a network learns from a batch. What it remembers between batches is its state.

    Where it has a dictionary `settings` of plain values, a run is resumed with the same settings only.
    """

    def __call__(self, model: nn.Module, batch: Batch, /) -> Outcome:
        """The loss of a batch; `model` is in training mode and may run on several devices."""
        ...

    def begin_epoch(self, epoch: int, epochs: int, /) -> None:
        """Called before the first batch of an epoch."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that must survive a kill; asked for after an epoch, in every process."""
        ...

    def restore(self, state: Mapping[str, Tensor], /) -> None:
        """Take back what `state` gave."""
        ...


class Stateless:
    """A step that remembers nothing."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Nothing to prepare."""

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take back."""


def settings_of(step: Step) -> dict[str, object]:
    """What kind of step it is, and its settings."""
    return {"kind": type(step).__name__, **getattr(step, "settings", {})}
