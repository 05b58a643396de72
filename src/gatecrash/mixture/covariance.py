"""The shapes that covariances of a mixture can have: how each enters the likelihood, and its best estimate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gatecrash.mixture.rows import Chunks, block
from gatecrash.registry import Registry

if TYPE_CHECKING:
    from gatecrash.mixture.model import Mixture

CovarianceName = Literal["diag", "spherical", "tied", "full"]


class Covariance(ABC):
    """What the covariances of a mixture have in common: how they enter the likelihood, and their best estimate."""

    def fixed_moments(self, data: Chunks) -> Tensor:
        """Second moments that do not depend on the shares of the components."""
        return torch.zeros_like(data.centre[0])

    def expand(self, z: Tensor) -> Tensor:
        """The functions of rows (R, D) in which likelihood and moments are linear."""
        return z

    @abstractmethod
    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Expanded rows → log π_k + log N(z; μ_k, Σ_k), (R, K)."""

    @abstractmethod
    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """First moments (K, D) and second moments of rows under their shares (R, K); they add up over chunks."""

    @abstractmethod
    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """The roots from second moments; those of components that are not alive stay the old ones."""

    @abstractmethod
    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """The roots of components that all have these variances (D,)."""


class Diagonal(Covariance):
    """A variance for every component and dimension: the log-density is linear in (z², z)."""

    def squares(self, z: Tensor) -> Tensor:
        """What the variances multiply."""
        return z.square()

    def expand(self, z: Tensor) -> Tensor:
        """(z², z)."""
        return torch.cat([self.squares(z), z], dim=1)

    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """One matrix product: −½ p z² + p μ z + constant, with p the precision."""
        width = mixture.means.shape[1]
        roots = mixture.roots.reshape(len(mixture.means), -1)
        precision = roots.square()
        linear = torch.cat([-0.5 * precision, precision * mixture.means], dim=1).to(dtype).T
        volume = roots.log().sum(dim=1) * (width // roots.shape[1])
        inner = (precision * self.squares(mixture.means)).sum(dim=1)
        constant = (mixture.weights.log() + volume - 0.5 * inner - 0.5 * width * math.log(2 * math.pi)).to(dtype)
        return lambda expanded: torch.addmm(constant, expanded, linear)

    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """One matrix product for both."""
        both, width = shares.T @ expanded, means.shape[1]
        return both[:, -width:], both[:, :-width]

    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """1 / √(E z² − (E z)² + floor)."""
        spread = (second / counts[:, None] - self.squares(means)) / (means.shape[1] // second.shape[1])
        roots = (spread.clamp_min(0) + floor).rsqrt()
        return torch.where(alive[:, None], roots, old.roots.reshape(roots.shape)).reshape(old.roots.shape)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ."""
        return variance.rsqrt().repeat(components, 1)


class Spherical(Diagonal):
    """One variance per component: as `Diagonal`, with |z|² in the place of z²."""

    def squares(self, z: Tensor) -> Tensor:
        """|z|², (R, 1)."""
        return z.square().sum(dim=1, keepdim=True)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ of the mean variance."""
        return variance.mean().rsqrt().repeat(components)


class Tied(Covariance):
    """One matrix for all components: plain distances after one whitening."""

    def fixed_moments(self, data: Chunks) -> Tensor:
        """The scatter Σ z zᵀ (D, D) of all rows."""
        scatter = torch.zeros_like(data.centre[0])
        for z in data:
            exact = z.to(scatter)
            scatter = scatter + exact.T @ exact
        return scatter

    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """−½ |(z − μ) R|², multiplied out."""
        white, width = mixture.means @ mixture.roots, mixture.means.shape[1]
        volume = mixture.roots.diagonal().log().sum()
        inner = white.square().sum(dim=1)
        constant = (mixture.weights.log() + volume - 0.5 * inner - 0.5 * width * math.log(2 * math.pi)).to(dtype)
        roots, linear = mixture.roots.to(dtype), white.to(dtype).T

        def joint(z: Tensor) -> Tensor:
            whitened = z @ roots
            return torch.addmm(constant, whitened, linear) - 0.5 * whitened.square().sum(dim=1, keepdim=True)

        return joint

    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """The first moments only: the second are fixed."""
        return shares.T @ expanded, expanded.new_zeros(())

    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """The root of (Σ z zᵀ − Σ_k N_k μ_k μ_kᵀ) / N + floor."""
        weights = torch.where(alive, counts, 0.0)
        between = (means * weights[:, None]).T @ means
        return precision_root((second - between) / weights.sum(), floor)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ on the diagonal."""
        return variance.rsqrt().diag()


class Full(Covariance):
    """A matrix for every component, a few components at a time."""

    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """−½ |z R_k − μ_k R_k|²."""
        width = mixture.means.shape[1]
        volume = mixture.roots.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        constant = (mixture.weights.log() + volume - 0.5 * width * math.log(2 * math.pi)).to(dtype)
        roots = mixture.roots.to(dtype)
        white = (mixture.means[:, None] @ mixture.roots).squeeze(1).to(dtype)

        def joint(z: Tensor) -> Tensor:
            some = block(z)
            distances = [
                ((z @ part.transpose(0, 1).flatten(1)).unflatten(1, means.shape) - means).square().sum(dim=2)
                for part, means in zip(roots.split(some), white.split(some), strict=True)
            ]
            return constant - 0.5 * torch.cat(distances, dim=1)

        return joint

    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """The second moments are about the given means, so that little cancels."""
        some, second = block(expanded), []
        for centre, share in zip(means.split(some), shares.split(some, dim=1), strict=True):
            centred = expanded - centre[:, None]
            second.append((centred * share.T[:, :, None]).transpose(1, 2) @ centred)
        return shares.T @ expanded, torch.cat(second)

    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """The root of E (z − m)(z − m)ᵀ − (μ − m)(μ − m)ᵀ + floor, with m the old mean."""
        shift = means - old.means
        covariance = second / counts[:, None, None] - shift[:, :, None] * shift[:, None]
        alive = alive[:, None, None]
        unit = torch.eye(means.shape[1], device=means.device, dtype=means.dtype)
        return torch.where(alive, precision_root(torch.where(alive, covariance, unit), floor), old.roots)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ on the diagonals."""
        return variance.rsqrt().diag().repeat(components, 1, 1)


COVARIANCES: Registry[Covariance] = Registry("covariance")
COVARIANCES.register("diag")(Diagonal())
COVARIANCES.register("spherical")(Spherical())
COVARIANCES.register("tied")(Tied())
COVARIANCES.register("full")(Full())


def precision_root(covariance: Tensor, floor: float) -> Tensor:
    """A triangular R with (Σ + floor)⁻¹ = R Rᵀ; NaN where Σ + floor is not positive definite."""
    unit = torch.eye(covariance.shape[-1], device=covariance.device, dtype=covariance.dtype)
    lower, failed = torch.linalg.cholesky_ex(covariance + floor * unit)
    root: Tensor = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False).mT
    return root.masked_fill((failed != 0)[..., None, None], torch.nan)


def collapsed(floor: float) -> str:
    """The sentence for a covariance without an inverse."""
    return (
        f"a component's covariance collapsed: its rows do not vary in some direction, and floor={floor:g} does not "
        "hold it up; raise the floor or take fewer components"
    )
