"""Training: a plain classifier, and the randomness that a seed determines."""

from gatecrash.training.classifier import seeded, train_classifier

__all__ = ["seeded", "train_classifier"]
