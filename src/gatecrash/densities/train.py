"""Training a density: the fit loop with the likelihood as its step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gatecrash.densities.base import Density
from gatecrash.fitting import Batch, History, Material, Outcome, Recipe, Stateless, fit, generator_of
from gatecrash.fitting.watch import NotFinite

BEGIN_WITH = 256
"""Samples that a density may take its first statistics from."""


class Likelihood(Stateless):
    """Bits per dimension of a batch under a density."""

    def __init__(self, density: Density) -> None:
        self.scale = math.log(2) * density.dimensions
        self.settings: dict[str, object] = {"density": density.name, "options": density.options}

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """The mean over the batch."""
        bits = -model(batch.x).mean() / self.scale
        return Outcome(bits, {"bits per dimension": bits.detach()})


def train_density(
    density: Density,
    samples: Tensor,
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> History:
    """Train a density in place on samples (N, *shape); afterwards it is in eval mode and its parameters are frozen.

    Args:
        density: what is trained, on its device.
        samples: what is likely.
        recipe: how.
        folder: where checkpoints and logs go; a run that was killed there goes on.
        augment: (B, *shape), generator → (B, *shape).

    Raises:
        ValueError: the samples have another shape, the training diverges, or the checkpoint does not fit.
    """
    density.check(samples)
    density.requires_grad_(True).train()
    device = next(density.parameters()).device
    first = torch.randperm(len(samples), generator=generator_of(recipe.seed, "begin"))[:BEGIN_WITH]
    few = samples[first.to(samples.device)].to(device)
    with torch.no_grad():
        density.begin(few)
    material = Material(samples, torch.zeros(len(samples), dtype=torch.long), augment=augment)
    step = Likelihood(density)
    try:
        history = fit(density, step, material, recipe, folder=folder, resume=folder is not None)
    except NotFinite as error:
        raise NotFinite(f"the training of {density.name} diverged: {error}") from error
    density.requires_grad_(False)
    return history
