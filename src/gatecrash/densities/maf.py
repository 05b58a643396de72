"""The masked autoregressive flow of feature vectors, through zuko."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gatecrash.densities.base import register
from gatecrash.densities.options import whole
from gatecrash.densities.standardised import Standardised
from gatecrash.densities.vae import log_normal


@register("maf")
class MAF(Standardised):
    """A masked autoregressive flow (Papamakarios et al. 2017) of standardised features.

    log p(x) = log N(f(x); 0, I) + log |det ∂f/∂x|, f a chain of affine autoregressive transforms with the order of the
    features reversed between them. Shao et al. (2020) have "a 5-layer MADE model with hidden layer size of 128", which
    we read as five transforms with one hidden layer each.

    Args:
        shape: (D,).
        transforms: how many.
        hidden: units of the hidden layers of every transform's network.

    Raises:
        ValueError: the samples are no vectors, or an option is out of range.
    """

    def __init__(self, shape: Sequence[int], *, transforms: int = 5, hidden: Sequence[int] = (128,)) -> None:
        whole(transforms=transforms)
        if isinstance(hidden, str) or not isinstance(hidden, Sequence) or not hidden:
            raise ValueError(f"hidden must be the sizes of one layer or more, as a list, got {hidden!r}")
        for size in hidden:
            whole(hidden=size)
        super().__init__(shape, transforms=transforms, hidden=list(hidden))
        # It turns off the checks of torch.distributions, so it is imported only where it is used.
        from zuko.flows import MAF as Flow  # type: ignore[import-untyped]

        self.flow: Any = Flow(shape[0], transforms=transforms, hidden_features=list(hidden))

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-likelihood in nats, (B,)."""
        z, log_determinant = self.flow.transform().call_and_ladj(x)
        likelihood: Tensor = log_normal(z) + log_determinant
        return likelihood
