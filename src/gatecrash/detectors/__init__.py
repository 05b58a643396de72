"""Detectors by family; every one is differentiable, and a higher score always means more out-of-distribution."""

from gatecrash.detectors.base import DETECTORS, Card, Detector, build, register
from gatecrash.detectors.distance import Mahalanobis, RelativeMahalanobis
from gatecrash.detectors.ensemble import DeepEnsemble, ScoreEnsemble
from gatecrash.detectors.fit import Learner, fit_all
from gatecrash.detectors.logits import MSP, ODIN, Energy, MaxLogit, OutlierExposureScore

__all__ = [
    "DETECTORS",
    "Card",
    "DeepEnsemble",
    "Detector",
    "Energy",
    "Mahalanobis",
    "Learner",
    "MaxLogit",
    "MSP",
    "ODIN",
    "OutlierExposureScore",
    "RelativeMahalanobis",
    "ScoreEnsemble",
    "build",
    "fit_all",
    "register",
]
