"""Training: what a network learns from a batch, and a plain classifier."""

from gatecrash.training.classifier import train_classifier
from gatecrash.training.confident import ConfidentClassifier
from gatecrash.training.exposure import Exposure, Inner
from gatecrash.training.prepared import Prepared
from gatecrash.training.temporal import TemporalEnsembling, few_labels

__all__ = [
    "ConfidentClassifier",
    "Exposure",
    "Inner",
    "Prepared",
    "TemporalEnsembling",
    "few_labels",
    "train_classifier",
]
