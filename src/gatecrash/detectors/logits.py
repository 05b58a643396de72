"""Detectors that read a classifier's logits: MSP, MaxLogit, Energy, Outlier Exposure's score, ODIN."""

from __future__ import annotations

import math

from torch import Tensor, nn

from gatecrash.detectors.base import Card, Detector, register
from gatecrash.detectors.preprocessing import input_gradient
from gatecrash.encoder import as_encoder
from gatecrash.objective import single
from gatecrash.protocols import Latent


class LogitDetector(Detector):
    """A detector that reads the network's output, whatever layer the encoder taps."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(as_encoder(encoder).at(None))


@register("msp")
class MSP(LogitDetector):
    """Maximum softmax probability: τ = −max_k softmax(z)_k."""

    card = Card(paper="Hendrycks & Gimpel, ICLR 2017", year=2017, reads="logits")

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K)."""
        return -max_softmax(single(z))


@register("maxlogit")
class MaxLogit(LogitDetector):
    """Maximum logit: τ = −max_k z_k."""

    card = Card(paper="Hendrycks et al., ICML 2022", year=2022, reads="logits")

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K)."""
        return -single(z).amax(dim=1)


@register("energy")
class Energy(LogitDetector):
    """Free energy: τ = −T·logsumexp(z / T)."""

    card = Card(paper="Liu et al., NeurIPS 2020", year=2020, reads="logits")

    def __init__(self, encoder: nn.Module, *, temperature: float = 1.0) -> None:
        super().__init__(encoder)
        self.options = {"temperature": positive(temperature, "temperature")}
        self.temperature = temperature

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K)."""
        return -self.temperature * (single(z) / self.temperature).logsumexp(dim=1)


@register("oe")
class OutlierExposureScore(LogitDetector):
    """Minus the cross-entropy to the uniform distribution: τ = mean_k z_k − logsumexp(z) (Liang et al., App. E)."""

    card = Card(paper="Hendrycks et al., ICLR 2019", year=2019, reads="logits")

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K)."""
        logits = single(z)
        return logits.mean(dim=1) - logits.logsumexp(dim=1)


@register("odin")
class ODIN(LogitDetector):
    """Softmax at a high temperature, on an input moved towards confidence.

    x̃ = x + η·sign(∇ log S(x; T)) and τ = −S(x̃; T), S the maximum softmax probability at temperature T. The sign is
    constant almost everywhere, so the gradient of τ treats the step as a constant.
    """

    card = Card(paper="Liang, Li & Srikant, ICLR 2018", year=2018, reads="logits")

    def __init__(self, encoder: nn.Module, *, temperature: float = 1000.0, magnitude: float = 0.0014) -> None:
        if not 0 <= magnitude < math.inf:
            raise ValueError(f"magnitude must not be negative, got {magnitude:g}")
        super().__init__(encoder)
        self.options = {"temperature": positive(temperature, "temperature"), "magnitude": magnitude}
        self.temperature = temperature
        self.magnitude = magnitude

    @property
    def preprocesses(self) -> bool:
        """Whether the step has a length."""
        return self.magnitude > 0

    def encode(self, x: Tensor) -> Latent:
        """The logits of the preprocessed images."""
        if self.preprocesses:
            x = x + self.magnitude * input_gradient(self._log_confidence, x).sign()
        return super().encode(x)

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K)."""
        return -max_softmax(single(z) / self.temperature)

    def _log_confidence(self, x: Tensor) -> Tensor:
        return (single(super().encode(x)) / self.temperature).log_softmax(dim=1).amax(dim=1)


def max_softmax(logits: Tensor) -> Tensor:
    """The largest softmax probability of every row, (B,).

    Written as 1 / (1 + Σ exp(z_j − z_max)) over the other entries: where the probability rounds to 1, its gradient
    is still right to the last digit, which that of `softmax` is not.
    """
    top = logits.max(dim=1, keepdim=True)
    others = (logits - top.values).exp().scatter(1, top.indices, 0)
    return 1 / (1 + others.sum(dim=1))


def positive(value: float, name: str) -> float:
    """The value, when it is positive."""
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return value
