"""The charts of a triage: ROC and precision-recall curves of all detectors, and histograms with a threshold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import altair as alt
import numpy as np
import torch
from torch import Tensor

from gatecrash.metrics import pr_curve, roc_curve
from gatecrash.report.bins import Bins, Values
from gatecrash.report.charts import INLIER, OUTLIER, Columns, Drawing, Specification, edges_of, framed, given

POINTS = 200
"""At most this many points of a curve are drawn."""

SERIES = 8
"""Colours of curves; further ones are the same colours dashed."""

_HEIGHT = 300
_DIGITS = 5


class Names(NamedTuple):
    """What the two sides of a task are called."""

    inside: str
    outside: str


TASKS = {
    "mistakes": Names("correct", "wrong"),
    "adversarial": Names("clean", "adversarial"),
    "outliers": Names("inliers", "outliers"),
}


class Curve(NamedTuple):
    """A detector's scores of both sides, and its place among the detectors, which is its colour."""

    detector: str
    series: int
    inside: Values
    outside: Values


def triage_specifications() -> dict[str, Specification]:
    """The specification of every kind of chart of a triage, without data."""
    kinds: dict[str, alt.TopLevelMixin] = {}
    for task, names in TASKS.items():
        kinds |= {
            f"{task}_roc": _roc_chart(names),
            f"{task}_pr": _pr_chart(names),
            f"{task}_scores": _histogram("linear", names),
            f"{task}_scores_log": _histogram("log", names),
        }
    return framed(kinds)


def roc_drawing(task: str, curves: Iterable[Curve]) -> Drawing:
    """The ROC curves of several detectors; those inside are positive."""
    points = _no_points()
    for curve in curves:
        roc = roc_curve(*_sides(curve))
        _append(points, curve, roc.fpr, roc.tpr)
    return {"spec": f"{task}_roc", "data": {"points": points, "chance": {"x": [0, 1], "y": [0, 1]}}}


def pr_drawing(task: str, curves: Iterable[Curve]) -> Drawing:
    """The precision-recall curves of several detectors; those outside are positive, because they are to be found."""
    points, share = _no_points(), 0.0
    for curve in curves:
        inside, outside = _sides(curve)
        share = len(outside) / (len(inside) + len(outside))
        found = pr_curve(-outside, -inside)
        _append(points, curve, found.recall, found.precision)
    return {"spec": f"{task}_pr", "data": {"points": points, "chance": {"x": [0, 1], "y": 2 * [round(share, _DIGITS)]}}}


def histogram_drawing(task: str, bins: Bins, inside: Values, outside: Values, threshold: float | None) -> Drawing:
    """Two histograms over the same bins, as counts and as shares of their side, with a threshold where there is one."""
    columns = edges_of(bins)
    for name, values in zip(TASKS[task], (inside, outside), strict=True):
        counts = bins.counts(values)
        columns[name] = counts.tolist()
        columns[f"share_{name}"] = (counts / max(counts.sum(), 1)).round(_DIGITS).tolist()
    marks: Columns = {"threshold": [] if threshold is None else [threshold]}
    return {"spec": f"{task}_scores{'_log' if bins.log else ''}", "data": {"bins": columns, "marks": marks}}


def thinned(x: Values, y: Values, count: int = POINTS) -> list[int]:
    """The places of at most `count` points of a curve, both ends among them, evenly spread along its length."""
    if len(x) <= count:
        return list(range(len(x)))
    length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    places = np.searchsorted(length, np.linspace(0, length[-1], count))
    places[-1] = len(x) - 1
    return [int(place) for place in np.unique(places)]


def colour(series: int) -> str:
    """The colour of a detector's curves."""
    return f"var(--series-{series % SERIES})"


def is_dashed(series: int) -> bool:
    """Whether a detector's curves are dashed, because their colour is another's too."""
    return series // SERIES % 2 == 1


def _sides(curve: Curve) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(curve.inside), torch.from_numpy(curve.outside)


def _no_points() -> Columns:
    return {name: [] for name in ("x", "y", "detector", "colour", "dash")}


def _append(points: Columns, curve: Curve, x: Tensor, y: Tensor) -> None:
    across, up = x.double().numpy(), y.double().numpy()
    shown = thinned(across, up)
    new: dict[str, list[Any]] = {
        "x": across[shown].round(_DIGITS).tolist(),
        "y": up[shown].round(_DIGITS).tolist(),
        "detector": [curve.detector] * len(shown),
        "colour": [colour(curve.series)] * len(shown),
        "dash": [[5, 3] if is_dashed(curve.series) else [1, 0]] * len(shown),
    }
    for name, column in new.items():
        points[name] += column


def _roc_chart(names: Names) -> alt.TopLevelMixin:
    return _curves_chart(f"{names.outside} accepted (FPR)", f"{names.inside} accepted (TPR)", "linear")


def _pr_chart(names: Names) -> alt.TopLevelMixin:
    # Between two points the average precision takes the precision of the second.
    return _curves_chart(f"{names.outside} rejected (recall)", f"{names.outside} among the rejected", "step-before")


def _curves_chart(x: str, y: str, interpolate: Literal["linear", "step-before"]) -> alt.TopLevelMixin:
    unit = alt.Scale(domain=[0, 1], nice=False)
    across = alt.X("x:Q", scale=unit, axis=alt.Axis(title=f"share of {x}", tickCount=5, format=".1f"))
    up = alt.Y("y:Q", scale=unit, axis=alt.Axis(title=f"share of {y}", tickCount=5, format=".1f"))
    chance = given("chance").mark_line(color="currentColor", opacity=0.45, strokeDash=[2, 4], strokeWidth=1)
    lines = given("points").mark_line(interpolate=interpolate, strokeWidth=1.8)
    return alt.layer(
        chance.encode(x=across, y=up),
        lines.encode(
            x=across,
            y=up,
            detail="detector:N",
            color=alt.Color("colour:N", scale=None),
            strokeDash=alt.StrokeDash("dash:N", scale=None),
            tooltip=["detector:N", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y)],
        ),
    ).properties(height=_HEIGHT)


def _histogram(scale: Literal["linear", "log"], names: Names) -> alt.TopLevelMixin:
    across = alt.Scale(type=scale, zero=False, nice=False)
    base = given("bins").encode(
        x=alt.X("low:Q", scale=across, axis=alt.Axis(title=None, tickCount=4, format=".3~g", labelOverlap=True)),
        x2="high:Q",
        tooltip=[
            alt.Tooltip("low:Q", title="from", format=".4~g"),
            alt.Tooltip("high:Q", title="to", format=".4~g"),
            *(alt.Tooltip(f"{name}:Q", title=f"{name}, images") for name in names),
        ],
    )
    shares = alt.Axis(title=None, tickCount=3, format=".0%")
    bars = [
        base.mark_rect(color=ink, opacity=0.6).encode(y=alt.Y(f"share_{name}:Q", axis=shares), y2=alt.datum(0))
        for name, ink in zip(names, (INLIER, OUTLIER), strict=True)
    ]
    rule = given("marks").mark_rule(color="currentColor", strokeDash=[4, 3], strokeWidth=1.4)
    tooltip = alt.Tooltip("threshold:Q", format=".4~g")
    return alt.layer(*bars, rule.encode(x=alt.X("threshold:Q", scale=across), tooltip=tooltip)).properties(height=110)
