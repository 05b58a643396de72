"""Mixtures of discretised logistics: the probability of a grey level, given those of the channels before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

HALF_BIN = 1 / 255
"""Half of a grey level, where black is −1 and white is 1."""
EDGE = 0.999
"""Values beyond it are black or white, whose bins have no outer end."""
LOG_SCALES = (-7.0, 20.0)
"""The sharpest and the flattest component; the upper end only keeps 32 bits from underflowing."""


def parameter_count(channels: int, components: int) -> int:
    """Numbers per pixel: a weight, and per channel a mean, a scale and a coupling to every channel before it."""
    return components * (1 + 2 * channels + math.comb(channels, 2))


@dataclass(frozen=True)
class LogisticMixture:
    """For every pixel a mixture of K components that are logistic in every channel; values lie in [−1, 1].

    The means are linear in the channels before: m_c + Σ_{j<c} γ_cj x_j, equation (3) of Salimans et al. (2017).
    """

    log_weights: Tensor
    """(B, K, H, W)."""
    means: Tensor
    """(B, K, C, H, W), m."""
    log_scales: Tensor
    """(B, K, C, H, W), log s."""
    couplings: Tensor
    """(B, K, C·(C−1)/2, H, W), γ in the order (1, 0), (2, 0), (2, 1), …"""

    @classmethod
    def of(cls, raw: Tensor, channels: int) -> LogisticMixture:
        """The mixtures that a network's output (B, P, H, W) stands for, with P from `parameter_count`."""
        parts = raw.unflatten(1, (-1, parameter_count(channels, 1)))
        weights, means, log_scales, couplings = parts.split([1, channels, channels, math.comb(channels, 2)], dim=2)
        return cls(weights.squeeze(2).log_softmax(dim=1), means, log_scales.clamp(*LOG_SCALES), torch.tanh(couplings))

    @staticmethod
    def raw_of(x: Tensor, components: int) -> Tensor:
        """The network's output (P,) for a mixture that has its means at quantiles of images (N, C, H, W) in [−1, 1]."""
        values = x.transpose(0, 1).flatten(1).sort(dim=1).values  # (C, N·H·W)
        places = (torch.arange(components, device=x.device) + 0.5) / components
        means = values[:, (places * values.shape[1]).long()].T
        spread = values.std(dim=1, correction=0) / components
        log_scales = spread.clamp_min(2 * HALF_BIN).log().expand_as(means)
        others = means.new_zeros(components, math.comb(len(values), 2))
        return torch.cat([means.new_zeros(components, 1), means, log_scales, others], dim=1).flatten()

    def means_given(self, x: Tensor) -> Tensor:
        """The means (B, K, C, H, W), given every pixel's channels before; x is (B, C, H, W) in [−1, 1]."""
        means, first = [self.means[:, :, :1]], 0
        for channel in range(1, x.shape[1]):
            couplings = self.couplings[:, :, first : first + channel]
            known = (couplings * x[:, None, :channel]).sum(dim=2, keepdim=True)
            means.append(self.means[:, :, channel : channel + 1] + known)
            first += channel
        return torch.cat(means, dim=2)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-probability (B, H, W) of every pixel's bins, half a grey level to both sides of x in [−1, 1]."""
        levels = log_bins(x[:, None], self.means_given(x), self.log_scales)
        return (self.log_weights + levels.sum(dim=2)).logsumexp(dim=1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Grey levels (B, C, H, W) in [−1, 1]: a logistic, rounded to the nearest, is a discretised one."""
        channels, chosen = self.means.shape[2], self._component(generator)
        x = self.means.new_zeros(len(self.means), channels, *self.means.shape[3:])
        for channel in range(channels):
            means = self.means_given(x)[:, :, channel].gather(1, chosen).squeeze(1)
            scales = self.log_scales[:, :, channel].gather(1, chosen).squeeze(1).exp()
            drawn = means + scales * torch.logit(uniform(means, generator))
            x[:, channel] = ((drawn + 1) * 127.5).round().clamp(0, 255) / 127.5 - 1
        return x

    def _component(self, generator: torch.Generator) -> Tensor:
        """A component per pixel, (B, 1, H, W), drawn by its weight."""
        gumbel = -torch.log(-torch.log(uniform(self.log_weights, generator)))
        return (self.log_weights + gumbel).argmax(dim=1, keepdim=True)


def log_bins(x: Tensor, means: Tensor, log_scales: Tensor) -> Tensor:
    """The log-mass of a logistic from x − ½ to x + ½ grey levels; black's bin begins at −∞ and white's ends at ∞.

    σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{b−a}), where b − a does not depend on x: nothing cancels, and in 32 bits value and
    gradient are finite however far x is from the mean.
    """
    sharpness = torch.exp(-log_scales)
    below = logsigmoid(sharpness * (x - means + HALF_BIN))
    above = logsigmoid(-sharpness * (x - means - HALF_BIN))
    within = below + above + torch.log(-torch.expm1(-2 * HALF_BIN * sharpness))
    return torch.where(x < -EDGE, below, torch.where(x > EDGE, above, within))


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers strictly between 0 and 1, of the shape, precision and device of a tensor."""
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    return drawn.clamp(1e-7, 1 - 1e-7).to(like)
