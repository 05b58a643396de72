"""A mixture of Gaussians and its likelihood; stacks of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gatecrash.mixture.covariance import COVARIANCES, CovarianceName
from gatecrash.mixture.rows import rows_at_once, widest


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of K Gaussians in D dimensions.

    `roots` are square roots of the precisions, as scikit-learn's `precisions_cholesky_`: 1/σ for "diag" (K, D) and
    "spherical" (K,), a triangular R with Σ⁻¹ = R Rᵀ for "tied" (D, D) and "full" (K, D, D). A component of weight 0 is
    not part of the mixture. A stack of mixtures has one more dimension in front of every tensor.
    """

    weights: Tensor  # (K,)
    means: Tensor  # (K, D)
    roots: Tensor
    covariance: CovarianceName = "diag"

    def log_prob(self, z: Tensor) -> Tensor:
        """The log-likelihood of every row of z (B, D), shape (B,), differentiable in z; of half precision in float32.

        Computed in float64 (on MPS, which has none, in float32), in chunks of rows where no gradient is wanted.

        Raises:
            ValueError: z is not of shape (B, D).
        """
        components, width = self.means.shape
        z = check_rows(z, width)
        wide = widest(z.device)
        centre = (self.weights @ self.means).to(z.device, wide)
        covariance = COVARIANCES[self.covariance]
        joint = covariance.joint(self.to(centre).moved(-centre), wide)
        with_history = torch.is_grad_enabled() and z.requires_grad
        parts = (z,) if with_history else z.split(rows_at_once(components, width, z.device))
        return torch.cat([joint(covariance.expand(part.to(wide) - centre)).logsumexp(dim=1) for part in parts]).to(z)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and roots."""
        return self.weights, self.means, self.roots

    def to(self, other: Tensor) -> Mixture:
        """The mixture on another tensor's device, in its precision."""
        return Mixture(self.weights.to(other), self.means.to(other), self.roots.to(other), self.covariance)

    def moved(self, by: Tensor) -> Mixture:
        """The mixture with every mean moved by (D,)."""
        return Mixture(self.weights, self.means + by, self.roots, self.covariance)

    def __getitem__(self, index: int) -> Mixture:
        """One mixture of a stack."""
        return Mixture(self.weights[index], self.means[index], self.roots[index], self.covariance)


def stacked(mixtures: Sequence[Mixture]) -> Mixture:
    """Several mixtures as a stack; the smaller ones are filled up with components of weight 0."""
    most = max(len(mixture.weights) for mixture in mixtures)

    def filled(tensor: Tensor, missing: int, value: Tensor) -> Tensor:
        return torch.cat([tensor, value.expand(missing, *tensor.shape[1:])])

    weights, means, roots = [], [], []
    for mixture in mixtures:
        missing = most - len(mixture.weights)
        weights.append(filled(mixture.weights, missing, mixture.weights.new_zeros(())))
        means.append(filled(mixture.means, missing, mixture.means[:1]))
        shared = mixture.covariance == "tied"
        roots.append(mixture.roots if shared else filled(mixture.roots, missing, mixture.roots[:1]))
    return Mixture(torch.stack(weights), torch.stack(means), torch.stack(roots), mixtures[0].covariance)


def log_prob_under(stack: Mixture, z: Tensor, which: Tensor) -> Tensor:
    """The log-likelihood of every row of z (B, D) under the mixture of a stack that `which` (B,) names, (B,).

    Raises:
        ValueError: z is not of shape (B, D).
    """
    z = check_rows(z, stack.means.shape[-1])
    if stack.covariance in ("diag", "spherical"):
        width = z.shape[1]
        weights, means, roots = (part.to(z)[which] for part in stack.tensors)
        roots = roots.reshape(*weights.shape, -1)
        distances = ((z[:, None] - means) * roots).square().sum(dim=2)
        volume = roots.log().sum(dim=2) * (width // roots.shape[2])
        joint: Tensor = weights.log() + volume - 0.5 * (distances + width * math.log(2 * math.pi))
        return joint.logsumexp(dim=1)
    order = which.argsort(stable=True)
    present, counts = which[order].unique_consecutive(return_counts=True)
    parts = zip(present.tolist(), z[order].split(counts.tolist()), strict=True)
    return torch.cat([stack[index].log_prob(part) for index, part in parts])[order.argsort()]


def check_rows(z: Tensor, width: int) -> Tensor:
    """The features, in float32 where they come in half precision.

    Raises:
        ValueError: they are not of shape (B, D) with D the width of what was fitted.
    """
    if z.ndim != 2 or z.shape[1] != width:
        raise ValueError(f"features must be of shape (B, {width}), as those of the fit were, got {tuple(z.shape)}")
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
