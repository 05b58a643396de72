"""Results on the terminal: tables, sentences, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gatecrash.audit.checks import TOO_SMALL, not_run
from gatecrash.audit.checks.registry import counted
from gatecrash.bundle import Bundle, Check, PurifiedRow, Results, Row, TriageResults, TriageRow
from gatecrash.harden import HardenResults


def print_results(results: Results, bundle: Bundle, as_json: bool) -> None:
    """The AUROC of every detector, clean and after each attack, and where the report is."""
    if as_json:
        print_line(json.dumps(results, indent=1))
        return
    columns: dict[str, str] = {}
    for row in results["rows"]:
        columns.setdefault(column_of(row), "")
    table = Table(title="AUROC")
    table.add_column("detector")
    table.add_column("outliers")
    for column in columns:
        table.add_column(column, justify="right")
    pairs = dict.fromkeys((row["detector"], row["outliers"]) for row in results["rows"])
    for detector, outliers in pairs:
        values = {
            column_of(row): f"{row['auroc']:.3f}" + proven(row)
            for row in results["rows"]
            if (row["detector"], row["outliers"]) == (detector, outliers)
        }
        table.add_row(detector, outliers, *(values.get(column, "") for column in columns))
    wide_console().print(table)
    for line in collision_lines(results["rows"]):
        print_line(line)
    print_checks(results["checks"])
    print_line(f"report: {bundle.report}")


def proven(row: Row) -> str:
    """What no attack on the outliers comes below, where the detector has a proof of that."""
    return f" ≥ {row['certified_auroc']:.3f}" if "certified_auroc" in row else ""


def print_checks(checks: Sequence[Check]) -> None:
    """The checks that failed or warn, a line each, and in one line those that were not run."""
    skipped = {check["name"]: reason for check in checks if (reason := not_run(check)) is not None}
    for check in checks:
        if check["status"] != "pass" and check["name"] not in skipped:
            print_line(
                f"check {check['name']} {'failed' if check['status'] == 'fail' else 'warns'}: {check['sentence']}"
            )
    for reason in dict.fromkeys(skipped.values()):
        names = [name for name, why in skipped.items() if why == reason]
        print_line(f"{counted(len(names), 'check')} not run, {reason}: {', '.join(names)}")


def strict_objection(checks: Sequence[Check]) -> str | None:
    """Why a result does not stand under --strict: a check failed, or one that applies could not be run."""
    failed = [check["name"] for check in checks if check["status"] == "fail"]
    unmade = [check["name"] for check in checks if not_run(check) == TOO_SMALL]
    if failed:
        return f"{counted(len(failed), 'check')} failed"
    if unmade:
        return (
            f"{counted(len(unmade), 'check')} could not be run, and what is not checked has not passed; "
            "audit more images, or with more steps"
        )
    return None


def print_triage(results: TriageResults, bundle: Bundle, as_json: bool) -> None:
    """How well every detector finds mistakes, adversarial images and outliers, and where the report is."""
    if as_json:
        print_line(json.dumps(results, indent=1))
        return
    rows = results["rows"]
    mistakes = [row for row in rows if row["task"] == "mistakes"]
    if mistakes:
        wide_console().print(mistakes_table(mistakes))
    for task, noun in (("adversarial", "adversarial images"), ("outliers", "outliers")):
        found = [row for row in rows if row["task"] == task]
        if found:
            wide_console().print(auroc_table(found, f"AUROC, {noun}", results["accuracy"]))
    if results["purified"]:
        wide_console().print(purified_table(results["purified"]))
    accuracy = ", ".join(f"{name} {value:.4f}" for name, value in results["accuracy"].items())
    print_line(f"accuracy of the classifier: {accuracy}")
    print_checks(results["checks"])
    print_line(f"report: {bundle.report}")


def mistakes_table(rows: Sequence[TriageRow]) -> Table:
    """A line per detector: the U test and how well it finds the classifier's mistakes."""
    first = rows[0]
    table = Table(title=f"The classifier's mistakes: {first['n_out']} of {first['n_in'] + first['n_out']} test images")
    table.add_column("detector")
    for column in ("U test p", "AUROC", "AUPR in", "AUPR out", "threshold", "precision", "recall"):
        table.add_column(column, justify="right")
    for row in rows:
        several = row["repeats"] > 1
        chosen = (
            [f"{row['threshold']:.4g}", f"{row['precision']:.3f}", f"{row['recall']:.3f}"]
            if "threshold" in row and "precision" in row
            else ["", "", ""]
        )
        table.add_row(
            row["detector"],
            f"{row['p']:.2g}" if "p" in row else "",
            give_or_take(row["auroc"], row["auroc_std"], several),
            give_or_take(row["aupr_in"], row["aupr_in_std"], several),
            give_or_take(row["aupr_out"], row["aupr_out_std"], several),
            *chosen,
        )
    return table


def auroc_table(rows: Sequence[TriageRow], title: str, accuracy: dict[str, float]) -> Table:
    """A line per detector, a column per set; the classifier's accuracy first, where that is known."""
    sets = list(dict.fromkeys(row["against"] for row in rows))
    table = Table(title=title)
    table.add_column("detector")
    for name in sets:
        table.add_column(f"{name}\naccuracy {accuracy[name]:.3f}" if name in accuracy else name, justify="right")
    for detector in dict.fromkeys(row["detector"] for row in rows):
        cells = {
            row["against"]: give_or_take(row["auroc"], row["auroc_std"], row["repeats"] > 1)
            for row in rows
            if row["detector"] == detector
        }
        table.add_row(detector, *(cells.get(name, "") for name in sets))
    return table


def purified_table(rows: Sequence[PurifiedRow]) -> Table:
    """A line per point of the grid: accuracy before and after."""
    table = Table(title="Accuracy before and after purification")
    table.add_column("detector")
    for column in ("step ε", "pull ν", "validation before", "after", "test before", "after"):
        table.add_column(column, justify="right")
    for row in rows:
        several = row["repeats"] > 1
        validation = (
            [
                f"{row['validation_before']:.4f}",
                give_or_take(row["validation_after"], row["validation_std"], several, 4),
            ]
            if "validation_before" in row
            else ["", ""]
        )
        test = [f"{row['test_before']:.4f}", give_or_take(row["test_after"], row["test_std"], several, 4)]
        table.add_row(row["detector"], f"{row['step']:g}", f"{row['pull']:g}", *validation, *test)
    return table


def print_hardening(results: HardenResults, folder: Path, as_json: bool) -> None:
    """Accuracy and detection of every method's model, clean and attacked, and where the models are."""
    if as_json:
        print_line(json.dumps(results, indent=1))
        return
    table = Table(title="Clean → under attack")
    pgd, softmax = (
        f"{ball_words('linf', results['attacks'][name]['eps'])}, {results['attacks'][name]['steps']} steps"
        for name in ("pgd", "softmax")
    )
    table.caption = f"accuracy under PGD, {pgd}; detection with both sides attacked, {softmax}"
    for column in ("method", "detector", "outliers"):
        table.add_column(column)
    for column in ("accuracy", "AUROC", "FPR95", "detection error"):
        table.add_column(column, justify="right")
    for row in results["rows"]:
        table.add_row(
            row["method"],
            row["detector"],
            row["outliers"],
            f"{row['accuracy']:.3f} → {row['pgd_accuracy']:.3f}",
            f"{row['auroc']:.3f} → {row['attacked_auroc']:.3f}",
            f"{row['fpr95']:.3f} → {row['attacked_fpr95']:.3f}",
            f"{row['detection_error']:.3f} → {row['attacked_detection_error']:.3f}",
        )
    wide_console().print(table)
    if results["plain"] is None:
        print_line("ce among the methods gives the plain model to compare with")
    for name, place in results["bundles"].items():
        print_line(f"{name}: model bundle:{folder / place}")


def give_or_take(mean: float, std: float, several: bool, digits: int = 3) -> str:
    """A mean with its standard deviation, where there are several values."""
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if several else f"{mean:.{digits}f}"


def column_of(row: Row) -> str:
    """The head of a row's column: the attack, its ball and its side."""
    if row["attack"] == "none":
        return "clean"
    side = "" if row["attack"].startswith("collide") else f"\n{row['side']}"
    return f"{row['attack']}\n{ball_text(row)}{side}"


def ball_text(row: Row) -> str:
    """A row's ball."""
    return ball_words(row["norm"], row["eps"] or 0.0)


def ball_words(norm: str | None, eps: float) -> str:
    """A ball in a few signs, small L∞ radii in grey levels."""
    if norm == "linf" and abs(255 * eps - round(255 * eps)) < 1e-6:
        return f"L∞ {round(255 * eps)}/255"
    return f"{'L∞' if norm == 'linf' else 'L2'} {eps:g}"


def collision_lines(rows: Sequence[Row]) -> list[str]:
    """A sentence per collision: how close the latents came, and how far the target was."""
    lines = {}
    for row in rows:
        if "mape_median" in row and "target_distance_median" in row:
            lines[row["attack"], row["outliers"], row["eps"]] = (
                f"{row['attack']} from {row['outliers']}: median MAPE {row['mape_median']:.4%}, "
                f"the target {row['target_distance_median']:.1f} away, {ball_text(row)} allowed"
            )
    return list(lines.values())


def print_listing(entries: list[dict[str, Any]], as_json: bool, hidden: set[str] | None = None) -> None:
    """Entries as a table or as JSON."""
    if as_json:
        print_line(json.dumps(entries, indent=1))
        return
    shown = [key for key in entries[0] if key not in (hidden or set())]
    table = Table()
    for key in shown:
        table.add_column(key, overflow="fold")
    for entry in entries:
        table.add_row(*(str(entry[key]) for key in shown))
    wide_console().print(table)


def wide_console() -> Console:
    """The terminal at its own width; a pipe or file wide enough that no table is squeezed.

    Labels are a user's: what looks like markup or an emoji's name in them is printed as it is.
    """
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False)


def print_line(text: str, stream: Any = None) -> None:
    """One piece of text, as it is."""
    (stream or sys.stdout).write(text + "\n")
