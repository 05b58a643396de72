"""Named attacks from the literature, each a few lines: objective × ball × stepper."""

from gatecrash.attacks.classifier import bim, fgsm, pgd
from gatecrash.attacks.curve import Curve, CurveRow, curve_of, perturbation_curve
from gatecrash.attacks.expectation import Expected
from gatecrash.attacks.latent import collide
from gatecrash.attacks.mahalanobis import attack_mahalanobis
from gatecrash.attacks.minimal import Minimal, minimal
from gatecrash.attacks.nullspace import nullspace
from gatecrash.attacks.purify import purify
from gatecrash.attacks.registry import ATTACKS, Attack
from gatecrash.attacks.rounding import Rounded, RoundedFound, to_8bit
from gatecrash.attacks.score import admit, evict, score_to
from gatecrash.attacks.softmax import attack_softmax
from gatecrash.attacks.suite import WorstCase
from gatecrash.attacks.worst_case import worst_case

__all__ = [
    "ATTACKS",
    "Attack",
    "Curve",
    "CurveRow",
    "Expected",
    "Minimal",
    "Rounded",
    "RoundedFound",
    "WorstCase",
    "admit",
    "attack_mahalanobis",
    "attack_softmax",
    "bim",
    "collide",
    "curve_of",
    "evict",
    "fgsm",
    "minimal",
    "nullspace",
    "perturbation_curve",
    "pgd",
    "purify",
    "score_to",
    "to_8bit",
    "worst_case",
]
