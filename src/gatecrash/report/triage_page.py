"""The page of a triage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gatecrash.bundle import Bundle
from gatecrash.report import triage_tables, triage_words
from gatecrash.report.charts import Drawings
from gatecrash.report.page import cells_of, columns_of, render_page, write_page
from gatecrash.report.triage_charts import TASKS, triage_specifications
from gatecrash.report.triage_panels import legend_of, trials
from gatecrash.report.triage_scores import TriageSamples


def write_triage_report(bundle: Bundle) -> Path:
    """Write a triage's `report.html`, one file that needs no network, and return where it stands.

    Raises:
        ValueError: the folder holds no finished triage, or a file of it is damaged.
    """
    return write_page(bundle, render(bundle))


def render(bundle: Bundle) -> str:
    """The page as HTML."""
    results, samples, drawings = bundle.triage(), TriageSamples(bundle.samples()), Drawings()
    rows = results["rows"]
    columns = [name for name in columns_of(rows) if name != "per_repeat"]
    return render_page(
        "triage.html.j2",
        bundle,
        results,
        triage_specifications(),
        drawings,
        title=_title(results["manifest"]),
        headline=triage_words.headline(rows),
        findings=triage_words.findings(results),
        rule=triage_words.RULE,
        tiles=triage_words.tiles(results),
        repeats=max((row["repeats"] for row in rows), default=1),
        legend=triage_tables.legend(),
        series=legend_of(triage_tables.detectors_of(rows)),
        mistakes=triage_tables.mistake_lines(rows),
        adversarial=triage_tables.adversarial_matrix(rows),
        outliers=triage_tables.outlier_lines(rows),
        points=triage_tables.points(results["purified"]),
        trials={task: trials(task, rows, samples, drawings) for task in TASKS},
        sides=TASKS,
        clean=triage_tables.accuracy_text(results["accuracy"]),
        columns=columns,
        rows=cells_of(rows, columns),
    )


def _title(manifest: dict[str, Any]) -> str:
    try:
        return f"Triage of {manifest['data']['inliers']['source']}"
    except (KeyError, TypeError):
        return "Triage"
