"""Searches in two turns: the second begins with the perturbations that led to the nearest targets of the first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatecrash.found import Found, joined, reordered
from gatecrash.protocols import Latent, as_vectors, rows_of

PORTION = 512
"""Targets that are compared with those of the first turn at once."""


def in_two_turns(run: Callable[[Tensor, Tensor | None], Found], start: Tensor, goal: Latent) -> Found:
    """Every other sample first; the rest from the perturbation that led to the nearest of their targets.

    Args:
        run: searches for some rows, from given points or, where these are None, as ever.
        start: (B, ...), the centres of the balls.
        goal: the latents to come to, one per sample.
    """
    rows = torch.arange(len(start), device=start.device)
    before, after = rows[::2], rows[1::2]
    first = run(before, None)
    if len(after) == 0:
        return first
    nearest = nearest_of(rows_of(goal, after), rows_of(goal, before))
    moved = first.x - start[before]
    second = run(after, start[after] + moved[nearest])
    return reordered(joined([first, second]), torch.cat([before, after]).argsort())


def nearest_of(some: Latent, others: Latent) -> Tensor:
    """For every latent the row of the nearest of the others, (B,)."""
    one, other = as_vectors(some), as_vectors(others)
    return torch.cat([torch.cdist(part, other).argmin(dim=1) for part in one.split(PORTION)])
