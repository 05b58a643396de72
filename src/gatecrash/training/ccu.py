"""Certified certain uncertainty: a classifier trained together with two densities (Meinke & Hein, ICLR 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gatecrash.detectors.certified import APART, CCU, log_posterior
from gatecrash.fitting import Batch, Outcome
from gatecrash.fitting.checkpoint import optimiser_tensors, restore_optimiser
from gatecrash.mixture import Mixture, widest
from gatecrash.objective import single
from gatecrash.training.confident import descend, under

METRIC = ("shape", "classes", "centre", "whiten", "stretch")
"""The detector's buffers that training leaves as they are."""

FEWEST = 1e-8
"""The smallest weight that a component begins with: one that EM left empty may still be learnt."""


class CertifiedUncertainty:
    """−log p(y|x) on inliers and −1/K Σ_y log p(y|x) on outliers, p as in `CCU`, in classifier and mixtures alike.

    Metric and mixtures begin with what EM finds in the pixels. Then in every step the classifier learns by the recipe,
    and weights, means and variances of both mixtures by an Adam of their own; the variances outside are kept at `APART`
    times the largest inside, or above. Images may be mirrored; the black borders of crops are far from any inlier.

    Args:
        detector: the score of the network being trained, which is what the network will be used with.
        inliers: (N, C, H, W), what the metric and the mixture inside begin with.
        outliers: likewise outside.
        weight: of the outliers' loss.
        lr: of the mixtures' Adam.
    """

    def __init__(
        self, detector: CCU, inliers: Tensor, outliers: Tensor, *, weight: float = 1.0, lr: float = 1e-3
    ) -> None:
        if not weight >= 0:
            raise ValueError(f"weight must not be negative, got {weight:g}")
        if not 0 < lr < math.inf:
            raise ValueError(f"lr must be positive, got {lr:g}")
        self.detector, self.inliers, self.outliers, self.weight, self.lr = detector, inliers, outliers, weight, lr
        self.parameters: dict[str, nn.Parameter] = {}
        self.adam: torch.optim.Adam | None = None

    @property
    def settings(self) -> dict[str, object]:
        """What a resumed run must have in common with this one."""
        return {"weight": self.weight, "lr": self.lr, **self.detector.options}

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Fit the mixtures before the first one."""
        if self.parameters:
            return
        detector, device = self.detector, self.detector.device
        with torch.no_grad():
            assert detector.encoder is not None
            classes = single(detector.encoder(self.inliers[:1].to(device))).shape[1]
        detector.learn_inside(self.inliers.to(device), classes)
        detector.learn_outside(self.outliers.to(device))
        self._learn(
            {
                f"{side}_{name}": tensor
                for side, mixture in (("in", detector.inside), ("out", detector.outside))
                for name, tensor in unconstrained(mixture).items()
            }
        )

    def _learn(self, tensors: Mapping[str, Tensor]) -> None:
        wide, device = widest(self.detector.device), self.detector.device
        # In the order of their names, which is the order they come back in: the optimiser knows them by their place.
        self.parameters = {name: nn.Parameter(tensors[name].to(device, wide)) for name in sorted(tensors)}
        self.adam = torch.optim.Adam(self.parameters.values(), lr=self.lr)

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """One step of the mixtures, and the classifier's loss, both from where they stood before it."""
        if batch.outliers is None or not len(batch.outliers):
            raise ValueError("this method needs outliers to be exposed to")
        images = torch.cat([batch.x, batch.outliers])
        logits, log_odds = single(model(images)), self.log_odds(images)
        count, last = len(batch.x), self.weight * batch.balance
        inside, outside = losses(logits.detach(), log_odds, batch.y)
        assert self.adam is not None
        descend(self.adam, inside + last * outside, list(self.parameters.values()))
        self.keep_apart()
        inside, outside = losses(logits, log_odds.detach(), batch.y)
        facts = {
            "accuracy": (logits[:count].argmax(dim=1) == batch.y).float().mean(),
            "loss in": inside.detach(),
            "loss out": outside.detach(),
            "taken for in": (log_odds[:count] > 0).float().mean(),
        }
        return Outcome(inside + last * outside, facts)

    def log_odds(self, images: Tensor) -> Tensor:
        """The log of p_in(x) / λ p_out(x) of every image, (B,), with a gradient for the mixtures."""
        z = self.detector.whitened(images)
        with torch.autocast(images.device.type, enabled=False):
            inside, outside = (log_density(z, under(self.parameters, f"{side}_")) for side in ("in", "out"))
        return inside - outside - math.log(self.detector.odds)

    @torch.no_grad()
    def keep_apart(self) -> None:
        """Raise the variances outside to `APART` times the largest inside."""
        least = self.parameters["in_log_variances"].amax() + math.log(APART)
        self.parameters["out_log_variances"].clamp_(min=least)

    @property
    def trained(self) -> CCU:
        """The detector, with the mixtures as they stand."""
        if not self.parameters:
            raise ValueError("the mixtures are not trained yet")
        inside, outside = (mixture_of(under(self.parameters, f"{side}_")) for side in ("in", "out"))
        self.detector.take(inside, outside)
        return self.detector

    def state(self) -> dict[str, Tensor]:
        """The metric, the mixtures and what their optimiser remembers."""
        tensors = {f"metric.{name}": getattr(self.detector, name) for name in METRIC}
        tensors |= {f"mixture.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        if self.adam is not None:
            tensors |= {f"adam.{name}": tensor for name, tensor in optimiser_tensors(self.adam).items()}
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take them back."""
        for name, tensor in under(state, "metric.").items():
            setattr(self.detector, name, tensor.to(self.detector.device))
        self._learn(under(state, "mixture."))
        assert self.adam is not None
        restore_optimiser(self.adam, under(state, "adam."))


def losses(logits: Tensor, log_odds: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """−log p(y|x) of the inliers, which come first, and −1/K Σ_y log p(y|x) of the outliers after them; two means."""
    log_p = log_posterior(logits.to(log_odds), log_odds)
    inside, outside = log_p[: len(labels)], log_p[len(labels) :]
    return -inside.gather(1, labels.unsqueeze(1)).mean(), -outside.mean()


def unconstrained(mixture: Mixture) -> dict[str, Tensor]:
    """A spherical mixture as numbers that may have any value."""
    return {
        "log_weights": mixture.weights.clamp_min(FEWEST).log(),
        "means": mixture.means,
        "log_variances": -2 * mixture.roots.log(),
    }


def mixture_of(numbers: Mapping[str, Tensor]) -> Mixture:
    """The mixture that `unconstrained` describes."""
    weights, roots = numbers["log_weights"].softmax(dim=0), (-numbers["log_variances"] / 2).exp()
    return Mixture(weights.detach(), numbers["means"].detach(), roots.detach(), "spherical")


def log_density(z: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """The log-density of every row of z (B, D), (B,), with a gradient for the mixture's numbers."""
    means, log_variances = numbers["means"], numbers["log_variances"]
    squares = z.square().sum(dim=1, keepdim=True) - 2 * z @ means.T + means.square().sum(dim=1)
    volume = z.shape[1] * (log_variances + math.log(2 * math.pi))
    joint = numbers["log_weights"].log_softmax(dim=0) - 0.5 * (volume + squares / log_variances.exp())
    return joint.logsumexp(dim=1)
