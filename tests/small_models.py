"""Networks small and smooth enough for finite differences, and images whose classes anyone can see."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache

import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn.functional import one_hot

CLASSES = 3
SIDE = 6
CORNERS = ((0, 0), (0, 3), (3, 0))


class SmallNet(nn.Module):
    """A classifier of grey images (B, 1, 6, 6) without a kink; its layers are `maps`, `hidden` and `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Conv2d(1, 4, 3, stride=3), nn.Softplus())
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(4 * 2 * 2, 5), nn.Tanh())
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, 3)."""
        logits: Tensor = self.head(self.hidden(self.maps(x)))
        return logits


class Fragile(SmallNet):
    """The same network, in which an image with a white pixel turns to NaN."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, 3), NaN for an image with a white pixel."""
        white = x.detach().flatten(1).amax(dim=1) >= 1
        return super().forward(x.masked_fill(white[:, None, None, None], torch.nan))


class Affine(nn.Module):
    """Pixels as features: z = s·x, flattened, so that a test chooses the features themselves."""

    def __init__(self, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The features (B, C·H·W)."""
        return self.scale * x.flatten(1)


def trained_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> SmallNet:
    """A network that tells the corners of `squares` apart, in eval mode; the caller's own to change."""
    return deepcopy(_trained(seed)).to(dtype)


def fragile_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Fragile:
    """`trained_net` with its one weakness."""
    with torch.random.fork_rng(devices=[]):
        net = Fragile().eval()
    net.load_state_dict(_trained(seed).state_dict())
    return net.to(dtype)


def squares(count: int = 60, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inliers: a bright square in the corner that is the label, (N, 1, 6, 6), and the labels 0, 1, 2, 0, … (N,)."""
    images, labels = blank(count, seed, dtype), torch.arange(count) % CLASSES
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = CORNERS[label]
        image[:, row : row + 3, column : column + 3] += 0.5
    return images, labels


def blank(count: int = 20, seed: int = 1000, dtype: torch.dtype = torch.float32) -> Tensor:
    """Outliers: dark noise and no square at all, (N, 1, 6, 6)."""
    generator = torch.Generator().manual_seed(seed)
    return (0.1 + 0.1 * torch.rand(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)).to(dtype)


def as_images(features: Tensor) -> Tensor:
    """Features (N, D) in [0, 1] as images (N, 1, 1, D), which `Affine` gives back."""
    return features[:, None, None, :]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread for a module that imports this: on small tensors the others only wait for each other."""
    with threadpool_limits(1):
        yield


@cache
def _trained(seed: int) -> SmallNet:
    """Random features, and the head that gives ±4 on squares and 0 on blanks by least squares: no waiting."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = SmallNet().eval()
        for parameter in net.parameters():
            parameter *= 2
        images, labels = squares(120, seed=100 + seed)
        features = net.hidden(net.maps(torch.cat([images, blank(40, seed=200 + seed)])))
        wanted = torch.cat([8 * one_hot(labels, CLASSES).float() - 4, torch.zeros(40, CLASSES)])
        fit = torch.linalg.lstsq(torch.cat([features, torch.ones(len(features), 1)], dim=1), wanted).solution
        net.head.weight.copy_(fit[:-1].T)
        net.head.bias.copy_(fit[-1])
    return net
