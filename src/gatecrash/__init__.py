"""Gatecrash attacks out-of-distribution detectors, measures how far they break, and hardens them.

>>> import torch, gatecrash as gate
>>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
>>> encoder = gate.Encoder(model)
>>> noise, images = torch.rand(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5)
>>> found = gate.collide(encoder, noise, images, gate.L2(2.0), steps=100)
>>> bool((found.mape < 0.01).all())
True
"""

from gatecrash import detectors, metrics, networks
from gatecrash.attacks import (
    Expected,
    admit,
    attack_mahalanobis,
    attack_softmax,
    bim,
    collide,
    evict,
    fgsm,
    minimal,
    nullspace,
    perturbation_curve,
    pgd,
    purify,
    score_to,
    to_8bit,
    worst_case,
)
from gatecrash.audit import audit, audit_plan
from gatecrash.ball import L2, Ball, Linf
from gatecrash.detectors import fit_all
from gatecrash.encoder import Encoder
from gatecrash.found import Found
from gatecrash.harden import harden_plan
from gatecrash.search import search
from gatecrash.stepper import Adamax, Apgd, Langevin, Normalised, Sign
from gatecrash.triage import triage, triage_plan

__version__ = "0.1.0"

__all__ = [
    "Adamax",
    "Apgd",
    "Ball",
    "Encoder",
    "Expected",
    "Found",
    "L2",
    "Langevin",
    "Linf",
    "Normalised",
    "Sign",
    "__version__",
    "admit",
    "attack_mahalanobis",
    "attack_softmax",
    "audit",
    "audit_plan",
    "bim",
    "collide",
    "detectors",
    "evict",
    "fgsm",
    "fit_all",
    "harden_plan",
    "metrics",
    "minimal",
    "networks",
    "nullspace",
    "perturbation_curve",
    "pgd",
    "purify",
    "score_to",
    "search",
    "to_8bit",
    "triage",
    "triage_plan",
    "worst_case",
]
