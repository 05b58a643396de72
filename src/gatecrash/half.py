"""How much of a run is in half precision, and what ends that sooner: values too rough, or gradients that vanish."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatecrash.glance import Glance
from gatecrash.protocols import Stepper
from gatecrash.stepper import Adamax, Normalised, Sign

FAR, FAR_EVEN, FAR_ANNEALED = 0.7, 0.9, 0.97
"""The share of a mixed run, at its beginning, that is evaluated in half precision at most. Steps that are all alike get
nowhere finer at its end, and Adamax's need little of an end in float32: theirs are the second and the third."""

DOUBTS = (0.5, 0.75)
"""Where in a mixed run a few samples are evaluated in float32 too, to see whether half precision is still of use."""

LATER = 4
"""The steps after which it is read whether the first one had gradients in half precision: by then the device has told,
and has the other three still to do."""

FEW = 24
"""So many samples are evaluated in float32 too, drawn anew every time: too few for code to be compiled for."""

ROUGH = 0.02
"""How far apart the two values may be, as a share of them: from there on rounding is what leads the search."""

SOME = 1 / 8
"""The share of those samples that may be so far apart: few, since some may be almost there and others far off. As large
a share of all may have no gradient."""


class Half:
    """The part of a run, from its beginning, that is evaluated in half precision.

    Args:
        stepper: how the run moves.
        steps: how many steps it takes.
        really: whether there is such a part at all.
    """

    def __init__(self, stepper: Stepper, steps: int, *, really: bool) -> None:
        self.end = int(share_of(stepper) * steps) if really else 0
        """The step before which it ends."""
        self._doubts = {int(share * steps) for share in DOUBTS} - {0}
        self._later = LATER if steps > 10 * LATER else 1
        self._vanished: Tensor | None = None
        self._told: Glance | None = None

    def note(self, step: int, gradient: Tensor) -> None:
        """What the gradient of a step was like, if that is going to be asked for."""
        if step < self.end and (step == 0 or step + 1 in self._doubts):
            self._vanished = vanishing(gradient)
            self._told = Glance(self._vanished) if step == 0 else self._told

    def review(self, step: int, roughness: Callable[[], Tensor]) -> None:
        """Before a step, end it here if it is of no use; `roughness` says how many values it is too rough for."""
        if not 0 < step < self.end:
            return
        if step in self._doubts:
            rough = roughness()
            self._judge(step, float(rough if self._vanished is None else torch.maximum(rough, self._vanished)))
        elif step == self._later and self._told is not None:
            self._judge(step, self._told.read())

    def _judge(self, step: int, share: float) -> None:
        if share > SOME:
            self.end = step


def share_of(stepper: Stepper) -> float:
    """The share of a mixed run that is in half precision at most."""
    if isinstance(stepper, Adamax):
        return FAR_ANNEALED
    return FAR_EVEN if isinstance(stepper, Sign | Normalised) and stepper.schedule == "constant" else FAR


def vanishing(gradient: Tensor) -> Tensor:
    """The share of samples that have no gradient in half precision, as of a saturated softmax, ().

    They would stand still, and since their values do too, nothing else shows it. One that is NaN or infinite is none.
    """
    flat = gradient.flatten(1)
    return ((flat == 0).all(dim=1) | ~flat.isfinite().all(dim=1)).to(gradient.dtype).mean()


def some_of(count: int, step: int) -> Tensor:
    """The samples that are evaluated in float32 too.

    They are drawn by numbers of their own, since the samples may be in an order that an even spread would miss.
    """
    return torch.randperm(count, generator=torch.Generator().manual_seed(step))[:FEW]


def rough(value: Tensor, half: Tensor) -> Tensor:
    """The share of samples whose values in float32 and in half precision are too far apart, ()."""
    near = (value - half).abs() <= ROUGH * value.abs()
    return (~near).to(value.dtype).mean()
