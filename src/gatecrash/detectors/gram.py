"""Gram: how far the correlations between a network's channels leave the range that inliers gave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gatecrash.detectors.base import Card, Detector, Stateful, register
from gatecrash.detectors.fit import Learner
from gatecrash.detectors.logits import max_softmax
from gatecrash.encoder import Encoder, as_encoder, upcast
from gatecrash.features import Reader, encoded
from gatecrash.images import Images
from gatecrash.protocols import Latent, leaves

TENTH = 10
"""Without held-out inliers, every tenth inlier is set aside to play their part."""
KEPT_BYTES = 256 << 20
"""What the statistics of inliers set aside may take; the inliers after that widen the ranges like all others."""
CACHED = 1 << 19
"""Values that are raised to all powers before the next ones, on a CPU."""
PIECE = 1 << 24
"""Values that `fit` works on at a time, however large its batches are."""


class Ranges(Stateful):
    """The range of every statistic of one layer for every predicted class, and how far others leave it.

    A bound near zero would make any deviation from it infinite: as a divisor none is smaller than `floor`, a
    millionth of the layer's largest bound, so that the units of the features do not matter.
    """

    lows: Tensor  # (K, P, R)
    highs: Tensor  # (K, P, R)
    floor: Tensor  # ()

    def set(self, lows: Tensor, highs: Tensor) -> None:
        """Take the ranges (K, P, R); a class that was never predicted, where low > high, gets those of all classes."""
        unseen = lows > highs
        self.lows = torch.where(unseen, lows.amin(dim=0), lows)
        self.highs = torch.where(unseen, highs.amax(dim=0), highs)
        largest = torch.maximum(self.lows.abs().amax(), self.highs.abs().amax())
        self.floor = 1e-6 * torch.where(largest > 0, largest, 1)

    def deviation(self, statistics: Tensor, predicted: Tensor) -> Tensor:
        """Σ relu(min − g) / |min| + relu(g − max) / |max| of statistics g (B, P, R), (B,)."""
        low, high = self.lows[predicted].to(statistics), self.highs[predicted].to(statistics)
        floor = self.floor.to(statistics)
        below = (low - statistics).relu() / low.abs().clamp_min(floor)
        above = (statistics - high).relu() / high.abs().clamp_min(floor)
        return (below + above).sum(dim=(1, 2))


@register("gram")
class Gram(Detector):
    """Deviation of Gram matrices from the range they have on inliers of the predicted class.

    For maps F (C, HW) of a layer and every power p, G = F^p (F^p)ᵀ, and g is the signed p-th root of its row sums, or
    of its entries. A layer's deviation is Σ relu(min − g) / |min| + relu(g − max) / |max| over powers and rows, divided
    by the largest softmax probability; min and max are those of the inliers of the same predicted class. τ is the sum
    of the layers' deviations, each divided by its mean on held-out inliers; where that mean is zero, by 1.

    `fit(inliers, held_out=…)` takes that mean from `held_out`. Without, every tenth inlier is set aside for it and
    does not widen the ranges; of fewer than ten none is, and the deviations are divided by 1. Inliers inside all
    ranges score exactly 0, and have no gradient.

    Args:
        encoder: taps the layers; whatever it pools is read unpooled. Vectors are maps of one place, tokens (B, T, D)
            maps of D channels and T places.
        layers: tap these instead.
        powers: the powers p, or a whole number n for 1, …, n.
        entries: keep every entry of the Gram matrix, as Liang et al. write it, instead of its row sums. Costs C²·HW
            per layer and power instead of C·HW, in float64, and the memory of C² numbers per image, layer and power.

    Raises:
        ValueError: no layer is named, a power is not a positive whole number, `entries` is neither True nor False, or
            the network's output is not (B, K).
    """

    card = Card(paper="Sastry & Oore, ICML 2020", year=2020, reads="maps", fit="inliers")

    scales: Tensor  # (L,), the mean deviation of every layer on held-out inliers

    def __init__(
        self,
        encoder: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        powers: int | Sequence[int] = 10,
        entries: bool = False,
    ) -> None:
        if not isinstance(entries, bool):
            raise ValueError(f"entries must be True or False, got {entries!r}")
        taps, names = tapped_maps(encoder, layers)
        wanted = check_powers(powers)
        super().__init__(taps, layers=names, powers=wanted, entries=entries)
        self.powers, self.entries = wanted, entries
        self.per_layer = nn.ModuleList(Ranges() for _ in names)
        self.sets_aside = True

    @property
    def fit_reader(self) -> Reader:
        """The maps and the logits, which other detectors may learn from too."""
        return super().encode if self.encoder is None else self.encoder

    def check_data(self, held_out: Images | None, outliers: Images | None) -> None:
        """Notes whether there will be held-out inliers, or some must be set aside."""
        self.sets_aside = held_out is None

    def learner(self) -> Learner:
        """Folds minimum and maximum batch by batch."""
        return Extremes(self)

    def settle(self, held_out: Images | None, outliers: Images | None) -> None:
        """The mean deviation of every layer on the held-out inliers, where there are some."""
        if held_out is None:
            return
        with torch.no_grad():
            parts = [
                self.deviations(piece)
                for (z,), _ in encoded(lambda x: [self.fit_reader(x)], held_out, self.device)
                for piece in self.pieces(z)
            ]
            if not parts:
                raise ValueError("held_out has no images")
            self.normalise(torch.cat(parts))

    def normalise(self, deviations: Tensor) -> None:
        """Divide the layers' deviations from now on by the means of these, (N, L)."""
        means = deviations.mean(dim=0)
        self.scales = torch.where(means > 0, means, 1)

    def encode(self, x: Tensor) -> Latent:
        """The statistics (B, P, R) of every layer, then the logits (B, K)."""
        return self.summary(leaves(super().encode(x)))

    def summary(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The statistics of every layer and the logits, from the maps of every layer and the logits."""
        *maps, logits = outputs
        if logits.ndim != 2:
            raise ValueError(f"Gram needs logits (B, K) as the network's output, got shape {tuple(logits.shape)}")
        statistics = gram_entries if self.entries else gram_rows
        with torch.autocast(logits.device.type, enabled=False):
            return *(statistics(as_maps(part), self.powers) for part in maps), logits

    def pieces(self, z: Latent) -> Iterator[tuple[Tensor, ...]]:
        """The summaries of a batch of maps and logits, few samples at a time."""
        parts = leaves(z)
        shapes = [as_maps(part[:1]).shape for part in parts[:-1]]
        largest = max(
            channels * (channels * len(self.powers) if self.entries else places) for _, channels, places in shapes
        )
        rows = max(1, PIECE // largest)
        for piece in zip(*(part.split(rows) for part in parts), strict=True):
            yield self.summary(piece)

    def deviations(self, z: Latent) -> Tensor:
        """The deviation of every layer over the largest softmax probability, (B, L); of half precision in float32."""
        *statistics, logits = map(upcast, leaves(z))
        predicted = logits.argmax(dim=1)
        pairs = zip(ranges_of(self), statistics, strict=True)
        total = torch.stack([ranges.deviation(part, predicted) for ranges, part in pairs], dim=1)
        return total / max_softmax(logits).unsqueeze(1)

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits, which decide whose ranges count."""
        return leaves(z)[-1:]

    def judge(self, z: Latent) -> Tensor:
        """The total deviation of every sample, (B,)."""
        deviations = self.deviations(z)
        return (deviations / self.scales.to(deviations)).sum(dim=1)


class Extremes:
    """Minimum and maximum of every statistic per predicted class, batch by batch, and the inliers set aside."""

    def __init__(self, detector: Gram) -> None:
        self.detector = detector
        self.lows: list[Tensor] = []
        self.highs: list[Tensor] = []
        self.aside: list[Tensor] = []
        self.seen = self.kept = 0

    def take(self, z: Latent, y: Tensor | None) -> None:
        """Widen the ranges by one batch of maps and logits, or set some of its rows aside."""
        for piece in self.detector.pieces(z):
            aside = self._aside(piece)
            if bool(aside.any()):
                self._keep([part[aside] for part in piece])
            self._widen([part[~aside] for part in piece])

    def finish(self) -> None:
        """Leave ranges and scales in the detector."""
        for ranges, low, high in zip(ranges_of(self.detector), self.lows, self.highs, strict=True):
            ranges.set(low, high)
        self.detector.scales = self.lows[0].new_ones(len(self.lows))
        if self.kept:
            pieces = zip(*(part[: self.kept].split(256) for part in self.aside), strict=True)
            self.detector.normalise(torch.cat([self.detector.deviations(piece) for piece in pieces]))

    def _aside(self, piece: Sequence[Tensor]) -> Tensor:
        logits = piece[-1]
        index = torch.arange(self.seen, self.seen + len(logits), device=logits.device)
        self.seen += len(logits)
        chosen = (index % TENTH == TENTH - 1) & (index // TENTH < self._room(piece))
        return chosen & self.detector.sets_aside

    @staticmethod
    def _room(piece: Sequence[Tensor]) -> int:
        """How many inliers can be set aside."""
        return max(1, KEPT_BYTES // sum(part[0].numel() * part.element_size() for part in piece))

    def _keep(self, piece: Sequence[Tensor]) -> None:
        """Set rows aside, in memory that is claimed once: many small pieces between large ones would fragment it."""
        if not self.aside:
            self.aside = [part.new_empty(self._room(piece), *part.shape[1:]) for part in piece]
        for store, part in zip(self.aside, piece, strict=True):
            store[self.kept : self.kept + len(part)] = part
        self.kept += len(piece[0])

    def _widen(self, piece: Sequence[Tensor]) -> None:
        *statistics, logits = piece
        if not self.lows:
            tables = [(logits.shape[1], *part.shape[1:]) for part in statistics]
            self.lows = [part.new_full(table, torch.inf) for part, table in zip(statistics, tables, strict=True)]
            self.highs = [-low for low in self.lows]
        predicted = logits.argmax(dim=1)
        for part, low, high in zip(statistics, self.lows, self.highs, strict=True):
            rows = predicted[:, None, None].expand_as(part)
            low.scatter_reduce_(0, rows, part, "amin")
            high.scatter_reduce_(0, rows, part, "amax")


def gram_rows(maps: Tensor, powers: Sequence[int]) -> Tensor:
    """The signed p-th roots of the row sums of F^p (F^p)ᵀ for maps F (B, C, HW), (B, P, C)."""
    sums, rows = RowSums.apply(maps, tuple(powers))
    # The largest term of a sum is 1: what is below the rounding error has cancelled.
    roots = signed_roots(sums, powers, sums.new_tensor(torch.finfo(maps.dtype).eps))
    statistics: Tensor = roots * rows.mT
    return statistics


class RowSums(torch.autograd.Function):
    """The row sums of F^p (F^p)ᵀ, each over the p-th power of its row's scale; and these scales.

    A row sum is Σ_h F_ch^p Σ_k F_kh^p. With M_h the largest |F_kh| of a place and a_c the largest |F_ch| M_h of a row,
    it is a_c^p Σ_h r_ch^p w_h for r_ch = F_ch M_h / a_c, w_h = Σ_k u_kh^p and u_kh = F_kh / M_h: no base is above 1,
    and the largest one of either sum is 1. M and a cancel out, and so are constants to the gradient.

    With k the gradient of the sums, that of r is Σ_p p·k_cp w_hp r_ch^(p−1), that of u is Σ_p p·(Σ_c k_cp r_ch^p)
    u_kh^(p−1), both by Horner's rule. No power is kept: few samples at a time are raised, in the same memory, and again
    for the gradient. There is no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, maps: Tensor, powers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Sums (B, P, C) and scales (B, C, 1) of maps (B, C, HW)."""
        size, memory = cache_for(maps, 4)
        parts = [row_sums(part, powers, memory[:, : len(part)]) for part in maps.split(size)]
        sums, weights, places, rows = (torch.cat(leaf) for leaf in zip(*parts, strict=True))
        ctx.save_for_backward(maps, weights, places, rows)
        ctx.powers = powers
        ctx.mark_non_differentiable(rows)
        return sums, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor, None]:
        """The gradient for the maps from that for the sums, (B, P, C)."""
        maps, weights, places, rows = ctx.saved_tensors
        size, memory = cache_for(maps, 3)
        gradient = torch.empty_like(maps)
        whole = (gradient, maps, weights, places, rows, slopes)
        for out, part, *known in zip(*(leaf.split(size) for leaf in whole), strict=True):
            row_sums_backward(out, part, known, ctx.powers, memory[:, : len(part)])
        return gradient, None


def row_sums(maps: Tensor, powers: Sequence[int], memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ_h r_ch^p w_hp (B, P, C), and w (B, P, HW), M (B, 1, HW) and a (B, C, 1)."""
    r, u, r_powers, u_powers = memory.unbind()
    places = above_zero(torch.abs(maps, out=u).amax(dim=1, keepdim=True))
    torch.mul(maps, places, out=r)
    rows = above_zero(torch.abs(r, out=u).amax(dim=2, keepdim=True))
    r.div_(rows)
    torch.div(maps, places, out=u)
    ones = maps.new_ones(len(maps), 1, maps.shape[1])
    sums, weights = [], []
    for across, within in zip(raised(r, powers, r_powers), raised(u, powers, u_powers), strict=True):
        weights.append(ones @ within)
        sums.append(weights[-1] @ across.mT)
    return torch.cat(sums, dim=1), torch.cat(weights, dim=1), places, rows


def row_sums_backward(
    out: Tensor, maps: Tensor, known: Sequence[Tensor], powers: Sequence[int], memory: Tensor
) -> None:
    """Write the gradient for maps (B, C, HW), given w, M, a and the gradient for the sums (B, P, C)."""
    weights, places, rows, slopes = known
    r, u, for_r = memory.unbind()
    torch.div(maps, places, out=u)
    torch.mul(maps, places, out=r).div_(rows)
    at_places = [slope @ row for slope, row in zip(slopes.split(1, dim=1), raised(r, powers, for_r), strict=True)]
    for_r.zero_()
    out.zero_()
    for power in range(powers[-1], 0, -1):
        for_r.mul_(r)
        out.mul_(u)
        if power in powers:
            index = powers.index(power)
            for_r.baddbmm_(slopes[:, index].unsqueeze(2), weights[:, index].unsqueeze(1), alpha=power)
            out.add_(at_places[index], alpha=power)
    out.div_(places).add_(for_r.div_(rows).mul_(places))


def cache_for(maps: Tensor, count: int) -> tuple[int, Tensor]:
    """How many samples to work on together, as many as a CPU's cache holds and elsewhere all; and memory for them."""
    size = min(len(maps), max(1, CACHED // maps[0].numel())) if maps.device.type == "cpu" else len(maps)
    return size, maps.new_empty(count, size, *maps.shape[1:])


def gram_entries(maps: Tensor, powers: Sequence[int]) -> Tensor:
    """The signed p-th roots of the entries of F^p (F^p)ᵀ for maps F (B, C, HW), (B, P, C·C).

    Rows are divided by their largest magnitude first. Two that are large at different places still have a product far
    below 1, whose tenth power float32 cannot hold: the product is in float64, where the device has it.
    """
    exact = maps if maps.device.type == "mps" else maps.double()
    rows = above_zero(exact.detach().abs().amax(dim=2, keepdim=True))
    raw = torch.stack(list(raised(exact / rows, powers)), dim=1)
    size, info = raw.detach().abs(), torch.finfo(exact.dtype)
    least = (info.eps * (size @ size.mT)).clamp_min(info.tiny**0.8)
    roots = signed_roots((raw @ raw.mT).flatten(2), powers, least.flatten(2))
    return (roots * (rows @ rows.mT).flatten(1).unsqueeze(1)).to(maps)


def above_zero(largest: Tensor) -> Tensor:
    """The largest magnitudes, 1 where all are zero: something to divide by."""
    return torch.where(largest > torch.finfo(largest.dtype).tiny, largest, 1)


def raised(values: Tensor, powers: Sequence[int], memory: Tensor | None = None) -> Iterator[Tensor]:
    """The values to each of the ascending powers, every one from the one before, and in its place in the memory."""
    current, reached = values, 1
    for power in powers:
        for _ in range(power - reached):
            current = torch.mul(current, values, out=memory)
        reached = power
        yield current


def signed_roots(values: Tensor, powers: Sequence[int], least: Tensor) -> Tensor:
    """sign(v)·|v|^(1/p) of values (B, P, R), and a line through 0 where |v| < least, so that the slope is finite."""
    exponents = (1 / torch.tensor(powers, dtype=values.dtype, device=values.device)).unsqueeze(1)
    size = values.abs()
    near = size < least
    # Unlike pow's, the last digits of exp and log do not depend on a value's place in memory.
    root = (torch.where(near, least, size).log() * exponents).exp()
    return torch.where(near, values / least, values.sign()) * root


def as_maps(z: Tensor) -> Tensor:
    """Maps (B, C, H, W), tokens (B, T, C) or vectors (B, C) as channels and places, (B, C, HW)."""
    if z.ndim < 2:
        raise ValueError(f"a tapped layer must give (B, C, …), got shape {tuple(z.shape)}")
    return z.unsqueeze(2) if z.ndim == 2 else z.mT if z.ndim == 3 else z.flatten(2)


def ranges_of(detector: Gram) -> list[Ranges]:
    """The ranges of every layer."""
    return [part for part in detector.per_layer if isinstance(part, Ranges)]


def tapped_maps(encoder: nn.Module, layers: str | Sequence[str] | None) -> tuple[Encoder, list[str]]:
    """The encoder with its layers, or others, unpooled and the logits after them; and the names of the layers."""
    encoder = as_encoder(encoder)
    if not (layers is None or isinstance(layers, str | Sequence)):
        raise ValueError(f"layers must be the names of layers, got {layers!r}")
    wanted = encoder.layers if layers is None else (layers,) if isinstance(layers, str) else layers
    names = list(dict.fromkeys(name for name in wanted if name is not None))
    if not names:
        raise ValueError("Gram reads the maps of layers and none is named: Gram(encoder, layers=['layer1', …])")
    return encoder.at([*names, None], pool=None), names


def check_powers(powers: int | Sequence[int]) -> list[int]:
    """The powers, ascending, when they are positive whole numbers."""
    wanted = list(powers) if isinstance(powers, Sequence) else list(range(1, powers + 1)) if type(powers) is int else []
    if not wanted or not all(type(power) is int and power > 0 for power in wanted):
        raise ValueError(f"powers must be positive whole numbers, or how many of 1, 2, …, got {powers!r}")
    return sorted(set(wanted))
