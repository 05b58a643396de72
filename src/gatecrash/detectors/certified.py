"""Detectors that come with a proof: how low any attack can bring their score inside a ball."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from gatecrash.ball import check_norm
from gatecrash.detectors.base import Card, Detector, read_saved, register, state_names
from gatecrash.detectors.logits import positive
from gatecrash.encoder import as_encoder
from gatecrash.images import Images, batches, check_images
from gatecrash.mixture import Mixture, check_options, fit_mixture, rows_at_once, widest
from gatecrash.objective import single
from gatecrash.protocols import Latent, leaves

APART = 4.0
"""The smallest variance outside is at least so many times the largest inside: far away, all is outside."""

LARGEST = 12288
"""Numbers in an image, 3·64·64, beyond which a metric, a square matrix of that side, is refused."""

FILE = "ccu.safetensors"
"""Where a model bundle has the mixtures that were trained with its network."""

ROWS = 256
"""Images whose distances are measured together."""

Scale = Literal["excess", "confidence"]
Norm = Literal["l2", "linf"]


class Certified(Detector):
    """A detector whose score has a lower bound over every ball."""

    @abstractmethod
    def score_bound(self, x: Tensor, radius: float, norm: Norm = "l2") -> Tensor:
        """What no image within `radius` of x in `norm` scores below, (B,): no attack does better."""


@register("ccu")
class CCU(Certified):
    """Certified certain uncertainty: a classifier that is as unsure as can be wherever its data are unlikely.

    p(y|x) = [p_in(x)·p(y|x, in) + λ·p_out(x)/K] / [p_in(x) + λ·p_out(x)], with p(y|x, in) the softmax. Both densities
    are mixtures of spherical Gaussians in the metric that whitens the inliers' pixels. Every variance outside is at
    least four times the largest inside, so that far from the inliers the confidence max_y p(y|x) comes down to 1/K, and
    in every ball there is a bound that it cannot exceed.

    `fit` takes the classifier as it is and fits metric and mixtures to inliers and outliers; `harden` with the method
    `ccu` trains all of them together, and its bundle has the mixtures.

    Args:
        encoder: the classifier.
        components: of each mixture.
        odds: λ, how much likelier an image is thought to be from outside before it is seen.
        score: "excess", τ = −log(max_y p(y|x) − 1/K), or "confidence", τ = −log max_y p(y|x). Both put images in the
            same order. The second is at most log K, and far away rounds to it: there it has no gradient to follow.
        ridge: no variance of the pixels is taken for less than this share of the largest. A larger one makes the bound
            stronger, as the metric stretches less; a smaller one tells more images apart.
        steps: at most so many EM steps.
        tol: EM stops when a step changes the mean log-likelihood by less than this.
        floor: added to every variance, in units of the whitened inliers'.
        seed: of EM's starts.
        bundle: a model bundle of the method `ccu`, or a saved detector; its mixtures are taken and not fitted again.
    """

    card = Card(paper="Meinke & Hein, ICLR 2020", year=2020, reads="pixels", fit="inliers and outliers")

    shape: Tensor  # (3,), of an image
    classes: Tensor  # (), K
    centre: Tensor  # (D,)
    whiten: Tensor  # (D, D); (x − centre) @ whiten has unit covariance
    stretch: Tensor  # (), what no length is multiplied by more than
    in_weights: Tensor  # (C,)
    in_means: Tensor  # (C, D), whitened
    in_roots: Tensor  # (C,), 1/σ
    out_weights: Tensor
    out_means: Tensor
    out_roots: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        *,
        components: int = 100,
        odds: float = 1.0,
        score: Scale = "excess",
        ridge: float = 1e-4,
        steps: int = 100,
        tol: float = 1e-3,
        floor: float = 1e-3,
        seed: int = 0,
        bundle: str | None = None,
    ) -> None:
        check_options(components, "spherical", 1, steps, tol, floor, seed)
        if score not in get_args(Scale):
            raise ValueError(f"score must be one of {', '.join(get_args(Scale))}, got {score!r}")
        if not isinstance(ridge, int | float) or not 0 < ridge <= 1:
            raise ValueError(f"ridge must be in (0, 1], got {ridge!r}")
        super().__init__(
            as_encoder(encoder).at(None),
            components=components,
            odds=positive(odds, "odds"),
            score=score,
            ridge=ridge,
            steps=steps,
            tol=tol,
            floor=floor,
            seed=seed,
        )
        self.odds, self.score, self.ridge = odds, score, ridge
        self.components, self.steps, self.tol, self.floor, self.seed = components, steps, tol, floor, seed
        self._wide: tuple[tuple[int, int, torch.dtype], Tensor, Tensor] | None = None
        self.given = bundle is not None
        if bundle is not None:
            defaults = {name: part.default for name, part in inspect.signature(CCU.__init__).parameters.items()}
            learnt = [name for name, value in self.options.items() if name != "score" and value != defaults[name]]
            if learnt:
                raise ValueError(f"a bundle has its mixtures and odds; leave out {', '.join(learnt)}, or the bundle")
            self._take_saved(Path(bundle))

    def _take_saved(self, path: Path) -> None:
        """Metric, mixtures and λ of a saved detector."""
        spec, state = read_saved(path / FILE if path.is_dir() else path)
        needed = state_names(type(self))
        if spec.get("name") != self.name or not {*needed} <= {*state}:
            raise ValueError(f"{path} holds no mixtures of a fitted {type(self).__name__}")
        for name in needed:
            setattr(self, name, state[name].to(self.device))
        self.odds = self.options["odds"] = positive(spec["options"]["odds"], "odds")

    def to_fit(self) -> list[Detector]:
        """Itself, where no bundle gave it its mixtures."""
        return [] if self.given else [self]

    def check_data(self, held_out: Images | None, outliers: Images | None) -> None:
        """Raises a ValueError without outliers, since what is outside is learnt from them."""
        if outliers is None:
            raise ValueError("CCU learns from outliers too: fit(inliers, outliers=...), or fit_outliers in a plan")

    # Fitting

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """The metric and the mixture inside, of images (N, C, H, W) beside their logits (N, K)."""
        images, logits = leaves(z)
        self.learn_inside(images, single(logits).shape[1])

    def settle(self, held_out: Images | None, outliers: Images | None) -> None:
        """The mixture outside."""
        if outliers is not None:
            parts = [x.to(self.device) for x, _ in batches(outliers, name="outliers")]
            if not parts:
                raise ValueError("there are no outliers to learn from")
            self.learn_outside(torch.cat(parts))

    def learn_inside(self, images: Tensor, classes: int) -> None:
        """The metric and the mixture inside, for a classifier of so many classes."""
        if classes < 2:
            raise ValueError(f"the classifier must have at least 2 classes, got {classes}")
        with torch.no_grad():
            metric = whitening(images.flatten(1), self.ridge)
            self.centre, self.whiten, self.stretch = metric
            self.shape = torch.tensor(images.shape[1:], device=images.device)
            self.classes = torch.tensor(classes, device=images.device)
            inside = self._mixture(images)
            self.in_weights, self.in_means, self.in_roots = inside.tensors

    def learn_outside(self, images: Tensor) -> None:
        """The mixture outside, in the metric that the inliers gave, its variances raised to where they must be."""
        with torch.no_grad():
            self.take(Mixture(self.in_weights, self.in_means, self.in_roots, "spherical"), self._mixture(images))

    def take(self, inside: Mixture, outside: Mixture) -> None:
        """Both mixtures, those of the outside with variances at least `APART` times the largest inside."""
        inside, outside = inside.to(self.centre), outside.to(self.centre)
        widest_root = inside.roots[inside.weights > 0].amin() / math.sqrt(APART)
        self.in_weights, self.in_means, self.in_roots = inside.tensors
        self.out_weights, self.out_means = outside.weights, outside.means
        self.out_roots = outside.roots.minimum(widest_root)

    def _mixture(self, images: Tensor) -> Mixture:
        whitened = self.whitened(images, images.dtype)
        mixture, _ = fit_mixture(
            whitened,
            self.components,
            "spherical",
            steps=self.steps,
            tol=self.tol,
            floor=self.floor,
            seed=self.seed,
        )
        return mixture.to(whitened)

    # Scoring

    @property
    def inside(self) -> Mixture:
        """The density of inliers, whitened."""
        return Mixture(self.in_weights, self.in_means, self.in_roots, "spherical")

    @property
    def outside(self) -> Mixture:
        """The density of outliers, whitened."""
        return Mixture(self.out_weights, self.out_means, self.out_roots, "spherical")

    def whitened(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The pixels (B, D) in the metric of the densities, in the widest numbers that the device has, or as asked."""
        if tuple(images.shape[1:]) != tuple(self.shape.tolist()):
            raise ValueError(
                f"this CCU is fitted on images of shape {tuple(self.shape.tolist())}, got {tuple(images.shape[1:])}"
            )
        dtype = dtype or widest(images.device)
        with torch.autocast(images.device.type, enabled=False):
            return (images.flatten(1).to(dtype) - self.centre.to(dtype)) @ self._whiten_as(dtype)

    def _whiten_as(self, dtype: torch.dtype) -> Tensor:
        """The matrix in other numbers; the last copy is kept, since a search asks for it at every step."""
        if self.whiten.dtype == dtype or self.whiten.is_inference():
            return self.whiten.to(dtype)
        key = (id(self.whiten), self.whiten._version, dtype)
        if self._wide is None or self._wide[0] != key:
            with torch.inference_mode(False):
                self._wide = (key, self.whiten.to(dtype), self.whiten)
        return self._wide[1]

    def log_odds(self, images: Tensor) -> Tensor:
        """The log of p_in(x) / λ p_out(x) of every image, (B,), in the widest numbers that the device has."""
        z = self.whitened(images)
        return self.inside.log_prob(z) - self.outside.log_prob(z) - math.log(self.odds)

    def encode(self, x: Tensor) -> Latent:
        """The images themselves and their logits."""
        return x, single(super().encode(x))

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits."""
        return leaves(z)[1:]

    def judge(self, z: Latent) -> Tensor:
        """The score of images beside their logits, (B,)."""
        images, logits = leaves(z)
        log_odds = self.log_odds(images)
        logits = logits.to(log_odds)
        if self.score == "confidence":
            return -log_posterior(logits, log_odds).amax(dim=1).to(images)
        return -(logsigmoid(log_odds) + log_excess(logits)).to(images)

    # The proof

    def log_odds_bound(self, x: Tensor, radius: float, norm: Norm = "l2") -> Tensor:
        """What log p_in − log λ p_out does not exceed within `radius` of x in pixels, (B,).

        A step of L2 length r in pixels is at most r·stretch long when whitened, and one of L∞ length r at most √D·r in
        L2. So no mean inside is nearer than max(d − r, 0), and none outside further than d + r.
        """
        check_images(x)
        self.require_fitted()
        check_norm(norm)
        if not 0 <= radius < math.inf:
            raise ValueError(f"radius must not be negative, got {radius:g}")
        width = len(self.centre)
        reach = radius * (math.sqrt(width) if norm == "linf" else 1.0) * float(self.stretch)
        bounds = []
        with torch.no_grad():
            for part in x.split(ROWS):
                z = self.whitened(part.to(self.device))
                near = (distances(z, self.inside) - reach).clamp_min(0)
                far = distances(z, self.outside) + reach
                bounds.append(log_mixed(near, self.inside, width) - log_mixed(far, self.outside, width))
        return torch.cat(bounds) - math.log(self.odds)

    def confidence_bound(self, x: Tensor, radius: float, norm: Norm = "l2") -> Tensor:
        """What the confidence max_y p(y|·) does not exceed anywhere within `radius` of x in pixels, (B,).

        Args:
            x: (B, C, H, W) in [0, 1].
            radius: in pixels, 0 for the images themselves.
            norm: "l2" or "linf".

        Raises:
            ValueError: x is no batch of images of the fitted shape, or the radius or norm is none.
        """
        log_odds = self.log_odds_bound(x, radius, norm)
        return certain(log_odds, int(self.classes)).exp()

    def score_bound(self, x: Tensor, radius: float, norm: Norm = "l2") -> Tensor:
        """What no image within `radius` of x in `norm` scores below, (B,)."""
        log_odds, classes = self.log_odds_bound(x, radius, norm), int(self.classes)
        if self.score == "confidence":
            return -certain(log_odds, classes)
        return -(logsigmoid(log_odds) + math.log1p(-1 / classes))


class Whitening(NamedTuple):
    """A metric: (x − centre) @ whiten, and what no length is multiplied by more than."""

    centre: Tensor
    whiten: Tensor
    stretch: Tensor


def whitening(x: Tensor, ridge: float) -> Whitening:
    """The metric in which rows (N, D) have unit covariance; no variance counts less than a share of the largest.

    Raises:
        ValueError: the rows are too wide for a matrix, or all the same.
    """
    count, width = x.shape
    if width > LARGEST:
        raise ValueError(f"CCU's metric is a matrix, and images of {width} numbers are too large for it; resize them")
    wide = widest(x.device)
    parts = x.split(rows_at_once(1, width, x.device))
    centre = sum((part.sum(dim=0, dtype=wide) for part in parts), torch.zeros((), device=x.device)) / count
    centre = centre.to(x).to(wide)
    scatter = torch.zeros(width, width, dtype=wide, device=x.device)
    for part in parts:
        centred = part.to(wide) - centre
        scatter.addmm_(centred.T, centred)
    variances, axes = torch.linalg.eigh(scatter / count)
    if not float(variances[-1]) > torch.finfo(x.dtype).tiny:
        raise ValueError("the inliers are all the same image, and have no metric")
    roots = variances.clamp_min(ridge * variances[-1]).rsqrt()
    # Rounding the matrix to x's precision may add as much as this to its largest singular value.
    slack = 1 + torch.finfo(x.dtype).eps * math.sqrt(width)
    return Whitening(centre.to(x), (axes * roots).to(x), (roots[0] * slack).to(x))


def log_posterior(logits: Tensor, log_odds: Tensor) -> Tensor:
    """The log of p(y|x) for every class, (B, K), from logits (B, K) and log p_in − log λ p_out (B,)."""
    inside, outside = logsigmoid(log_odds)[:, None], logsigmoid(-log_odds)[:, None]
    return torch.logaddexp(logits.log_softmax(dim=1) + inside, outside - math.log(logits.shape[1]))


def log_excess(logits: Tensor) -> Tensor:
    """log(max_k softmax(z)_k − 1/K) of every row, (B,), exact also where the softmax is almost uniform.

    The difference is max_k p_k / K · Σ_j (1 − exp(z_j − z_max)).
    """
    top = logits.amax(dim=1, keepdim=True)
    missing = -torch.expm1(logits - top).sum(dim=1)
    tiny = torch.finfo(logits.dtype).tiny
    return logits.log_softmax(dim=1).amax(dim=1) + missing.clamp_min(tiny).log() - math.log(logits.shape[1])


def certain(log_odds: Tensor, classes: int) -> Tensor:
    """The log of the confidence of a classifier that is certain of its class, (B,): none is more confident."""
    return torch.logaddexp(logsigmoid(log_odds), logsigmoid(-log_odds) - math.log(classes))


def distances(z: Tensor, mixture: Mixture) -> Tensor:
    """From every row of z (B, D) to every mean, (B, C)."""
    return torch.cdist(z, mixture.means.to(z), compute_mode="donot_use_mm_for_euclid_dist")


def log_mixed(lengths: Tensor, mixture: Mixture, width: int) -> Tensor:
    """The log-density of a spherical mixture in `width` dimensions at these distances (B, C) from its means, (B,)."""
    weights, _, roots = (part.to(lengths) for part in mixture.tensors)
    volume = width * (roots.log() - 0.5 * math.log(2 * math.pi))
    return (weights.log() + volume - 0.5 * (lengths * roots).square()).logsumexp(dim=1)
