"""Exact collisions along the null space: of a layer as a matrix, of a ReLU network inside its linear region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from math import inf, prod
from typing import Any, TypeAlias

import scipy.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gatecrash.attacks.registry import register
from gatecrash.ball import L2, Ball, Linf
from gatecrash.encoder import Encoder, evaluating, first_tensor
from gatecrash.found import Found
from gatecrash.images import check_form, check_images
from gatecrash.metrics import mape
from gatecrash.progress import progress
from gatecrash.protocols import leaves
from gatecrash.search import generator_for

_ENTRIES = 2**29
"""The most entries a matrix may have here: 4 GiB in float64."""

_TOUCH = 1e-6
"""The share of the way to a kink that is left, so that rounding cannot cross it."""

_WALL = 1e-2
"""The share of the way to the nearest wall of the box that is left, so that the next piece can still turn."""

_SPENT = 1 / 16
"""The share of the free dimensions that is given up, after every piece, to hold off the nearest kinks."""

_TRIES = 8
"""How many times as many directions as pieces may be tried: at a tie, one may lead nowhere."""

_INDEPENDENT = 1e-9
"""How much of a unit row must lie outside the others' span for it to count as a row of its own."""


@dataclass(frozen=True, kw_only=True)
class NullSpaceFound(Found):
    """Collisions at rounding level: `value` is max|f(x) − f(start)| in float64, `success` whether x came to 0.99 ε.

    `x` and `start` are float64, since the rounding of a float32 image is itself a step out of the null space;
    `cast_value` says how large that step is. `steps` are the straight pieces of the way.
    """

    cast_value: Tensor
    """(B,), max|f(x) − f(start)| of the images as float32, in the network's own precision."""
    nullity: Tensor
    """(B,), the dimension of the null space at the start."""
    first_piece: Tensor
    """(B,), the length of the first straight piece: how far one direction alone would have gone."""
    pattern_kept: Tensor
    """(B,), whether every ReLU and max-pool still chooses as it did; a tie, to 1e-9, counts as either choice."""


@register("nullspace", aim="latent", paper="Liang et al., Section 2.2")
def nullspace(
    network: nn.Module,
    images: Tensor,
    ball: Ball,
    *,
    steps: int = 30,
    restarts: int = 1,
    generator: torch.Generator | int | None = None,
) -> NullSpaceFound:
    """Move images as far as asked along directions that the latent does not see: f(x + Σ λη) = f(x).

    The λ of the first direction are random. Where there is nothing in the way (a linear layer or a convolution, no box)
    the perturbation has length ε, however large. Otherwise the way is made of straight pieces. Each goes on until the
    first pixel nears the wall of the box or the first ReLU or max-pool would choose otherwise; then the direction of
    growth is projected once more, onto what the null space leaves when the nearest such kinks are held where they
    are. So the perturbation grows with every piece, and the network stays the affine map that it is on the linear
    region of the image. It ends at ε, in a corner, or after `steps` pieces.

    Args:
        network: a linear layer, a convolution, or a network or `Encoder` whose only kinks are ReLUs and max-pools, as
            modules or as functions. It is copied to float64 and left as it is.
        images: (B, C, H, W) in [0, 1]; (B, D) for a layer that takes vectors; any finite values where there is no box.
        ball: `L2(eps)`: a perturbation of length eps, or as long as the region allows; `L2(eps, box=None)`: outside
            [0, 1] too. `Linf(eps)` bounds every pixel and goes as far as it can.
        steps: straight pieces per run, at most; 30 of them through a ResNet-20 for 32×32×3 pixels take a core minutes.
        restarts: runs, each from another random direction; the longest perturbation is kept.
        generator: where random numbers come from: a generator, a seed, or None for seed 0.

    Raises:
        ValueError: the latent keeps every dimension of the image, the network has other kinks, or an input is off.
    """
    _check(images, ball, steps, restarts)
    source = generator_for(generator, images.device)
    network = _reading(network, images)
    exact = deepcopy(network).double().eval().requires_grad_(False)
    start = images.detach().double()
    layer = isinstance(network, nn.Linear | nn.Conv2d)
    rows = row_space(linear_matrix(network, tuple(start.shape[1:]))[0]) if layer else None
    found = []
    with progress("walking", len(start) * restarts) as bar:
        for index, x in enumerate(start.split(1)):
            region = Region(exact, x)
            if index == 0:
                require_piecewise_linear(region)
            seen = row_space(region.jacobian()) if rows is None else rows
            if len(seen) == x.numel():
                raise ValueError(_no_null_space(x.numel(), region.latent_size, index))
            ways = []
            for _ in range(restarts):
                ways.append(_walk(region, seen, ball, steps, source))
                bar.advance()
            way = max(ways, key=lambda way: float((way.x - x).norm()))
            found.append(_measured(network, region, way, ball, x.numel() - len(seen)))
    return _joined(found)


def _joined(parts: list[NullSpaceFound]) -> NullSpaceFound:
    """What was found for one image after the other as one."""
    tensors: dict[str, Any] = {
        part.name: torch.cat([getattr(one, part.name) for one in parts])
        for part in fields(NullSpaceFound)
        if isinstance(getattr(parts[0], part.name), Tensor)
    }
    return NullSpaceFound(**tensors)


def _measured(network: nn.Module, region: Region, way: _Way, ball: Ball, nullity: int) -> NullSpaceFound:
    """What a way came to, measured on the network itself: with the kinks where they are, not held."""
    start, x = region.x, way.x
    with torch.no_grad():
        z, reached = _latent(region.network, start), _latent(region.network, x)
        cast = _latent(network, x.float()) - _latent(network, start.float())
    return NullSpaceFound(
        x=x,
        value=(reached - z).abs().amax(dim=1),
        start=start,
        start_value=start.new_zeros(1),
        success=ball.distance(x, start) >= 0.99 * ball.eps,
        steps=torch.tensor([way.pieces], device=x.device),
        evaluations=torch.tensor([region.passes], device=x.device),
        mape=mape(reached, z),
        cast_value=cast.abs().amax(dim=1).to(x.dtype),
        nullity=torch.tensor([nullity], device=x.device),
        first_piece=x.new_tensor([way.first]),
        pattern_kept=torch.tensor([region.holds(x)], device=x.device),
    )


def linear_matrix(layer: nn.Module, input_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A linear layer or a convolution as W x + b on flattened inputs: W (outputs, inputs) and b (outputs,), float64.

    Column j of W is what the layer makes of the j-th unit vector, so every stride, padding, dilation and grouping is
    the layer's own. A linear layer with as many inputs as a whole sample reads it flattened, as after `nn.Flatten`.

    Args:
        layer: an `nn.Linear` or `nn.Conv2d`; it is left as it is.
        input_shape: the shape of one sample, without the batch.

    Raises:
        ValueError: the layer is of another kind, or W would not fit into 4 GiB.
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise ValueError(f"only nn.Linear and nn.Conv2d are one matrix, got {type(layer).__name__}")
    count = prod(input_shape)
    affine = deepcopy(layer).double().requires_grad_(False)
    if isinstance(layer, nn.Linear) and count == layer.in_features:
        input_shape = (count,)
    bias = affine(torch.zeros(1, *input_shape, dtype=torch.float64, device=affine.weight.device)).flatten()
    _check_entries(len(bias), count)
    affine.bias = None
    matrix = bias.new_empty(len(bias), count)
    for columns in torch.arange(count, device=bias.device).split(256):
        units = bias.new_zeros(len(columns), count)
        units[torch.arange(len(columns), device=bias.device), columns] = 1
        matrix[:, columns] = affine(units.view(-1, *input_shape)).flatten(1).T
    return matrix, bias


def row_space(matrix: Tensor, tolerance: float | None = None) -> Tensor:
    """An orthonormal basis of what a matrix (K, M) sees, (rank, M).

    By QR with pivoting: row after row, the one that sticks out furthest from those before it, until none does by more
    than `tolerance`; None is max(K, M) · the longest row · the rounding of the dtype.
    """
    return _row_and_null_space(matrix, tolerance, mode="economic")[0]


def null_space(matrix: Tensor, tolerance: float | None = None) -> Tensor:
    """An orthonormal basis η of what a matrix (K, M) does not see, as columns, (M, M − rank); W η = 0."""
    return _row_and_null_space(matrix, tolerance, mode="full")[1].T


def _row_and_null_space(matrix: Tensor, tolerance: float | None, mode: str) -> tuple[Tensor, Tensor]:
    """Both bases as rows; in mode "economic" the second is not complete."""
    if matrix.numel() == 0:
        return matrix, torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    rounding = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    if matrix.shape[0] > matrix.shape[1]:
        matrix = torch.linalg.qr(matrix, mode="r").R
    columns, triangle, _ = scipy.linalg.qr(matrix.detach().T.cpu().numpy(), mode=mode, pivoting=True)
    lengths = abs(triangle.diagonal())
    rank = int((lengths > (rounding * lengths[0] if tolerance is None else tolerance)).sum())
    rows = torch.from_numpy(columns.T).to(matrix)
    return rows[:rank], rows[rank:]


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
            z = _latent(network, x)
        if not bool(z.isfinite().all()):
            raise ValueError("the network's output has NaN or infinity")
        self.patterns = held.patterns
        self.latent_size = z.shape[1]
        self.slack_size = sum(slack.shape[1] for slack in held.slacks)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latents (B, K) and the slacks (B, ·) of points (B, ...)."""
        self.passes += len(x)
        with _Held(self.patterns) as held:
            z = _latent(self.network, x)
        return z, torch.cat([*held.slacks, x.new_zeros(len(x), 0)], dim=1)

    def jacobian(self) -> Tensor:
        """The latent's derivative, (K, M).

        Raises:
            ValueError: it would not fit into 4 GiB.
        """
        _check_entries(self.latent_size, self.x.numel())
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


@dataclass(frozen=True)
class _Way:
    """Where one run came to."""

    x: Tensor
    first: float
    """The length of the first straight piece."""
    pieces: int


def _walk(region: Region, seen: Tensor, ball: Ball, steps: int, generator: torch.Generator) -> _Way:
    """Straight pieces from the region's image, orthogonal to all that the latent has `seen`, inside ball and region."""
    start = region.x.flatten()
    low, high = _bounds(start, ball)
    goal = ball.eps if isinstance(ball, L2) else inf

    def random() -> Tensor:
        return torch.randn(len(start), generator=generator, device=generator.device, dtype=start.dtype).to(start.device)

    moved, normals, seed = torch.zeros_like(start), seen, random()
    held = torch.zeros(region.slack_size, dtype=torch.bool, device=start.device)
    limit = min(len(start), _ENTRIES // len(start))
    first, tries, pieces, arrived = 0.0, 0, 0, False
    while pieces < steps and tries < _TRIES * steps and not arrived and len(normals) < limit:
        below, above = start + moved - low, high - start - moved
        direction = _direction(moved if bool(moved.any()) else seed, normals, below, above)
        if direction is None:  # the way grows no further as it is, but any free direction lengthens it
            direction = _direction(random(), normals, below, above)
        if direction is None:
            break
        slack, slope = region.along(start + moved, direction)
        ratios = torch.where((slope < 0) & ~held, slack.clamp_min(0) / -slope, inf)
        kink = float(ratios.min()) if len(ratios) else inf
        wall = float((torch.where(direction > 0, above, below) / direction.abs()).nan_to_num(inf, posinf=inf).min())
        rest = _until(moved, direction, goal)
        step = min(rest, kink * (1 - _TOUCH), wall * (1 - _WALL))
        moved = moved + step * direction
        first = first or step
        tries, pieces = tries + 1, pieces + (step > 0)
        arrived = step == rest
        if step == kink * (1 - _TOUCH):
            nearest = _nearest(ratios, kink, limit - len(normals))
            held[nearest] = True
            normals = _with_rows(normals, region.slack_rows(nearest))
        elif step <= 1e-6 * float(moved.norm()):
            break
    moved = moved - (moved @ seen.T) @ seen
    x = (start + moved).clamp(low, high)
    return _Way(x.view_as(region.x), first, pieces)


def _nearest(ratios: Tensor, kink: float, free: int) -> Tensor:
    """The kinks to hold from now on: all that are as near as the first, and more as long as dimensions are free.

    At a tie, as in a max-pool over a black background, nothing more: one of them may well hold the others.
    """
    touching = int((ratios <= kink * (1 + 1e-9)).sum())
    count = touching if kink == 0 else min(max(touching, int(free * _SPENT)), int(ratios.isfinite().sum()))
    return ratios.topk(count, largest=False).indices


def _bounds(start: Tensor, ball: Ball) -> tuple[Tensor, Tensor]:
    """The least and the largest value of every pixel."""
    low, high = (torch.full_like(start, bound) for bound in ball.box or (-inf, inf))
    if isinstance(ball, Linf):
        low, high = torch.maximum(low, start - ball.eps), torch.minimum(high, start + ball.eps)
    return low, high


def _direction(pull: Tensor, normals: Tensor, below: Tensor, above: Tensor) -> Tensor | None:
    """The unit direction along `pull` (M,) that is orthogonal to all normals and has room before the walls.

    In coordinates scaled by the room s that every pixel has, it is the projection of the pull: s·(I − QQᵀ)(s·pull),
    where the columns of Q span the scaled normals. A pixel at its wall moves away from it or not at all, and none of
    them ends the piece early. None where nothing of the pull is left.
    """
    scale = torch.where(pull == 0, torch.maximum(above, below), torch.where(pull > 0, above, below)).clamp(0, 1)
    while True:
        wish = scale * pull / pull.norm()
        free = _orthogonal(wish, normals * scale)
        direction = scale * free
        room = torch.where(direction > 0, above, below).clamp(0, 1)
        crossing = (direction != 0) & (room < scale)
        if not bool(crossing.any()):
            break
        scale = torch.where(crossing, room, scale)
    length = direction.norm()
    return direction / length if float(free.norm()) > 1e-9 * float(wish.norm()) and float(length) > 0 else None


def _orthogonal(vector: Tensor, rows: Tensor) -> Tensor:
    """What of a vector (M,) is orthogonal to the rows (r, M).

    By the normal equations, refined until the square of their condition has lost nothing; where the rows depend on
    each other, by QR, which is slower by an order of magnitude.
    """
    factor, failed = torch.linalg.cholesky_ex(rows @ rows.T)
    if not bool(failed):
        free = vector
        for _ in range(3):
            free = free - rows.T @ torch.cholesky_solve((rows @ free)[:, None], factor)[:, 0]
        if float((rows @ free).norm()) <= 1e-14 * float(vector.norm()):
            return free
    basis = row_space(rows)
    for _ in range(2):
        vector = vector - basis.T @ (basis @ vector)
    return vector


def _until(moved: Tensor, direction: Tensor, goal: float) -> float:
    """How far a point can go along a unit direction until it is `goal` away from the origin."""
    along, length = float(moved @ direction), float(moved.norm())
    return inf if goal == inf else max(0.0, (along**2 + goal**2 - length**2) ** 0.5 - along)


def _with_rows(normals: Tensor, rows: Tensor) -> Tensor:
    """Orthonormal rows and what others, of any length, add to their span."""
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    for _ in range(2):
        rows = rows - (rows @ normals.T) @ normals
    return torch.cat([normals, row_space(rows, tolerance=_INDEPENDENT)])


def require_piecewise_linear(region: Region) -> None:
    """Raises a ValueError that names the first module which is not affine even with ReLUs and max-pools held.

    An affine map sends the middle of two points to the middle of their images; here the points are far apart, so that
    every bend shows.
    """
    generator = torch.Generator().manual_seed(0)
    far = 10 * torch.randn(region.x.shape, generator=generator, dtype=region.x.dtype).to(region.x.device)
    points = torch.cat([region.x, region.x + far, region.x + far / 2])
    model = region.network.model if isinstance(region.network, Encoder) else region.network
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


def _bent(values: object) -> bool:
    """Whether the third of three rows is not the mean of the others."""
    if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != 3 or not values.is_floating_point():
        return False
    error = (values[0] + values[1]) / 2 - values[2]
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


def _no_null_space(pixels: int, latent: int, index: int) -> str:
    return (
        f"the latent of image {index} ({latent} values) sees all {pixels} dimensions of the image, so no direction "
        f"leaves it as it is; take a latent with fewer than {pixels} values: Encoder(network, layer=...)"
    )


def _reading(network: nn.Module, images: Tensor) -> nn.Module:
    """The network as it reads these samples: a linear layer flattened images, any other network behind an `Encoder`."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"network must be a torch.nn.Module, got {type(network).__name__}")
    shape = images.shape[1:]
    if isinstance(network, nn.Linear) and shape[-1] != network.in_features == prod(shape):
        return nn.Sequential(nn.Flatten(), network)
    whole = isinstance(network, Encoder | nn.Linear | nn.Conv2d) or images.ndim != 4
    return network if whole else Encoder(network)


def _latent(network: nn.Module, x: Tensor) -> Tensor:
    """The latent of a batch as vectors (B, K), in eval mode."""
    if isinstance(network, Encoder):
        return torch.cat([leaf.flatten(1) for leaf in leaves(network(x))], dim=1)
    parameter = next((p for p in network.parameters() if p.is_floating_point()), x)
    with evaluating(network):
        return first_tensor(network(x.to(parameter.dtype)), type(network).__name__).flatten(1)


def _check(images: object, ball: Ball, steps: int, restarts: int) -> None:
    """Raises a ValueError for whatever the attack cannot start with."""
    for name, count in (("steps", steps), ("restarts", restarts)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not isinstance(ball, L2 | Linf) or len(ball.ladder) > 1:
        raise ValueError(f"nullspace takes one L2 or L∞ ball, got {ball}")
    if not (isinstance(images, Tensor) and images.ndim == 2 and images.is_floating_point()):
        images = check_form(images) if ball.box is None else check_images(images)
    low, high = ball.box or (-inf, inf)
    if images.numel() == 0 or not bool((images.isfinite() & (images >= low) & (images <= high)).all()):
        wanted = "finite" if ball.box is None else f"in [{low:g}, {high:g}]"
        raise ValueError(f"images must be {wanted}, and at least one; got shape {tuple(images.shape)}")
    if images.device.type == "mps":
        raise ValueError("nullspace computes in float64, which mps does not have; move network and images to the cpu")


def _check_entries(rows: int, columns: int) -> None:
    """Raises a ValueError for a matrix of more than 4 GiB."""
    if rows * columns > _ENTRIES:
        raise ValueError(
            f"the matrix of {rows} latents by {columns} pixels would take {rows * columns / 2**27:.0f} GiB; take a "
            "smaller latent, Encoder(network, layer=...), or smaller images, Encoder(network, size=...)"
        )
