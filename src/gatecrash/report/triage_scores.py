"""The scores of a triage's first repeat, sorted into those in and those out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gatecrash.bundle import TriageRow
from gatecrash.report.bins import Values

_ROLES = {"adversarial": "adversarial", "outliers": "out"}
_COLUMNS = ("index", "score", "predicted", "label")


class Sides(NamedTuple):
    """The scores that one row of results was computed from; empty where they were not kept."""

    inside: Values
    outside: Values


class Scored(NamedTuple):
    """A detector's scores of a set, image by image, and which of them the classifier gets right."""

    scores: Values
    right: NDArray[np.bool_]


_NOTHING = Scored(np.empty(0), np.empty(0, dtype=bool))


class TriageSamples:
    """The rows of a triage's `samples.parquet` that belong to its first repeat, grouped."""

    def __init__(self, table: pa.Table) -> None:
        first = table.filter(pc.equal(table["repeat"], pc.min(table["repeat"])))
        keys = ["detector", "role", "set"]
        groups = first.group_by(keys, use_threads=False).aggregate([(name, "list") for name in _COLUMNS])
        self._sets = {}
        for place, (detector, role, name) in enumerate(zip(*(groups[key].to_pylist() for key in keys), strict=True)):
            columns = (_array(groups[f"{column}_list"][place].values) for column in _COLUMNS)
            # There is one set of test images, whatever it is called.
            self._sets[detector, role, "" if role == "in" else name] = _scored(*columns)

    def sides(self, row: TriageRow) -> Sides:
        """The scores of a row. Where it counts fewer adversarial images than there are, only those that fool count."""
        clean = self._sets.get((row["detector"], "in", ""), _NOTHING)
        if row["task"] == "mistakes":
            return Sides(clean.scores[clean.right], clean.scores[~clean.right])
        other = self._sets.get((row["detector"], _ROLES[row["task"]], row["against"]), _NOTHING)
        if row["task"] == "adversarial" and row["n_out"] < len(other.scores) == len(clean.scores):
            fooled = clean.right & ~other.right
            return Sides(clean.scores[fooled], other.scores[fooled])
        return Sides(clean.scores, other.scores)


def _scored(index: Values, score: Values, predicted: Values, label: Values) -> Scored:
    """One set in the order of its images; without labels nothing is right."""
    order = np.unique(index, return_index=True)[1]
    return Scored(score[order], (predicted == label)[order])


def _array(values: pa.Array) -> Values:
    array: Values = values.to_numpy(zero_copy_only=False).astype(np.float64)
    return array
