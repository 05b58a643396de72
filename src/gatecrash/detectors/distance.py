"""Detectors that measure a distance in feature space: Mahalanobis and relative Mahalanobis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gatecrash.detectors.base import Card, Detector, Stateful, register
from gatecrash.detectors.preprocessing import input_gradients
from gatecrash.encoder import Encoder, as_encoder, upcast
from gatecrash.features import Reader
from gatecrash.images import Images
from gatecrash.metrics import fpr_at_tpr
from gatecrash.protocols import Latent, leaves

Weighting = Literal["samples", "classes"]

CHUNK = 1 << 23
"""Numbers that are looked at together in float64, 64 MiB."""


class Gaussians(Stateful):
    """Gaussians of one covariance, one per class: squared Mahalanobis distances as plain ones after whitening."""

    centre: Tensor  # (D,), subtracted before whitening, for precision
    whiten: Tensor  # (D, R), with Σ⁻¹ = W Wᵀ
    means: Tensor  # (K, R), centred and whitened

    def learn(self, z: Tensor, y: Tensor, weighting: Weighting = "samples") -> None:
        """Class means and the shared covariance of features z (N, D) with labels y (N,)."""
        labels, y = torch.unique(y, return_inverse=True)
        means, centre = class_means(z, y, len(labels))
        # Not z.abs().amax(): that would be a copy of all features.
        rounding = torch.finfo(z.dtype).eps * torch.stack(torch.aminmax(z)).abs().amax().to(means)
        whiten = inverse_root(shared_covariance(z, means, y, weighting), rounding.square())
        self.centre, self.whiten = centre.to(z), whiten.to(z)
        self.means = ((means - centre) @ whiten).to(z)

    def nearest(self, z: Tensor) -> Tensor:
        """min_k (z − μ_k)ᵀ Σ⁻¹ (z − μ_k) for every sample, (B,); of half precision in float32."""
        z = upcast(z)
        white, means = (z - self.centre.to(z)) @ self.whiten.to(z), self.means.to(z)
        # The matrix product finds the class; the distance itself is a difference, since the product's terms cancel.
        index = squared_distances(white.detach(), means).argmin(dim=1)
        return (white - means[index]).square().sum(dim=1)


@register("mahalanobis")
class Mahalanobis(Detector):
    """Distance to the nearest class mean under one shared covariance, in one layer or several.

    Per layer M = min_k (z − μ_k)ᵀ Σ⁻¹ (z − μ_k), equation (3) of Fort (2022). With a magnitude η every layer is judged
    on an input of its own, x − η·sign(∇M) (Lee et al.); the sign is constant almost everywhere, so the gradient of τ
    treats the step as a constant. The layers are combined by their mean, or by a logistic regression between held-out
    inliers and outliers whose logit is τ.

    Args:
        encoder: taps the layers.
        layers: tap these instead.
        magnitude: η in pixels; of several, `fit` takes the one with the lowest FPR95 on held-out inliers and outliers.
        combine: "mean", or "logistic", for which `fit` needs `held_out` and `outliers`.
        weighting: whether every sample or every class counts the same in the covariance (Fort's release: "classes").
    """

    card = Card(paper="Lee et al., NeurIPS 2018", year=2018, reads="features", fit="labelled inliers")

    step: Tensor  # (), the magnitude in use
    weights: Tensor  # (L,), of the layers' distances in τ
    bias: Tensor  # ()

    def __init__(
        self,
        encoder: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        magnitude: float | Sequence[float] = 0.0,
        combine: Literal["mean", "logistic"] = "mean",
        weighting: Weighting = "samples",
    ) -> None:
        if combine not in ("mean", "logistic"):
            raise ValueError(f"combine must be 'mean' or 'logistic', got {combine!r}")
        check_weighting(weighting)
        magnitudes = [float(value) for value in magnitude] if isinstance(magnitude, Iterable) else [float(magnitude)]
        if not magnitudes or not all(0 <= value < math.inf for value in magnitudes):
            raise ValueError(f"magnitude must not be negative or an empty list, got {magnitude}")
        taps = tapped(encoder, layers)
        super().__init__(
            taps,
            layers=listed(taps.layer),
            magnitude=magnitudes if isinstance(magnitude, Iterable) else magnitudes[0],
            combine=combine,
            weighting=weighting,
        )
        self.magnitudes, self.combine, self.weighting = magnitudes, combine, weighting
        self.per_layer = one_per_layer(taps)

    @property
    def magnitude(self) -> float:
        """The step η in use: the one given, or after `fit` the one it chose."""
        # A look at the one that `fit` chose makes the host wait, so it is taken where there was a choice only.
        return float(self.step) if self.fitted and len(self.magnitudes) > 1 else self.magnitudes[0]

    @property
    def preprocesses(self) -> bool:
        """Whether the step has a length."""
        return self.magnitude > 0

    @property
    def reader(self) -> Reader:
        """The layers of the input as it is, where nothing is moved: other detectors can share them then."""
        return self.encode if self.encoder is None or self.preprocesses else self.encoder

    @property
    def fit_reader(self) -> Reader:
        """The layers of the input as it is."""
        return self.encode if self.encoder is None else self.encoder

    @property
    def chooses(self) -> bool:
        """Whether step or combination are learnt from held-out inliers and outliers."""
        return self.combine == "logistic" or len(self.magnitudes) > 1

    def check_data(self, held_out: Images | None, outliers: Images | None) -> None:
        """Raises a ValueError when an option needs data that `fit` was not given."""
        if self.chooses and (held_out is None or outliers is None):
            option = "combine='logistic'" if self.combine == "logistic" else "a list of magnitudes"
            raise ValueError(f"{option} needs held-out inliers and outliers: fit(inliers, held_out=…, outliers=…)")

    def settle(self, held_out: Images | None, outliers: Images | None) -> None:
        """Choose step and combination by held-out inliers and outliers."""
        if self.chooses and held_out is not None and outliers is not None:
            self._choose(held_out, outliers)

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """Gaussians for every layer, and the mean of the layers as the combination."""
        parts = leaves(z)
        for gaussians, features in zip(each(self.per_layer), parts, strict=True):
            gaussians.learn(features.flatten(1), labels_of(y), self.weighting)
        self.step = parts[0].new_tensor(self.magnitudes[0])
        self.weights = parts[0].new_full((len(parts),), 1 / len(parts))
        self.bias = parts[0].new_zeros(())

    def encode(self, x: Tensor) -> Latent:
        """The features of every layer, each of the input moved for that layer."""
        magnitude = self.magnitude
        if not magnitude or not self.fitted:
            return super().encode(x)
        gradients = input_gradients(
            lambda leaf: list(self.distances(super(Mahalanobis, self).encode(leaf)).unbind(1)), x
        )
        moved = [x - magnitude * gradient.sign() for gradient in gradients]
        return tuple(leaves(super(Mahalanobis, self).encode(point))[i] for i, point in enumerate(moved))

    def distances(self, z: Latent) -> Tensor:
        """The distance to the nearest class in every layer, (B, L)."""
        pairs = zip(each(self.per_layer), leaves(z), strict=True)
        return torch.stack([gaussians.nearest(part.flatten(1)) for gaussians, part in pairs], dim=1)

    def judge(self, z: Latent) -> Tensor:
        """The combined distance of every sample, (B,)."""
        distances = self.distances(z)
        return distances @ self.weights.to(distances) + self.bias.to(distances)

    def _choose(self, held_out: Images, outliers: Images) -> None:
        trials: list[tuple[float, int, Tensor, Tensor, Tensor]] = []
        for magnitude in self.magnitudes:
            self.step = torch.full_like(self.step, magnitude)
            inside, outside = (self.distances(self.latents(data)[0]) for data in (held_out, outliers))
            if self.combine == "logistic":
                self.weights, self.bias = logistic(inside, outside)
            rate = fpr_at_tpr(inside @ self.weights, outside @ self.weights)
            trials.append((rate, len(trials), self.step, self.weights, self.bias))
        _, _, self.step, self.weights, self.bias = min(trials)


@register("rmd")
class RelativeMahalanobis(Detector):
    """Distance to the nearest class less the distance to all classes as one: τ = min_k MD_k − MD_0 (Fort, eq. 5).

    MD_0 is the distance to one Gaussian over the whole training set. Of several layers the mean is taken.
    """

    card = Card(paper="Ren et al., 2021", year=2021, reads="features", fit="labelled inliers")

    def __init__(
        self, encoder: nn.Module, *, layers: str | Sequence[str] | None = None, weighting: Weighting = "samples"
    ) -> None:
        check_weighting(weighting)
        taps = tapped(encoder, layers)
        super().__init__(taps, layers=listed(taps.layer), weighting=weighting)
        self.weighting = weighting
        self.classes, self.background = one_per_layer(taps), one_per_layer(taps)

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """For every layer the classes' Gaussians and the one over all of them."""
        for classes, background, part in zip(each(self.classes), each(self.background), leaves(z), strict=True):
            labels = labels_of(y)
            classes.learn(part.flatten(1), labels, self.weighting)
            background.learn(part.flatten(1), torch.zeros_like(labels))

    def judge(self, z: Latent) -> Tensor:
        """The relative distance of every sample, (B,)."""
        layers = zip(each(self.classes), each(self.background), leaves(z), strict=True)
        return torch.stack(
            [
                classes.nearest(part.flatten(1)) - background.nearest(part.flatten(1))
                for classes, background, part in layers
            ]
        ).mean(dim=0)


def in_double(z: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels in chunks of rows, in float64, so that there is never a copy of all of them."""
    rows = max(1, CHUNK // z.shape[1])
    for part, labels in zip(z.split(rows), y.split(rows), strict=True):
        exact = part.double() if part.device.type != "mps" else part.cpu().double()
        yield exact, labels.to(exact.device)


def class_means(z: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean of every class, (K, D), and of all features, (D,), in float64."""
    sums: Tensor | float = 0.0
    for part, labels in in_double(z, y):
        sums = sums + part.new_zeros(count, part.shape[1]).index_add_(0, labels, part)
    sums = torch.as_tensor(sums)
    counts = torch.bincount(y, minlength=count).to(sums)
    return sums / counts.unsqueeze(1), sums.sum(dim=0) / len(z)


def shared_covariance(z: Tensor, means: Tensor, y: Tensor, weighting: Weighting) -> Tensor:
    """The covariance of the features about their class means, (D, D), in float64."""
    counts = torch.bincount(y, minlength=len(means)).to(means)
    weight = torch.full_like(counts, 1 / len(z)) if weighting == "samples" else 1 / (counts * len(means))
    total = means.new_zeros(z.shape[1], z.shape[1])
    for part, labels in in_double(z, y):
        centred = part - means[labels]
        total += (centred * weight[labels].unsqueeze(1)).T @ centred
    return total


def inverse_root(covariance: Tensor, noise: Tensor) -> Tensor:
    """W (D, R) with W Wᵀ the pseudo-inverse of the covariance; directions without variance above noise are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > len(values) * torch.maximum(noise, values[-1] * torch.finfo(values.dtype).eps)
    if not bool(kept.any()):
        raise ValueError(
            "the features do not vary at all, so there is no distance to measure; is the layer the right one?"
        )
    root: Tensor = vectors[:, kept] * values[kept].rsqrt()
    return root


def squared_distances(z: Tensor, means: Tensor) -> Tensor:
    """Squared Euclidean distances of every row of z (B, R) from every mean (K, R), as one matrix product."""
    return z.square().sum(dim=1, keepdim=True) - 2 * z @ means.T + means.square().sum(dim=1)


def logistic(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (L,) and bias of the logistic regression between the distances (N, L) of inliers and outliers."""
    from sklearn.linear_model import LogisticRegression  # slow to import, and needed only here

    distances = torch.cat([inside, outside]).double().cpu()
    centre, scale = distances.mean(dim=0), distances.std(dim=0).clamp_min(1e-12)
    is_outlier = [0] * len(inside) + [1] * len(outside)
    model = LogisticRegression(max_iter=1000).fit(((distances - centre) / scale).numpy(), is_outlier)
    weights = torch.from_numpy(model.coef_[0]) / scale
    bias = torch.from_numpy(model.intercept_)[0] - weights @ centre
    return weights.to(inside), bias.to(inside)


def one_per_layer(encoder: Encoder) -> nn.ModuleList:
    """Gaussians for every layer that the encoder taps."""
    return nn.ModuleList(Gaussians() for _ in encoder.layers or ("output",))


def each(modules: nn.ModuleList) -> list[Gaussians]:
    """The Gaussians of a list of modules."""
    return [module for module in modules if isinstance(module, Gaussians)]


def tapped(encoder: nn.Module, layers: str | Sequence[str] | None) -> Encoder:
    """The encoder, at other layers where some are named."""
    encoder = as_encoder(encoder)
    return encoder if layers is None else encoder.at(layers)


def listed(value: Any) -> Any:
    """A sequence as a list, anything else as it is: what JSON gives back."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def labels_of(y: Tensor | None) -> Tensor:
    """The labels, which the base class has made sure of."""
    if y is None:
        raise ValueError("labels are needed: give (images, labels)")
    return y


def check_weighting(weighting: str) -> None:
    """Raises a ValueError unless the weighting exists."""
    if weighting not in ("samples", "classes"):
        raise ValueError(f"weighting must be 'samples' or 'classes', got {weighting!r}")
