"""The page: what every report has, put into its template and written beside the bundle."""

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

from gatecrash.bundle import Bundle, Results, TriageResults
from gatecrash.files import write_text
from gatecrash.report.charts import Drawings, Specification
from gatecrash.report.formats import cell, counted

_HERE = Path(__file__).parent


def write_page(bundle: Bundle, text: str) -> Path:
    """Write a page as the bundle's `report.html` and return where it stands."""
    # A name that came from a file system may hold lone surrogates, which no UTF-8 file can.
    write_text(bundle.report, text.encode("utf-8", "replace").decode("utf-8"))
    return bundle.report


def render_page(
    template: str,
    bundle: Bundle,
    results: Results | TriageResults,
    specifications: Mapping[str, Specification],
    drawings: Drawings,
    **content: Any,
) -> str:
    """A template filled with its content and with what every page has: checks, plan, manifest, charts, scripts."""
    scripts = {"vega": _vega(), "page": _own("page.js")}
    return (
        _environment()
        .get_template(template)
        .render(
            checks=results["checks"],
            verdict=_verdict([check["status"] for check in results["checks"]]),
            plan=bundle.plan_text(),
            manifest=_flat(results["manifest"]),
            charts={"specs": specifications, "charts": drawings.named},
            style=_own("page.css"),
            scripts=scripts,
            hashes=[_hash(script) for script in scripts.values()],
            **content,
        )
    )


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cells_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """The rows as texts, column by column."""
    return [[cell(row.get(name)) for name in columns] for row in rows]


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
