"""Training against an attacker, and with outliers at hand: CE, OE, ADV, AOE and ALOE (Chen et al., 2021)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gatecrash.ball import Linf
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Outcome, Stateless
from gatecrash.objective import single
from gatecrash.protocols import Objective
from gatecrash.search import search
from gatecrash.stepper import Sign
from gatecrash.training.losses import to_uniform

PIXEL = 1 / 255

MEASURED = 10
"""Batches from one whose attack is measured to the next."""


@dataclass(frozen=True)
class Inner:
    """The attacker inside training: PGD from a random point of the L∞ ball, its last point taken."""

    eps: float
    step: float = PIXEL
    steps: int | None = None
    """⌊255·eps + 1⌋ where not given, as in the paper."""

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps:g}")
        if not self.step > 0:
            raise ValueError(f"step must be positive, got {self.step:g}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    @property
    def count(self) -> int:
        """Gradient steps."""
        return math.floor(255 * self.eps + 1 + 1e-6) if self.steps is None else self.steps

    def attack(self, objective: Objective, x: Tensor, generator: torch.Generator) -> Tensor:
        """The images moved to where the objective is small; parameters and batch statistics are left alone."""
        seed = int(torch.randint(2**62, (), generator=generator))
        found = search(
            objective,
            x,
            Linf(self.eps),
            stepper=Sign(self.step),
            steps=self.count,
            keep="last",
            random_start=True,
            generator=seed,
            precision="float32",  # what is prepared for speed would be of weights that have changed since
            measure=False,
        )
        return found.x


@dataclass(frozen=True)
class Astray:
    """What the attacker makes small: log p of the true class of inliers, and of the outliers that come after them minus
    the cross-entropy to uniform, so that the classifier is sure of something.
    """

    logits: Encoder
    labels: Tensor
    """(B,), of the inliers."""

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The value of every sample, (B,)."""
        z = single(self.logits(x))
        sure, inliers = -to_uniform(z), len(self.labels)
        if not inliers:
            return sure
        labels = self.labels[rows.clamp(max=inliers - 1)]
        return torch.where(rows < inliers, -cross_entropy(z, labels, reduction="none"), sure)


class Exposure(Stateless):
    """Cross-entropy on inliers, attacked or not, and cross-entropy to uniform on outliers, attacked, not, or none.

    ALOE = CE(x + δ) + λ·U(x_o + δ_o), with δ the inner attacker's and U = logsumexp − mean logit; the other methods
    leave parts of it out. Inliers and outliers go through the network together. The attacker sees the network in eval
    mode.

    Args:
        encoder: the network being trained, with its normalisation: what the attacker sees. What `fit` trains must be
            the same function of the images: `Prepared(encoder)`, or the network itself where nothing stands before it.
        inliers: whether they are attacked.
        outliers: "none", "plain" or "attacked".
        inner: the attacker; needed where one of them is attacked.
        weight: λ.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        inliers: Literal["plain", "attacked"] = "plain",
        outliers: Literal["none", "plain", "attacked"] = "none",
        inner: Inner | None = None,
        weight: float = 0.5,
    ) -> None:
        if inner is None and "attacked" in (inliers, outliers):
            raise ValueError("an attack needs its radius: eps")
        if not weight >= 0:
            raise ValueError(f"weight must not be negative, got {weight:g}")
        self.encoder, self.inliers, self.outliers, self.inner, self.weight = encoder, inliers, outliers, inner, weight

    @property
    def settings(self) -> dict[str, object]:
        """What a resumed run must have in common with this one."""
        inner = None if self.inner is None else asdict(self.inner)
        return {"inliers": self.inliers, "outliers": self.outliers, "inner": inner, "weight": self.weight}

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """The loss of a batch, with the accuracy on what the network was shown and what the attacker came to.

        `attack success` is the share of the inliers it had right and then gets wrong, `outlier attack gain` the mean
        rise of the outliers' cross-entropy to uniform, both of every tenth batch: they take two more passes.
        """
        shown, count = self._shown(batch), len(batch.x)
        x = shown if self.inner is None else self._attacked(self.inner, shown, batch)
        logits = single(model(x))
        inside, outside = logits[:count], logits[count:]
        loss = cross_entropy(inside, batch.y)
        facts, counts = {"accuracy": (inside.argmax(dim=1) == batch.y).float().mean()}, dict[str, Tensor]()
        if x is not shown and batch.number % MEASURED == 0:
            self._measure(shown, x, batch.y, facts, counts)
        if self.outliers != "none":
            exposed = to_uniform(outside).mean()
            facts |= {"loss in": loss.detach(), "loss out": exposed.detach()}
            loss = loss + self.weight * batch.balance * exposed
        return Outcome(loss, facts, counts)

    def _shown(self, batch: Batch) -> Tensor:
        """The inliers, and after them the outliers, where there are to be any."""
        if self.outliers == "none":
            return batch.x
        if batch.outliers is None or not len(batch.outliers):
            raise ValueError("this method needs outliers to be exposed to")
        return torch.cat([batch.x, batch.outliers])

    def _attacked(self, inner: Inner, x: Tensor, batch: Batch) -> Tensor:
        """Inliers and outliers with those that are attacked moved, by one search."""
        first = 0 if self.inliers == "attacked" else len(batch.x)
        last = len(x) if self.outliers == "attacked" else len(batch.x)
        if first == last:
            return x
        moved = inner.attack(Astray(self.encoder, batch.y[first:]), x[first:last], batch.generator)
        return torch.cat([x[:first], moved, x[last:]])

    @torch.no_grad()
    def _measure(
        self, before: Tensor, after: Tensor, y: Tensor, facts: dict[str, Tensor], counts: dict[str, Tensor]
    ) -> None:
        """Add what the attacker came to; the network is in eval mode, as he sees it."""
        count = len(y)
        if self.outliers != "attacked":
            before, after = before[:count], after[:count]
        z, moved = (single(self.encoder(x)) for x in (before, after))
        if self.inliers == "attacked":
            right = z[:count].argmax(dim=1) == y
            lost = right & (moved[:count].argmax(dim=1) != y)
            facts["attack success"], counts["attack success"] = lost.sum() / right.sum().clamp(min=1), right.sum()
        if self.outliers == "attacked":
            facts["outlier attack gain"] = (to_uniform(moved[count:]) - to_uniform(z[count:])).mean()
