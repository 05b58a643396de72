"""Values counted in bins, so that a page holds counts and never the values themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

BINS = 40
_HUGE = 1e300
"""Scores beyond this count as infinite; the arithmetic of bin edges would overflow."""

_TAIL = 0.5
"""Per cent of the finite values at either end that may lie beyond the axis, in its outermost bins."""

_LONG = 2.0
"""Tails are left beyond the axis where they would stretch it by more than this factor."""

_WIDE = 100.0
"""Positive values whose axis spans more than this factor are counted in bins of equal ratio."""


@dataclass(frozen=True)
class Bins:
    """The edges that several histograms share."""

    edges: Values
    """(B+1,), ascending."""
    log: bool
    """Whether the bins are of equal ratio instead of equal width."""

    @property
    def low(self) -> float:
        """The left end of the axis."""
        return float(self.edges[0])

    @property
    def high(self) -> float:
        """The right end of the axis."""
        return float(self.edges[-1])

    def counts(self, values: Values) -> NDArray[np.int64]:
        """How many values are in each bin, (B,); those beyond the axis are in the outermost bins, NaN in none."""
        inside = np.clip(values[~np.isnan(values)], self.low, self.high)
        return np.histogram(inside, bins=self.edges)[0].astype(np.int64)

    def beyond(self, values: Values) -> int:
        """How many values lie beyond the axis."""
        return int(((values < self.low) | (values > self.high)).sum())


def shared_bins(groups: Sequence[Values], *, log: bool | None = None, count: int = BINS) -> Bins:
    """Bins for all groups, over their finite values except far tails.

    Args:
        groups: the values of several histograms.
        log: bins of equal ratio; None takes them where positive values span orders of magnitude. Values that are not
            positive then lie beyond the axis.
        count: how many bins.
    """
    pooled = np.concatenate([np.empty(0), *groups])
    finite = pooled[np.abs(pooled) < _HUGE]
    if log is None:
        log = _spans_magnitudes(finite)
    if log:
        low, high = _range(np.log10(finite[finite > 0]))
        return Bins(10 ** np.linspace(low, high, count + 1), log=True)
    low, high = _range(finite)
    return Bins(np.linspace(low, high, count + 1), log=False)


def _spans_magnitudes(values: Values) -> bool:
    if not len(values) or values.min() <= 0:
        return False
    low, high = np.percentile(values, [_TAIL, 100 - _TAIL])
    return bool(high > _WIDE * low)


def _range(values: Values) -> tuple[float, float]:
    """The range of the values, without their tails where these would take up most of it; never empty."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(end) for end in np.percentile(values, [_TAIL, 100 - _TAIL]))
    if high - low > _LONG * (inner_high - inner_low) > 0:
        low, high = inner_low, inner_high
    margin = max(abs(low) / 1000, 0.5) if low == high else 0.0
    return low - margin, high + margin
