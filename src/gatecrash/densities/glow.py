"""Glow: a flow of affine or additive couplings, invertible 1×1 convolutions and activation normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import normflows as nf
import torch
from torch import Tensor, nn

from gatecrash.densities.base import Density, register
from gatecrash.densities.options import flag, whole
from gatecrash.fitting import seeded
from gatecrash.speed import full_float32

Coupling = Literal["affine", "additive"]
Preset = Literal["small", "paper"]

PRESETS: dict[str, dict[str, int]] = {"small": {"steps": 4, "hidden": 32}, "paper": {"steps": 32, "hidden": 512}}
"""Steps per level and width by name; "paper" is Kingma & Dhariwal's, which Liang et al. attack at 64×64, 4 levels."""
GREYS = 256
"""Values that a pixel of an image file has."""
BOUND = 8.0
"""Log-scales stay between minus and plus this, so that no image, however it was made, overflows."""
FLAT = 1e-4
"""Channels whose first batch deviates by less are not scaled up."""


@register("glow")
class Glow(Density):
    """The log-likelihood of images of n bits under a flow of several scales, in nats.

    log p(x) = log N(f(y)) + log |det ∂f/∂y| − D·ln 2ⁿ, where y in [−½, ½] is the image and a grey level is a bin of
    width 2⁻ⁿ. On every scale the image is folded into four times the channels, goes `steps` times through
    normalisation, 1×1 convolution and coupling, and half of the channels leave as Gaussians whose mean and scale the
    other half says.

    In training y is anywhere in its bin: the mean of log p then bounds the likelihood of the bin from below. In eval
    mode y = (255x + ½)/256 − ½. For 8 bits that is the bin's midpoint wherever x is an image file's; for fewer bits it
    is a point inside the bin. Nothing is rounded, so log p is smooth and its gradient exact between two files too,
    where an attack goes. `midpoints=True` scores at the midpoint of every bin instead, as a file of n bits would be;
    the true gradient is then zero almost everywhere, and the one at the midpoint takes its place.

    Args:
        shape: (C, H, W); H and W must be divisible by 2 to the power of `levels`.
        preset: "small" or "paper", for `steps` and `hidden` where they are not given.
        levels: scales; by default as many as the sides allow, at most 3.
        steps: on every scale.
        hidden: channels inside a coupling.
        coupling: "affine" or "additive".
        bits: per channel of a pixel, 1 to 8; 5 in Liang et al.'s release.
        midpoints: score at the midpoints of the bins.

    Raises:
        ValueError: the shape is no image's, or cannot be halved so often; an option is off.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        preset: Preset = "small",
        levels: int | None = None,
        steps: int | None = None,
        hidden: int | None = None,
        coupling: Coupling = "affine",
        bits: int = 5,
        midpoints: bool = False,
    ) -> None:
        if preset not in get_args(Preset):
            raise ValueError(f"preset must be {either(Preset)}, got {preset!r}")
        levels = levels_for(shape) if levels is None else levels
        steps = PRESETS[preset]["steps"] if steps is None else steps
        hidden = PRESETS[preset]["hidden"] if hidden is None else hidden
        whole(levels=levels, steps=steps, hidden=hidden, bits=bits)
        flag(midpoints=midpoints)
        if coupling not in get_args(Coupling):
            raise ValueError(f"coupling must be {either(Coupling)}, got {coupling!r}")
        if bits > 8:
            raise ValueError(f"bits must be 1 to 8, got {bits}")
        super().__init__(
            shape, levels=levels, steps=steps, hidden=hidden, coupling=coupling, bits=bits, midpoints=midpoints
        )
        check_sides(self.shape, levels)
        self.count, self.midpoints = 1 << bits, midpoints
        self.flow: Any = multiscale(self.shape, levels, steps, hidden, coupling)

    def forward(self, x: Tensor) -> Tensor:
        """The log-likelihood of every image (B, C, H, W) in [0, 1], (B,)."""
        self.check(x)
        y = self.noisy(x) if self.training else self.still(x)
        log_density: Tensor = self.flow.log_prob(y, None)
        return log_density - self.dimensions * math.log(self.count)

    def begin(self, x: Tensor) -> None:
        """Let every normalisation bring its channels to mean 0 and variance 1 on these images."""
        self.check(x)
        norms = [part for part in self.modules() if isinstance(part, ActNorm)]
        for norm in norms:
            norm.starting = True
        try:
            with torch.no_grad(), seeded(0, x.device):
                self.flow.inverse_and_log_det(self.noisy(x))
        finally:
            for norm in norms:
                norm.starting = False

    def latents(self, x: Tensor) -> list[Tensor]:
        """What the flow makes of images in eval mode: Gaussians, one tensor per scale, the coarsest first."""
        self.check(x)
        with full_float32():  # else the way back does not end where this one began
            z: list[Tensor] = self.flow.inverse_and_log_det(self.still(x))[0]
        return z

    def images(self, latents: Sequence[Tensor]) -> Tensor:
        """The images of latents: the inverse of `latents`."""
        with full_float32():
            return pixels(self.flow.forward_and_log_det(list(latents))[0])

    @torch.no_grad()
    def sample(self, count: int, temperature: float = 1.0) -> Tensor:
        """New images (count, C, H, W) in [0, 1], by torch's global generator.

        Raises:
            ValueError: the count or the temperature is not positive.
        """
        if count < 1 or not temperature > 0:
            raise ValueError(f"count and temperature must be positive, got {count} and {temperature:g}")
        return pixels(self.flow.sample(count, temperature=temperature)[0]).clamp(0, 1)

    def noisy(self, x: Tensor) -> Tensor:
        """Where images are in training: anywhere in their bins."""
        bins = self.bins(x)
        noise = torch.rand_like(bins).clamp_max(1 - 2**-15)  # more, and float32 may round up into the next bin
        return (bins + noise) / self.count - 0.5

    def still(self, x: Tensor) -> Tensor:
        """Where images are in scoring, differentiable."""
        y = ((GREYS - 1) * x + 0.5) / GREYS - 0.5
        if not self.midpoints:
            return y
        return y + ((self.bins(x) + 0.5) / self.count - 0.5 - y).detach()

    def bins(self, x: Tensor) -> Tensor:
        """The bin of every pixel of the image as a file, 0 to 2ⁿ − 1."""
        levels = ((GREYS - 1) * x.detach().float()).round()  # in 32 bits, so that no precision makes another file
        return levels.div(GREYS // self.count).floor().to(x.dtype)


class ActNorm(nn.Module):
    """A scale and a shift per channel, which the first batch may set; in the density's direction, z = (x − t)·e⁻ˢ."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine = nf.flows.AffineConstFlow((channels, 1, 1))
        self.starting = False

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """From latents to images."""
        moved: tuple[Tensor, Tensor] = self.affine(z)
        return moved

    def inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From images to latents."""
        if self.starting:
            deviation, mean = torch.std_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
            self.affine.s.copy_(torch.where(deviation < FLAT, 1, deviation).log())
            self.affine.t.copy_(mean)
        moved: tuple[Tensor, Tensor] = self.affine.inverse(x)
        return moved


class Mixing(nn.Module):
    """The invertible 1×1 convolution as W = P L (U + diag(σ·eˢ)); its log-determinant is H·W·Σ s.

    In full precision also where the rest of training is not: a rounded W would have another determinant. normflows' own
    calls `torch.lu`, which torch is to lose.
    """

    lower: nn.Parameter
    order: Tensor
    sign: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        rotation, _ = torch.linalg.qr(torch.randn(channels, channels))
        permutation, lower, upper = torch.linalg.lu(rotation)
        diagonal = upper.diagonal()
        self.lower, self.upper = nn.Parameter(lower.tril(-1)), nn.Parameter(upper.triu(1))
        self.log_scale = nn.Parameter(diagonal.abs().log())
        self.register_buffer("order", permutation.argmax(dim=1))
        self.register_buffer("sign", diagonal.sign())

    def factors(self) -> tuple[Tensor, Tensor]:
        """L and U, triangular."""
        unit = torch.eye(len(self.sign), dtype=self.sign.dtype, device=self.sign.device)
        return self.lower.tril(-1) + unit, self.upper.triu(1) + torch.diag(self.sign * self.log_scale.exp())

    def inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From images to latents: W x at every pixel."""
        with torch.autocast(x.device.type, enabled=False):
            lower, upper = self.factors()
            mixed = torch.matmul((lower @ upper)[self.order], x.flatten(2)).view_as(x)
            return mixed, self.log_scale.sum() * x[0, 0].numel()

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """From latents to images: W⁻¹ z at every pixel."""
        with torch.autocast(z.device.type, enabled=False):
            lower, upper = self.factors()
            unmixed = z.flatten(2)[:, self.order.argsort()]
            unmixed = torch.linalg.solve_triangular(lower, unmixed, upper=False, unitriangular=True)
            unmixed = torch.linalg.solve_triangular(upper, unmixed, upper=True)
            return unmixed.view_as(z), -self.log_scale.sum() * z[0, 0].numel()


class Conditioner(nn.Module):
    """What one half of the channels says of the other: shifts, and log-scales within ±`BOUND`, in turns.

    Args:
        network: half of the channels → shifts and log-scales; its last layer starts at zero.
        scales: whether there are log-scales.
    """

    def __init__(self, network: nn.Module, scales: bool) -> None:
        super().__init__()
        self.network, self.scales = network, scales

    def forward(self, half: Tensor) -> Tensor:
        """(B, 2C, H, W), or (B, C, H, W) without scales."""
        said: Tensor = self.network(half).to(half.dtype)
        if not self.scales:
            return said
        shift, scale = said.chunk(2, dim=1)
        return torch.stack([shift, BOUND * torch.tanh(scale / BOUND)], dim=2).flatten(1, 2)


class Step(nn.Module):
    """One step of the flow; in the density's direction normalisation, 1×1 convolution and coupling."""

    def __init__(self, channels: int, hidden: int, coupling: Coupling) -> None:
        super().__init__()
        half, scales = channels // 2, coupling == "affine"
        network = nf.nets.ConvNet2d((half, hidden, hidden, (1 + scales) * half), (3, 1, 3))
        block = nf.flows.AffineCouplingBlock(Conditioner(network, scales), scales, "sigmoid")
        self.parts: Any = nn.ModuleList([block, Mixing(channels), ActNorm(channels)])

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """From latents to images."""
        total = z.new_zeros(len(z))
        for part in self.parts:
            z, log_det = part(z)
            total = total + log_det
        return z, total

    def inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From images to latents."""
        total = x.new_zeros(len(x))
        for part in reversed(self.parts):
            x, log_det = part.inverse(x)
            total = total + log_det
        return x, total


class Leaving(nn.Module):
    """The half of the channels that leaves a scale, made Gaussian by what the half that stays says of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        prior = nf.nets.ConvNet2d((half, channels), (3,))
        self.coupling = nf.flows.AffineCoupling(Conditioner(prior, True), True, "exp")
        self.merge = nf.flows.Merge()

    def forward(self, halves: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The halves that stayed and left as one."""
        halves, log_det = self.coupling(halves)
        return self.merge(halves)[0], log_det

    def inverse(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The half that stays and the half that leaves."""
        parted: tuple[list[Tensor], Tensor] = self.coupling.inverse(self.merge.inverse(x)[0])
        return parted


def multiscale(shape: Sequence[int], levels: int, steps: int, hidden: int, coupling: Coupling) -> nn.Module:
    """The flow of images of a shape; normflows counts the scales from the coarsest."""
    channels, height, width = shape
    bases, flows, leaving = [], [], []
    for level in range(levels):
        channels, height, width = 4 * channels, height // 2, width // 2
        flows.append([*(Step(channels, hidden, coupling) for _ in range(steps)), nf.flows.Squeeze()])
        if level == levels - 1:
            bases.append(nf.distributions.GlowBase((channels, height, width)))
        else:
            leaving.append(Leaving(channels))
            channels //= 2
            bases.append(nf.distributions.DiagGaussian((channels, height, width), trainable=False))
    flow: nn.Module = nf.MultiscaleFlow(bases[::-1], flows[::-1], leaving[::-1], class_cond=False)
    return flow


def pixels(y: Tensor) -> Tensor:
    """The images of what the flow has for them."""
    return (GREYS * (y + 0.5) - 0.5) / (GREYS - 1)


def levels_for(shape: Sequence[int]) -> int:
    """How often the sides of images can be halved, at most 3 times."""
    return next((level for level in (3, 2) if all(side % 2**level == 0 for side in shape[1:])), 1)


def check_sides(shape: Sequence[int], levels: int) -> None:
    """Raises a ValueError unless it is the shape of images whose sides can be halved so often."""
    if len(shape) != 3:
        raise ValueError(f"Glow is of images of shape (C, H, W), got {tuple(shape)}")
    if any(side % 2**levels for side in shape[1:]):
        sides = "×".join(map(str, shape[1:]))
        raise ValueError(f"a Glow with levels={levels} needs sides divisible by {2**levels}, got {sides}")


def either(choices: object) -> str:
    """The values of a Literal as a sentence has them."""
    return " or ".join(repr(choice) for choice in get_args(choices))
