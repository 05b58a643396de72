"""Mixtures of Gaussians: their likelihood, and EM that reads its data in chunks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gatecrash.progress import Bar, progress
from gatecrash.registry import Registry

CovarianceName = Literal["diag", "spherical", "tied", "full"]

Share: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rows (R, D) and what `Covariance.expand` made of them → shares of the components (R, K), log-likelihoods (R,)."""

SEEDING_ROWS = 64
"""k-means++ looks at no more than this many rows per component, drawn at random."""

LLOYD_STEPS = 10
"""Steps of Lloyd's algorithm between k-means++ and EM."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of K Gaussians in D dimensions.

    `roots` are square roots of the precisions, as scikit-learn's `precisions_cholesky_`: 1/σ for "diag" (K, D) and
    "spherical" (K,), a triangular R with Σ⁻¹ = R Rᵀ for "tied" (D, D) and "full" (K, D, D). A component of weight 0 is
    not part of the mixture. A stack of mixtures has one more dimension in front of every tensor.
    """

    weights: Tensor  # (K,)
    means: Tensor  # (K, D)
    roots: Tensor
    covariance: CovarianceName = "diag"

    def log_prob(self, z: Tensor) -> Tensor:
        """The log-likelihood of every row of z (B, D), shape (B,), differentiable in z; of half precision in float32.

        Computed in float64 (on MPS, which has none, in float32), in chunks of rows where no gradient is wanted.

        Raises:
            ValueError: z is not of shape (B, D).
        """
        components, width = self.means.shape
        z = check_rows(z, width)
        wide = widest(z.device)
        centre = (self.weights @ self.means).to(z.device, wide)
        covariance = COVARIANCES[self.covariance]
        joint = covariance.joint(self.to(centre).moved(-centre), wide)
        with_history = torch.is_grad_enabled() and z.requires_grad
        parts = (z,) if with_history else z.split(rows_at_once(components, width, z.device))
        return torch.cat([joint(covariance.expand(part.to(wide) - centre)).logsumexp(dim=1) for part in parts]).to(z)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and roots."""
        return self.weights, self.means, self.roots

    def to(self, other: Tensor) -> Mixture:
        """The mixture on another tensor's device, in its precision."""
        return Mixture(self.weights.to(other), self.means.to(other), self.roots.to(other), self.covariance)

    def moved(self, by: Tensor) -> Mixture:
        """The mixture with every mean moved by (D,)."""
        return Mixture(self.weights, self.means + by, self.roots, self.covariance)

    def __getitem__(self, index: int) -> Mixture:
        """One mixture of a stack."""
        return Mixture(self.weights[index], self.means[index], self.roots[index], self.covariance)


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


class Rows:
    """Rows of matrices that lie side by side, some of them or all, without a copy of more than is asked for.

    Args:
        parts: matrices (N, D_i).
        members: the indices of the rows that count, (M,); None is all of them.
    """

    def __init__(self, parts: Sequence[Tensor], members: Tensor | None = None) -> None:
        self.parts, self.members = check_parts(parts), members
        self.dtype, self.device = self.parts[0].dtype, self.parts[0].device
        self.width = sum(part.shape[1] for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0]) if self.members is None else len(self.members)

    def between(self, first: int, last: int) -> Tensor:
        """Consecutive rows, (R, D); a view where it can be one."""
        if self.members is not None:
            return self._picked(self.members[first:last])
        found = [part[first:last] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def at(self, which: Tensor) -> Tensor:
        """The rows with some numbers, (R, D), a copy."""
        return self._picked(which if self.members is None else self.members[which])

    def _picked(self, which: Tensor) -> Tensor:
        found = [part[which] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class Chunks:
    """Rows about their mean, a chunk at a time."""

    def __init__(self, data: Rows, rows: int) -> None:
        self.data, self.rows, self.dtype = data, rows, data.dtype
        wide, nothing = widest(data.device), torch.zeros((), device=data.device)
        self.centre = sum((part.sum(dim=0, dtype=wide) for part in self._parts()), nothing) / len(data)
        if not bool(self.centre.isfinite().all()):
            raise ValueError("the features hold NaN or infinity")
        self.shift = self.centre.to(data.dtype)
        self.centre = self.shift.to(wide)
        self.variance = sum((part.square().sum(dim=0, dtype=wide) for part in self), nothing) / len(data)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts():
            yield part - self.shift

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Some rows, drawn without replacement; all of them, in their order, where so many are asked for."""
        if count == len(self):
            return self.data.between(0, count) - self.shift
        chosen = torch.randperm(len(self), generator=generator, device=self.data.device)[:count]
        return self.data.at(chosen).sub_(self.shift)

    def _parts(self) -> Iterator[Tensor]:
        for first in range(0, len(self), self.rows):
            yield self.data.between(first, first + self.rows)


class Covariance(ABC):
    """What the covariances of a mixture have in common: how they enter the likelihood, and their best estimate."""

    def fixed_moments(self, data: Chunks) -> Tensor:
        """Second moments that do not depend on the shares of the components."""
        return torch.zeros_like(data.centre[0])

    def expand(self, z: Tensor) -> Tensor:
        """The functions of rows (R, D) in which likelihood and moments are linear."""
        return z

    @abstractmethod
    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Expanded rows → log π_k + log N(z; μ_k, Σ_k), (R, K)."""

    @abstractmethod
    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """First moments (K, D) and second moments of rows under their shares (R, K); they add up over chunks."""

    @abstractmethod
    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """The roots from second moments; those of components that are not alive stay the old ones."""

    @abstractmethod
    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """The roots of components that all have these variances (D,)."""


class Diagonal(Covariance):
    """A variance for every component and dimension: the log-density is linear in (z², z)."""

    def squares(self, z: Tensor) -> Tensor:
        """What the variances multiply."""
        return z.square()

    def expand(self, z: Tensor) -> Tensor:
        """(z², z)."""
        return torch.cat([self.squares(z), z], dim=1)

    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """One matrix product: −½ p z² + p μ z + constant, with p the precision."""
        width = mixture.means.shape[1]
        roots = mixture.roots.reshape(len(mixture.means), -1)
        precision = roots.square()
        linear = torch.cat([-0.5 * precision, precision * mixture.means], dim=1).to(dtype).T
        volume = roots.log().sum(dim=1) * (width // roots.shape[1])
        inner = (precision * self.squares(mixture.means)).sum(dim=1)
        constant = (mixture.weights.log() + volume - 0.5 * inner - 0.5 * width * math.log(2 * math.pi)).to(dtype)
        return lambda expanded: torch.addmm(constant, expanded, linear)

    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """One matrix product for both."""
        both, width = shares.T @ expanded, means.shape[1]
        return both[:, -width:], both[:, :-width]

    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """1 / √(E z² − (E z)² + floor)."""
        spread = (second / counts[:, None] - self.squares(means)) / (means.shape[1] // second.shape[1])
        roots = (spread.clamp_min(0) + floor).rsqrt()
        return torch.where(alive[:, None], roots, old.roots.reshape(roots.shape)).reshape(old.roots.shape)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ."""
        return variance.rsqrt().repeat(components, 1)


class Spherical(Diagonal):
    """One variance per component: as `Diagonal`, with |z|² in the place of z²."""

    def squares(self, z: Tensor) -> Tensor:
        """|z|², (R, 1)."""
        return z.square().sum(dim=1, keepdim=True)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ of the mean variance."""
        return variance.mean().rsqrt().repeat(components)


class Tied(Covariance):
    """One matrix for all components: plain distances after one whitening."""

    def fixed_moments(self, data: Chunks) -> Tensor:
        """The scatter Σ z zᵀ (D, D) of all rows."""
        scatter = torch.zeros_like(data.centre[0])
        for z in data:
            exact = z.to(scatter)
            scatter = scatter + exact.T @ exact
        return scatter

    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """−½ |(z − μ) R|², multiplied out."""
        white, width = mixture.means @ mixture.roots, mixture.means.shape[1]
        volume = mixture.roots.diagonal().log().sum()
        inner = white.square().sum(dim=1)
        constant = (mixture.weights.log() + volume - 0.5 * inner - 0.5 * width * math.log(2 * math.pi)).to(dtype)
        roots, linear = mixture.roots.to(dtype), white.to(dtype).T

        def joint(z: Tensor) -> Tensor:
            whitened = z @ roots
            return torch.addmm(constant, whitened, linear) - 0.5 * whitened.square().sum(dim=1, keepdim=True)

        return joint

    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """The first moments only: the second are fixed."""
        return shares.T @ expanded, expanded.new_zeros(())

    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """The root of (Σ z zᵀ − Σ_k N_k μ_k μ_kᵀ) / N + floor."""
        weights = torch.where(alive, counts, 0.0)
        between = (means * weights[:, None]).T @ means
        return precision_root((second - between) / weights.sum(), floor)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ on the diagonal."""
        return variance.rsqrt().diag()


class Full(Covariance):
    """A matrix for every component, a few components at a time."""

    def joint(self, mixture: Mixture, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """−½ |z R_k − μ_k R_k|²."""
        width = mixture.means.shape[1]
        volume = mixture.roots.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        constant = (mixture.weights.log() + volume - 0.5 * width * math.log(2 * math.pi)).to(dtype)
        roots = mixture.roots.to(dtype)
        white = (mixture.means[:, None] @ mixture.roots).squeeze(1).to(dtype)

        def joint(z: Tensor) -> Tensor:
            some = block(z)
            distances = [
                ((z @ part.transpose(0, 1).flatten(1)).unflatten(1, means.shape) - means).square().sum(dim=2)
                for part, means in zip(roots.split(some), white.split(some), strict=True)
            ]
            return constant - 0.5 * torch.cat(distances, dim=1)

        return joint

    def moments(self, expanded: Tensor, shares: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """The second moments are about the given means, so that little cancels."""
        some, second = block(expanded), []
        for centre, share in zip(means.split(some), shares.split(some, dim=1), strict=True):
            centred = expanded - centre[:, None]
            second.append((centred * share.T[:, :, None]).transpose(1, 2) @ centred)
        return shares.T @ expanded, torch.cat(second)

    def estimate(
        self, counts: Tensor, means: Tensor, second: Tensor, alive: Tensor, old: Mixture, floor: float
    ) -> Tensor:
        """The root of E (z − m)(z − m)ᵀ − (μ − m)(μ − m)ᵀ + floor, with m the old mean."""
        shift = means - old.means
        covariance = second / counts[:, None, None] - shift[:, :, None] * shift[:, None]
        alive = alive[:, None, None]
        unit = torch.eye(means.shape[1], device=means.device, dtype=means.dtype)
        return torch.where(alive, precision_root(torch.where(alive, covariance, unit), floor), old.roots)

    def roots_of(self, variance: Tensor, components: int) -> Tensor:
        """1/σ on the diagonals."""
        return variance.rsqrt().diag().repeat(components, 1, 1)


COVARIANCES: Registry[Covariance] = Registry("covariance")
COVARIANCES.register("diag")(Diagonal())
COVARIANCES.register("spherical")(Spherical())
COVARIANCES.register("tied")(Tied())
COVARIANCES.register("full")(Full())


def precision_root(covariance: Tensor, floor: float) -> Tensor:
    """A triangular R with (Σ + floor)⁻¹ = R Rᵀ; NaN where Σ + floor is not positive definite."""
    unit = torch.eye(covariance.shape[-1], device=covariance.device, dtype=covariance.dtype)
    lower, failed = torch.linalg.cholesky_ex(covariance + floor * unit)
    root: Tensor = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False).mT
    return root.masked_fill((failed != 0)[..., None, None], torch.nan)


def stacked(mixtures: Sequence[Mixture]) -> Mixture:
    """Several mixtures as a stack; the smaller ones are filled up with components of weight 0."""
    most = max(len(mixture.weights) for mixture in mixtures)

    def filled(tensor: Tensor, missing: int, value: Tensor) -> Tensor:
        return torch.cat([tensor, value.expand(missing, *tensor.shape[1:])])

    weights, means, roots = [], [], []
    for mixture in mixtures:
        missing = most - len(mixture.weights)
        weights.append(filled(mixture.weights, missing, mixture.weights.new_zeros(())))
        means.append(filled(mixture.means, missing, mixture.means[:1]))
        shared = mixture.covariance == "tied"
        roots.append(mixture.roots if shared else filled(mixture.roots, missing, mixture.roots[:1]))
    return Mixture(torch.stack(weights), torch.stack(means), torch.stack(roots), mixtures[0].covariance)


def log_prob_under(stack: Mixture, z: Tensor, which: Tensor) -> Tensor:
    """The log-likelihood of every row of z (B, D) under the mixture of a stack that `which` (B,) names, (B,).

    Raises:
        ValueError: z is not of shape (B, D).
    """
    z = check_rows(z, stack.means.shape[-1])
    if stack.covariance in ("diag", "spherical"):
        width = z.shape[1]
        weights, means, roots = (part.to(z)[which] for part in stack.tensors)
        roots = roots.reshape(*weights.shape, -1)
        distances = ((z[:, None] - means) * roots).square().sum(dim=2)
        volume = roots.log().sum(dim=2) * (width // roots.shape[2])
        joint: Tensor = weights.log() + volume - 0.5 * (distances + width * math.log(2 * math.pi))
        return joint.logsumexp(dim=1)
    order = which.argsort(stable=True)
    present, counts = which[order].unique_consecutive(return_counts=True)
    parts = zip(present.tolist(), z[order].split(counts.tolist()), strict=True)
    return torch.cat([stack[index].log_prob(part) for index, part in parts])[order.argsort()]


def widest(device: torch.device) -> torch.dtype:
    """The most precise numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def cells(device: torch.device) -> int:
    """How many numbers a temporary matrix may have."""
    return 1 << 22 if device.type == "cpu" else 1 << 26


def rows_at_once(components: int, width: int, device: torch.device) -> int:
    """How many rows a chunk has."""
    return max(1, cells(device) // (components + 2 * width))


def block(z: Tensor) -> int:
    """How many components with a matrix of their own are dealt with at once, for rows z (R, D)."""
    return max(1, cells(z.device) // z.numel())


def collapsed(floor: float) -> str:
    """The sentence for a covariance without an inverse."""
    return (
        f"a component's covariance collapsed: its rows do not vary in some direction, and floor={floor:g} does not "
        "hold it up; raise the floor or take fewer components"
    )


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


def check_rows(z: Tensor, width: int) -> Tensor:
    """The features, in float32 where they come in half precision.

    Raises:
        ValueError: they are not of shape (B, D) with D the width of what was fitted.
    """
    if z.ndim != 2 or z.shape[1] != width:
        raise ValueError(f"features must be of shape (B, {width}), as those of the fit were, got {tuple(z.shape)}")
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def check_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """The matrices without their history.

    Raises:
        ValueError: there is none, one is no matrix of float32 or float64, or they do not lie side by side.
    """
    found: list[Any] = list(parts) if isinstance(parts, list | tuple) else [parts]
    for part in found:
        if not isinstance(part, Tensor):
            raise ValueError(f"features must be a tensor (N, D), or several, got {type(part).__name__}")
        if part.ndim != 2 or part.dtype not in (torch.float32, torch.float64) or not part.shape[1]:
            raise ValueError(
                f"features must be float32 or float64 of shape (N, D), got {part.dtype} {tuple(part.shape)}"
            )
    if len({(len(part), part.dtype, part.device) for part in found}) != 1:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in found)
        raise ValueError(f"features in several parts must have the same rows, dtype and device, got {shapes or 'none'}")
    return [part.detach() for part in found]


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
