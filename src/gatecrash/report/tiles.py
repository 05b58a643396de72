"""The key numbers of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from gatecrash.bundle import Row
from gatecrash.report.formats import NORMS, decimal, general, known, percent, span
from gatecrash.report.table import Table
from gatecrash.report.words import broken_detectors


class Tile(NamedTuple):
    """A number, what it is, and a remark."""

    value: str
    name: str
    remark: str


def tiles(rows: Sequence[Row], table: Table) -> list[Tile]:
    """The key numbers; those that the rows do not hold are left out."""
    candidates = [_broken(table), _clean(table), _lowest(table), _mape(rows), _way(rows), _images(rows)]
    return [tile for tile in candidates if tile]


def _broken(table: Table) -> Tile | None:
    if not table.settings:
        return None
    count = len(broken_detectors(table))
    return Tile(f"{count} of {len(table.detectors)}", "detectors broken", "by at least one attack")


def _clean(table: Table) -> Tile | None:
    aurocs = known(table.clean_auroc(pair) for pair in table.pairs)
    if not aurocs:
        return None
    return Tile(decimal(median(aurocs)), "AUROC without attack", f"median; {span(aurocs)}")


def _lowest(table: Table) -> Tile | None:
    found = [(table.auroc(pair, setting), pair, setting) for setting in table.settings for pair in table.pairs]
    measured = [(auroc, pair, setting) for auroc, pair, setting in found if auroc is not None]
    if not measured:
        return None
    auroc, pair, setting = min(measured, key=lambda item: item[0])
    return Tile(
        decimal(auroc), "lowest AUROC under attack", f"{pair.detector} on {pair.outliers}, {table.label(setting)}"
    )


def _mape(rows: Sequence[Row]) -> Tile | None:
    values = known(row.get("mape_median") for row in rows)
    if not values:
        return None
    return Tile(percent(median(values)), "median MAPE of the collisions", "how far the latent is from its target’s")


def _way(rows: Sequence[Row]) -> Tile | None:
    collisions = [row for row in rows if known([row.get("target_distance_median")]) and row["eps"] is not None]
    if not collisions:
        return None
    norm = collisions[0]["norm"]
    own = [row for row in collisions if row["norm"] == norm]
    moved = max(known(row["eps"] for row in own))
    target = median(known(row.get("target_distance_median") for row in own))
    return Tile(
        f"{general(moved)} of {general(target)}",
        f"{NORMS.get(norm or '', norm)} distance moved, at most",
        f"the target images are {general(target)} away, in the median",
    )


def _images(rows: Sequence[Row]) -> Tile | None:
    if not rows:
        return None
    inliers, outliers = max(row["n_in"] for row in rows), max(row["n_out"] for row in rows)
    return Tile(f"{inliers} + {outliers}", "images", "inliers + outliers of each set, at most")
