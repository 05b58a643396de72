"""The scores of a joint energy-based model: a classifier that is also a density of its images."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gatecrash.detectors.base import Card, register
from gatecrash.detectors.logits import LogitDetector, max_softmax
from gatecrash.features import Reader
from gatecrash.objective import single
from gatecrash.protocols import Latent, leaves

Score = Literal["logsumexp", "softmax", "gradient"]


@register("jem")
class JEM(LogitDetector):
    """A classifier whose logsumexp is a log-density up to a constant: log p(x) = logsumexp(z) − log Z.

    The network is one that `harden` trained with the method `jem`, or any other; there is nothing to fit. The score is
    one of the paper's three: τ = −logsumexp(z), −max_k softmax(z)_k, or +‖∂ logsumexp(z) / ∂x‖₂, which is small near a
    mode of the density. The gradient of the third is a second derivative of the network, so its layers must have one:
    fused attention and compiled networks have none, and at the kinks of ReLUs it jumps.

    Args:
        encoder: the network, whose normalisation takes images to [−1, 1]: mean 0.5 and std 0.5.
        score: "logsumexp", "softmax" or "gradient".
    """

    card = Card(paper="Grathwohl et al., ICLR 2020", year=2020, reads="logits")

    def __init__(self, encoder: nn.Module, *, score: Score = "logsumexp") -> None:
        if score not in get_args(Score):
            raise ValueError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}")
        super().__init__(encoder)
        self.options = {"score": score}
        self.score = score
        if score == "gradient":
            self.card = replace(type(self).card, reads="pixels", gradient="exact between jumps")

    @property
    def reader(self) -> Reader:
        """The encoder, where the logits are all that is read."""
        return self.encode if self.encoder is None or self.score == "gradient" else self.encoder

    def encode(self, x: Tensor) -> Latent:
        """The logits; for the score "gradient" also the gradient of their logsumexp, in x's shape."""
        if self.score != "gradient":
            return super().encode(x)
        followed = torch.is_grad_enabled() and x.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            point = x if followed else x.detach().clone().requires_grad_()
            logits = single(super().encode(point))
            (gradient,) = torch.autograd.grad(logits.logsumexp(dim=1).sum(), point, create_graph=followed)
        return (logits, gradient) if followed else (logits.detach(), gradient)

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits, whatever else is read."""
        return leaves(z)[:1]

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K), or of the gradient beside them."""
        logits, *gradient = leaves(z)
        if self.score == "gradient":
            length: Tensor = torch.linalg.vector_norm(gradient[0].flatten(1), dim=1)
            return length
        return -single(logits).logsumexp(dim=1) if self.score == "logsumexp" else -max_softmax(single(logits))
