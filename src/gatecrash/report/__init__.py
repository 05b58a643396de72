"""The bundle made visible: one page that needs no network."""

from gatecrash.report.audit_page import write_report
from gatecrash.report.triage_page import write_triage_report

__all__ = ["write_report", "write_triage_report"]
