"""The binarisation test: does the attack find what is certainly there?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatecrash.attacks.latent import latents
from gatecrash.audit.checks.evidence import Effort, Evidence, spread_rows
from gatecrash.audit.checks.registry import Finding, check, counted, per_attack
from gatecrash.ball import Ball
from gatecrash.protocols import Encoder, as_vectors
from gatecrash.search import generator_for, search

IMAGES = 32
"""Images that points must be planted for to prove anything."""

FOUND = 0.95
"""The share of planted points, or better ones, that the attack must find."""

EASY = 0.5
"""The share of planted points, found by chance, from which the test is too easy."""

AROUND = 8
"""Points per image that must score as outliers, the start among them; fewer where the latent has few numbers."""

FRESH = 4
"""Further random points per image, to see what chance finds."""


def planted_price(evidence: Evidence) -> int:
    """For every image, detector and attack: points to fit on, points of chance, and the attack."""
    return evidence.planted * sum(
        evidence.passes[title] * (AROUND + 1 + FRESH + effort.evaluations) for title, effort in evidence.heads
    )


@check("planted", price=planted_price, attack="own")
def planted(evidence: Evidence) -> Finding:
    """A point that scores as an inlier is planted in every ball, and the attack finds an inlier score in 95 %."""
    images = some_images(evidence, evidence.planted)

    def look(title: str, effort: Effort) -> Finding:
        encode = evidence.detector(title).encode
        batch, seed = evidence.job.batch_size, evidence.job.seed
        trap = plant(encode, images, effort.ball, seed, batch)
        start = images[trap.rows]
        if len(start) < len(images) / 2:
            return Finding(
                "warn", f"{title}: only for {len(start)} of {len(images)} images its latents tell a planted point apart"
            )
        found = search(
            trap,
            start,
            effort.ball,
            stepper=effort.stepper,
            steps=effort.steps,
            restarts=effort.restarts,
            stop=trap.threshold,
            generator=seed,
            batch_size=batch,
        )
        share, chance = float(found.success.float().mean()), trap.chance(start, effort.ball, seed + 2, batch)
        words = (
            f"{title}: the attack finds the inlier score that was planted in {effort.ball} for {share:.0%} of "
            f"{len(start)} images, {FRESH} random points for {chance:.0%} "
            f"(fitted against {counted(trap.others, 'other')} each)"
        )
        if share < FOUND:
            return Finding("fail", words)
        if chance > EASY:
            return Finding("warn", f"{words}; where chance finds it too, that says little")
        if len(images) < IMAGES:
            return Finding("warn", f"{words}; for proof it takes {IMAGES} images")
        return Finding("pass", words, 1 - share)

    return per_attack(evidence.heads, look)


def some_images(evidence: Evidence, count: int) -> Tensor:
    """Outliers, and inliers where these are too few, evenly spread over their sets."""
    sets = [images.x for images in evidence.job.outliers.values()]
    share = -(-count // len(sets))
    picked = torch.cat([x[spread_rows(len(x), share)] for x in sets])[:count]
    short = count - len(picked)
    inliers = evidence.job.inliers.x
    return torch.cat([picked, inliers[spread_rows(len(inliers), short)]]).to(evidence.job.device)


@dataclass(frozen=True)
class Trap:
    """A linear readout of every image's latent: −1, an inlier, at the planted point and 1 at others near the start."""

    encode: Encoder
    rows: Tensor
    """The images, among those given, whose readout does separate."""
    centre: Tensor
    scale: Tensor
    weight: Tensor
    others: int
    threshold: float = -0.9
    """Well on the planted point's side, so that leaving the others behind is not enough."""

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The readout of every image, (B,): low is inlier."""
        return self.read(as_vectors(self.encode(x)), rows)

    def read(self, z: Tensor, rows: Tensor) -> Tensor:
        """The readout of latents (B, D)."""
        return 1 - (((z - self.centre[rows]) * self.scale[rows]) * self.weight[rows]).sum(dim=1)

    def chance(self, start: Tensor, ball: Ball, seed: int, batch_size: int) -> float:
        """The share of images for which one of a few random points scores as an inlier."""
        rows = torch.arange(len(start), device=start.device)
        hit = torch.zeros(len(start), dtype=torch.bool, device=start.device)
        for x in random_points(start, ball, FRESH, seed):
            hit |= self.read(as_vectors(latents(self.encode, x, batch_size)), rows) <= self.threshold
        return float(hit.float().mean())


def plant(encode: Encoder, images: Tensor, ball: Ball, seed: int, batch_size: int) -> Trap:
    """A random point of every ball planted, and the readout fitted that tells it from others around the start.

    The readout is the shortest linear function of standardised latents that is −1 at the planted point and 1 at the
    others. In D dimensions that exists for D others in general position, but swings so widely that other points of
    the ball are below −1 as well; so there are at most D / 2 of them.
    """
    start = as_vectors(latents(encode, images, batch_size))
    others = max(1, min(AROUND, start.shape[1] // 2))
    points = [*random_points(images, ball, others - 1, seed), corner(images, ball, seed)]
    z = torch.stack([start, *(as_vectors(latents(encode, x, batch_size)) for x in points)], dim=1).cpu().double()
    centre = z[:, 0]
    spread = (z - centre[:, None]).square().mean(dim=1).sqrt()
    noise = 10 * torch.finfo(start.dtype).eps * centre.abs()
    scale = torch.where(spread > noise, 1 / spread.clamp_min(1e-300), 0)
    # Relative to the start, at which the readout is fixed, the last point is planted and the rest are around it.
    features = (z[:, 1:] - centre[:, None]) * scale[:, None]
    wanted = features.new_zeros(len(images), others)
    wanted[:, -1] = 2
    gram = features @ features.mT
    ridge = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
    solved = torch.linalg.solve(gram + ridge[:, None, None] * torch.eye(others).to(gram), wanted)
    weight = (features.mT @ solved[:, :, None]).squeeze(2)
    values = 1 - (features @ weight[:, :, None]).squeeze(2)
    separates = (values[:, -1] < -0.9) & (values[:, :-1] > 0.9).all(dim=1)
    rows = separates.nonzero().flatten()
    centre, scale, weight = (part[rows].to(start) for part in (centre, scale, weight))
    return Trap(encode, rows, centre, scale, weight, others)


def random_points(images: Tensor, ball: Ball, count: int, seed: int) -> list[Tensor]:
    """Random points of every image's ball, `count` batches of them."""
    source = generator_for(seed, images.device)
    return [
        ball.random_start(images, torch.rand(images.shape, generator=source, device=images.device, dtype=images.dtype))
        for _ in range(count)
    ]


def corner(images: Tensor, ball: Ball, seed: int) -> Tensor:
    """A random point of every image's ball that is as far out as the ball allows: every pixel by ±eps, projected."""
    source = generator_for(seed + 1, images.device)
    uniform = torch.rand(images.shape, generator=source, device=images.device, dtype=images.dtype)
    return ball.random_start(images, uniform.round())
