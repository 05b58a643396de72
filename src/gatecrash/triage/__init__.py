"""Triage: one tool for a classifier's own mistakes, adversarial images and outliers."""

from gatecrash.triage.main import EXAMPLES, example_text, triage, triage_plan
from gatecrash.triage.plan import TriagePlan

__all__ = ["EXAMPLES", "TriagePlan", "example_text", "triage", "triage_plan"]
