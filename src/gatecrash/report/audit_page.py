"""The page of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gatecrash.bundle import Bundle, Row
from gatecrash.report import auroc_table, words
from gatecrash.report.charts import Drawings, specifications
from gatecrash.report.gallery import galleries
from gatecrash.report.page import cells_of, columns_of, render_page, write_page
from gatecrash.report.panels import contests, mape_panels
from gatecrash.report.scores import Samples
from gatecrash.report.table import Table
from gatecrash.report.tiles import tiles


def write_report(bundle: Bundle) -> Path:
    """Write the bundle's `report.html`, one file that needs no network, and return where it stands.

    Raises:
        ValueError: the folder holds no finished run, or a file of it is damaged.
    """
    return write_page(bundle, render(bundle))


def render(bundle: Bundle) -> str:
    """The page as HTML."""
    results, samples, drawings = bundle.results(), Samples(bundle.samples()), Drawings()
    rows, table = results["rows"], Table(results["rows"])
    columns = columns_of(rows)
    return render_page(
        "audit.html.j2",
        bundle,
        results,
        specifications(),
        drawings,
        title=_title(rows),
        headline=words.headline(table),
        findings=words.findings(table),
        rule=words.RULE,
        tiles=tiles(rows, table),
        settings=[table.label(setting) for setting in table.settings],
        halves=table.has_halves,
        lines=auroc_table.lines(table),
        legend=auroc_table.legend(),
        columns=columns,
        rows=cells_of(rows, columns),
        galleries=galleries(bundle.pictures(), drawings),
        contests=contests(table, samples, drawings),
        mape=mape_panels(samples.collisions(), drawings),
    )


def _title(rows: Sequence[Row]) -> str:
    sets = list(dict.fromkeys(row["inliers"] for row in rows))
    return f"Out-of-distribution audit of {', '.join(sets)}" if sets else "Out-of-distribution audit"
