"""Families of drawn images: every image has random parameters of its own, so that there is no end of them.

Each family takes (count, channels, size, generator) and gives (count, channels, size, size) in [0, 1], on the
generator's device. It draws from that generator only.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv2d, pad

from gatecrash.images import resized

_CONTRAST = 1 / 3
"""Two colours of one image differ by at least this much in every channel."""
_MOST_FIELDS = 16
_BLOB_GRID, _BLOB_SHARE, _BLOB_SIGMA, _BLOB_THRESHOLD = 32, 0.7, 1.5, 0.75


def noise(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Independent uniform values."""
    return _uniform(generator, 0, 1, count, channels, size, size)


def gaussian(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Independent normal values of mean 0.5 and variance 1, clipped to [0, 1], as in ODIN (Liang et al., ICLR 2018)."""
    values = torch.randn(count, channels, size, size, generator=generator, device=generator.device)
    return (values + 0.5).clamp(0, 1)


def spiral(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Spirals of one to six arms that turn either way; every channel has its own phase, so that three give colour."""
    arms = _whole(generator, 1, 6, count, 1, 1, 1)
    turns = _uniform(generator, 1, 4, count, 1, 1, 1) * _sign(generator, count)
    phase = _uniform(generator, 0, 2 * math.pi, count, channels, 1, 1)
    centre = _uniform(generator, -0.25, 0.25, 2, count, 1, 1, 1)
    first, second = _two_colours(count, channels, generator)

    wave = spiral_wave(arms, turns, phase, centre[0], centre[1], size)
    return torch.lerp(first, second, (1 + wave) / 2).clamp(0, 1)


def spiral_wave(arms: Tensor, turns: Tensor, phase: Tensor, down: Tensor, right: Tensor, size: int) -> Tensor:
    """cos(arms·θ + 2π·turns·r + phase) in polar coordinates around (down, right), on the square [−1, 1]².

    The parameters have shape (N, 1, 1, 1), or (N, C, 1, 1) for the phase; the result is (N, C, size, size).
    """
    axis = torch.linspace(-1, 1, size, device=phase.device)
    y, x = axis.view(1, 1, size, 1) - down, axis.view(1, 1, 1, size) - right
    return torch.cos(arms * torch.atan2(y, x) + 2 * math.pi * turns * torch.hypot(y, x) + phase)


def checkerboard(count: int, channels: int, size: int, generator: Generator, fields: int | None = None) -> Tensor:
    """Checkerboards of n×n fields in two colours; n is `fields`, or random from 2 to 16 (to `size`, where smaller).

    Raises:
        ValueError: `fields` is not in 1..`size`.
    """
    if fields is not None and not 1 <= fields <= size:
        raise ValueError(f"a checkerboard of {size} pixels takes 1 to {size} fields a side, got {fields}")
    most = min(_MOST_FIELDS, size)
    drawn = _whole(generator, min(2, most), most, count, 1, 1)
    side = drawn if fields is None else torch.full_like(drawn, fields)
    flipped = _whole(generator, 0, 1, count, 1, 1)
    first, second = _two_colours(count, channels, generator)

    field = torch.arange(size, device=generator.device) * side // size
    odd = (field.transpose(1, 2) + field + flipped) % 2 == 1
    return torch.where(odd.unsqueeze(1), first, second)


def constant(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Images of one colour."""
    return _uniform(generator, 0, 1, count, channels, 1, 1).repeat(1, 1, size, size)


def blobs(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Blurred and thresholded coin flips, as in Outlier Exposure (Hendrycks et al., ICLR 2019).

    Pixels that are 1 with probability 0.7, blurred with σ = 1.5, and 0 where less than 0.75 is left. Images larger than
    32 pixels are blurred at 32 and enlarged before the threshold: the blobs grow with the image. Channels are blurred
    apart from each other; the release also blurs across them.
    """
    grid = min(size, _BLOB_GRID)
    flips = (_uniform(generator, 0, 1, count, channels, grid, grid) < _BLOB_SHARE).float()
    values = resized(_blurred(flips, _BLOB_SIGMA), size).clamp(0, 1)
    return torch.where(values < _BLOB_THRESHOLD, 0.0, values)


def _blurred(x: Tensor, sigma: float) -> Tensor:
    radius = math.ceil(4 * sigma)
    offsets = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = kernel / kernel.sum()
    single = x.flatten(0, 1).unsqueeze(1)
    padded = pad(single, (radius, radius, radius, radius), mode="replicate")
    return conv2d(conv2d(padded, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1)).view_as(x)


def _two_colours(count: int, channels: int, generator: Generator) -> tuple[Tensor, Tensor]:
    first = _uniform(generator, 0, 1, count, channels, 1, 1)
    return first, (first + _uniform(generator, _CONTRAST, 1 - _CONTRAST, count, channels, 1, 1)) % 1


def _uniform(generator: Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)


def _whole(generator: Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator, device=generator.device)


def _sign(generator: Generator, count: int) -> Tensor:
    return 2 * _whole(generator, 0, 1, count, 1, 1, 1) - 1
