"""The architectures of the papers that no library provides, and the files their weights live in."""

from gatecrash.networks.densenet import DenseNetBC
from gatecrash.networks.registry import NETWORKS, Builder
from gatecrash.networks.resnet_cifar import ResNetCifar
from gatecrash.networks.weights import load_weights, save_weights

__all__ = ["NETWORKS", "Builder", "DenseNetBC", "ResNetCifar", "load_weights", "save_weights"]
