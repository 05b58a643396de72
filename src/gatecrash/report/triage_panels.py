"""What is seen of every task: the curves of all detectors, and each detector's histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gatecrash.bundle import TriageRow
from gatecrash.report.bins import Values, shared_bins
from gatecrash.report.charts import Drawings
from gatecrash.report.formats import counted, decimal, general, known, listed
from gatecrash.report.panels import Panel
from gatecrash.report.triage_charts import (
    SERIES,
    TASKS,
    Curve,
    histogram_drawing,
    is_dashed,
    pr_drawing,
    roc_drawing,
)
from gatecrash.report.triage_scores import Sides, TriageSamples
from gatecrash.report.triage_tables import detectors_of, label_of


class Key(NamedTuple):
    """An entry of the legend: a detector and the look of its curves."""

    detector: str
    series: int
    dashed: bool


@dataclass(frozen=True)
class Trial:
    """One thing to be found, seen by all detectors."""

    name: str
    curves: list[Panel]
    histograms: list[Panel]


def legend_of(detectors: Sequence[str]) -> list[Key]:
    """The look of every detector's curves."""
    return [Key(name, place % SERIES, is_dashed(place)) for place, name in enumerate(detectors)]


def trials(task: str, rows: Sequence[TriageRow], samples: TriageSamples, drawings: Drawings) -> list[Trial]:
    """Everything that is to be found in a task; the charts join `drawings`. `rows` are those of all tasks."""
    series = {name: place for place, name in enumerate(detectors_of(rows))}
    by_name: dict[str, list[TriageRow]] = {}
    for row in rows:
        if row["task"] == task:
            by_name.setdefault(label_of(row), []).append(row)
    return [_trial(name, own, series, samples, drawings) for name, own in by_name.items()]


def _trial(
    name: str, rows: Sequence[TriageRow], series: dict[str, int], samples: TriageSamples, drawings: Drawings
) -> Trial:
    sides = [samples.sides(row) for row in rows]
    numbers = [Sides(*(side[~np.isnan(side)] for side in both)) for both in sides]
    curves = [
        Curve(row["detector"], series[row["detector"]], *both)
        for row, both in zip(rows, numbers, strict=True)
        if len(both.inside) and len(both.outside)
    ]
    return Trial(
        name,
        _curve_panels(rows, curves, drawings) if curves else [],
        [_histogram(row, both, drawings) for row, both in zip(rows, sides, strict=True)],
    )


def _curve_panels(rows: Sequence[TriageRow], curves: Sequence[Curve], drawings: Drawings) -> list[Panel]:
    task, against = rows[0]["task"], label_of(rows[0])
    inside, outside = TASKS[task]
    aurocs = listed([f"{row['detector']} {decimal(row['auroc'], 3)}" for row in rows])
    auprs = listed([f"{row['detector']} {decimal(row['aupr_out'], 3)}" for row in rows])
    return [
        Panel(
            "ROC",
            f"{inside} positive; the dotted line is guessing",
            drawings.add(roc_drawing(task, curves)),
            f"ROC curves, {against}, of the first repeat. AUROC: {aurocs}.",
        ),
        Panel(
            "Precision and recall",
            f"{outside} positive; the dotted line is guessing",
            drawings.add(pr_drawing(task, curves)),
            f"Precision-recall curves, {against}, of the first repeat. AUPR out: {auprs}.",
        ),
    ]


def _histogram(row: TriageRow, sides: Sides, drawings: Drawings) -> Panel:
    remark = f"AUROC {decimal(row['auroc'], 3)}"
    if not any(len(side) for side in sides):
        return Panel(row["detector"], f"{remark}; no scores were kept", None, "")
    bins = shared_bins(sides)
    threshold = _first_threshold(row)
    shown = threshold if threshold is not None and bins.low <= threshold <= bins.high else None
    remarks = [remark, *_remarks(np.concatenate(sides), bins.beyond(np.concatenate(sides)), log=bins.log)]
    if threshold is not None and shown is None:
        remarks.append("the threshold is beyond the axis")
    inside, outside = TASKS[row["task"]]
    return Panel(
        row["detector"],
        "; ".join(remarks),
        drawings.add(histogram_drawing(row["task"], bins, *sides, shown)),
        f"Histogram of the scores of {row['detector']}, {label_of(row)}: {inside} {_middle(sides.inside)}, "
        f"{outside} {_middle(sides.outside)}; threshold {general(threshold)}; {remark}.",
    )


def _first_threshold(row: TriageRow) -> float | None:
    """The threshold of the repeat whose scores are shown."""
    first = row["per_repeat"][0] if row["per_repeat"] else {}
    return next(iter(known([first.get("threshold"), row.get("threshold")])), None)


def _remarks(values: Values, beyond: int, *, log: bool) -> list[str]:
    """What a histogram does not show where it stands."""
    missing = int(np.isnan(values).sum())
    found = []
    if beyond:
        found.append(f"{counted(beyond, 'score')} beyond the axis, in the outermost bins")
    if missing:
        found.append(f"{counted(missing, 'score')} NaN, left out")
    if log:
        found.append("logarithmic axis")
    return found


def _middle(values: Values) -> str:
    values = values[~np.isnan(values)]
    return f"with median {general(float(np.median(values)))}" if len(values) else "not kept"
