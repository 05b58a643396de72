"""The table of checks, and how what was found for every detector becomes one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gatecrash.audit.checks.evidence import Effort, Evidence, Shared
from gatecrash.audit.checks.evidence import Status as Status
from gatecrash.bundle import Check
from gatecrash.registry import Registry

SHOWN = 3
"""Detectors that the sentence of a failed check names before it counts the others."""


Attacks = Literal["none", "own"] | Shared


class Finding(NamedTuple):
    """How a doubt came out, for one detector or in all."""

    status: Status
    words: str
    closeness: float = 0.0
    """How near to failing it came, in units of the check's own; the nearest is the one reported when all pass."""


@dataclass(frozen=True)
class Doubt:
    """A check by its name: called with the evidence it gives its verdict and never raises."""

    name: str
    look: Callable[[Evidence], Finding]
    price: Callable[[Evidence], int]
    """The most network passes it may take, besides the attacks that several checks share."""
    attack: Attacks
    """Whether it makes no attack, only ones of its own with the plan's settings, or looks at shared ones."""
    free: Callable[[Evidence], Finding | None] = lambda evidence: None
    """What fails by the audit's own numbers, for where the check is too costly; None where nothing does."""

    def __call__(self, evidence: Evidence) -> Check:
        """The verdict; an error inside the check is a failure that says so."""
        try:
            finding = self.look(evidence)
        except Exception as error:
            return undone(self.name, error)
        return {"name": self.name, "status": finding.status, "sentence": sentence(finding.words)}


CHECKS: Registry[Doubt] = Registry("check")

ORDER = (
    "gradient_flows",
    "score_is_attacked",
    "steps_suffice",
    "restarts_suffice",
    "monotone_in_eps",
    "unbounded_breaks",
    "iterative_beats_single",
    "black_box_not_stronger",
    "collision_is_real",
    "deterministic",
    "planted",
    "pixel_budget",
    "both_sides",
    "precision_drift",
    "leakage",
)
"""The checks in the order in which they are reported."""


def check(
    name: str,
    *,
    price: Callable[[Evidence], int] = lambda evidence: 0,
    attack: Attacks = "none",
    free: Callable[[Evidence], Finding | None] = lambda evidence: None,
) -> Callable[[Callable[[Evidence], Finding]], Doubt]:
    """A decorator that enters a check under its name."""

    def enter(look: Callable[[Evidence], Finding]) -> Doubt:
        return CHECKS.register(name)(Doubt(name, look, price, attack, free))

    return enter


def per_detector(evidence: Evidence, look: Callable[[str], Finding]) -> Finding:
    """What was found for every detector, as one: the worst status, and in words those detectors that have it."""
    return worst([guarded(title, look, title) for title in evidence.job.detectors], "detectors")


def per_attack(looks: Sequence[tuple[str, Effort]], look: Callable[[str, Effort], Finding]) -> Finding:
    """What was found for every attack on a detector's score, as one; likewise."""
    return worst([guarded(title, look, title, effort) for title, effort in looks], "attacks on a score")


def guarded(title: str, look: Callable[..., Finding], *args: object) -> Finding:
    """A finding; an error on the way is a failure of the detector's."""
    try:
        return look(*args)
    except Exception as error:
        return Finding("fail", f"{title}: {in_words(error)}")


def worst(findings: Sequence[Finding], noun: str) -> Finding:
    """The worst of several findings: all that failed, else all that warn, else the one nearest to failing.

    Args:
        findings: at least one.
        noun: what they are about, in the plural.
    """
    for status in ("fail", "warn"):
        bad = list(dict.fromkeys(finding.words for finding in findings if finding.status == status))
        if bad:
            more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            return Finding("fail" if status == "fail" else "warn", "; ".join(bad[:SHOWN]) + more)
    nearest = max(findings, key=lambda finding: finding.closeness)
    several = f"{len(findings)} {noun} pass; nearest to failing is " if len(findings) > 1 else ""
    return nearest._replace(words=several + nearest.words)


def undone(name: str, error: Exception) -> Check:
    """The verdict of a check that an error ended."""
    return {"name": name, "status": "fail", "sentence": sentence(f"The check could not be done: {in_words(error)}")}


def in_words(error: Exception) -> str:
    """An error as a clause: its own words, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def sentence(words: str) -> str:
    """Words as a sentence: a full stop at the end."""
    return words if words.endswith((".", "!", "?")) else f"{words}."


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural where it must be."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
