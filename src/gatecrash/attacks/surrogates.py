"""What an attack can follow in the place of a score: functions of logits that do not saturate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatecrash.protocols import Detector, Latent


def log_odds(logits: Tensor) -> Tensor:
    """Minus the log-odds of the largest softmax probability, (B,); it never saturates."""
    top = logits.max(dim=1, keepdim=True)
    return logits.scatter(1, top.indices, -torch.inf).logsumexp(dim=1) - top.values.squeeze(1)


def margin(logits: Tensor) -> Tensor:
    """Minus the distance between the two largest logits, (B,)."""
    top = logits.topk(2, dim=1).values
    return top[:, 1] - top[:, 0]


def spread_of(logits: Tensor) -> Tensor:
    """The mean logit less logsumexp, (B,)."""
    return logits.mean(dim=1) - logits.logsumexp(dim=1)


SURROGATES: dict[str, Callable[[Tensor], Tensor]] = {"log-odds": log_odds, "margin": margin, "logit spread": spread_of}
"""Functions of logits that, like a score, are higher the less sure the classifier is, and do not saturate."""


def logits_read(detector: Detector, z: Latent) -> Tensor | None:
    """The logits that a detector reads off its latent, (B, K); of several networks' the log of their mean softmax.

    None where it reads none: of an ensemble's members, those that read logits count.
    """
    parts = [part for part in logit_parts(detector, z) if part.ndim == 2]
    if not parts or any(part.shape != parts[0].shape for part in parts) or parts[0].shape[1] < 2:
        return None
    return parts[0] if len(parts) == 1 else torch.stack([p.log_softmax(dim=1) for p in parts]).logsumexp(dim=0)


def logit_parts(detector: Detector, z: Latent) -> list[Tensor]:
    """The tensors in a latent that are logits; none where the detector does not say."""
    told: Callable[[Latent], list[Tensor]] | None = getattr(detector, "logits_in", None)
    return [] if told is None else told(z)


def unprocessed(detector: Detector, x: Tensor) -> Latent:
    """The latent of images as they are, where the detector would change them first; of an ensemble, its members'."""
    members: list[Detector] | None = getattr(detector, "detectors", None)
    if members is not None:
        return tuple(unprocessed(member, x) for member in members)
    encoder: Callable[[Tensor], Latent] | None = getattr(detector, "encoder", None)
    if encoder is None or not getattr(detector, "preprocesses", False):
        return detector.encode(x)
    return encoder(x)
