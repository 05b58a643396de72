"""The softmax score of a calibrated classifier: one temperature, learnt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gatecrash.detectors.base import Card, register
from gatecrash.detectors.distance import labels_of
from gatecrash.detectors.logits import LogitDetector, max_softmax
from gatecrash.encoder import upcast
from gatecrash.images import Images
from gatecrash.metrics import ece
from gatecrash.objective import single
from gatecrash.protocols import Latent

CHUNK = 1 << 20
"""Logits that are looked at together in float64."""


@register("temperature")
class Temperature(LogitDetector):
    """Maximum softmax probability after temperature scaling: τ = −max_k softmax(z / T)_k.

    T has the smallest negative log-likelihood on the held-out images where they have labels, else on the inliers. Give
    images that the network was not trained on: on its training images it looks better than it is. `ece_before` and
    `ece_after` are the expected calibration errors there at T = 1 and at T, in 10 bins.
    """

    card = Card(paper="Guo et al., ICML 2017", year=2017, reads="logits", fit="labelled inliers")

    temperature: Tensor  # ()
    ece_before: Tensor  # ()
    ece_after: Tensor  # ()

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """The best temperature on logits (N, K) with labels (N,)."""
        logits, labels = single(z).detach().cpu(), labels_of(y).cpu().long()
        before = ece(logits.softmax(dim=1, dtype=torch.float64), labels)
        temperature = best_temperature(logits, labels)
        after = ece((logits.double() / temperature).softmax(dim=1), labels)
        self.temperature, self.ece_before, self.ece_after = map(single(z).new_tensor, (temperature, before, after))

    def settle(self, held_out: Images | None, outliers: Images | None) -> None:
        """Learn from held-out images instead, where they have labels."""
        if held_out is not None:
            z, y = self.latents(held_out)
            if y is not None:
                self.fit_latents(z, y)

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, K)."""
        logits = upcast(single(z))
        return -max_softmax(logits / self.temperature.to(logits))


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the smallest negative log-likelihood, by L-BFGS in float64; 1 where none is best.

    The likelihood of logits (N, K) is concave in β = 1/T. It has its maximum at a positive, finite β exactly where its
    slope is positive at β = 0 and negative for large β: the labels' logits are above the average, and not all of them
    are the largest.
    """
    below = above = 0.0
    for part, own in in_chunks(logits, labels):
        chosen = part.gather(1, own.unsqueeze(1)).squeeze(1)
        below += float((part.amax(dim=1) - chosen).sum())
        above += float((chosen - part.mean(dim=1)).sum())
    if not (below > 0 and above > 0):
        return 1.0
    spread = torch.cat([part.std(dim=1) for part, _ in in_chunks(logits, labels)])
    unit = spread[spread > 0].median()
    beta = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [beta], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> float:
        optimiser.zero_grad()
        total = 0.0
        for part, own in in_chunks(logits, labels):
            value = cross_entropy(beta * part / unit, own, reduction="sum") / len(logits)
            value.backward()
            total += float(value.detach())
        return total

    optimiser.step(loss)
    return float(unit / beta.detach())


def in_chunks(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels in chunks of rows, in float64, so that there is never such a copy of all of them."""
    rows = max(1, CHUNK // logits.shape[1])
    for part, own in zip(logits.split(rows), labels.split(rows), strict=True):
        yield part.double(), own
