"""Random changes of images that leave their class as it is: crops, mirror images, warps.

The functions take images (B, C, H, W) in [0, 1] and give as many of the same shape, in [0, 1] and on the same device.
They draw from the generator only, which is one of the CPU wherever the images are: a seed means the same everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import grid_sample, pad

_HORIZON = 1e-3
"""The least depth of a pixel; what lies beyond the horizon of a warped image gets the colour of its edge."""


@dataclass(frozen=True)
class Augmentation:
    """Which random changes are made, and how far they go; nothing set leaves the images alone.

    Raises:
        ValueError: an amount is negative or not finite.
    """

    crop: int = 0
    """Pixels of black around the image before a part of its own size is cut out."""
    flip: bool = False
    """Whether every other image is mirrored left to right."""
    rotation: float = 0.0
    """Degrees, to either side."""
    translation: float = 0.0
    """Pixels, in each direction."""
    projection: float = 0.0
    """Pixels by which every corner moves, in each direction."""

    def __post_init__(self) -> None:
        _check_amounts(**{field.name: getattr(self, field.name) for field in fields(self)})

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """The images warped, cropped and mirrored, in this order; `x` itself when nothing is set."""
        x = transformed(x, self.rotation, self.translation, self.projection, generator)
        x = crop(x, self.crop, generator)
        return flip(x, generator) if self.flip else x


def crop(x: Tensor, padding: int, generator: Generator, *, mode: Literal["constant", "reflect"] = "constant") -> Tensor:
    """A random part of every padded image, as large as the image was; `x` itself without padding.

    Args:
        x: the images.
        padding: pixels on every side, black or with `mode="reflect"` mirrored.
        generator: determines where the parts are; all (2·padding + 1)² places are as likely.
        mode: what the padding holds.

    Raises:
        ValueError: the padding is negative, or too wide to be mirrored.
    """
    _check_amounts(padding=padding)
    if padding == 0:
        return x
    height, width = x.shape[-2:]
    if mode == "reflect" and padding >= min(height, width):
        raise ValueError(f"padding must be less than the side of the image to be mirrored, got {padding}")
    top, left = torch.randint(2 * padding + 1, (2, len(x)), generator=generator).to(x.device)
    parts = pad(x, [padding] * 4, mode=mode).unfold(2, height, 1).unfold(3, width, 1)
    return parts[torch.arange(len(x), device=x.device), :, top, left]


def flip(x: Tensor, generator: Generator) -> Tensor:
    """Every image mirrored left to right with probability 1/2."""
    mirrored = torch.randint(2, (len(x), 1, 1, 1), generator=generator).bool()
    return torch.where(mirrored.to(x.device), x.flip(3), x)


def transformed(x: Tensor, rotation: float, translation: float, projection: float, generator: Generator) -> Tensor:
    """Every image warped by a homography of its own; `x` itself when all three amounts are 0.

    Its corners are moved, then it is turned around its centre, then shifted, each by amounts uniform up to the given
    ones and to either side. Pixels are interpolated, and what comes in from outside is the colour of the edge.

    Args:
        x: the images.
        rotation: degrees.
        translation: pixels, down and to the right.
        projection: pixels by which every corner moves, down and to the right.
        generator: determines the amounts.

    Raises:
        ValueError: an amount is negative or not finite, or the corners could move by a quarter of a side, from where on
            they need not span an image.
    """
    _check_amounts(rotation=rotation, translation=translation, projection=projection)
    height, width = x.shape[-2:]
    if projection and projection >= min(height, width) / 4:
        raise ValueError(f"projection must be less than a quarter of {min(height, width)} pixels, got {projection:g}")
    if not (rotation or translation or projection):
        return x
    angles, shifts, moves = (
        amount * (2 * torch.rand(len(x), *shape, generator=generator, dtype=torch.float64) - 1)
        for amount, shape in ((math.radians(rotation), ()), (translation, (2,)), (projection, (4, 2)))
    )
    return warped(x, translations(shifts) @ rotations(angles) @ projections(moves, height, width))


def translations(shifts: Tensor) -> Tensor:
    """The homographies (B, 3, 3) that move by (right, down) in pixels, (B, 2)."""
    moved = torch.eye(3, dtype=shifts.dtype).repeat(len(shifts), 1, 1)
    moved[:, :2, 2] = shifts
    return moved


def rotations(angles: Tensor) -> Tensor:
    """The homographies (B, 3, 3) that turn clockwise around the centre by angles (B,), in radians."""
    turned = torch.eye(3, dtype=angles.dtype).repeat(len(angles), 1, 1)
    turned[:, 0, 0] = turned[:, 1, 1] = angles.cos()
    turned[:, 1, 0] = angles.sin()
    turned[:, 0, 1] = -angles.sin()
    return turned


def projections(moves: Tensor, height: int, width: int) -> Tensor:
    """The homographies (B, 3, 3) that move the corners of an image.

    Args:
        moves: (B, 4, 2), (right, down) in pixels for the corners top left, top right, bottom left, bottom right.
        height: of the image.
        width: of the image.
    """
    corners = torch.tensor([[-1, -1], [1, -1], [-1, 1], [1, 1]], dtype=moves.dtype)
    corners = (corners * torch.tensor([width / 2, height / 2], dtype=moves.dtype)).expand_as(moves)
    # (h·c) = (h₃·c) m for each corner c = (x, y, 1) and the place m it moves to, with the last entry of h₃ fixed at 1.
    places = corners + moves
    points = torch.cat([corners, torch.ones_like(corners[..., :1])], dim=2)
    left = torch.zeros(len(moves), 4, 2, 8, dtype=moves.dtype)
    left[:, :, 0, 0:3] = left[:, :, 1, 3:6] = points
    left[:, :, :, 6:8] = -places.unsqueeze(3) * corners.unsqueeze(2)
    entries = torch.linalg.solve(left.flatten(1, 2), places.flatten(1))
    return torch.cat([entries, torch.ones_like(entries[:, :1])], dim=1).view(-1, 3, 3)


def warped(x: Tensor, homographies: Tensor) -> Tensor:
    """Every image moved by its homography.

    Args:
        x: the images.
        homographies: (B, 3, 3), which take (right, down, 1), in pixels from the centre, to where it moves.
    """
    height, width = x.shape[-2:]
    back = torch.linalg.inv(homographies).to(x)
    down, right = (torch.arange(side, dtype=x.dtype, device=x.device) - (side - 1) / 2 for side in (height, width))
    across, along, depth = (
        back[:, :, :1, None] * right + back[:, :, 1:2, None] * down[:, None] + back[:, :, 2:, None]
    ).unbind(1)
    depth = depth.clamp(min=_HORIZON)
    grid = torch.stack([across / depth * (2 / width), along / depth * (2 / height)], dim=3)
    moved = grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    # Weights that sum to 1 + 1e-7 would leave white a little too white.
    return moved.clamp(0, 1)


def _check_amounts(**amounts: float) -> None:
    for name, value in amounts.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value:g}")
