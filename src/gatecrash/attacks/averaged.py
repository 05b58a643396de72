"""Steps along the mean of gradients, for scores with a kink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatecrash.ball import normalised
from gatecrash.protocols import State, Walk
from gatecrash.stepper import gradient_of


@dataclass(frozen=True)
class Averaged:
    """Steps in the ball's direction of the running mean of the gradients, each shorter than the one before.

    A score with a maximum or a predicted class in it has a kink where two classes tie, and its best points often lie
    there. The gradient is another on either side, so steps along it leap to and fro; the mean of both points along the
    kink. A mean of their signs, which is what momentum after the sign comes to, does not.

    Args:
        first: the length of the first step, as a share of ε.
        last: that of the last, with a constant ratio from step to step.
        memory: the share of the mean that is kept at every step.
    """

    first: float = 0.3
    last: float = 0.002
    memory: float = 0.9
    needs_gradient = True

    def begin(self, walk: Walk) -> State:
        """The mean of no gradients."""
        return {"mean": torch.zeros_like(walk.x)}

    def move(self, walk: Walk, state: State) -> Tensor:
        """One step against the mean."""
        state["mean"] = state["mean"].lerp(normalised(gradient_of(walk)), 1 - self.memory)
        share: float = self.first * (self.last / self.first) ** (walk.step / walk.steps)
        return walk.x - share * walk.ball.eps * walk.ball.direction(state["mean"])
