"""The tables of a triage's page: what stands in each cell and how it is coloured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gatecrash.bundle import PurifiedRow, TriageRow
from gatecrash.report.auroc_table import BANDS, Cell, band_of
from gatecrash.report.formats import ABSENT, NORMS, decimal, general, known, named, percent, probability, spread
from gatecrash.report.words import GUESSING, REVERSED


class Line(NamedTuple):
    """A line of a table: what stands before it, and its cells."""

    heads: list[str]
    cells: list[Cell]


class Matrix(NamedTuple):
    """AUROCs by detector and attack, with the classifier's accuracy under each attack."""

    columns: list[str]
    accuracies: list[str]
    lines: list[Line]


class Point(NamedTuple):
    """A point of purification's grid."""

    detector: str
    step: str
    pull: str
    cells: list[str]
    """Accuracies before and after and their difference: on validation images, then on test images."""
    best: bool
    """Whether it has the detector's highest accuracy on validation images; the first among equals."""


def detectors_of(rows: Sequence[TriageRow]) -> list[str]:
    """The detectors in the order in which they first appear."""
    return list(dict.fromkeys(row["detector"] for row in rows))


def of_task(rows: Sequence[TriageRow], task: str) -> list[TriageRow]:
    """The rows of one task."""
    return [row for row in rows if row["task"] == task]


def label_of(row: TriageRow) -> str:
    """What is to be found, an attack with its norm."""
    norm = row["norm"]
    return named(row["against"], NORMS.get(norm, norm) if norm else "")


def legend() -> list[tuple[int, str]]:
    """Every band of colour with its range in words."""
    bounds = [f"{bound:.2f}" for bound in BANDS]
    first = [f"below {REVERSED:.2f}: the wrong way round", f"to {GUESSING:.2f}: guessing"]
    return [*enumerate([*first, *(f"to {bound}" for bound in bounds[2:])]), (len(BANDS), f"from {bounds[-1]}")]


def mistake_lines(rows: Sequence[TriageRow]) -> list[Line]:
    """A line per detector: AUROC, AUPR in and out, p, threshold, rates on the test and cross-validated, rejected."""
    return [
        Line(
            [row["detector"]],
            [
                auroc_cell(row),
                *(_cell(row, name) for name in ("aupr_in", "aupr_out")),
                Cell(probability(row.get("p")), None, f"U = {general(row.get('u'), 6)}"),
                Cell(_threshold(row), None, ""),
                *(_cell(row, name) for name in ("precision", "recall", "validated_precision", "validated_recall")),
                _cell(row, "rejected_in"),
            ],
        )
        for row in of_task(rows, "mistakes")
    ]


def outlier_lines(rows: Sequence[TriageRow]) -> list[Line]:
    """A line per set and detector: AUROC, AUPR in and out, FPR95, the share rejected."""
    return [
        Line(
            [label_of(row), row["detector"]],
            [auroc_cell(row), *(_cell(row, name) for name in ("aupr_in", "aupr_out", "fpr95", "rejected_out"))],
        )
        for row in of_task(rows, "outliers")
    ]


def adversarial_matrix(rows: Sequence[TriageRow]) -> Matrix | None:
    """The table of adversarial images; None where there are none."""
    own = of_task(rows, "adversarial")
    if not own:
        return None
    found = {(row["detector"], label_of(row)): row for row in own}
    columns = list(dict.fromkeys(label_of(row) for row in own))
    accuracies = {label_of(row): row.get("accuracy") for row in own}
    return Matrix(
        columns,
        [decimal(accuracies[column], 3) for column in columns],
        [
            Line([detector], [auroc_cell(found.get((detector, column))) for column in columns])
            for detector in detectors_of(own)
        ],
    )


def auroc_cell(row: TriageRow | None) -> Cell:
    """An AUROC with its colour."""
    if row is None or not known([row["auroc"]]):
        return Cell(ABSENT, None, "not tried" if row is None else "no AUROC")
    rejected = row.get("rejected_out")
    share = "" if rejected is None else f"; {percent(rejected)} rejected at the threshold"
    hint = f"AUROC {decimal(row['auroc'], 4)}, {row['n_in']} against {row['n_out']} images{share}"
    return Cell(_spread(row, "auroc"), band_of(row["auroc"]), hint)


def points(purified: Sequence[PurifiedRow]) -> list[Point]:
    """The grid of purification."""
    chosen = best_points(purified)
    return [
        Point(
            row["detector"],
            general(row["step"]),
            general(row["pull"]),
            [*_change(row, "validation"), *_change(row, "test")],
            any(row is best for best in chosen),
        )
        for row in purified
    ]


def best_points(purified: Sequence[PurifiedRow]) -> list[PurifiedRow]:
    """For every detector the point with the highest accuracy on validation images, the first among equals."""
    best: dict[str, PurifiedRow] = {}
    for row in purified:
        rival = best.get(row["detector"])
        if "validation_after" in row and (rival is None or row["validation_after"] > rival["validation_after"]):
            best[row["detector"]] = row
    return list(best.values())


def number_in(row: Mapping[str, object], name: str) -> float | None:
    """The number that a row has under a name; None where it has none."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None


def _change(row: PurifiedRow, name: str) -> list[str]:
    before, after, deviation = (number_in(row, f"{name}_{part}") for part in ("before", "after", "std"))
    # Rounded first, and + 0.0, so that a change too small to be seen is not called negative.
    moved = ABSENT if before is None or after is None else f"{round(after - before, 3) + 0.0:+.3f}"
    return [decimal(before, 3), spread(after, deviation, row["repeats"]), moved]


def _cell(row: TriageRow, name: str) -> Cell:
    return Cell(_spread(row, name), None, "")


def _spread(row: TriageRow, name: str) -> str:
    return spread(number_in(row, name), number_in(row, f"{name}_std"), row["repeats"])


def _threshold(row: TriageRow) -> str:
    text = general(row.get("threshold"))
    deviation = general(row.get("threshold_std"), 2)
    return text if row["repeats"] < 2 or text == ABSENT else f"{text} ±\N{NO-BREAK SPACE}{deviation}"


def accuracy_text(accuracy: Mapping[str, float]) -> str:
    """The accuracy on the test images as they are."""
    return decimal(accuracy.get("inliers"), 3)
