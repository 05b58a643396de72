"""Models of the data itself: how likely an image or a feature vector is, trained by the one fit loop."""

from gatecrash.densities.base import DENSITIES, Density, register
from gatecrash.densities.store import load_density, save_density
from gatecrash.densities.train import Likelihood, train_density

__all__ = [
    "DENSITIES",
    "Density",
    "Likelihood",
    "load_density",
    "register",
    "save_density",
    "train_density",
]
