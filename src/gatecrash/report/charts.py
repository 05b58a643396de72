"""The charts: one Vega-Lite specification per kind, and the columns that each chart of that kind is drawn from."""

from __future__ import annotations

from typing import Any, TypedDict

import altair as alt
import numpy as np
from torch import Tensor

from gatecrash.report.bins import Bins, Values
from gatecrash.report.formats import percent

Columns = dict[str, list[Any]]

COORDINATES = 512
"""At most this many coordinates of a latent are drawn, evenly chosen."""

INLIER, OUTLIER, START = "var(--inlier)", "var(--outlier)", "var(--start)"
"""Colours are the page's own, so that they follow its light and dark schemes."""


class Drawing(TypedDict):
    """What a chart is drawn from: the name of its specification and its data, column by column."""

    spec: str
    data: dict[str, Columns]


def specifications() -> dict[str, dict[str, Any]]:
    """The specification of every kind of chart, without data."""
    kinds = {
        "scores": _scores_chart("linear"),
        "scores_log": _scores_chart("log"),
        "mape": _mape_chart(),
        "latents": _latents_chart(),
    }
    return {name: _plain(chart).to_dict() for name, chart in kinds.items()}


def scores_drawing(bins: Bins, inliers: Values, outliers: Values) -> Drawing:
    """Two histograms over the same bins."""
    counts = {"inliers": bins.counts(inliers).tolist(), "outliers": bins.counts(outliers).tolist()}
    return {"spec": "scores_log" if bins.log else "scores", "data": {"bins": {**_edges(bins), **counts}}}


def mape_drawing(bins: Bins, mape: Values) -> Drawing:
    """A histogram of MAPE; the bins are in fractions, the axis in per cent."""
    edges = {name: [100 * edge for edge in column] for name, column in _edges(bins).items()}
    return {"spec": "mape", "data": {"bins": {**edges, "count": bins.counts(mape).tolist()}}}


def latents_drawing(target: Tensor, start: Tensor, found: Tensor, mape: float | None) -> Drawing:
    """Three latents of shape (D,), coordinate by coordinate, with the MAPE between the found one and the target's."""
    shown = np.unique(np.linspace(0, len(target) - 1, min(len(target), COORDINATES)).round().astype(int))
    columns = {"target": target, "start": start, "found": found}
    points: Columns = {"coordinate": shown.tolist()}
    for name, latent in columns.items():
        points[name] = [_rounded(value) for value in latent.double().numpy()[shown]]
    return {"spec": "latents", "data": {"points": points, "note": {"text": [f"MAPE {percent(mape)}"]}}}


def _scores_chart(scale: str) -> alt.LayerChart:
    axis = alt.Axis(title=None, tickCount=4, format=".3~g", labelOverlap=True)
    base = alt.Chart(alt.Data(name="bins")).encode(
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


def _mape_chart() -> alt.Chart:
    axis = alt.Axis(title="MAPE in %", tickCount=4, format="~g", labelOverlap=True)
    return (
        alt.Chart(alt.Data(name="bins"))
        .mark_rect(color=OUTLIER, opacity=0.8)
        .encode(
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
        .properties(height=130)
    )


def _latents_chart() -> alt.LayerChart:
    base = alt.Chart(alt.Data(name="points")).encode(
        x=alt.X("coordinate:Q", axis=alt.Axis(title="latent coordinate", tickMinStep=1), scale=alt.Scale(nice=False)),
        tooltip=["coordinate:Q", *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("target", "start", "found"))],
    )
    value = alt.Axis(title="value", tickCount=5, format="~g")
    note = alt.Chart(alt.Data(name="note")).mark_text(align="right", baseline="top", dx=-6, dy=4, color="currentColor")
    return alt.layer(
        base.mark_point(shape="diamond", filled=True, color=START, size=16, opacity=0.7).encode(
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


def _plain(chart: alt.Chart | alt.LayerChart) -> alt.Chart | alt.LayerChart:
    """The chart with the page's typography and ink, as wide as its place."""
    return (
        chart.properties(width="container", background="transparent", autosize=alt.AutoSizeParams(type="fit"))
        .configure_view(stroke=None)
        .configure_axis(
            labelColor="currentColor",
            titleColor="currentColor",
            tickColor="currentColor",
            domainColor="currentColor",
            gridColor="currentColor",
            gridOpacity=0.12,
            tickOpacity=0.4,
            domainOpacity=0.4,
            labelFontSize=11,
            titleFontSize=11,
            titleFontWeight="normal",
        )
        .configure_text(fontSize=12)
        .configure(font="system-ui, sans-serif")
    )


def _edges(bins: Bins) -> Columns:
    edges = [_rounded(edge) for edge in bins.edges]
    return {"low": edges[:-1], "high": edges[1:]}


def _rounded(value: float) -> float | None:
    """Six significant digits, which is more than a chart shows; None for what is not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
