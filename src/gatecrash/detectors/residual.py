"""How long the residual of a reconstruction is: its norm, or a Mahalanobis distance from the inliers' residuals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gatecrash.densities.options import number, whole
from gatecrash.detectors.base import Stateful
from gatecrash.fitting import generator_of

DistanceName = Literal["l1", "l2", "lp", "mahalanobis"]

ROUNDS = 6
"""Rounds of subspace iteration towards the directions of largest variance."""
SPARE = 16
"""Directions more than asked for, which make the iteration converge."""
ROUNDING = 10
"""Deviations up to so many units in the last place of a white pixel are none."""
ROWS = 512
"""Samples that are looked at together."""


class Norm(nn.Module):
    """The length ‖r‖_p of residuals."""

    def __init__(self, p: float) -> None:
        super().__init__()
        number(p=p)
        if not 1 <= p < float("inf"):
            raise ValueError(f"p must be at least 1 and finite, got {p:g}")
        self.p = p

    def learn(self, residuals: Tensor) -> None:
        """Nothing."""

    def forward(self, residuals: Tensor) -> Tensor:
        """The length of every residual (B, …), (B,)."""
        length: Tensor = torch.linalg.vector_norm(residuals.flatten(1), self.p, dim=1)
        return length


class Whitened(Stateful):
    """The squared Mahalanobis distance of residuals from those of inliers.

    Images have too many dimensions for a full covariance, and it would not be stable: Σ = U Λ Uᵀ + σ²(I − U Uᵀ) has
    the `rank` directions U of largest variance, found by subspace iteration, and one variance σ² for all others. There
    are no more directions than half the inliers, so that something is left to tell σ² from.
    """

    mean: Tensor  # (D,)
    directions: Tensor  # (D, R), orthonormal
    weights: Tensor  # (R,), 1 / λ
    rest: Tensor  # (), 1 / σ²

    def __init__(self, rank: int) -> None:
        super().__init__()
        whole(rank=rank)
        self.rank = rank

    def learn(self, residuals: Tensor) -> None:
        """Mean and covariance of residuals (N, …).

        Raises:
            ValueError: there are fewer than three, or they do not vary.
        """
        r = residuals.flatten(1)
        rank = min(self.rank, r.shape[1], (len(r) - 1) // 2)
        if rank < 1:
            raise ValueError(f"a Mahalanobis distance of residuals needs at least 3 inliers, got {len(r)}")
        mean, directions, variances, others = principal(r, rank)
        self.mean, self.directions = mean.to(r), directions.to(r)
        self.weights, self.rest = variances.reciprocal().to(r), others.reciprocal().to(r)

    def forward(self, residuals: Tensor) -> Tensor:
        """The distance of every residual (B, …), (B,)."""
        r = residuals.flatten(1)
        mean, directions, weights, rest = (part.to(r) for part in (self.mean, self.directions, self.weights, self.rest))
        along = (r - mean) @ directions
        beside = r - mean - along @ directions.T
        return (weights * along.square()).sum(dim=1) + rest * beside.square().sum(dim=1)


def principal(r: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean (D,), directions of largest variance (D, R), their variances (R,), and that of the others (), in float64.

    Raises:
        ValueError: the residuals do not vary.
    """
    count, dimensions = r.shape
    mean = torch.stack([part.sum(dim=0) for part in in_double(r)]).sum(dim=0) / count
    total = float(torch.stack([(part - mean).square().sum() for part in in_double(r)]).sum()) / count
    floor = 1e-6 * total / dimensions
    if total <= dimensions * (ROUNDING * torch.finfo(r.dtype).eps) ** 2:
        raise ValueError("the residuals of the inliers do not vary, so there is no Mahalanobis distance")
    width = min(dimensions, rank + SPARE)
    basis = torch.randn(dimensions, width, generator=generator_of("principal"), dtype=torch.float64).to(mean)
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(covariance_times(r, mean, basis)).Q
    values, turn = torch.linalg.eigh(basis.T @ covariance_times(r, mean, basis))
    directions, variances = basis @ turn[:, -rank:], values[-rank:].clamp_min(floor)
    others = (total - float(variances.sum())) / max(dimensions - rank, 1)
    return mean, directions, variances, variances.new_tensor(max(others, floor))


def covariance_times(r: Tensor, mean: Tensor, basis: Tensor) -> Tensor:
    """The covariance of rows, times a basis (D, R), without the covariance."""
    product = torch.zeros_like(basis)
    for part in in_double(r):
        product += (part - mean).T @ ((part - mean) @ basis)
    return product / len(r)


def in_double(r: Tensor) -> Iterator[Tensor]:
    """Rows in float64, some at a time, so that there is never a copy of all of them."""
    yield from (part.double() for part in r.split(ROWS))


def distance_of(name: DistanceName, p: float, rank: int) -> Norm | Whitened:
    """The distance of a name.

    Raises:
        ValueError: there is none, or an option is out of range.
    """
    if name not in get_args(DistanceName):
        raise ValueError(f"distance must be one of {', '.join(get_args(DistanceName))}, got {name!r}")
    norm, whitened = Norm({"l1": 1.0, "l2": 2.0}.get(name, p)), Whitened(rank)
    return whitened if name == "mahalanobis" else norm
