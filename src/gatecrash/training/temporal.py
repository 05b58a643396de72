"""Temporal ensembling: learning from few labels by agreeing with one's own past predictions (Laine & Aila, 2017)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gatecrash.fitting import Batch, Outcome, generator_of, several
from gatecrash.objective import single


class TemporalEnsembling:
    """Cross-entropy on the images whose labels are known, and agreement with the ensemble of past epochs on all.

    loss = 1/|B| Σ_labelled −log p_y + w(t)·mean (p − z̃)². After every epoch Z ← αZ + (1 − α)p, and the targets are
    z̃ = Z / (1 − α^t). w(t) = w_max·M/N·exp(−5(1 − t/ramp)²), which is 0 in the first epoch, when there are no targets.

    Args:
        known: (N,) bool, of which training images the label is known; the other labels are not looked at.
        classes: K.
        momentum: α.
        weight: w_max.
        ramp: epochs in which the weight rises.
    """

    def __init__(
        self, known: Tensor, classes: int, *, momentum: float = 0.6, weight: float = 100.0, ramp: int = 80
    ) -> None:
        if not bool(known.any()):
            raise ValueError("temporal ensembling needs at least one known label")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum:g}")
        if not weight >= 0:
            raise ValueError(f"weight must not be negative, got {weight:g}")
        if ramp < 1:
            raise ValueError(f"ramp must be at least 1, got {ramp}")
        self.known, self.momentum, self.ramp = known.bool(), momentum, ramp
        self.largest = weight * float(known.float().mean())
        self.mean = torch.zeros(len(known), classes, device=known.device)
        self.outputs, self.targets = self.mean.clone(), self.mean.clone()
        self.epoch = 0
        self._gathered = True

    @property
    def settings(self) -> dict[str, object]:
        """What a resumed run must have in common with this one."""
        known = hashlib.sha256(self.known.cpu().numpy().tobytes()).hexdigest()
        return {"known": known, "momentum": self.momentum, "weight": self.largest, "ramp": self.ramp}

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Fold the last epoch's predictions into the ensemble; the first epoch begins without one."""
        self.epoch = epoch
        if epoch > 0:
            self._gather()
            self.mean = self.momentum * self.mean + (1 - self.momentum) * self.outputs
            self.targets = self.mean / (1 - self.momentum**epoch)
        else:
            self.mean, self.targets = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        self.outputs = torch.zeros_like(self.mean)
        self._gathered = False

    @property
    def weight(self) -> float:
        """w(t), by how many epochs are done."""
        if self.epoch == 0:
            return 0.0
        share = min(1.0, self.epoch / self.ramp)
        return self.largest * math.exp(-5 * (1 - share) ** 2)

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """The loss of a batch, with the accuracy on the images whose label is known."""
        logits = single(model(batch.x))
        self._move(logits.device)
        rows = batch.rows.to(logits.device)
        probabilities, known = logits.softmax(dim=1), self.known[rows]
        labels = batch.y.where(known, 0)
        supervised = cross_entropy(logits, labels, reduction="none").where(known, 0).mean()
        apart = (probabilities - self.targets[rows]).square().mean()
        self.outputs[rows] = probabilities.detach().to(self.outputs)
        right, labelled = (logits.argmax(dim=1) == labels) & known, known.sum()
        facts = {"accuracy": right.sum() / labelled.clamp(min=1), "disagreement": apart.detach()}
        return Outcome(supervised + self.weight * apart, facts, {"accuracy": labelled})

    def state(self) -> dict[str, Tensor]:
        """The ensemble and the last epoch's predictions, those of all processes."""
        self._gather()
        return {"mean": self.mean, "outputs": self.outputs}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take them back."""
        device = self.known.device
        self.mean, self.outputs = state["mean"].to(device), state["outputs"].to(device)
        self.targets = torch.zeros_like(self.mean)
        self._gathered = True

    def _gather(self) -> None:
        """Put the predictions of all processes together: each has seen some of the images."""
        if not self._gathered and several():
            torch.distributed.all_reduce(self.outputs)
        self._gathered = True

    def _move(self, device: torch.device) -> None:
        """Stay where the network is, so that no step waits for a copy."""
        if self.known.device != device:
            self.known, self.mean = self.known.to(device), self.mean.to(device)
            self.outputs, self.targets = self.outputs.to(device), self.targets.to(device)


def few_labels(labels: Tensor, per_class: int, seed: int) -> Tensor:
    """Which labels are known when there are so many per class, (N,) bool, drawn at random.

    Raises:
        ValueError: a class has fewer.
    """
    if per_class < 1:
        raise ValueError(f"there must be at least 1 label per class, got {per_class}")
    labels = labels.cpu()
    known = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        if len(rows) < per_class:
            raise ValueError(f"class {label} has {len(rows)} images, fewer than {per_class}")
        known[rows[torch.randperm(len(rows), generator=generator_of(seed, "labels", label))[:per_class]]] = True
    return known
