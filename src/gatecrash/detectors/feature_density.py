"""Detectors that measure how likely features are under a model that is trained by gradients: VAE and MAF."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from gatecrash.densities import Density
from gatecrash.densities.standardised import Standardised
from gatecrash.detectors.base import Card, register
from gatecrash.detectors.learned import Learned
from gatecrash.fitting import History

SHAO = Card(paper="Shao, Song & Ermon, arXiv 2020", year=2020, reads="features", fit="inliers")


class FeatureDensity(Learned):
    """A detector whose density sees standardised features; mean and deviation come from all inliers."""

    def learn(self, density: Density, samples: Tensor, y: Tensor | None) -> History:
        """Standardise, then train."""
        assert isinstance(density, Standardised)
        density.standardise(samples)
        return super().learn(density, samples, y)


@register("vae")
class FeatureVAE(FeatureDensity):
    """Bits per dimension of the features by the bound of a variational autoencoder (Kingma & Welling 2014).

    τ = −ELBO / (D ln 2); the expectation in it is a mean over noise vectors that never change, so an image has one
    score and the gradient is exact.

    Args:
        encoder: taps the features.
        layers: tap these instead; several are put together as one vector.
        model: `hidden` (512), `latent` (128), `draws` (16), `importance` (false: the ELBO; true: the bound by
            importance weights over the draws); 512 and 128 are the paper's.
        training: fields of `Recipe`; the paper trains for 1,000 epochs at a learning rate of 1e-3.
        bundle: a folder with a trained density.
        checkpoints: a folder in which a killed `fit` goes on.
        shape: of the features; filled in by `fit`.
    """

    card = SHAO
    density_name = "vae"
    recipe: ClassVar[dict[str, Any]] = {
        "epochs": 50,
        "batch_size": 128,
        "optimiser": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "clip": 10.0,
    }


@register("maf")
class FeatureMAF(FeatureDensity):
    """Bits per dimension of the features under a masked autoregressive flow (Papamakarios et al. 2017).

    τ = −log₂ p(z) / D.

    Args:
        encoder: taps the features.
        layers: tap these instead; several are put together as one vector.
        model: `transforms` (5) and `hidden` ([128]), the paper's.
        training: fields of `Recipe`; the paper trains for 1,000 epochs at a learning rate of 0.01 in batches of 32.
        bundle: a folder with a trained density.
        checkpoints: a folder in which a killed `fit` goes on.
        shape: of the features; filled in by `fit`.
    """

    card = SHAO
    density_name = "maf"
    recipe: ClassVar[dict[str, Any]] = {
        "epochs": 50,
        "batch_size": 128,
        "optimiser": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "clip": 10.0,
    }
