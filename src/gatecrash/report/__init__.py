"""The bundle made visible: one page that needs no network."""

from gatecrash.report.page import write_report

__all__ = ["write_report"]
