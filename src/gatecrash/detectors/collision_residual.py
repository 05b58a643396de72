"""A latent detector combined with a reconstruction from the same latent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from gatecrash.densities.autoencoder import Decoder
from gatecrash.detectors.base import Card, Detector, build, register
from gatecrash.detectors.density import together
from gatecrash.detectors.reconstruction import Rebuilding
from gatecrash.detectors.residual import ROWS, DistanceName
from gatecrash.features import Reader, encoded, reader_key, shared_pass
from gatecrash.images import Images
from gatecrash.protocols import Latent, leaves, rows_of

Combination = Literal["sum", "max"]


@register("collision_residual")
class CollisionResidual(Rebuilding):
    """A latent detector combined with reconstruction from the same latent: a collided image cannot rebuild itself.

    The future work of Liang et al. (2020), Section 2.4. A decoder g learns to rebuild the inliers from the classifier's
    features f(x); an image that has the latent of an inlier is rebuilt as that inlier, so ‖x − g(f(x))‖ is large. The
    latent detector's score and this residual are each standardised on inliers (held-out ones where `fit` has them) and
    combined by their sum or their maximum. What `encode` gives is what the latent detector reads and the residual side
    by side: to make `detector.encode` collide is to match latent and reconstruction together.

    Args:
        encoder: taps the features.
        layers: tap these instead.
        latent: the name of the latent detector, which reads the same network.
        latent_options: its options.
        combine: "sum" or "max" of the two standardised scores; a maximum hides the gradient of the smaller one, so what
            an attack makes of it is less certain.
        distance: "l1", "l2", "lp" with `p`, or "mahalanobis", the squared distance by mean and covariance of the
            inliers' residuals.
        p: of "lp".
        rank: directions that the covariance of "mahalanobis" tells apart.
        model: `width` of the decoder.
        training: fields of the fit loop's `Recipe` that are other than the detector's own.
        bundle: a folder with a trained decoder; `fit` then learns only the rest.
        checkpoints: a folder for checkpoints and logs; a `fit` that was killed goes on from there.
        shape: of features and image as one vector; filled in by `fit`.
    """

    card = Card(paper="Liang et al., arXiv 2020", year=2020, reads="features", fit="labelled inliers")
    density_name = "decoder"
    recipe: ClassVar[dict[str, Any]] = Rebuilding.recipe | {"epochs": 10}

    centres: Tensor  # (2,), the means of latent score and residual on inliers
    scales: Tensor  # (2,), their standard deviations

    def __init__(
        self,
        encoder: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        latent: str = "mahalanobis",
        latent_options: Mapping[str, Any] | None = None,
        combine: Combination = "sum",
        distance: DistanceName = "l2",
        p: float = 2.0,
        rank: int = 256,
        model: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        bundle: str | None = None,
        checkpoints: str | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        if combine not in get_args(Combination):
            raise ValueError(f"combine must be 'sum' or 'max', got {combine!r}")
        super().__init__(
            encoder,
            layers=layers,
            latent=latent,
            latent_options=dict(latent_options or {}),
            combine=combine,
            distance=distance,
            p=p,
            rank=rank,
            model=model,
            training=training,
            bundle=bundle,
            checkpoints=checkpoints,
            shape=shape,
        )
        self.combine = combine
        self.latent = self._latent_detector(latent, self.options["latent_options"])
        if self.latent.card.fit != "labelled inliers":
            self.card = replace(type(self).card, fit="inliers")

    def _latent_detector(self, name: str, options: dict[str, Any]) -> Detector:
        assert self.encoder is not None
        try:
            detector = build({"name": name, "options": options}, self.encoder)
        except KeyError:
            raise ValueError(
                f"latent: {name!r} is made of other detectors, and the latent detector must be one"
            ) from None
        except TypeError as error:
            raise ValueError(f"latent: {error}") from error
        self._require_plain(detector)
        return detector

    def _require_plain(self, detector: Detector) -> None:
        reads_latent = detector.card.reads in ("features", "logits") and not isinstance(detector, Rebuilding)
        if not reads_latent or detector.preprocesses:
            raise ValueError(
                f"the latent detector must judge features or logits of the image itself, which {detector.name} does not"
            )

    @property
    def decoder(self) -> Decoder:
        """What was trained."""
        if not isinstance(self.density, Decoder):
            self.require_fitted()
            raise RuntimeError(f"{type(self.density).__name__} is no decoder")
        return self.density

    @property
    def fit_reader(self) -> Reader:
        """What the latent detector reads, the features, and the images."""
        return self._read

    def to_fit(self) -> list[Detector]:
        """The latent detector, then itself."""
        return [*self.latent.to_fit(), self]

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits that the latent detector reads."""
        return self.latent.logits_in(z[0])

    def samples(self, z: Latent) -> Tensor:
        """Features and pixels as one vector, (B, D), in the decoder's precision."""
        _, features, images = z
        vector = together([*leaves(features), *leaves(images)])
        return vector if self.density is None else vector.to(next(self.density.parameters()).dtype)

    def residual(self, samples: Tensor) -> Tensor:
        """The residual x − g(f(x)) of features and pixels as one vector."""
        self.decoder.check(samples)
        features, images = self.decoder.split(samples)
        return images - self.decoder.decode(features)

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """Train the decoder, learn the distance, and standardise by the inliers that were learnt from."""
        images = leaves(z)[-1]
        if not self.given:
            self.options["model"] = {**self.options["model"], "image": list(images.shape[1:])}
        self._check(images)
        super().fit_latents(z, y)
        rows = torch.arange(len(images), device=images.device).split(ROWS)
        self._standardise(torch.cat([self._pair(rows_of(z, part)) for part in rows]))

    def settle(self, held_out: Images | None, outliers: Images | None) -> None:
        """Standardise by held-out inliers, where there are any: the decoder has not learnt them by heart."""
        self._require_plain(self.latent)
        if held_out is not None:
            scores = [z for (z,), _ in encoded(lambda x: [self._pair(self._read(x))], held_out, self.device)]
            self._standardise(torch.cat([leaves(z)[0] for z in scores]))

    def encode(self, x: Tensor) -> Latent:
        """What the latent detector reads, and the residual (B, 1)."""
        self._check(x)
        z = self._read(x)
        return z[0], self._length(z)

    def judge(self, z: Latent) -> Tensor:
        """The combined score, (B,)."""
        scores = self._standardised(z)
        return scores.amax(dim=1) if self.combine == "max" else scores.sum(dim=1)

    def parts(self, x: Tensor) -> Tensor:
        """Latent score and residual of every image, each standardised, (B, 2)."""
        self.require_fitted()
        return self._standardised(self.encode(x))

    def _standardised(self, z: Latent) -> Tensor:
        length = leaves(z[1])[0]
        scores = torch.cat([self.latent.judge(z[0]).unsqueeze(1).to(length), length], dim=1)
        return (scores - self.centres.to(scores)) / self.scales.to(scores)

    def _read(self, x: Tensor) -> tuple[Latent, Tensor, Tensor]:
        assert self.encoder is not None
        readers: list[Reader] = [self.latent.reader, self.encoder]
        if reader_key(readers[0]) == reader_key(readers[1]):
            readers = readers[:1]
        latents = shared_pass(readers)(x)
        return latents[0], together(leaves(latents[-1])), x

    def _length(self, z: Latent) -> Tensor:
        length: Tensor = self.measure(self.residual(self.samples(z)))
        return length.unsqueeze(1)

    def _pair(self, z: Latent) -> Tensor:
        """Latent score and residual as they are, (B, 2)."""
        length = self._length(z)
        return torch.cat([self.latent.judge(z[0]).unsqueeze(1).to(length), length], dim=1)

    def _standardise(self, scores: Tensor) -> None:
        spread = scores.std(dim=0, correction=0)
        self.centres, self.scales = scores.mean(dim=0), torch.where(spread > 0, spread, torch.ones_like(spread))

    def _check(self, images: Tensor) -> None:
        """Raises a ValueError when images have another shape than those that were learnt."""
        if self.density is not None and tuple(images.shape[1:]) != self.decoder.image:
            raise ValueError(
                f"this {type(self).__name__} is of images of shape {self.decoder.image}, got {tuple(images.shape[1:])}"
            )
