"""Where EM begins: k-means++, then Lloyd's algorithm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gatecrash.mixture.rows import Chunks

SEEDING_ROWS = 64
"""k-means++ looks at no more than this many rows per component, drawn at random."""

LLOYD_STEPS = 10
"""Steps of Lloyd's algorithm between k-means++ and EM."""


def seeded(data: Chunks, components: int, generator: torch.Generator) -> Tensor:
    """Rows chosen by greedy k-means++: each the best of a few drawn in proportion to their squared distance, (K, D).

    Every step writes into the same few tensors. With new ones, small tensors that stay lie between large ones that go,
    and the heap grows by hundreds of MiB.
    """
    z = data.sample(min(len(data), SEEDING_ROWS * components), generator)
    squares = torch.linalg.vector_norm(z, dim=1).square()
    trials = min(2 + int(math.log(components)), len(z))
    chosen, candidates, reach = z.new_empty(components, z.shape[1]), z[:trials].clone(), z.new_empty(len(z), trials)
    distances, race = torch.ones_like(squares), torch.empty_like(squares)
    for index in range(components):
        # The first of exponential clocks with these rates to ring: a draw that needs no running sum and no host.
        torch.div(distances, race.exponential_(generator=generator), out=race)
        drawn = race.topk(trials if index else 1).indices
        some = candidates[: len(drawn)]
        torch.index_select(z, 0, drawn, out=some)
        near = reach[:, : len(drawn)]
        torch.addmm(squares[drawn], z, some.T, alpha=-2, out=near).add_(squares[:, None]).clamp_min_(0)
        if index:
            torch.minimum(near, distances[:, None], out=near)
        best = near.sum(dim=0).argmin(dim=0, keepdim=True)
        torch.index_select(near, 1, best, out=distances.unsqueeze(1))
        chosen[index] = some.index_select(0, best)[0]
    return chosen.to(data.centre)


def lloyd(data: Chunks, means: Tensor, steps: int) -> Tensor:
    """Means (K, D) after some steps of Lloyd's algorithm; one without rows stays."""
    for _ in range(steps):
        sums, counts = torch.zeros_like(means), means.new_zeros(len(means), 1)
        for z in data:
            shares = nearest(z, means.to(z))
            sums += shares.T @ z
            counts += shares.sum(dim=0)[:, None]
        means = torch.where(counts > 0, sums / counts.clamp_min(1), means)
    return means


def nearest(z: Tensor, means: Tensor) -> Tensor:
    """1 for the mean nearest to every row and 0 for the others, (R, K)."""
    closeness = torch.addmm(-0.5 * means.square().sum(dim=1), z, means.T)
    index = closeness.argmax(dim=1, keepdim=True)
    return closeness.zero_().scatter_(1, index, 1.0)
