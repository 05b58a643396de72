"""The histograms: scores before and after every attack, and how near the collisions came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gatecrash.report.bins import Bins, Values, shared_bins
from gatecrash.report.charts import Drawings, mape_drawing, scores_drawing
from gatecrash.report.formats import counted, decimal, general, named, percent, radius
from gatecrash.report.scores import Collisions, Samples, Scores
from gatecrash.report.table import Pair, Setting, Table


@dataclass(frozen=True)
class Panel:
    """One histogram with its caption; `chart` is None where there is nothing to draw."""

    caption: str
    remark: str
    chart: str | None
    description: str


@dataclass(frozen=True)
class Band:
    """A detector's histograms, without attack and under each, over the same bins."""

    detector: str
    remark: str
    panels: list[Panel]


@dataclass(frozen=True)
class Contest:
    """A pair of sets with the histograms of every detector on it."""

    name: str
    bands: list[Band]


def contests(table: Table, samples: Samples, drawings: Drawings) -> list[Contest]:
    """The histograms of scores by pair of sets; their charts join `drawings`."""
    several = len({pair.inliers for pair in table.pairs}) > 1
    by_sets: dict[str, list[Pair]] = {}
    for pair in table.pairs:
        name = f"{pair.outliers} against {pair.inliers}" if several else pair.outliers
        by_sets.setdefault(name, []).append(pair)
    return [Contest(name, [_band(table, samples, pair, drawings) for pair in pairs]) for name, pairs in by_sets.items()]


def mape_panels(collisions: Sequence[Collisions], drawings: Drawings) -> list[Panel]:
    """A histogram of MAPE per outlier set and attack, all over the same bins; their charts join `drawings`."""
    bins = shared_bins([collision.mape for collision in collisions], log=True)
    return [_mape_panel(collision, bins, drawings) for collision in collisions]


def _band(table: Table, samples: Samples, pair: Pair, drawings: Drawings) -> Band:
    tried: list[Setting | None] = [None, *(item for item in table.settings if table.attacked(pair, item))]
    scores = {setting: samples.scores(pair, setting) for setting in tried}
    bins = shared_bins([side for both in scores.values() for side in both])
    panels = [_scores_panel(table, pair, None, scores[None], bins, drawings)]
    for setting in table.settings:
        if setting in scores:
            panels.append(_scores_panel(table, pair, setting, scores[setting], bins, drawings))
        else:
            panels.append(Panel(table.label(setting), "not tried", None, ""))
    return Band(pair.detector, _remark(list(scores.values()), bins), panels)


def _scores_panel(
    table: Table, pair: Pair, setting: Setting | None, scores: Scores, bins: Bins, drawings: Drawings
) -> Panel:
    caption = table.label(setting) if setting else "without attack"
    auroc = table.auroc(pair, setting) if setting else table.clean_auroc(pair)
    remark = f"AUROC {decimal(auroc)}"
    if not len(scores.inliers) and not len(scores.outliers):
        return Panel(caption, f"{remark}; no scores were kept", None, "")
    return Panel(
        caption,
        remark,
        drawings.add(scores_drawing(bins, *scores)),
        f"Histogram of the scores of {pair.detector}, {caption}: "
        f"inliers {_middle(scores.inliers)}, {pair.outliers} {_middle(scores.outliers)}; {remark}.",
    )


def _mape_panel(collision: Collisions, bins: Bins, drawings: Drawings) -> Panel:
    median = percent(float(np.nanmedian(collision.mape)))
    caption = f"{collision.outliers}: {named(collision.attack, radius(collision.norm, collision.eps))}"
    remark = f"{counted(len(collision.mape), 'image')}, median {median}"
    beyond = bins.beyond(collision.mape)
    if beyond:
        remark += f", {beyond} beyond the axis in the outermost bins"
    return Panel(
        caption,
        remark,
        drawings.add(mape_drawing(bins, collision.mape)),
        f"Histogram of the MAPE of {caption}: {remark}.",
    )


def _remark(scores: Sequence[Scores], bins: Bins) -> str:
    """What the charts of a detector do not show where it stands."""
    values = np.concatenate([side for both in scores for side in both])
    beyond, missing = bins.beyond(values), int(np.isnan(values).sum())
    parts = []
    if beyond:
        infinite = int(np.isinf(values).sum())
        of_these = f", {infinite} of them infinite" if infinite else ""
        parts.append(f"{counted(beyond, 'score')} beyond the axis{of_these}: in the outermost bins.")
    if missing:
        parts.append(f"{counted(missing, 'score')} NaN: left out.")
    if bins.log:
        parts.append("Logarithmic axis.")
    return " ".join(parts)


def _middle(values: Values) -> str:
    values = values[~np.isnan(values)]
    return f"with median {general(float(np.median(values)))}" if len(values) else "not kept"
