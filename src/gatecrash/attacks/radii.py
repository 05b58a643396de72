"""A ball whose radius is another for every sample."""

from __future__ import annotations

from torch import Tensor

from gatecrash.ball import Ball
from gatecrash.stepper import spread


class Radii(Ball):
    """Balls of one kind with a radius each, every one measured in its own radius.

    In that measure all of them have eps = 1, and a direction is one radius long: whatever takes its lengths from the
    ball's directions, as APGD does, moves every sample by its own. The box stays where it is.

    Args:
        kind: the norm, as a class of balls.
        radius: (B,), in pixels, positive.
        box: as for any ball.
    """

    norm = "radii"

    def __init__(self, kind: type[Ball], radius: Tensor, box: tuple[float, float] | None = (0.0, 1.0)) -> None:
        super().__init__(1.0, box)
        self.radius = radius
        self.unit = kind(1.0, box)
        self.pixels = kind(1.0, box)
        # A projection uses eps in sums and products only, where a column of radii serves as well as one number.
        self.pixels.eps = radius.unsqueeze(1)  # type: ignore[assignment]

    def distance(self, x: Tensor, centre: Tensor) -> Tensor:
        """Distance of every sample from its centre in radii, (B,)."""
        return self.unit.distance(x, centre) / self.radius

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        """The nearest points of every sample's own ball and the box."""
        return self.pixels.project(x.flatten(1), centre.flatten(1)).view_as(x)

    def direction(self, gradient: Tensor) -> Tensor:
        """The gradient as a step of one radius."""
        return spread(self.radius, gradient) * self.unit.direction(gradient)

    def scattered(self, centre: Tensor, uniform: Tensor) -> Tensor:
        """A random point of the cube around every sample's own ball."""
        return centre + (2 * uniform - 1) * spread(self.radius, centre)
