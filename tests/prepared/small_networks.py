"""Small networks to prepare, and the settings that prepare them on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.prepared import preparing
from gatecrash.speed import Pace, at_pace

SIZES = (4, 8)


class Smooth(nn.Module):
    """Convolution, batch norm and SiLU twice, then a linear layer: no kink at which rounding turns a gradient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.conv2, self.norm2 = nn.Conv2d(8, 6, 3, stride=2), nn.BatchNorm2d(6)
            self.act = nn.SiLU()
            self.fc = nn.Linear(6, 5)
            for norm in (self.norm1, self.norm2):
                norm.running_mean.normal_(0, 0.2)
                norm.running_var.uniform_(0.5, 1.5)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        maps = self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))
        return self.fc(maps.mean(dim=(2, 3))) * self.scale


def images(count: int, seed: int = 0, side: int = 8) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


@contextmanager
def fast(pace: Pace = "prepared", **changes: Any) -> Iterator[None]:
    """Networks on the CPU run at a pace, uncompiled unless asked otherwise."""
    settings = {"devices": ("cpu",), "sizes": SIZES, "compile_after": None} | changes
    with ExitStack() as stack:
        stack.enter_context(preparing(**settings))
        stack.enter_context(at_pace(pace))
        yield


def with_gradient(encoder: Callable[[Tensor], Any], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The latents of some images, and the gradient of the sum of their squares."""
    x = x.clone().requires_grad_()
    z = encoder(x)
    latents = list(z) if isinstance(z, tuple) else [z]
    (gradient,) = torch.autograd.grad(sum(latent.square().sum() for latent in latents), x)
    return [latent.detach() for latent in latents], gradient
