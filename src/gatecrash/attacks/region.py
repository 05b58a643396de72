"""The affine map that a piecewise linear network is around an image: its ReLU and max-pool choices held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gatecrash.ball import normalised
from gatecrash.encoder import Encoder, evaluating, first_tensor
from gatecrash.protocols import as_vector, as_vectors

ENTRIES = 2**29
"""The most entries a matrix may have here: 4 GiB in float64."""


@dataclass(frozen=True)
class _Gate:
    """What a ReLU let through."""

    open: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """The values that passed, zero for the others."""
        return x * self.open

    def slack(self, x: Tensor) -> Tensor:
        """How far every value is from zero, (B, ·), negative on the other side."""
        return torch.where(self.open, x, -x).flatten(1)


@dataclass(frozen=True)
class _Choice:
    """Which place a max-pool chose in every window."""

    winner: Tensor
    """(1, C, windows), as indices into the flattened map."""
    places: Tensor
    """(windows, kernel), the indices of every window's places."""
    inside: Tensor
    """(windows, kernel), whether a place is in the map and not in the padding."""
    size: tuple[int, int]

    def apply(self, x: Tensor) -> Tensor:
        """The values at the chosen places."""
        return self._chosen(x).view(*x.shape[:2], *self.size)

    def slack(self, x: Tensor) -> Tensor:
        """By how much the chosen value of every window exceeds each of the values there, (B, ·)."""
        others = x.flatten(2)[:, :, self.places]
        return (self._chosen(x)[..., None] - others)[..., self.inside].flatten(1)

    def _chosen(self, x: Tensor) -> Tensor:
        return x.flatten(2).gather(2, self.winner.expand(len(x), -1, -1))


_SIDES = 8
"""The directions, each with its opposite, in which a network is looked at for bends."""

_Pattern: TypeAlias = _Gate | _Choice


def _gate(x: Tensor) -> _Gate:
    return _Gate(x > 0)


def _choice(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> _Choice:
    """What max_pool2d with these arguments chooses."""
    output, winner = functional.max_pool2d(
        x, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode, return_indices=True
    )
    lines = []
    for axis, (count, out) in enumerate(zip(x.shape[2:], output.shape[2:], strict=True)):
        kernel, step, pad, gap = (
            value if isinstance(value, int) else value[axis % len(value)]
            for value in (kernel_size, stride or kernel_size, padding, dilation)
        )
        first = step * torch.arange(out, device=x.device)[:, None] - pad
        lines.append((first + gap * torch.arange(kernel, device=x.device), count))
    (rows, height), (columns, width) = lines
    rows, columns = rows[:, None, :, None], columns[None, :, None, :]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = (rows * width + columns).where(inside, 0)
    windows = output.shape[2] * output.shape[3]
    return _Choice(
        winner.flatten(2), places.reshape(windows, -1), inside.reshape(windows, -1), (output.shape[2], output.shape[3])
    )


class _Held(TorchFunctionMode):
    """Runs a network with its ReLUs and max-pools held to patterns, or, where none are given, learns the patterns."""

    def __init__(self, patterns: list[_Pattern] | None = None) -> None:
        super().__init__()
        self.learns = patterns is None
        self.patterns = patterns or []
        self.slacks: list[Tensor] = []
        self.kinks: dict[Callable[..., Any], Callable[..., Tensor]] = {
            functional.relu: self._relu,
            torch.relu: self._relu,
            Tensor.relu: self._relu,
            torch.relu_: partial(self._relu, inplace=True),
            Tensor.relu_: partial(self._relu, inplace=True),
            functional.max_pool2d: self._max_pool,
            torch.max_pool2d: self._max_pool,
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch that the network calls."""
        return self.kinks.get(function, function)(*args, **(kwargs or {}))

    def _relu(self, input: Tensor, inplace: bool = False) -> Tensor:
        held = self._held(input, _gate)
        return input.copy_(held) if inplace else held

    def _max_pool(self, input: Tensor, *args: Any, return_indices: bool = False, **kwargs: Any) -> Tensor:
        return self._held(input, partial(_choice, **kwargs), *args)

    def _held(self, x: Tensor, learn: Callable[..., _Pattern], *args: Any) -> Tensor:
        if self.learns:
            self.patterns.append(learn(x.detach(), *args))
        pattern = self.patterns[len(self.slacks)]
        self.slacks.append(pattern.slack(x))
        return pattern.apply(x)


class Region:
    """The affine map that a network is on the linear region of one image: its ReLUs and max-pools choose as there.

    A slack is by how much a ReLU or a max-pool is away from choosing otherwise; the region is where all are positive.
    Latent and slacks are affine in x wherever they are asked for.

    Args:
        network: in float64, its parameters without gradients.
        x: (1, ...), the image.

    Raises:
        ValueError: the network's output is not finite.
    """

    def __init__(self, network: nn.Module, x: Tensor) -> None:
        self.network = network
        self.x = x
        self.passes = 1
        with torch.no_grad(), _Held() as held:
            z = latent_of(network, x)
        if not bool(z.isfinite().all()):
            raise ValueError("the network's output has NaN or infinity")
        self.patterns = held.patterns
        self.latent_size = z.shape[1]
        self.slack_size = sum(slack.shape[1] for slack in held.slacks)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latents (B, K) and the slacks (B, ·) of points (B, ...)."""
        self.passes += len(x)
        with _Held(self.patterns) as held:
            z = latent_of(self.network, x)
        return z, torch.cat([*held.slacks, x.new_zeros(len(x), 0)], dim=1)

    def jacobian(self) -> Tensor:
        """The latent's derivative, (K, M).

        Raises:
            ValueError: it would not fit into 4 GiB.
        """
        check_entries(self.latent_size, self.x.numel())
        return self._rows(0, torch.arange(self.latent_size, device=self.x.device))

    def slack_rows(self, which: Tensor) -> Tensor:
        """The derivatives of some slacks, (len(which), M)."""
        return self._rows(1, which)

    def along(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The slacks at a point (M,) and their change per unit of length along a direction (M,)."""
        with torch.no_grad():
            _, slacks = self(torch.stack([x, x + direction]).view(2, *self.x.shape[1:]))
        return slacks[0], slacks[1] - slacks[0]

    def holds(self, x: Tensor) -> bool:
        """Whether a point (1, ...) lies in the region, to 1e-9 of the largest slack."""
        with torch.no_grad():
            _, slacks = self(x)
        return slacks.numel() == 0 or bool(slacks.min() >= -1e-9 * slacks.abs().max())

    def _rows(self, part: int, which: Tensor) -> Tensor:
        """The derivatives of some latents (part 0) or slacks (part 1), a copy of the image for each of them."""
        rows = []
        for chunk in which.split(max(1, min(64, 2**22 // max(1, self.slack_size)))):
            points = self.x.repeat(len(chunk), *(1 for _ in self.x.shape[1:])).requires_grad_()
            with torch.enable_grad():
                chosen = self(points)[part].gather(1, chunk[:, None]).sum()
            gradient = torch.autograd.grad(chosen, points, allow_unused=True)[0] if chosen.requires_grad else None
            rows.append(torch.zeros_like(points) if gradient is None else gradient)
        return torch.cat(rows).flatten(1)


def require_piecewise_linear(region: Region, reach: float) -> None:
    """Raises a ValueError that names the first module which is not affine even with ReLUs and max-pools held.

    An affine map sends the middle of two points to the middle of their images; here the points are far from the image,
    to several sides and to the opposite ones, so that every bend lies on the way to one of them. Where all
    pixels may go further, to a `reach`, that far too.
    """
    generator, shape = torch.Generator().manual_seed(0), (_SIDES, *region.x.shape[1:])
    sides = torch.randn(shape, generator=generator, dtype=region.x.dtype).to(region.x.device)
    model = region.network.model if isinstance(region.network, Encoder) else region.network
    for distance in sorted({10.0, max(10.0, reach)}, reverse=True):
        far = distance * sides
        points = region.x + torch.cat([torch.zeros_like(region.x), far, -far, far / 2, -far / 2])
        with torch.no_grad(), _watching(model, _bent):
            z, _ = region(points)
        if _bent(z):
            raise ValueError(_not_affine("", model))
    with torch.no_grad():
        alone, _ = region(region.x)
    if float((alone - z[:1]).abs().max()) > 1e-9 * float(z.abs().max()):
        raise ValueError(
            "the latent of one image depends on the others in its batch, so it has no linear region of its own; is "
            "there a batch norm without running statistics?"
        )


def require_affine_until(region: Region, x: Tensor) -> None:
    """Raises a ValueError where a way in a null space has left it: there is a bend that no look at a few points told.

    The latent may differ by what float64 rounds of latents as far off as this in other directions, drawn at random: any
    that followed from the way, as its mirror image does, could lie in the null space too.
    """
    moved, generator = x - region.x, torch.Generator().manual_seed(0)
    sides = torch.randn((_SIDES, *x.shape[1:]), generator=generator, dtype=x.dtype).to(x.device)
    with torch.no_grad():
        z, _ = region(torch.cat([region.x, x, region.x + normalised(sides) * moved.norm()]))
    error, scale = float((z[1] - z[0]).abs().max()), float(z.abs().max())
    if not error <= 1e-9 * scale:
        model = region.network.model if isinstance(region.network, Encoder) else region.network
        raise ValueError(
            f"{type(model).__name__} bends on the way: {float(moved.norm()):.4g} from the image its latent is another "
            f"by {error:.3g}; take a smaller ball, or collide, which needs gradients only"
        )


def _bent(values: object) -> bool:
    """Whether a row half-way from the first to one of the far rows is not the mean of the two."""
    if not isinstance(values, Tensor) or values.ndim == 0 or not values.is_floating_point():
        return False
    if len(values) != 1 + 4 * _SIDES:
        return False
    far, middle = values[1:].chunk(2)
    error = (values[:1] + far) / 2 - middle
    return not bool(error.abs().max() <= 1e-9 * values.abs().max())


@contextmanager
def _watching(model: nn.Module, wrong: Callable[[object], bool]) -> Iterator[None]:
    """While the block runs, the first module to give something wrong raises; a wrong input is its parent's doing."""
    running: list[tuple[str, nn.Module]] = [("", model)]

    def before(name: str, module: nn.Module, args: Any) -> None:
        if any(wrong(arg) for arg in args):
            raise ValueError(_not_affine(*running[-1]))
        running.append((name, module))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        if wrong(output):
            raise ValueError(_not_affine(name, module))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda module, args, name=name: before(name, module, args)))
        handles.append(
            module.register_forward_hook(lambda module, args, out, name=name: after(name, module, args, out))
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _not_affine(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return (
        f"{f'layer {name!r} ({kind})' if name else kind} is not affine between its ReLUs and max-pools, so the network "
        "has no linear region to stay in; take a layer before it, Encoder(network, layer=...), or use collide, which "
        "needs gradients only"
    )


def latent_of(network: nn.Module, x: Tensor) -> Tensor:
    """The latent of a batch as vectors (B, K), in eval mode."""
    if isinstance(network, Encoder):
        return as_vectors(network(x))
    parameter = next((p for p in network.parameters() if p.is_floating_point()), x)
    with evaluating(network):
        return as_vector(first_tensor(network(x.to(parameter.dtype)), type(network).__name__))


def check_entries(rows: int, columns: int) -> None:
    """Raises a ValueError for a matrix of more than 4 GiB."""
    if rows * columns > ENTRIES:
        raise ValueError(
            f"the matrix of {rows} latents by {columns} pixels would take {rows * columns / 2**27:.0f} GiB; take a "
            "smaller latent, Encoder(network, layer=...), or smaller images, Encoder(network, size=...)"
        )
