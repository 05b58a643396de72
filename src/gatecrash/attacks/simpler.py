"""Simpler versions of images: where an attack begins on a score that has more to it than its gradient tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import avg_pool2d

from gatecrash.ball import Ball

GREYS = 255
"""Steps from black to white in an image file."""
COARSER = (0.5, 1.0, 2.0, 4.0)
"""How far apart the greys of flattened images are, as multiples of what the ball has room for at every pixel."""
WINDOWS = (3, 5)
"""Sides of the windows that blurred images are means over."""


def simpler(ball: Ball, dimensions: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to make images (B, C, H, W) simpler by name: flattened to few greys, blurred, and both.

    What they give need not lie in the ball.

    Args:
        ball: how far images may be moved, which says how coarse the greys are.
        dimensions: numbers in an image.
    """
    gaps = sorted({min(GREYS, max(2, round(share * gap_within(ball, dimensions)))) for share in COARSER})
    fitting = min(GREYS, gap_within(ball, dimensions))
    ways: dict[str, Callable[[Tensor], Tensor]] = {}
    for gap in gaps:
        ways[f"flattened to every {gap}th grey"] = partial(flattened, gap=gap)
    for side in WINDOWS:
        ways[f"blurred {side}×{side}"] = partial(blurred, side=side)
    ways["blurred and flattened"] = lambda x: flattened(blurred(x, WINDOWS[0]), fitting)
    return ways


def gap_within(ball: Ball, dimensions: int) -> int:
    """The widest gap between greys, in 255ths, for which the nearest of them lies inside the ball at every pixel.

    In L2 that is meant on average: the distance to the nearest grey is uniform up to half a gap, whose root mean square
    is the gap over √12.
    """
    gap = 2 * ball.eps if ball.norm == "linf" else math.sqrt(12 / dimensions) * ball.eps
    return 1 + int(GREYS * gap + 1e-3)


def flattened(x: Tensor, gap: int) -> Tensor:
    """The nearest of the greys 0, gap, 2·gap, … 255ths at every pixel."""
    return (x * (GREYS / gap)).round() * (gap / GREYS)


def blurred(x: Tensor, side: int) -> Tensor:
    """The mean over a window around every pixel, as much of it as lies in the image."""
    return avg_pool2d(x, side, stride=1, padding=side // 2, count_include_pad=False)
