"""The table of AUROC before and after: what stands in each cell and how it is coloured."""

from __future__ import annotations

from typing import NamedTuple

from gatecrash.bundle import Row
from gatecrash.report.formats import ABSENT, decimal, known
from gatecrash.report.table import Pair, Table
from gatecrash.report.words import GUESSING, REVERSED

BANDS = (REVERSED, GUESSING, 0.7, 0.85, 0.95)
"""The AUROCs at which a cell's colour changes."""


class Cell(NamedTuple):
    """An AUROC as text, the band of its colour (None: no number), and its interval in words."""

    text: str
    band: int | None
    hint: str


class Line(NamedTuple):
    """A detector on a pair of sets: the cell without attack, then one per attack."""

    pair: Pair
    cells: list[Cell]


def lines(table: Table) -> list[Line]:
    """The lines of the table."""
    return [
        Line(pair, [_cell(table.clean(pair)), *(_cell(table.attacked(pair, setting)) for setting in table.settings)])
        for pair in table.pairs
    ]


def band_of(auroc: float) -> int:
    """The number of the band, from 0 (outliers look more familiar than inliers) to 5 (nearly all are told)."""
    return sum(auroc > bound if bound == GUESSING else auroc >= bound for bound in BANDS)


def legend() -> list[tuple[int, str]]:
    """Every band with its range in words."""
    bounds = [f"{bound:.2f}" for bound in BANDS]
    words = [f"below {bounds[0]}: reversed", f"to {bounds[1]}: guessing", *(f"to {bound}" for bound in bounds[2:])]
    return [*enumerate(words), (len(BANDS), f"from {bounds[-1]}")]


def _cell(row: Row | None) -> Cell:
    if row is None:
        return Cell(ABSENT, None, "not tried")
    if not known([row["auroc"]]):
        return Cell(ABSENT, None, "no AUROC")
    proven = f" ≥ {decimal(row['certified_auroc'])}" if "certified_auroc" in row else ""
    ends = [decimal(end, 3) for end in row["auroc_ci"] or []]
    interval = f", 95 % interval {' to '.join(ends)}" if ends else ""
    hint = f"AUROC {decimal(row['auroc'], 4)}{interval}"
    if proven:
        hint += f"; proven: no attack on the outliers comes below {decimal(row['certified_auroc'], 4)}"
    return Cell(decimal(row["auroc"]) + proven, band_of(row["auroc"]), hint)
