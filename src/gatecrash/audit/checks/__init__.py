"""The audit doubts itself: every check of the evaluation page, by its name."""

from gatecrash.audit.checks import effort, gradients, leakage, planted, tables
from gatecrash.audit.checks.evidence import Evidence
from gatecrash.audit.checks.registry import CHECKS, ORDER, Doubt, Finding
from gatecrash.audit.checks.run import evidence_of, run_checks, verdicts

__all__ = [
    "CHECKS",
    "Doubt",
    "Evidence",
    "Finding",
    "ORDER",
    "effort",
    "evidence_of",
    "gradients",
    "leakage",
    "planted",
    "run_checks",
    "tables",
    "verdicts",
]
