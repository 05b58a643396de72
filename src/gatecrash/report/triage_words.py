"""What a triage found, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import NamedTuple

from gatecrash.bundle import PurifiedRow, TriageResults, TriageRow
from gatecrash.report.formats import decimal, general, listed, probability, spread
from gatecrash.report.tiles import Tile
from gatecrash.report.triage_tables import best_points, detectors_of, label_of, of_task
from gatecrash.report.words import GUESSING

CHANCE = 0.05
"""From this p-value on, a difference may well be chance."""

RULE = (
    "AUROC is the probability that what is to be found scores higher than what is not; 0.5 is guessing. "
    "Who leads has the highest AUROC, on average over all attacks or sets of outliers."
)

_NAMED = 3
"""So many names stand in a sentence; further ones are counted."""

_TASKS = {"adversarial": "adversarial images", "outliers": "outliers"}


class Lead(NamedTuple):
    """The detectors with the highest AUROC; several where theirs read the same."""

    detectors: list[str]
    auroc: float
    """The mean over everything that is to be found."""


def lead(rows: Sequence[TriageRow]) -> Lead | None:
    """Who is best at a task, among those that were tried at all of it; None where nobody was."""
    everything = {label_of(row) for row in rows}
    means = {}
    for detector in detectors_of(rows):
        own = {label_of(row): row["auroc"] for row in rows if row["detector"] == detector}
        if len(own) == len(everything):
            means[detector] = mean(own.values())
    if not means:
        return None
    best = max(means.values())
    return Lead([name for name, auroc in means.items() if decimal(auroc, 3) == decimal(best, 3)], best)


def headline(rows: Sequence[TriageRow]) -> str:
    """The result in one sentence."""
    if not rows:
        return "No detector was measured."
    first = lead(of_task(rows, "mistakes"))
    others = {words: found for task, words in _TASKS.items() if (found := lead(of_task(rows, task)))}
    if first is None:
        return f"There were no mistakes to find{_elsewhere(others)}."
    row = next(row for row in of_task(rows, "mistakes") if row["detector"] == first.detectors[0])
    if first.auroc <= GUESSING:
        return f"No detector finds the classifier’s mistakes: the best is at {_auroc(row)}{_elsewhere(others)}."
    only = len(detectors_of(rows)) == 1
    verb = "finds" if len(first.detectors) == 1 else "find"
    claim = (
        f"{_who(first.detectors)} {verb} the classifier’s mistakes{'' if only else ' best'} ({_auroc(row)}{_p(row)})"
    )
    if only:
        return f"{claim}{_elsewhere(others, only=True)}."
    same = [words for words, found in others.items() if set(first.detectors) <= set(found.detectors)]
    too = f" and also {'leads' if verb == 'finds' else 'lead'} on {listed(same)}" if same else ""
    return f"{claim}{too}{_elsewhere({w: found for w, found in others.items() if w not in same})}."


def findings(results: TriageResults) -> list[tuple[str, str]]:
    """Everything that was to be found, with a sentence on who finds it."""
    rows, clean = results["rows"], results["accuracy"].get("inliers")
    found = []
    for row in {(row["task"], label_of(row)): row for row in rows}.values():
        own = [other for other in of_task(rows, row["task"]) if label_of(other) == label_of(row)]
        before = f"accuracy {decimal(clean, 3)} → {decimal(row.get('accuracy'), 3)}; " if "accuracy" in row else ""
        found.append((label_of(row), f"{before}{_ranking(own)}."))
    return found + [("purification", _purified(row)) for row in best_points(results["purified"])]


def tiles(results: TriageResults) -> list[Tile]:
    """The key numbers; those that the results do not hold are left out."""
    return [tile for tile in _tiles(results) if tile]


def _tiles(results: TriageResults) -> Iterable[Tile | None]:
    rows, accuracy = results["rows"], results["accuracy"]
    if "inliers" in accuracy:
        held_out = f"{decimal(accuracy['held_out'], 3)} on validation images" if "held_out" in accuracy else ""
        yield Tile(decimal(accuracy["inliers"], 3), "accuracy on test images", held_out)
    mistakes, attacked = of_task(rows, "mistakes"), of_task(rows, "adversarial")
    if mistakes:
        yield Tile(
            f"{mistakes[0]['n_out']}", "mistakes", f"of {mistakes[0]['n_in'] + mistakes[0]['n_out']} test images"
        )
        best = lead(mistakes)
        yield Tile(decimal(best.auroc, 3), "best AUROC for mistakes", _who(best.detectors)) if best else None
    fooled = [(row["accuracy"], label_of(row)) for row in attacked if "accuracy" in row]
    if fooled:
        lowest, attack = min(fooled)
        yield Tile(decimal(lowest, 3), "lowest accuracy under attack", attack)
    if rows:
        repeats = max(row["repeats"] for row in rows)
        remark = "no standard deviations" if repeats == 1 else "± is the standard deviation over them"
        yield Tile(f"{repeats}", "repeat" if repeats == 1 else "repeats", remark)


def _auroc(row: TriageRow) -> str:
    return f"AUROC {spread(row['auroc'], row['auroc_std'], row['repeats'])}"


def _p(row: TriageRow) -> str:
    """The p-value behind a comma, with a doubt where there is one; nothing where there is none."""
    if "p" not in row:
        return ""
    text, tied = probability(row["p"]), "\N{NO-BREAK SPACE}"
    sign = tied if text.startswith("<") else f"{tied}={tied}"
    return f", p{sign}{text}{', which may be chance' if row['p'] >= CHANCE else ''}"


def _who(detectors: Sequence[str]) -> str:
    """The detectors by name, or some of them and how many more."""
    if len(detectors) <= _NAMED:
        return listed(detectors)
    return f"{', '.join(detectors[: _NAMED - 1])} and {len(detectors) - _NAMED + 1} others"


def _elsewhere(others: dict[str, Lead], *, only: bool = False) -> str:
    """Who leads on what else."""
    parts = []
    for place, (words, found) in enumerate(others.items()):
        auroc = f"{'' if place else 'mean AUROC '}{decimal(found.auroc, 3)}"
        if only:
            parts.append(f"on {words} {'' if place else 'it reaches '}{auroc}")
        else:
            verb = "" if place else (" leads" if len(found.detectors) == 1 else " lead")
            parts.append(f"on {words} {_who(found.detectors)}{verb} ({auroc})")
    return f"; {', '.join(parts)}" if parts else ""


def _ranking(rows: Sequence[TriageRow]) -> str:
    """The best and the worst of one thing to be found, and those that only guess."""
    ordered = sorted(rows, key=lambda row: row["auroc"], reverse=True)
    (best, most), (worst, least) = ((row["detector"], decimal(row["auroc"], 3)) for row in (ordered[0], ordered[-1]))
    if len(ordered) == 1:
        return f"{best} has AUROC {most}"
    blind = [row["detector"] for row in rows if row["auroc"] <= GUESSING]
    guessing = f"; no better than guessing: {_who(blind)}" if blind else ""
    return f"{best} is best (AUROC {most}), {worst} worst ({least}){guessing}"


def _purified(row: PurifiedRow) -> str:
    """What the point of the grid that validation chooses does."""
    where = f"{row['detector']} with ε = {general(row['step'])} and ν = {general(row['pull'])}, chosen on validation"
    after = spread(row.get("test_after"), row.get("test_std"), row["repeats"])
    return f"{where}: test accuracy {decimal(row.get('test_before'), 3)} → {after}."
