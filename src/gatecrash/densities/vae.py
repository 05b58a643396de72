"""The variational autoencoder of feature vectors: a bound on how likely they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gatecrash.densities.base import register
from gatecrash.densities.options import flag, whole
from gatecrash.densities.standardised import Standardised

LOG_VARIANCES = (-10.0, 10.0)
"""Of the posterior."""
SHARPEST = -4.0
"""The logarithm of the smallest deviation of a feature from what was decoded; a constant feature would have none."""


@register("vae")
class VAE(Standardised):
    """A variational autoencoder (Kingma & Welling 2014) of standardised features, with Gaussians throughout.

    ELBO = E_q(z|x) log p(x|z) − KL(q(z|x) ‖ N(0, I)). Encoder and decoder have one hidden layer of ReLUs; the decoder
    gives the mean of every feature, and its deviation is learnt per feature. In training the expectation is one fresh
    draw per sample. In eval mode it is the mean over noise vectors that were drawn once and belong to the state, so the
    score is deterministic and its gradient exact.

    Args:
        shape: (D,).
        hidden: units of the hidden layers; 512 in Shao et al. (2020).
        latent: dimensions of z; 128 there.
        draws: noise vectors of the expectation.
        importance: in eval mode the importance-weighted bound log mean exp(log p(x, z) − log q(z|x)) over the draws
            instead, which is no looser on average.

    Raises:
        ValueError: the samples are no vectors, or an option is out of range.
    """

    noise: Tensor
    """(draws, latent)."""

    def __init__(
        self, shape: Sequence[int], *, hidden: int = 512, latent: int = 128, draws: int = 16, importance: bool = False
    ) -> None:
        whole(hidden=hidden, latent=latent, draws=draws)
        flag(importance=importance)
        super().__init__(shape, hidden=hidden, latent=latent, draws=draws, importance=importance)
        self.importance = importance
        self.encoder = nn.Sequential(nn.Linear(shape[0], hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, shape[0]))
        self.log_deviation = nn.Parameter(torch.zeros(shape[0]))
        self.register_buffer("noise", torch.randn(draws, latent, generator=torch.Generator().manual_seed(0)))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of q(z|x), (B, latent) each."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return mean, log_variance.clamp(*LOG_VARIANCES)

    def log_decoded(self, x: Tensor, z: Tensor) -> Tensor:
        """The log-likelihood log p(x|z), (S, B), of samples (B, D) and latents (S, B, latent)."""
        log_deviation = self.log_deviation.clamp_min(SHARPEST)
        return log_normal((x - self.decoder(z)) * torch.exp(-log_deviation)) - log_deviation.sum()

    def log_prob(self, x: Tensor) -> Tensor:
        """The bound in nats, (B,)."""
        mean, log_variance = self.posterior(x)
        noise = torch.randn_like(mean)[None] if self.training else self.noise[:, None]
        z = mean + torch.exp(log_variance / 2) * noise
        decoded = self.log_decoded(x, z)
        if self.importance and not self.training:
            ratio = log_normal(z) - log_normal(noise) + log_variance.sum(dim=1) / 2
            return (decoded + ratio).logsumexp(dim=0) - math.log(len(noise))
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return decoded.mean(dim=0) - divergence


def log_normal(z: Tensor) -> Tensor:
    """The logarithm of N(z; 0, I) over the last dimension."""
    return -(z.square() + math.log(2 * math.pi)).sum(dim=-1) / 2
