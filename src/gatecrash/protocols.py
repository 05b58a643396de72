"""The shapes of the four things everything else is made of: encoder, detector, objective, stepper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gatecrash.ball import Ball

Latent: TypeAlias = Tensor | tuple["Latent", ...]
"""What a network makes of a batch of images: one tensor, or a tuple with one entry per tapped layer or member."""

State: TypeAlias = dict[str, Tensor]
"""What a stepper remembers; every tensor has one entry per sample still in play, so that a search can drop rows.

An entry whose name ends in "value" holds values of the objective, which a search shifts when it changes its pace.
"""


class Encoder(Protocol):
    """A network as z = f(x): a batch of images in, a latent out, differentiable."""

    def __call__(self, x: Tensor, /) -> Latent:
        """The latent of a batch of images."""
        ...


class Detector(Protocol):
    """A detector τ = d(f(x)), one value per image; higher means more out-of-distribution, always."""

    def encode(self, x: Tensor, /) -> Latent:
        """The latent of a batch of images, everything `judge` needs to know of them."""
        ...

    def judge(self, z: Latent, /) -> Tensor:
        """The score of a latent, shape (B,)."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """The score of every image, (B,)."""
        ...


class Objective(Protocol):
    """What a search makes small: one value per sample, none of which depends on another sample.

    `rows` (B,) are the indices, in the starting batch, of the samples that `x` holds.
    """

    def __call__(self, x: Tensor, rows: Tensor, /) -> Tensor:
        """The value of every sample, (B,)."""
        ...


@dataclass
class Walk:
    """Where a search stands: all that a stepper may look at, for the B samples still in play."""

    x: Tensor
    """(B, ...), the point the objective was just evaluated at; inside the ball."""
    value: Tensor
    """(B,), the objective there."""
    gradient: Tensor | None
    """(B, ...), its gradient there; None for a stepper that asks for none."""
    centre: Tensor
    """(B, ...), the centre of the ball."""
    ball: Ball
    step: int
    """Steps already taken in this run, 0 at first."""
    steps: int
    """Steps this run may take."""
    normal: Callable[[], Tensor]
    """Standard normal numbers in x's shape; a sample's numbers do not depend on which others are still in play."""
    uniform: Callable[[], Tensor]
    """Uniform numbers in [0, 1) in x's shape, likewise."""
    evaluate: Callable[[Tensor], Tensor]
    """The objective (B,) at points of the stepper's own choosing, for line searches; every call is counted."""


class Stepper(Protocol):
    """How a search moves. A stepper is a description; what it remembers of one run is the state it returns."""

    @property
    def needs_gradient(self) -> bool:
        """Whether the search must compute a gradient at every step."""
        ...

    def begin(self, walk: Walk, /) -> State:
        """The state before the first step; `walk` holds the first point, its value and its gradient."""
        ...

    def move(self, walk: Walk, state: State, /) -> Tensor:
        """The next point, which the search then projects; changes `state` in place."""
        ...


def detached(z: Latent) -> Latent:
    """The same latent without its history."""
    return z.detach() if isinstance(z, Tensor) else tuple(detached(part) for part in z)


def rows_of(z: Latent, rows: Tensor) -> Latent:
    """Some rows of a latent."""
    return z[rows] if isinstance(z, Tensor) else tuple(rows_of(part, rows) for part in z)


def joined(parts: list[Latent]) -> Latent:
    """The latents of consecutive batches as one; of one batch, itself."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return tuple(joined([part[i] for part in parts]) for i in range(len(first)))


def as_vectors(z: Latent) -> Tensor:
    """A latent as one vector per sample, (B, D)."""
    return torch.cat([as_vector(leaf) for leaf in leaves(z)], dim=1)


def as_vector(leaf: Tensor) -> Tensor:
    """A tensor of a latent as one vector per sample, (B, D); of one number per sample, (B,), it is (B, 1)."""
    return leaf.flatten(1) if leaf.ndim > 1 else leaf.unsqueeze(1)


def leaves(z: Latent) -> list[Tensor]:
    """The tensors of a latent in order."""
    return [z] if isinstance(z, Tensor) else [leaf for part in z for leaf in leaves(part)]
