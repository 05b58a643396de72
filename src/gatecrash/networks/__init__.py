"""The architectures of the papers that no library provides, and the files their weights live in."""

from gatecrash.networks.densenet import DenseNetBC
from gatecrash.networks.gtsrb_stn import GtsrbStn
from gatecrash.networks.pretrained import PRETRAINED, Pretrained, pretrained_path
from gatecrash.networks.registry import NETWORKS, Builder
from gatecrash.networks.resnet18_in import resnet18_in
from gatecrash.networks.resnet34_cifar import ResNet34Cifar
from gatecrash.networks.resnet_cifar import ResNetCifar
from gatecrash.networks.small_cnn import SmallCNN
from gatecrash.networks.vgg13 import VGG13
from gatecrash.networks.weights import check_hash, hash_of, load_weights, save_weights
from gatecrash.networks.wide_resnet import WideResNet

__all__ = [
    "NETWORKS",
    "PRETRAINED",
    "Builder",
    "DenseNetBC",
    "GtsrbStn",
    "Pretrained",
    "ResNet34Cifar",
    "ResNetCifar",
    "SmallCNN",
    "VGG13",
    "WideResNet",
    "check_hash",
    "hash_of",
    "load_weights",
    "pretrained_path",
    "resnet18_in",
    "save_weights",
]
