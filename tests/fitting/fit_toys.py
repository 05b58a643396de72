"""A network whose every part depends on chance, and data that it can learn from, for the tests of the fit loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gatecrash.fitting import Batch, Material, Outcome, Stateless, seeded


def network(seed: int = 0, classes: int = 3) -> nn.Sequential:
    """Grey images (B, 1, 4, 4) → logits (B, 3), by way of batch norm and dropout."""
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(64, classes),
        )


def linear(seed: int = 0) -> nn.Sequential:
    """Grey images (B, 1, 4, 4) → logits (B, 3) in double precision, without chance or batch statistics."""
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()


def material(count: int = 22, outliers: int | None = None, dtype: torch.dtype = torch.float32) -> Material:
    """Random images with random labels, and outliers where asked for."""
    random = torch.Generator().manual_seed(7)
    x = torch.rand(count, 1, 4, 4, generator=random, dtype=torch.float64).to(dtype)
    beside = None if outliers is None else torch.rand(outliers, 1, 4, 4, generator=random, dtype=torch.float64)
    return Material(x, torch.arange(count) % 3, None if beside is None else beside.to(dtype))


@dataclass
class Plain(Stateless):
    """Cross-entropy, with all batches and learning weights remembered, and numbers that a test may swap in."""

    batches: list[Batch] = field(default_factory=list)
    poison: dict[int, float] = field(default_factory=dict)
    """By the number of the call, what the loss is multiplied with."""

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """The cross-entropy of the batch."""
        number = len(self.batches)
        self.batches.append(batch)
        logits = model(batch.x)
        loss = cross_entropy(logits, batch.y) * self.poison.get(number, 1.0)
        return Outcome(loss, {"accuracy": (logits.argmax(1) == batch.y).float().mean()})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two networks are the same to the last bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
