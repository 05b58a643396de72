"""The page: what a bundle holds, put into the template and written beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gatecrash.bundle import Bundle, Row
from gatecrash.files import write_text
from gatecrash.report import auroc_table, words
from gatecrash.report.charts import Drawings, specifications
from gatecrash.report.formats import cell, counted
from gatecrash.report.gallery import galleries
from gatecrash.report.panels import contests, mape_panels
from gatecrash.report.scores import Samples
from gatecrash.report.table import Table
from gatecrash.report.tiles import tiles

_HERE = Path(__file__).parent


def write_report(bundle: Bundle) -> Path:
    """Write the bundle's `report.html`, one file that needs no network, and return where it stands.

    Raises:
        ValueError: the folder holds no finished run, or a file of it is damaged.
    """
    # A name that came from a file system may hold lone surrogates, which no UTF-8 file can.
    text = render(bundle).encode("utf-8", "replace").decode("utf-8")
    write_text(bundle.report, text)
    return bundle.report


def render(bundle: Bundle) -> str:
    """The page as HTML."""
    results, samples, drawings = bundle.results(), Samples(bundle.samples()), Drawings()
    rows, table = results["rows"], Table(results["rows"])
    columns = list(dict.fromkeys(name for row in rows for name in row))
    scripts = {"vega": _vega(), "page": _own("page.js")}
    return (
        _environment()
        .get_template("template.html.j2")
        .render(
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
            rows=[[cell(row.get(name)) for name in columns] for row in rows],
            galleries=galleries(bundle.pictures(), drawings),
            contests=contests(table, samples, drawings),
            mape=mape_panels(samples.collisions(), drawings),
            checks=results["checks"],
            verdict=_verdict([check["status"] for check in results["checks"]]),
            plan=bundle.plan_text(),
            manifest=_flat(results["manifest"]),
            charts={"specs": specifications(), "charts": drawings.named},
            style=_own("page.css"),
            scripts=scripts,
            hashes=[_hash(script) for script in scripts.values()],
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _own(name: str) -> Markup:
    """A file of this folder, which is ours and needs no escaping."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))


@cache
def _vega() -> Markup:
    """The library that draws the charts, with all that it needs."""
    return Markup(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _hash(script: str) -> str:
    """A script's hash as a content security policy names it; the page runs these scripts and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _title(rows: Sequence[Row]) -> str:
    sets = list(dict.fromkeys(row["inliers"] for row in rows))
    return f"Out-of-distribution audit of {', '.join(sets)}" if sets else "Out-of-distribution audit"


def _verdict(statuses: Sequence[str]) -> str:
    """How the checks came out, in one sentence."""
    if not statuses:
        return "This run holds no checks."
    return f"{statuses.count('pass')} of {counted(len(statuses), 'check')} passed."


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested facts as pairs of a dotted name and a text."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))]
    return [(name, cell(value))]
