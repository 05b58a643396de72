"""Detectors that ask whether an image can be rebuilt from what is known of it: autoencoder and collision residual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from gatecrash.densities.autoencoder import Autoencoder, Decoder
from gatecrash.densities.options import number, whole
from gatecrash.detectors.base import Card, Detector, Stateful, build, register
from gatecrash.detectors.density import together
from gatecrash.detectors.learned import Learned, pixels
from gatecrash.features import Reader, encoded, reader_key, shared_pass
from gatecrash.fitting import generator_of
from gatecrash.images import Images
from gatecrash.protocols import Latent, leaves, rows_of

DistanceName = Literal["l1", "l2", "lp", "mahalanobis"]
Combination = Literal["sum", "max"]

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
        except (KeyError, TypeError) as error:
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
