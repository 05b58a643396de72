"""Hardening: networks trained so that their detectors hold, and what that costs."""

from gatecrash.harden.main import EXAMPLES, HardenResults, example_text, first_process, harden_plan, listed_methods
from gatecrash.harden.plan import HardenPlan

__all__ = ["EXAMPLES", "HardenPlan", "HardenResults", "example_text", "first_process", "harden_plan", "listed_methods"]
