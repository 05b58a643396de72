"""Named attacks from the literature, each a few lines: objective × ball × stepper."""

from gatecrash.attacks.classifier import bim, fgsm, pgd
from gatecrash.attacks.latent import collide
from gatecrash.attacks.registry import ATTACKS, Attack
from gatecrash.attacks.score import admit, evict, score_to
from gatecrash.attacks.softmax import attack_softmax
from gatecrash.attacks.worst_case import WorstCase, worst_case

__all__ = [
    "ATTACKS",
    "Attack",
    "WorstCase",
    "admit",
    "attack_softmax",
    "bim",
    "collide",
    "evict",
    "fgsm",
    "pgd",
    "score_to",
    "worst_case",
]
