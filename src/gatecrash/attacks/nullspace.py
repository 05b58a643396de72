"""Exact collisions along the null space: of a layer as a matrix, of a ReLU network inside its linear region."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from math import inf, prod
from typing import Any

import scipy.linalg
import torch
from torch import Tensor, nn

from gatecrash.attacks.region import (
    ENTRIES,
    Region,
    check_entries,
    latent_of,
    require_affine_until,
    require_piecewise_linear,
)
from gatecrash.attacks.registry import register
from gatecrash.ball import L2, Ball, Linf
from gatecrash.encoder import Encoder
from gatecrash.found import Found
from gatecrash.images import check_form, check_images
from gatecrash.metrics import mape
from gatecrash.progress import progress
from gatecrash.search import check_counts, generator_for
from gatecrash.taps import require_python

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
                require_piecewise_linear(region, ball.eps if isinstance(ball, Linf) else ball.eps / x.numel() ** 0.5)
            seen = row_space(region.jacobian()) if rows is None else rows
            if len(seen) == x.numel():
                raise ValueError(_no_null_space(x.numel(), region.latent_size, index))
            ways = []
            for _ in range(restarts):
                ways.append(_walk(region, seen, ball, steps, source))
                bar.advance()
            way = max(ways, key=lambda way: float((way.x - x).norm()))
            require_affine_until(region, way.x)
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
        z, reached = latent_of(region.network, start), latent_of(region.network, x)
        cast = latent_of(network, x.float()) - latent_of(network, start.float())
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
    check_entries(len(bias), count)
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
    limit = min(len(start), ENTRIES // len(start))
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


def _no_null_space(pixels: int, latent: int, index: int) -> str:
    return (
        f"the latent of image {index} ({latent} values) sees all {pixels} dimensions of the image, so no direction "
        f"leaves it as it is; take a latent with fewer than {pixels} values: Encoder(network, layer=...)"
    )


def _reading(network: nn.Module, images: Tensor) -> nn.Module:
    """The network as it reads these samples: a linear layer flattened images, any other network behind an `Encoder`."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"network must be a torch.nn.Module, got {type(network).__name__}")
    if hasattr(network, "judge"):
        raise ValueError(f"network must be one with a latent, not a detector: give {type(network).__name__}'s encoder")
    require_python(network)
    shape = images.shape[1:]
    if isinstance(network, nn.Conv2d) and shape[0] != network.in_channels:
        raise ValueError(f"the convolution takes images of {network.in_channels} channels, got shape {tuple(shape)}")
    if isinstance(network, nn.Linear) and shape[-1] != network.in_features == prod(shape):
        return nn.Sequential(nn.Flatten(), network)
    if isinstance(network, nn.Linear) and shape[-1] != network.in_features:
        raise ValueError(f"the layer takes {network.in_features} numbers, got samples of shape {tuple(shape)}")
    whole = isinstance(network, Encoder | nn.Linear | nn.Conv2d) or images.ndim != 4
    return network if whole else Encoder(network)


def _check(images: object, ball: Ball, steps: int, restarts: int) -> None:
    """Raises a ValueError for whatever the attack cannot start with."""
    check_counts(steps=steps, restarts=restarts)
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
