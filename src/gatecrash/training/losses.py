"""The losses of the papers, each a mean over the batch."""

from __future__ import annotations

import math

from torch import Tensor


def to_uniform(logits: Tensor) -> Tensor:
    """Cross-entropy of the uniform distribution against the softmax, logsumexp − mean logit, of every sample, (B,)."""
    return logits.logsumexp(dim=1) - logits.mean(dim=1)


def divergence_from_uniform(logits: Tensor) -> Tensor:
    """KL(uniform ‖ softmax) of every sample, (B,): `to_uniform` less the logarithm of the number of classes."""
    return to_uniform(logits) - math.log(logits.shape[1])
