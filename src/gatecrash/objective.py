"""What a search makes small: one value per sample, smaller is better for the attacker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gatecrash.protocols import Detector, Encoder, Latent, as_vector, leaves, rows_of


@dataclass(frozen=True)
class MatchLatent:
    """‖f(x) − z‖², summed over the latent's entries: line 3 of Liang et al.'s Algorithm 1."""

    encoder: Encoder
    target: Latent

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The squared distance of every sample's latent from its target, (B,)."""
        return squared_difference(self.encoder(x), rows_of(self.target, rows))


@dataclass(frozen=True)
class LowerScore:
    """A detector's score, made small: outliers are let in."""

    detector: Detector

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The score of every sample, (B,)."""
        return self.detector.judge(self.detector.encode(x))


@dataclass(frozen=True)
class RaiseScore:
    """A detector's score, made large: inliers are thrown out."""

    detector: Detector

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Minus the score of every sample, (B,)."""
        return -self.detector.judge(self.detector.encode(x))


@dataclass(frozen=True)
class ScoreNear:
    """(τ(x) − value)²: the score is brought to a value, one per sample or one for all."""

    detector: Detector
    value: Tensor

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The squared distance of every sample's score from its value, (B,)."""
        goal = self.value if self.value.ndim == 0 else self.value[rows]
        return (self.detector.judge(self.detector.encode(x)) - goal).square()


@dataclass(frozen=True)
class ToUniform:
    """Cross-entropy to the uniform distribution, logsumexp − mean logit: Chen et al.'s Algorithm 1 on inliers."""

    logits: Encoder

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The cross-entropy of every sample, (B,)."""
        z = single(self.logits(x))
        return z.logsumexp(dim=1) - z.mean(dim=1)


@dataclass(frozen=True)
class Entropy:
    """Entropy of the softmax: Chen et al.'s Algorithm 1 on outliers."""

    logits: Encoder

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The entropy of every sample, (B,)."""
        return softmax_entropy(single(self.logits(x)))


@dataclass(frozen=True)
class Misclassify:
    """Minus the cross-entropy of the true label: a classifier is led astray."""

    logits: Encoder
    labels: Tensor
    span: tuple[int, int] | None = None
    """The least and the largest label, where they are still to be compared with the number of classes."""

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Minus the cross-entropy of every sample, (B,)."""
        z = single(self.logits(x))
        if self.span is not None and not 0 <= self.span[0] <= self.span[1] < z.shape[1]:
            raise ValueError(f"labels must be from 0 to {z.shape[1] - 1}, got {self.span[0]} to {self.span[1]}")
        return -cross_entropy(z, self.labels.index_select(0, rows), reduction="none")


def squared_difference(z: Latent, target: Latent) -> Tensor:
    """‖z − target‖² of every sample, over all parts of the latent, (B,)."""
    pairs = zip(leaves(z), leaves(target), strict=True)
    return torch.stack([as_vector((part - goal).square()).sum(dim=1) for part, goal in pairs]).sum(dim=0)


def softmax_entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax of every row, (B,)."""
    log_p = logits.log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def single(z: Latent) -> Tensor:
    """The latent as one tensor, which a function of logits needs."""
    if not isinstance(z, Tensor):
        raise ValueError(f"expected one tensor of logits (B, K), got a tuple of {len(z)}; tap one layer only")
    if z.ndim != 2:
        raise ValueError(f"expected logits of shape (B, K), got {tuple(z.shape)}")
    return z


def name_of(objective: object) -> str:
    """What the objective is about, for error messages: the class of its detector or encoder, else its own."""
    for attribute in ("detector", "encoder", "logits"):
        inner = getattr(objective, attribute, None)
        if inner is not None:
            return type(inner).__name__
    return getattr(objective, "__name__", type(objective).__name__)
