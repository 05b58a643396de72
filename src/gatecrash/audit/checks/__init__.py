"""The audit doubts itself: every check of the evaluation page, by its name."""

from gatecrash.audit.checks import effort, followed, gradients, leakage, numbers, planted, tables
from gatecrash.audit.checks.evidence import Evidence
from gatecrash.audit.checks.registry import CHECKS, ORDER, Doubt, Finding
from gatecrash.audit.checks.run import TOO_SMALL, evidence_of, not_run, run_checks, verdicts

__all__ = [
    "CHECKS",
    "Doubt",
    "Evidence",
    "Finding",
    "ORDER",
    "TOO_SMALL",
    "effort",
    "evidence_of",
    "followed",
    "gradients",
    "leakage",
    "not_run",
    "numbers",
    "planted",
    "run_checks",
    "tables",
    "verdicts",
]
