"""Detectors by family; every one is differentiable, and a higher score always means more out-of-distribution."""

from gatecrash.detectors.base import DETECTORS, Card, Detector, build, register
from gatecrash.detectors.calibrated import Temperature
from gatecrash.detectors.density import GMM, ZhengHong
from gatecrash.detectors.distance import Mahalanobis, RelativeMahalanobis
from gatecrash.detectors.ensemble import DeepEnsemble, ScoreEnsemble
from gatecrash.detectors.fit import Learner, fit_all
from gatecrash.detectors.gram import Gram
from gatecrash.detectors.logits import MSP, ODIN, Energy, MaxLogit, OutlierExposureScore
from gatecrash.detectors.scoring import scores_all
from gatecrash.detectors.words import MCM, CLIPZeroShot, clip_encoder

__all__ = [
    "DETECTORS",
    "CLIPZeroShot",
    "Card",
    "DeepEnsemble",
    "Detector",
    "Energy",
    "GMM",
    "Gram",
    "Mahalanobis",
    "Learner",
    "MaxLogit",
    "MCM",
    "MSP",
    "ODIN",
    "OutlierExposureScore",
    "RelativeMahalanobis",
    "ScoreEnsemble",
    "Temperature",
    "ZhengHong",
    "build",
    "clip_encoder",
    "fit_all",
    "register",
    "scores_all",
]
