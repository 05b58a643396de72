"""The architectures of the papers that no library provides, and the files their weights live in."""

from gatecrash.networks.densenet import DenseNetBC
from gatecrash.networks.pretrained import PRETRAINED, Pretrained, pretrained_path
from gatecrash.networks.registry import NETWORKS, Builder
from gatecrash.networks.resnet_cifar import ResNetCifar
from gatecrash.networks.small_cnn import SmallCNN
from gatecrash.networks.weights import hash_of, load_weights, save_weights

__all__ = [
    "NETWORKS",
    "PRETRAINED",
    "Builder",
    "DenseNetBC",
    "Pretrained",
    "ResNetCifar",
    "SmallCNN",
    "hash_of",
    "load_weights",
    "pretrained_path",
    "save_weights",
]
