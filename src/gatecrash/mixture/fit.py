"""EM that reads its data in chunks, so that memory does not grow with the number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gatecrash.mixture.covariance import COVARIANCES, CovarianceName, collapsed
from gatecrash.mixture.model import Mixture
from gatecrash.mixture.rows import Chunks, Rows, rows_at_once
from gatecrash.mixture.seeding import LLOYD_STEPS, lloyd, nearest, seeded
from gatecrash.progress import Bar, progress

Share: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rows (R, D) and what `Covariance.expand` made of them → shares of the components (R, K), log-likelihoods (R,)."""


class EM:
    """Expectation and maximisation on given data, a chunk of rows at a time."""

    def __init__(self, data: Chunks, covariance: CovarianceName, floor: float) -> None:
        self.name, self.floor, self.data = covariance, floor, data
        self.shape = COVARIANCES[covariance]
        self.fixed = self.shape.fixed_moments(self.data)

    def climb(self, mixture: Mixture, steps: int, tol: float, restart: int, bar: Bar) -> tuple[Mixture, Convergence]:
        """Steps from a mixture until the likelihood stands still."""
        history: list[float] = []
        converged = False
        while len(history) < steps and not converged:
            mixture, total = self.maximised(mixture, posterior_of(self.shape.joint(mixture, self.data.dtype)))
            history.append(float(total) / len(self.data))  # the one time a step waits for the device
            if not math.isfinite(history[-1]):
                raise ValueError(collapsed(self.floor))
            converged = len(history) > 1 and abs(history[-1] - history[-2]) < tol
            bar.advance(note=f"log-likelihood {history[-1]:.6g}")
        if not all(bool(part.isfinite().all()) for part in mixture.tensors):
            raise ValueError(collapsed(self.floor))
        return mixture, Convergence(len(history), converged, tuple(history), restart)

    def maximised(self, old: Mixture, share: Share) -> tuple[Mixture, Tensor]:
        """The most likely mixture for given shares of every row, and the summed log-likelihood of the rows."""
        total, counts, first = (torch.zeros_like(self.data.centre[0]) for _ in range(3))
        second, wide = self.fixed, self.fixed.dtype
        for z in self.data:
            expanded = self.shape.expand(z)
            shares, evidence = share(z, expanded)
            sums, squares = self.shape.moments(expanded, shares, old.means.to(z))
            total, counts = total + evidence.sum(dtype=wide), counts + shares.sum(dim=0, dtype=wide)
            first, second = added(first, sums), added(second, squares)
        alive = counts > torch.finfo(self.data.dtype).eps
        divisor = torch.where(alive, counts, 1.0)
        means = torch.where(alive[:, None], first / divisor[:, None], old.means)
        roots = self.shape.estimate(divisor, means, second, alive, old, self.floor)
        return Mixture(torch.where(alive, counts, 0.0) / counts.sum(), means, roots, self.name), total

    def around(self, means: Tensor) -> Mixture:
        """The mixture whose components are the rows nearest to every mean (K, D)."""
        weights = means.new_full((len(means),), 1 / len(means))
        roots = self.shape.roots_of(self.data.variance + self.floor, len(means))

        def share(z: Tensor, expanded: Tensor) -> tuple[Tensor, Tensor]:
            shares = nearest(z, means.to(z))
            return shares, shares[:, 0]

        return self.maximised(Mixture(weights, means, roots, self.name), share)[0]


@dataclass(frozen=True)
class Convergence:
    """How EM went, in the restart that was kept."""

    steps: int
    converged: bool
    """Whether the last step changed the mean log-likelihood by less than the tolerance."""
    log_likelihoods: tuple[float, ...]
    """The mean over the rows before every step."""
    restart: int


def fit_mixture(
    z: Tensor | Sequence[Tensor],
    components: int,
    covariance: CovarianceName = "diag",
    *,
    restarts: int = 1,
    steps: int = 100,
    tol: float = 1e-3,
    floor: float = 1e-6,
    seed: int = 0,
    start: Literal["kmeans++"] | Tensor | Mixture = "kmeans++",
    rows: int | None = None,
    members: Tensor | None = None,
) -> tuple[Mixture, Convergence]:
    """Fit a mixture of Gaussians to the rows of z (N, D), in z's precision and on its device.

    Besides z there is never more than a chunk of rows, however many there are. Sums over chunks are in float64, except
    on MPS. A component that no row belongs to is left where it was, with weight 0.

    Args:
        z: float32 or float64, finite; or several such with the same rows, which are then put side by side.
        components: K, at most N.
        covariance: "diag", "spherical", "tied" (one matrix for all components) or "full".
        restarts: starts of which the one with the highest likelihood is kept; a given start has only one.
        steps: at most so many EM steps.
        tol: EM has converged when a step changes the mean log-likelihood by less than this.
        floor: added to every variance. In float32 the variance of a component that collapses on one point is known
            only to about 1e-7 of that point's squared distance from the mean of all.
        seed: of the k-means++ starts; the caller's random state is left alone.
        start: "kmeans++" (`SEEDING_ROWS`, `LLOYD_STEPS`); means (K, D), whose nearest rows make the first components;
            or a mixture.
        rows: rows in a chunk; None chooses by K, D and the device.
        members: the indices of the rows to fit to, (M,); None is all of them.

    Raises:
        ValueError: an argument is out of range, z holds NaN or infinity, or a covariance collapsed.
    """
    check_options(components, covariance, restarts, steps, tol, floor, seed)
    data = Rows([z] if isinstance(z, Tensor) else z, members)
    check_data(data, components, rows)
    check_start(start, components, data.width, covariance)
    with torch.no_grad(), progress("fitting a mixture") as bar:
        em = EM(Chunks(data, rows or rows_at_once(components, data.width, data.device)), covariance, floor)
        centre = em.data.centre
        generator = torch.Generator(data.device).manual_seed(seed)
        runs: list[tuple[Mixture, Convergence]] = []
        for restart in range(restarts if isinstance(start, str) else 1):
            if isinstance(start, Mixture):
                first = start.to(centre).moved(-centre)
            elif isinstance(start, Tensor):
                first = em.around(start.to(centre) - centre)
            else:
                first = em.around(lloyd(em.data, seeded(em.data, components, generator), LLOYD_STEPS))
            runs = [*runs, em.climb(first, steps, tol, restart, bar)]
            runs = [max(runs, key=lambda run: run[1].log_likelihoods[-1])]
        mixture, convergence = runs[0]
        return mixture.moved(centre), convergence


def added(total: Tensor, part: Tensor) -> Tensor:
    """The sum, in the place of the total once that has the shape of its parts."""
    return total.add_(part) if total.shape == part.shape else total + part


def posterior_of(joint: Callable[[Tensor], Tensor]) -> Share:
    """Every component's posterior probability for every row, from log π_k + log N_k (R, K)."""

    def share(z: Tensor, expanded: Tensor) -> tuple[Tensor, Tensor]:
        shares = joint(expanded)
        top = shares.amax(dim=1, keepdim=True)
        # What is far below rounding is made 0: denormal numbers would slow down the matrix product that follows.
        negligible = math.log(torch.finfo(shares.dtype).tiny) / 2
        torch.threshold_(shares.sub_(top), negligible, -math.inf).exp_()
        sums = shares.sum(dim=1, keepdim=True)
        return shares.div_(sums), (top + sums.log()).squeeze(1)

    return share


def check_options(
    components: int, covariance: str, restarts: int, steps: int, tol: float, floor: float, seed: int = 0
) -> None:
    """Raises a ValueError when an option of `fit_mixture` is out of range."""
    if not isinstance(covariance, str):
        raise ValueError(f"covariance must be the name of one, got {covariance!r}; known: {', '.join(COVARIANCES)}")
    COVARIANCES[covariance]
    whole = {"components": components, "restarts": restarts, "steps": steps, "seed": seed}
    for name, value in whole.items():
        if type(value) is not int:
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 − 1, got {seed}")
    for name, value in (("components", components), ("restarts", restarts), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, number in (("tol", tol), ("floor", floor)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name} must be a number, got {number!r}")
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must not be negative, got {number:g}")


def check_data(data: Rows, components: int, rows: int | None) -> None:
    """Raises a ValueError when there are not enough rows, or they cannot be picked or cut into chunks of `rows`."""
    if components > len(data):
        raise ValueError(f"{components} components need at least as many samples, got {len(data)}")
    which = data.members
    if which is not None and (which.ndim != 1 or which.is_floating_point() or which.dtype == torch.bool):
        raise ValueError(f"members must be indices of shape (M,), got {which.dtype} {tuple(which.shape)}")
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"rows must be a whole number of at least 1, or None, got {rows!r}")


def check_start(start: object, components: int, width: int, covariance: str) -> None:
    """Raises a ValueError when `fit_mixture` cannot start there."""
    if isinstance(start, Mixture):
        if start.covariance != covariance:
            raise ValueError(f"start has covariance {start.covariance!r}, not {covariance!r}")
        roots = {
            "diag": (components, width),
            "spherical": (components,),
            "tied": (width, width),
            "full": (components, width, width),
        }[covariance]
        wanted = {"weights": (components,), "means": (components, width), "roots": roots}
        for (name, shape), part in zip(wanted.items(), start.tensors, strict=True):
            check_shape(part, name, shape)
    elif isinstance(start, Tensor):
        check_shape(start, "means", (components, width))
    elif not (isinstance(start, str) and start == "kmeans++"):
        raise ValueError(f"start must be 'kmeans++', means or a mixture, got {start!r}")


def check_shape(part: Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless a part of a start has a shape and is finite."""
    if part.shape != shape:
        raise ValueError(f"start must have {name} of shape {shape}, got {tuple(part.shape)}")
    if not bool(part.isfinite().all()):
        raise ValueError(f"start must have finite {name}")
