"""Reconstruction: an autoencoder of images, and a decoder from a network's features back to the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from gatecrash.densities.base import Density, register
from gatecrash.densities.options import whole

SMALLEST = 4
"""The side down to which images are halved."""
WIDEST = 4
"""Channels of the smallest maps, as a multiple of the width."""


@register("autoencoder")
class Autoencoder(Density):
    """Images through a narrow code and back, x → z → x̂; how likely an image is, is −½‖x − x̂‖².

    Convolutions halve the image until no side is longer than `SMALLEST`, a linear layer makes the code, and the way
    back mirrors it. There is no normalisation by batch, nothing is random, and every step is smooth.

    Args:
        shape: (C, H, W) of an image, any sides.
        width: channels of the largest maps.
        latent: dimensions of the code; the fewer, the less of an outlier gets through.

    Raises:
        ValueError: the shape is no image's, or an option is no whole number or below 1.
    """

    centre: Tensor  # (C, H, W), the mean image of the first batch, which the decoder adds to

    def __init__(self, shape: Sequence[int], *, width: int = 16, latent: int = 64) -> None:
        super().__init__(shape, width=width, latent=latent)
        image = image_shape(shape)
        whole(width=width, latent=latent)
        self.down, self.up = Downwards(image, width, latent), Upwards(latent, image, width)
        self.register_buffer("centre", torch.zeros(image))

    def begin(self, x: Tensor) -> None:
        """The mean image."""
        self.centre.copy_(x.mean(dim=0))

    def encode(self, x: Tensor) -> Tensor:
        """The code of every image, (B, latent)."""
        code: Tensor = self.down(x - self.centre)
        return code

    def decode(self, code: Tensor) -> Tensor:
        """The image of every code, (B, C, H, W); it may leave [0, 1]."""
        image: Tensor = self.up(code)
        return self.centre + image

    def reconstruct(self, x: Tensor) -> Tensor:
        """x̂ of every image, (B, C, H, W)."""
        return self.decode(self.encode(x))

    def forward(self, x: Tensor) -> Tensor:
        """−½‖x − x̂‖² of every image, (B,)."""
        return -half_square(x - self.reconstruct(x))


@register("decoder")
class Decoder(Density):
    """Images from the features that a network has of them, x̂ = g(z); a sample is z and x as one vector.

    How likely the image is, given its features, is −½‖x − g(z)‖²; the features are given, not learnt.

    Args:
        shape: (D + C·H·W,): D features, then the image.
        image: (C, H, W).
        width: channels of the largest maps.

    Raises:
        ValueError: the shape leaves no feature beside the image, or an option is no whole number or below 1.
    """

    centre: Tensor  # (C, H, W), the mean image of the first batch
    mean: Tensor  # (D,), of the features of the first batch
    scale: Tensor  # (D,), their standard deviation

    def __init__(self, shape: Sequence[int], *, image: Sequence[int], width: int = 16) -> None:
        super().__init__(shape, image=list(image), width=width)
        self.image = image_shape(image)
        whole(width=width)
        self.features = self.dimensions - math.prod(self.image)
        if len(shape) != 1 or self.features < 1:
            raise ValueError(
                f"a sample must be features and an image of shape {self.image} as one vector, got {list(shape)}"
            )
        self.up = Upwards(self.features, self.image, width)
        self.register_buffer("centre", torch.zeros(self.image))
        self.register_buffer("mean", torch.zeros(self.features))
        self.register_buffer("scale", torch.ones(self.features))

    def begin(self, x: Tensor) -> None:
        """The mean image, and mean and spread of the features; one that does not vary keeps its unit."""
        features, images = self.split(x)
        spread = features.std(dim=0, correction=0)
        self.mean.copy_(features.mean(dim=0))
        self.scale.copy_(torch.where(spread > 1e-6 * features.abs().amax(), spread, torch.ones_like(spread)))
        self.centre.copy_(images.mean(dim=0))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features (B, D) and the images (B, C, H, W) of samples."""
        return x[:, : self.features], x[:, self.features :].unflatten(1, self.image)

    def decode(self, features: Tensor) -> Tensor:
        """The image of every row of features, (B, C, H, W); it may leave [0, 1]."""
        image: Tensor = self.up((features - self.mean) / self.scale)
        return self.centre + image

    def forward(self, x: Tensor) -> Tensor:
        """−½‖x − g(z)‖² of every sample, (B,)."""
        features, images = self.split(x)
        return -half_square(images - self.decode(features))


class Downwards(nn.Module):
    """Images (B, C, H, W) to codes (B, latent)."""

    def __init__(self, image: tuple[int, int, int], width: int, latent: int) -> None:
        super().__init__()
        sizes = halvings(image)
        widths = channels(width, len(sizes))
        self.first = nn.Conv2d(image[0], widths[0], 3, padding=1)
        self.halve = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in pairwise(widths)
        )
        self.refine = nn.ModuleList(Refine(after) for after in widths[1:])
        self.last = nn.Linear(widths[-1] * math.prod(sizes[-1]), latent)

    def forward(self, x: Tensor) -> Tensor:
        """The codes."""
        maps: Tensor = self.first(x)
        for halve, refine in zip(self.halve, self.refine, strict=True):
            maps = refine(halve(nn.functional.silu(maps)))
        code: Tensor = self.last(nn.functional.silu(maps).flatten(1))
        return code


class Upwards(nn.Module):
    """Codes (B, latent) to images (B, C, H, W)."""

    def __init__(self, latent: int, image: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.sizes = halvings(image)[::-1]
        widths = channels(width, len(self.sizes))[::-1]
        self.smallest = (widths[0], *self.sizes[0])
        self.first = nn.Linear(latent, math.prod(self.smallest))
        self.refine = nn.ModuleList(Refine(before) for before in widths[:-1])
        self.narrow = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(widths))
        self.last = nn.Conv2d(widths[-1], image[0], 3, padding=1)

    def forward(self, code: Tensor) -> Tensor:
        """The images."""
        maps: Tensor = self.first(code).unflatten(1, self.smallest)
        for size, refine, narrow in zip(self.sizes[1:], self.refine, self.narrow, strict=True):
            maps = interpolate(narrow(nn.functional.silu(refine(maps))), size=size)
        image: Tensor = self.last(nn.functional.silu(maps))
        return image


class Refine(nn.Module):
    """A convolution and a mixing of channels added to what came in; at first nothing is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Conv2d(width, width, 1)
        for parameter in self.two.parameters():
            nn.init.zeros_(parameter)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps of the same shape."""
        silu = nn.functional.silu
        refined: Tensor = maps + self.two(silu(self.one(silu(maps))))
        return refined


def half_square(residual: Tensor) -> Tensor:
    """½‖r‖² of every sample, (B,)."""
    return residual.square().flatten(1).sum(dim=1) / 2


def halvings(image: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Heights and widths of the maps from the image down to the smallest, odd sides rounded up."""
    sizes = [image[1:]]
    while max(sizes[-1]) > SMALLEST:
        height, width = sizes[-1]
        sizes.append((-(-height // 2), -(-width // 2)))
    return sizes


def channels(width: int, levels: int) -> list[int]:
    """Channels of the maps: twice as many at half the side, up to the widest."""
    return [width * min(2**level, WIDEST) for level in range(levels)]


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """(C, H, W).

    Raises:
        ValueError: it is no image's.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"an image has the shape (C, H, W), got {list(shape)}")
    return shape[0], shape[1], shape[2]
