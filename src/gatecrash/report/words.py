"""What the rows say, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gatecrash.report.formats import counted, known, listed, span
from gatecrash.report.table import Pair, Setting, Table

GUESSING = 0.55
"""A detector at or below this AUROC does not tell outliers from inliers; 0.5 is guessing."""

REVERSED = 0.45
"""Below this AUROC a detector takes outliers for inliers more often than it does not."""

RULE = (
    f"A detector counts as broken where its AUROC is above {GUESSING} without attack and at or below that with it. "
    "An AUROC of 0.5 is guessing; below, outliers look more familiar to the detector than inliers do."
)


@dataclass(frozen=True)
class Outcome:
    """What one attack did to the pairs that their detectors could tell apart before."""

    setting: Setting
    label: str
    aurocs: dict[Pair, float]
    """The AUROC after the attack."""
    everyone: int
    """How many detectors the audit has."""

    @property
    def broken(self) -> list[Pair]:
        """The pairs that can no longer be told apart."""
        return [pair for pair, auroc in self.aurocs.items() if auroc <= GUESSING]

    @property
    def held(self) -> list[Pair]:
        """The pairs that still can."""
        return [pair for pair, auroc in self.aurocs.items() if auroc > GUESSING]

    def span(self, pairs: Sequence[Pair]) -> str:
        """The range of the pairs' AUROCs."""
        return f"AUROC {span([self.aurocs[pair] for pair in pairs])}"


def outcomes(table: Table) -> list[Outcome]:
    """What every attack did, in the order of the table."""
    able = [pair for pair in table.pairs if (table.clean_auroc(pair) or 0) > GUESSING]
    found = []
    for setting in table.settings:
        aurocs = {pair: table.auroc(pair, setting) for pair in able}
        measured = {pair: auroc for pair, auroc in aurocs.items() if auroc is not None}
        found.append(Outcome(setting, table.label(setting), measured, len(table.detectors)))
    return found


def broken_detectors(table: Table) -> list[str]:
    """The detectors that at least one attack breaks on at least one set."""
    return _detectors([pair for outcome in outcomes(table) for pair in outcome.broken])


def headline(table: Table) -> str:
    """The result in one sentence."""
    if not table.pairs:
        return "No detector was measured."
    if not table.settings:
        clean = known(table.clean_auroc(pair) for pair in table.pairs)
        measured = f" (AUROC {span(clean)})" if clean else ""
        verb = "was" if len(table.detectors) == 1 else "were"
        return f"{counted(len(table.detectors), 'detector')} {verb} measured without any attack{measured}."
    broken = broken_detectors(table)
    if broken:
        worst = max(outcomes(table), key=lambda outcome: len(outcome.broken))
        return f"{_subject(len(broken), len(table.detectors))} broken: after {worst.label} {_damage(worst)}."
    aurocs = known(table.auroc(pair, setting) for pair in table.pairs for setting in table.settings)
    left = f": under attack, AUROC {span(aurocs)}" if aurocs else ""
    return f"{_subject(0, len(table.detectors))} broken{left}."


def findings(table: Table) -> list[tuple[str, str]]:
    """Every attack with a sentence on what it did; before them, what could not be told even without one."""
    blind = [pair for pair in table.pairs if (clean := table.clean_auroc(pair)) is not None and clean <= GUESSING]
    names = "; ".join(f"{pair.detector} on {pair.outliers}" for pair in blind)
    before = [("without attack", f"no better than guessing: {names}.")] if blind else []
    return before + [(outcome.label, _finding(outcome)) for outcome in outcomes(table)]


def _subject(broken: int, tried: int) -> str:
    """How many detectors are or are not what follows."""
    if tried == 1:
        return "The detector is" if broken else "The detector is not"
    if not broken:
        return f"None of {tried} detectors is"
    return f"{broken} of {tried} detectors {'is' if broken == 1 else 'are'}"


def _finding(outcome: Outcome) -> str:
    if not outcome.aurocs:
        return "there was nothing to break: no detector that it was tried on could tell the outliers before."
    if not outcome.held:
        return f"{_damage(outcome)}."
    tried = _detectors(list(outcome.aurocs))
    if not outcome.broken:
        return f"breaks none of {counted(len(tried), 'detector')} ({outcome.span(outcome.held)})."
    return f"breaks {_names(outcome, outcome.broken)}, but not {_names(outcome, outcome.held)}."


def _damage(outcome: Outcome) -> str:
    """Who cannot tell what from what, among the broken pairs."""
    broken = outcome.broken
    detectors, inliers, outliers = ([*dict.fromkeys(names)] for names in zip(*broken, strict=True))
    named = [pair for pair in outcome.aurocs if pair.detector in detectors and pair.outliers in outliers]
    if len(named) != len(broken):
        return f"outliers get past {_names(outcome, broken)}"
    every = 1 < len(detectors) == outcome.everyone
    if all(outcome.aurocs[pair] < REVERSED for pair in broken):
        who = "all of them" if every else listed(detectors)
        verb = "ranks" if len(detectors) == 1 else "rank"
        what = f"{who} {verb} {listed(outliers)} below {listed(inliers)}"
    else:
        who = "none can" if every else f"{listed(detectors)} cannot"
        what = f"{who} tell {listed(outliers, 'or')} from {listed(inliers)}"
    return f"{what} ({outcome.span(broken)})"


def _names(outcome: Outcome, pairs: Sequence[Pair]) -> str:
    """The detectors of the pairs, each with its sets where these are not all of them, and the range of their AUROCs."""
    whole, partly = [], []
    for detector in _detectors(pairs):
        own = [pair.outliers for pair in pairs if pair.detector == detector]
        if len(own) == sum(pair.detector == detector for pair in outcome.aurocs):
            whole.append(detector)
        else:
            partly.append(f"{detector} on {listed(own)}")
    names = "; ".join([*([listed(whole)] if whole else []), *partly])
    return f"{names} ({outcome.span(pairs)})"


def _detectors(pairs: Sequence[Pair]) -> list[str]:
    return [*dict.fromkeys(pair.detector for pair in pairs)]
