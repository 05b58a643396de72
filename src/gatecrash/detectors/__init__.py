"""Detectors by family; every one is differentiable, and a higher score always means more out-of-distribution."""

from gatecrash.detectors.autoregressive import PixelCNNLikelihood
from gatecrash.detectors.base import DETECTORS, Card, Detector, build, register
from gatecrash.detectors.calibrated import Temperature
from gatecrash.detectors.certified import CCU, Certified
from gatecrash.detectors.collision_residual import CollisionResidual
from gatecrash.detectors.confident import Confident
from gatecrash.detectors.density import GMM, ZhengHong
from gatecrash.detectors.distance import Mahalanobis, RelativeMahalanobis
from gatecrash.detectors.ensemble import DeepEnsemble, ScoreEnsemble
from gatecrash.detectors.expected import Expected
from gatecrash.detectors.feature_density import FeatureMAF, FeatureVAE
from gatecrash.detectors.fit import Learner, fit_all
from gatecrash.detectors.gram import Gram
from gatecrash.detectors.jem import JEM
from gatecrash.detectors.likelihood import GlowLikelihood, InputComplexity
from gatecrash.detectors.logits import MSP, ODIN, Energy, MaxLogit, OutlierExposureScore
from gatecrash.detectors.reconstruction import Reconstruction
from gatecrash.detectors.scoring import scores_all
from gatecrash.detectors.words import MCM, CLIPZeroShot, clip_encoder

__all__ = [
    "CCU",
    "DETECTORS",
    "CLIPZeroShot",
    "Card",
    "Certified",
    "CollisionResidual",
    "Confident",
    "DeepEnsemble",
    "Detector",
    "Energy",
    "Expected",
    "FeatureMAF",
    "FeatureVAE",
    "GMM",
    "GlowLikelihood",
    "Gram",
    "InputComplexity",
    "JEM",
    "Mahalanobis",
    "Learner",
    "MaxLogit",
    "MCM",
    "MSP",
    "ODIN",
    "OutlierExposureScore",
    "PixelCNNLikelihood",
    "Reconstruction",
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
