"""Detectors made of several: the mean of scores, and the entropy of averaged softmaxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.detectors.base import Card, Detector, build, register
from gatecrash.encoder import as_encoder
from gatecrash.objective import single
from gatecrash.protocols import Latent

NEEDS = ("nothing", "inliers", "inliers and outliers", "labelled inliers")
GRADIENTS = ("exact", "exact between jumps", "omitted")
"""What members' cards may say, the ensemble's being the last of them in this order."""


@register("ensemble")
class ScoreEnsemble(Detector):
    """The mean of several detectors' scores: τ = mean_m τ_m (Fort, Section 2.7)."""

    card = Card(paper="Fort, 2022", year=2022, reads="scores")

    def __init__(self, members: Sequence[Detector]) -> None:
        if not members:
            raise ValueError("an ensemble needs at least one member")
        wrong = next((member for member in members if not isinstance(member, Detector)), None)
        if wrong is not None:
            raise ValueError(f"an ensemble is made of detectors, such as MSP(network), got a {type(wrong).__name__}")
        super().__init__(None)
        self.members = nn.ModuleList(members)
        cards = [member.card for member in members]
        needs = max((card.fit for card in cards), key=NEEDS.index)
        gradient = max((card.gradient for card in cards), key=GRADIENTS.index)
        self.card = replace(type(self).card, fit=needs, gradient=gradient)

    @property
    def detectors(self) -> list[Detector]:
        """The members."""
        return [member for member in self.members if isinstance(member, Detector)]

    def to_fit(self) -> list[Detector]:
        """The members that must be fitted."""
        return [part for member in self.detectors for part in member.to_fit()]

    def encode(self, x: Tensor) -> Latent:
        """The members' latents."""
        return tuple(member.encode(x) for member in self.detectors)

    def judge(self, z: Latent) -> Tensor:
        """The mean of the members' scores, (B,)."""
        return torch.stack([member.judge(part) for member, part in zip(self.detectors, z, strict=True)]).mean(dim=0)

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits that the members read."""
        return [part for member, inner in zip(self.detectors, z, strict=True) for part in member.logits_in(inner)]

    @property
    def preprocesses(self) -> bool:
        """Whether a member does."""
        return any(member.preprocesses for member in self.detectors)

    @property
    def spec(self) -> dict[str, Any]:
        """The members' specs."""
        return {"name": self.name, "options": {}, "members": [member.spec for member in self.detectors]}

    @classmethod
    def rebuild(cls, spec: dict[str, Any], encoder: nn.Module | Sequence[nn.Module] | None) -> Detector:
        """The ensemble that `spec` describes; one encoder serves all members, or there is one for each."""
        specs = spec["members"]
        return cls([build(part, one) for part, one in zip(specs, per_member(encoder, len(specs)), strict=True)])


@register("deep_ensemble")
class DeepEnsemble(Detector):
    """Entropy of the averaged softmax of several networks: τ = H(mean_m softmax(z_m)) (Liang et al., App. F)."""

    card = Card(paper="Lakshminarayanan et al., NeurIPS 2017", year=2017, reads="logits")

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        if not encoders:
            raise ValueError("an ensemble needs at least one network")
        super().__init__(None, networks=len(encoders))
        self.encoders = nn.ModuleList(as_encoder(encoder).at(None) for encoder in encoders)

    def encode(self, x: Tensor) -> Latent:
        """Every network's logits."""
        return tuple(encoder(x) for encoder in self.encoders)

    def judge(self, z: Latent) -> Tensor:
        """The entropy of the mean of the networks' softmaxes, (B,)."""
        log_p = torch.stack([single(logits).log_softmax(dim=1) for logits in z]).logsumexp(dim=0)
        p = log_p.softmax(dim=1)
        return -(p * log_p.log_softmax(dim=1)).sum(dim=1)

    @classmethod
    def rebuild(cls, spec: dict[str, Any], encoder: nn.Module | Sequence[nn.Module] | None) -> Detector:
        """The ensemble over the given encoders."""
        encoders = [encoder] if isinstance(encoder, nn.Module) else encoder or []
        if len(encoders) != spec["options"]["networks"]:
            raise ValueError(f"the ensemble has {spec['options']['networks']} networks, but {len(encoders)} were given")
        return cls(encoders)


def per_member(encoder: nn.Module | Sequence[nn.Module] | None, count: int) -> list[nn.Module | None]:
    """One encoder per member: the one given or none, repeated, or as many as there are members."""
    if encoder is None or isinstance(encoder, nn.Module):
        return [encoder] * count
    if len(encoder) != count:
        raise ValueError(f"the ensemble has {count} members, but {len(encoder)} encoders were given")
    return list(encoder)
