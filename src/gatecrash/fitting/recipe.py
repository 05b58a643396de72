"""How a network is trained, whatever it learns: epochs, optimiser, learning rate, precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

Optimisers = Literal["sgd", "adamw"]
Rates = Literal["cosine", "constant"]
Precisions = Literal["float32", "bf16"]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, whatever it learns."""

    epochs: int
    batch_size: int = 64
    optimiser: Optimisers = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Rates = "cosine"
    """How the learning rate falls, step by step."""
    warm_up: float = 0.0
    """The share of the steps in which it rises first."""
    clip: float | None = None
    """The largest length of the gradient of all parameters."""
    ema: float | None = None
    """The decay of the running mean of the weights, which is what is kept in the end; None keeps the weights."""
    precision: Precisions = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive, got {self.lr:g}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be between 0 and 1, got {self.ema:g}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, got {self.clip:g}")
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up must be a share of the steps, got {self.warm_up:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum:g}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay:g}")
        for name, known in (("optimiser", Optimisers), ("schedule", Rates), ("precision", Precisions)):
            if getattr(self, name) not in get_args(known):
                expected = " or ".join(repr(choice) for choice in get_args(known))
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    def _check_types(self) -> None:
        """Raises a ValueError that names the first field that is no number where it must be one."""
        for name in ("epochs", "batch_size", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must have at most 64 bits, got {self.seed}")
        for name in ("lr", "momentum", "weight_decay", "warm_up", "clip", "ema"):
            value = getattr(self, name)
            missing = value is None and name in ("clip", "ema")
            if not missing and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} must be a number, got {value!r}")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at a step of so many in all."""
        rising = round(self.warm_up * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising))) / 2


def optimiser_for(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The optimiser of a recipe over the parameters that learn."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameter that could be trained")
    if recipe.optimiser == "adamw":
        return AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    return SGD(
        parameters,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.momentum > 0,
    )
