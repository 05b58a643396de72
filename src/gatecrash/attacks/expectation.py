"""Randomised detectors are attacked through their expectation, which is itself a detector."""

from gatecrash.detectors.expected import Expected

__all__ = ["Expected"]
