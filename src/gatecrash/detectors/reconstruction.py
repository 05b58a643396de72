"""A detector that asks whether an image can be rebuilt: what such detectors share, and the autoencoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gatecrash.densities.autoencoder import Autoencoder
from gatecrash.detectors.base import Card, Detector, register
from gatecrash.detectors.learned import Learned, pixels
from gatecrash.detectors.residual import ROWS, DistanceName, Norm, distance_of
from gatecrash.features import Reader
from gatecrash.protocols import Latent, leaves


class Rebuilding(Learned):
    """A detector that trains a density which rebuilds images, and measures how far off it is.

    Args:
        encoder: as in `Learned`.
        distance: "l1", "l2", "lp" with `p`, or "mahalanobis", the squared distance by mean and covariance of the
            inliers' residuals.
        p: of "lp".
        rank: directions that the covariance of "mahalanobis" tells apart.
        bundle: a folder with a trained density; `fit` then learns only the rest.
        **options: as in `Learned`, and the subclass's own.
    """

    recipe: ClassVar[dict[str, Any]] = Learned.recipe | {"epochs": 6, "batch_size": 64}

    def __init__(
        self,
        encoder: nn.Module | None,
        *,
        distance: DistanceName,
        p: float,
        rank: int,
        bundle: str | None,
        **options: Any,
    ) -> None:
        measure = distance_of(distance, p, rank)
        super().__init__(encoder, bundle=bundle, distance=distance, p=p, rank=rank, **options)
        self.measure = measure
        self.given = bundle is not None

    @property
    def reader(self) -> Reader:
        """What `judge` takes."""
        return self.encode

    def to_fit(self) -> list[Detector]:
        """Itself, unless a bundle gave all that there is to learn."""
        return [] if self.given and self.fitted and isinstance(self.measure, Norm) else [self]

    def forget(self) -> None:
        """The density too, unless a bundle gave it."""
        given, losses = (self.density, self.losses) if self.given else (None, None)
        super().forget()
        if given is not None and losses is not None:
            self._take(given)
            self.losses = losses

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """Train the density, then learn how long its residuals on the inliers are."""
        if not self.given:
            super().fit_latents(z, y)
        samples = self.samples(z)
        self.measure.learn(torch.cat([self.residual(part) for part in samples.split(ROWS)]))

    def residual(self, samples: Tensor) -> Tensor:
        """What is left of every image when its reconstruction is taken away, (B, C, H, W)."""
        raise NotImplementedError


@register("autoencoder")
class Reconstruction(Rebuilding):
    """Reconstruction error of an autoencoder trained on the inliers: τ = ‖x − x̂‖ with x → z → x̂.

    Section 2.4 of Liang et al. (2020): an image whose code z collides with an inlier's is rebuilt as the inlier, and
    its error is large. What `encode` gives is the code and the error side by side: to make `detector.encode` collide is
    the attack of one who knows this, to make `detector.code` collide is the paper's.

    Args:
        encoder: only says on which device.
        distance: "l1", "l2", "lp" with `p`, or "mahalanobis", the squared distance by mean and covariance of the
            inliers' residuals.
        p: of "lp".
        rank: directions that the covariance of "mahalanobis" tells apart.
        model: `width` and `latent` of the autoencoder.
        training: fields of the fit loop's `Recipe` that are other than the detector's own.
        bundle: a folder with a trained autoencoder; `fit` then learns only the distance.
        checkpoints: a folder for checkpoints and logs; a `fit` that was killed goes on from there.
        shape: of an image; filled in by `fit`.
    """

    card = Card(paper="Chalapathy & Chawla, arXiv 2019", year=2019, reads="pixels", fit="inliers")
    density_name = "autoencoder"

    def __init__(
        self,
        encoder: nn.Module | None = None,
        *,
        distance: DistanceName = "l2",
        p: float = 2.0,
        rank: int = 256,
        model: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        bundle: str | None = None,
        checkpoints: str | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            encoder,
            distance=distance,
            p=p,
            rank=rank,
            model=model,
            training=training,
            bundle=bundle,
            checkpoints=checkpoints,
            shape=shape,
        )

    @property
    def autoencoder(self) -> Autoencoder:
        """What was trained."""
        if not isinstance(self.density, Autoencoder):
            self.require_fitted()
            raise RuntimeError(f"{type(self.density).__name__} is no autoencoder")
        return self.density

    @property
    def fit_reader(self) -> Reader:
        """The images themselves."""
        return pixels

    def code(self, x: Tensor) -> Tensor:
        """The autoencoder's code of every image, (B, latent)."""
        samples = self.samples(x)
        self.autoencoder.check(samples)
        return self.autoencoder.encode(samples)

    def residual(self, samples: Tensor) -> Tensor:
        """The residual x − x̂ of images (B, C, H, W)."""
        self.autoencoder.check(samples)
        return samples - self.autoencoder.reconstruct(samples)

    def encode(self, x: Tensor) -> Latent:
        """The code (B, latent) and the error (B, 1)."""
        code = self.code(x)
        residual = self.samples(x) - self.autoencoder.decode(code)
        return code, self.measure(residual).unsqueeze(1)

    def judge(self, z: Latent) -> Tensor:
        """The error, (B,)."""
        return leaves(z)[1].squeeze(1)
