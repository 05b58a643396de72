"""Densities of feature vectors, which see every feature with mean 0 and deviation 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatecrash.densities.base import Density

CONSTANT = 1e-4
"""A feature that varies by less than this share of what others vary by is a constant, and is scaled as they are."""


class Standardised(Density):
    """A density of feature vectors (D,): log p(x) = log p̃((x − μ) / σ) − Σ log σ, with μ and σ of the data.

    Raises:
        ValueError: the samples are no vectors.
    """

    mean: Tensor
    """(D,), μ."""
    deviation: Tensor
    """(D,), σ."""

    def __init__(self, shape: Sequence[int], **options: Any) -> None:
        if len(shape) != 1:
            raise ValueError(f"a {type(self).__name__} is of feature vectors of shape (D,), got {tuple(shape)}")
        super().__init__(shape, **options)
        self.register_buffer("mean", torch.zeros(shape[0]))
        self.register_buffer("deviation", torch.ones(shape[0]))
        self._standardised = False

    @torch.no_grad()
    def standardise(self, x: Tensor) -> None:
        """Take mean and deviation from samples (N, D), all of them where there is a choice."""
        self.check(x)
        deviation, mean = torch.std_mean(x.double(), dim=0, correction=0)
        typical = deviation.square().mean().sqrt()
        typical = typical.where(typical > 0, 1.0)
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.where(deviation > CONSTANT * typical, typical))
        self._standardised = True

    def begin(self, x: Tensor) -> None:
        """Mean and deviation from the first batch, where they are not known from more."""
        if not self._standardised:
            self.standardise(x)

    def forward(self, x: Tensor) -> Tensor:
        """The log-likelihood of every sample in nats, (B,), or a bound on it."""
        self.check(x)
        x = (x.to(self.mean.dtype) - self.mean) / self.deviation
        return self.log_prob(x) - self.deviation.log().sum()

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """The same for standardised samples (B, D)."""
