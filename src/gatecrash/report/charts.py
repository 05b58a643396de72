"""The charts: one Vega-Lite specification per kind, and the columns that each chart of that kind is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import altair as alt
import numpy as np
from torch import Tensor

from gatecrash.report.bins import Bins, Values
from gatecrash.report.formats import percent

Columns = dict[str, list[Any]]
Specification = dict[str, Any]

COORDINATES = 512
"""At most this many coordinates of a latent are drawn, evenly chosen."""

INLIER, OUTLIER, START = "var(--inlier)", "var(--outlier)", "var(--start)"
"""Colours are the page's own, so that they follow its light and dark schemes."""

_FRAME = {
    "width": "container",
    "background": "transparent",
    "autosize": {"type": "fit"},
    "config": {
        "font": "system-ui, sans-serif",
        "text": {"fontSize": 12},
        "view": {"stroke": None},
        "axis": {
            **{f"{part}Color": "currentColor" for part in ("label", "title", "tick", "domain", "grid")},
            "gridOpacity": 0.12,
            "tickOpacity": 0.4,
            "domainOpacity": 0.4,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
        },
    },
}
"""What all charts have in common: the page's ink, and the width of their place."""


class Drawing(TypedDict):
    """What a chart is drawn from: the name of its specification and its data, column by column."""

    spec: str
    data: dict[str, Columns]


class Drawings:
    """The charts of a page, each under a name of its own."""

    def __init__(self) -> None:
        self.named: dict[str, Drawing] = {}

    def add(self, drawing: Drawing) -> str:
        """Takes a chart in and gives its name."""
        name = f"chart-{len(self.named)}"
        self.named[name] = drawing
        return name


def specifications() -> dict[str, Specification]:
    """The specification of every kind of chart of an audit, without data."""
    return framed(
        {
            "scores": _scores_chart("linear"),
            "scores_log": _scores_chart("log"),
            "mape": _mape_chart(),
            "latents": _latents_chart(),
        }
    )


def framed(kinds: Mapping[str, alt.TopLevelMixin]) -> dict[str, Specification]:
    """The specifications of several kinds of charts, with what all charts have in common."""
    return {name: {**chart.to_dict(), **_FRAME} for name, chart in kinds.items()}


def scores_drawing(bins: Bins, inliers: Values, outliers: Values) -> Drawing:
    """Two histograms over the same bins."""
    counts = {"inliers": bins.counts(inliers).tolist(), "outliers": bins.counts(outliers).tolist()}
    return {"spec": "scores_log" if bins.log else "scores", "data": {"bins": {**edges_of(bins), **counts}}}


def mape_drawing(bins: Bins, mape: Values) -> Drawing:
    """A histogram of MAPE; the bins are in fractions, the axis in per cent."""
    edges = {name: [100 * edge for edge in column] for name, column in edges_of(bins).items()}
    return {"spec": "mape", "data": {"bins": {**edges, "count": bins.counts(mape).tolist()}}}


def latents_drawing(target: Tensor, start: Tensor, found: Tensor, mape: float | None) -> Drawing:
    """Three latents of shape (D,), coordinate by coordinate, with the MAPE between the found one and the target's."""
    shown = np.unique(np.linspace(0, len(target) - 1, min(len(target), COORDINATES)).round().astype(int))
    columns = {"target": target, "start": start, "found": found}
    points: Columns = {"coordinate": shown.tolist()}
    for name, latent in columns.items():
        points[name] = [rounded(value) for value in latent.double().numpy()[shown]]
    return {"spec": "latents", "data": {"points": points, "note": {"text": [f"MAPE {percent(mape)}"]}}}


def _scores_chart(scale: Literal["linear", "log"]) -> alt.TopLevelMixin:
    axis = alt.Axis(title=None, tickCount=4, format=".3~g", labelOverlap=True)
    base = given("bins").encode(
        x=alt.X("low:Q", scale=alt.Scale(type=scale, zero=False, nice=False), axis=axis),
        x2="high:Q",
        tooltip=[
            alt.Tooltip("low:Q", title="from", format=".4~g"),
            alt.Tooltip("high:Q", title="to", format=".4~g"),
            "inliers:Q",
            "outliers:Q",
        ],
    )
    images = alt.Axis(title=None, tickCount=3, tickMinStep=1)
    return alt.layer(
        base.mark_rect(color=INLIER, opacity=0.65).encode(y=alt.Y("inliers:Q", axis=images), y2=alt.datum(0)),
        base.mark_rect(color=OUTLIER, opacity=0.65).encode(y=alt.Y("outliers:Q", axis=images), y2=alt.datum(0)),
    ).properties(height=88)


def _mape_chart() -> alt.TopLevelMixin:
    axis = alt.Axis(title="MAPE in %", tickCount=4, format=".2~g", labelOverlap="greedy", labelSeparation=8)
    base = given("bins").mark_rect(color=OUTLIER, opacity=0.8).properties(height=130)
    chart: alt.TopLevelMixin = base.encode(
        x=alt.X("low:Q", scale=alt.Scale(type="log", nice=False), axis=axis),
        x2="high:Q",
        y=alt.Y("count:Q", axis=alt.Axis(title="images", tickCount=3, tickMinStep=1)),
        y2=alt.datum(0),
        tooltip=[
            alt.Tooltip("low:Q", title="from %", format=".3~g"),
            alt.Tooltip("high:Q", title="to %", format=".3~g"),
            alt.Tooltip("count:Q", title="images"),
        ],
    )
    return chart


def _latents_chart() -> alt.TopLevelMixin:
    base = given("points").encode(
        x=alt.X("coordinate:Q", axis=alt.Axis(title="latent coordinate", tickMinStep=1), scale=alt.Scale(nice=False)),
        tooltip=["coordinate:Q", *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("target", "start", "found"))],
    )
    value = alt.Axis(title="value", tickCount=5)
    note = given("note").mark_text(align="right", baseline="bottom", dy=-5, color="currentColor")
    return alt.layer(
        base.mark_point(shape="diamond", filled=True, color=START, size=24, opacity=0.8).encode(
            y=alt.Y("start:Q", axis=value)
        ),
        base.mark_point(shape="circle", filled=True, color=INLIER, size=16, opacity=1).encode(
            y=alt.Y("target:Q", axis=value)
        ),
        base.mark_point(shape="circle", filled=False, color=OUTLIER, size=52, strokeWidth=1.4, opacity=0.9).encode(
            y=alt.Y("found:Q", axis=value)
        ),
        note.encode(x=alt.value("width"), y=alt.value(0), text="text:N"),
    ).properties(height=210)


def given(name: str) -> alt.Chart:
    """A chart of data that the page will give under `name`."""
    return alt.Chart(alt.NamedData(name=name))


def edges_of(bins: Bins) -> Columns:
    """The lower and the upper edge of every bin."""
    edges = [rounded(edge) for edge in bins.edges]
    return {"low": edges[:-1], "high": edges[1:]}


def rounded(value: float) -> float | None:
    """Six significant digits, which is more than a chart shows; None for what is not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
