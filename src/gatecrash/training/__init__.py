"""Training: what a network learns from a batch, and a plain classifier."""

from gatecrash.training.ccu import CertifiedUncertainty
from gatecrash.training.classifier import train_classifier
from gatecrash.training.confident import ConfidentClassifier, gan_samples, load_generator
from gatecrash.training.exposure import Exposure, Inner
from gatecrash.training.jem import JointEnergy, sample_jem
from gatecrash.training.prepared import Prepared
from gatecrash.training.temporal import TemporalEnsembling, few_labels

__all__ = [
    "CertifiedUncertainty",
    "ConfidentClassifier",
    "Exposure",
    "Inner",
    "JointEnergy",
    "Prepared",
    "TemporalEnsembling",
    "few_labels",
    "gan_samples",
    "load_generator",
    "sample_jem",
    "train_classifier",
]
