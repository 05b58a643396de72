"""Models of the data itself: how likely an image or a feature vector is, trained by the one fit loop."""

from gatecrash.densities.autoencoder import Autoencoder, Decoder
from gatecrash.densities.base import DENSITIES, Density, register
from gatecrash.densities.glow import Glow
from gatecrash.densities.maf import MAF
from gatecrash.densities.pixelcnn import PixelCNN
from gatecrash.densities.store import load_density, save_density
from gatecrash.densities.train import Likelihood, train_density
from gatecrash.densities.vae import VAE

__all__ = [
    "Autoencoder",
    "DENSITIES",
    "Decoder",
    "Density",
    "Glow",
    "Likelihood",
    "MAF",
    "PixelCNN",
    "VAE",
    "load_density",
    "register",
    "save_density",
    "train_density",
]
