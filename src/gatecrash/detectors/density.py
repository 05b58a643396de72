"""Detectors that measure how likely features are under a mixture of Gaussians: GMM and Zheng & Hong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gatecrash.detectors.base import Card, Detector, register
from gatecrash.detectors.distance import listed, tapped
from gatecrash.mixture import (
    Convergence,
    CovarianceName,
    Mixture,
    check_options,
    fit_mixture,
    log_prob_under,
    stacked,
)
from gatecrash.progress import tracked
from gatecrash.protocols import Latent, leaves

SAMPLES_PER_COMPONENT = 10
"""A class has no more components than leave every one of them this many samples on average."""


class MixtureDetector(Detector):
    """A detector that fits mixtures of Gaussians by EM; several layers are put together as one vector.

    Args:
        encoder: taps the layers.
        layers: tap these instead.
        components: K, of every mixture.
        covariance: "diag", "spherical", "tied" (one matrix for all components of a mixture) or "full".
        restarts: of EM; the most likely is kept.
        steps: at most so many EM steps.
        tol: EM stops when a step changes the mean log-likelihood by less than this.
        floor: added to every variance.
        seed: of the starts.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        components: int = 100,
        covariance: CovarianceName = "diag",
        restarts: int = 1,
        steps: int = 100,
        tol: float = 1e-3,
        floor: float = 1e-6,
        seed: int = 0,
    ) -> None:
        check_options(components, covariance, restarts, steps, tol, floor, seed)
        taps = tapped(encoder, layers)
        super().__init__(
            taps,
            layers=listed(taps.layer),
            components=components,
            covariance=covariance,
            restarts=restarts,
            steps=steps,
            tol=tol,
            floor=floor,
            seed=seed,
        )
        self.components, self.covariance = components, covariance
        self.restarts, self.steps, self.tol, self.floor, self.seed = restarts, steps, tol, floor, seed

    def fitted_mixture(
        self, parts: Sequence[Tensor], components: int, members: Tensor | None = None
    ) -> tuple[Mixture, Convergence]:
        """A mixture of the features (N, D) of several layers by the options, in their precision, and how EM went.

        No copy of the features is made: neither where there are several layers, nor where only some rows count.
        """
        mixture, convergence = fit_mixture(
            parts,
            components,
            self.covariance,
            restarts=self.restarts,
            steps=self.steps,
            tol=self.tol,
            floor=self.floor,
            seed=self.seed,
            members=members,
        )
        return mixture.to(parts[0]), convergence


@register("gmm")
class GMM(MixtureDetector):
    """Bits per dimension under one mixture of Gaussians over the features of all classes.

    τ = −log₂ p(z) / D with p(z) = Σ_k π_k N(z; μ_k, Σ_k), equation (5) of the paper; no labels are needed. The paper
    has 100 or 1,000 diagonal components. Options as in `MixtureDetector`.
    """

    card = Card(paper="Shao, Song & Ermon, arXiv 2020", year=2020, reads="features", fit="inliers")

    weights: Tensor  # (K,)
    means: Tensor  # (K, D)
    roots: Tensor  # of the precisions
    log_likelihoods: Tensor  # (S,), the mean over the inliers before every step
    converged: Tensor  # ()
    restart: Tensor  # (), the one that was kept

    @property
    def mixture(self) -> Mixture:
        """What was fitted."""
        return Mixture(self.weights, self.means, self.roots, self.covariance)

    @property
    def convergence(self) -> Convergence:
        """How EM went."""
        self.require_fitted()
        history = tuple(self.log_likelihoods.tolist())
        return Convergence(len(history), bool(self.converged), history, int(self.restart))

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """The mixture of all features."""
        parts = flattened(leaves(z))
        mixture, convergence = self.fitted_mixture(parts, self.components)
        self.weights, self.means, self.roots = mixture.tensors
        self.log_likelihoods = parts[0].new_tensor(convergence.log_likelihoods)
        self.converged = torch.tensor(convergence.converged, device=parts[0].device)
        self.restart = torch.tensor(convergence.restart, device=parts[0].device)

    def log_likelihood(self, z: Latent) -> Tensor:
        """The log-likelihood log p(z) of every sample in nats, (B,)."""
        return self.mixture.log_prob(together(leaves(z)))

    def judge(self, z: Latent) -> Tensor:
        """Bits per dimension of every sample, (B,)."""
        return self.log_likelihood(z) / (-math.log(2) * self.means.shape[1])


@register("zheng_hong")
class ZhengHong(MixtureDetector):
    """Surprise at the features under a mixture of Gaussians that belongs to the predicted class.

    τ = −log p_c(z) with c the class of the largest logit. The class is constant almost everywhere, so the gradient
    treats it so. Every class has a mixture of the inliers that the network predicts to be of it, with fewer components
    where it has fewer than `SAMPLES_PER_COMPONENT` of them per component; a class with fewer than that in all has the
    mixture of all inliers. Options as in `MixtureDetector`; 10 components per class are our choice.
    """

    card = Card(paper="Zheng & Hong, NeurIPS 2018", year=2018, reads="features", fit="inliers")

    weights: Tensor  # (C, K), 0 for components that a class does not have
    means: Tensor  # (C, K, D)
    roots: Tensor  # (C, …), of the precisions
    own: Tensor  # (C,), whether a class has a mixture of its own
    converged: Tensor  # (C,)

    def __init__(
        self,
        encoder: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        components: int = 10,
        covariance: CovarianceName = "diag",
        restarts: int = 1,
        steps: int = 100,
        tol: float = 1e-3,
        floor: float = 1e-6,
        seed: int = 0,
    ) -> None:
        taps = tapped(encoder, layers)
        super().__init__(
            taps,
            components=components,
            covariance=covariance,
            restarts=restarts,
            steps=steps,
            tol=tol,
            floor=floor,
            seed=seed,
        )
        self.encoder = taps.at([*(taps.layers or (None,)), None])

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """A mixture for every class, of the features that the network takes for it."""
        *layers, logits = leaves(z)
        parts, predicted = flattened(layers), logits.argmax(dim=1)
        everything: tuple[Mixture, Convergence] | None = None
        fits, own = [], []
        for label in tracked(range(logits.shape[1]), "fitting the classes"):
            members = (predicted == label).nonzero().squeeze(1)
            own.append(len(members) >= SAMPLES_PER_COMPONENT)
            if own[-1]:
                fits.append(self._fewer(parts, len(members), members))
            else:
                everything = everything or self._fewer(parts, len(logits))
                fits.append(everything)
        self.weights, self.means, self.roots = stacked([mixture for mixture, _ in fits]).tensors
        self.own = torch.tensor(own, device=logits.device)
        self.converged = torch.tensor([convergence.converged for _, convergence in fits], device=logits.device)

    def log_likelihood(self, z: Latent) -> Tensor:
        """The log-likelihood log p_c(z) of every sample under its predicted class in nats, (B,)."""
        features, logits = features_and_logits(z)
        mixtures = Mixture(self.weights, self.means, self.roots, self.covariance)
        return log_prob_under(mixtures, features, logits.argmax(dim=1))

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits, which decide whose mixture counts."""
        return leaves(z)[-1:]

    def judge(self, z: Latent) -> Tensor:
        """The negative log-likelihood of every sample, (B,)."""
        return -self.log_likelihood(z)

    def _fewer(self, parts: Sequence[Tensor], count: int, members: Tensor | None = None) -> tuple[Mixture, Convergence]:
        return self.fitted_mixture(parts, max(1, min(self.components, count // SAMPLES_PER_COMPONENT)), members)


def features_and_logits(z: Latent) -> tuple[Tensor, Tensor]:
    """The features (B, D) of all layers but the last, which is the network's output, and that output."""
    *parts, logits = leaves(z)
    return together(parts), logits


def together(parts: Sequence[Tensor]) -> Tensor:
    """The features of several layers as one vector per sample, (B, D); of one layer without a copy."""
    found = flattened(parts)
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def flattened(parts: Sequence[Tensor]) -> list[Tensor]:
    """The features of every layer as one vector per sample, (B, D_i), and a single vector as it is, for the check."""
    return [part.flatten(1) if part.ndim > 1 else part for part in parts]
