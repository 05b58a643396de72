"""The scores and MAPE of every image, found by detector, setting and set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gatecrash.report.bins import Values
from gatecrash.report.table import Pair, Setting

_KEYS = ("detector", "attack", "side", "norm", "eps", "set", "role")
_COLLISION = ("set", "attack", "norm", "eps")


class Scores(NamedTuple):
    """The scores that one row of results was computed from; empty where they were not kept."""

    inliers: Values
    outliers: Values


class Collisions(NamedTuple):
    """How near the collisions of one outlier set under one attack came to their targets."""

    outliers: str
    attack: str
    norm: str | None
    eps: float | None
    mape: Values
    """(n,), fractions."""


class Samples:
    """The rows of `samples.parquet`, grouped. Where they hold one set of inliers, its name need not be the rows'."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        inliers = pc.unique(table.filter(pc.equal(table["role"], "in"))["set"]).to_pylist()
        self._only_inliers = inliers[0] if len(inliers) == 1 else None
        self._groups = {_key(*key): _once(values) for key, values in _grouped(table, _KEYS, "attacked_score")}

    def scores(self, pair: Pair, setting: Setting | None) -> Scores:
        """The scores of a pair under an attack, or without one; a side that was not attacked has its clean scores."""
        attacked = setting.side if setting else "none"
        inliers = self._only_inliers or pair.inliers
        return Scores(
            self._scores(pair.detector, setting if attacked in ("in", "both") else None, "in", inliers),
            self._scores(pair.detector, setting if attacked in ("out", "both") else None, "out", pair.outliers),
        )

    def collisions(self) -> list[Collisions]:
        """The MAPE of every collision by outlier set and attack, one that several detectors share counted once."""
        collided = self._table.filter(pc.is_valid(self._table["mape"]))
        return [Collisions._make((*key, _distinct(values))) for key, values in _grouped(collided, _COLLISION, "mape")]

    def _scores(self, detector: str, setting: Setting | None, role: str, name: str) -> Values:
        attack = (setting.attack, role, setting.norm, setting.eps) if setting else ("none", "none", None, None)
        return self._groups.get(_key(detector, *attack, name, role), np.empty(0))


def _key(
    detector: str, attack: str, side: str, norm: str | None, eps: float | None, name: str, role: str
) -> tuple[Any, ...]:
    """What a group is found by: without an attack, side, norm and eps say nothing."""
    clean = attack == "none"
    return (detector, attack, *((None, None, None) if clean else (side, norm, eps)), name, role)


def _grouped(table: pa.Table, keys: tuple[str, ...], value: str) -> Iterator[tuple[tuple[Any, ...], Values]]:
    """The indices and values of every group, (2, n), in the order in which the groups first appear."""
    groups = table.group_by(list(keys), use_threads=False).aggregate([("index", "list"), (value, "list")])
    for group in groups.to_pylist():
        yield (
            tuple(group[key] for key in keys),
            np.array([group["index_list"], group[f"{value}_list"]], dtype=np.float64),
        )


def _once(indexed: Values) -> Values:
    """The first value of every index."""
    values: Values = indexed[1, np.sort(np.unique(indexed[0], return_index=True)[1])]
    return values


def _distinct(indexed: Values) -> Values:
    """The values, equal ones of the same index once."""
    values: Values = np.unique(indexed, axis=1)[1]
    return values
