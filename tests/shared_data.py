"""Real images and real weights for tests; a test that asks for a file that is not there is skipped.

The folder is named by the environment variable GATECRASH_SHARED_DATA, else it is `shared/data` beside the repository.
"""

from __future__ import annotations

import os
import zipfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from gatecrash.networks import DenseNetBC, ResNetCifar, load_weights

Pixels = npt.NDArray[np.uint8]
Channels = tuple[float, float, float]


class Classifier(NamedTuple):
    """A trained network in eval mode, and the normalisation of the images that it reads."""

    model: nn.Module
    mean: Channels
    std: Channels

    def logits(self, x: Tensor, batch_size: int = 50) -> Tensor:
        """The logits of images in [0, 1], without a graph."""
        mean, std = (torch.tensor(channels)[:, None, None] for channels in (self.mean, self.std))
        with torch.no_grad():
            return torch.cat([self.model((batch - mean) / std) for batch in torch.split(x, batch_size)])


def shared_file(name: str) -> Path:
    """The path of a shared file; skips the running test when it is not there."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("GATECRASH_SHARED_DATA", beside)) / name
    if not path.is_file():
        pytest.skip(f"needs the shared file {name}; set GATECRASH_SHARED_DATA to the folder that holds it")
    return path


def cifar10_test(count: int = 1000) -> tuple[Tensor, Tensor]:
    """The first `count` test images of CIFAR-10, (N, 3, 32, 32) in [0, 1], and their labels (N,)."""
    return _first(count, ["cifar10/cifar10_test_0.webp"], "cifar10/cifar10_test_labels.npz")


def gtsrb_test(count: int = 1000) -> tuple[Tensor, Tensor]:
    """The first `count` test images of GTSRB at side 32, (N, 3, 32, 32) in [0, 1], and their labels (N,)."""
    return _first(count, [f"gtsrb/gtsrb_test32_{part}.webp" for part in (0, 1)], "gtsrb/gtsrb_test32_labels.npz")


def tiny_imagenet(count: int = 1000, side: int = 32) -> tuple[Tensor, Tensor]:
    """Images of Tiny ImageNet spread evenly over its classes, (N, 3, side, side) in [0, 1], and their labels (N,)."""
    pixels, labels = _tiny_imagenet(shared_file("tiny_imagenet/tiny_imagenet_val5k.zip"), count, side)
    return _images(pixels), torch.from_numpy(labels)


def densenet_bc() -> Classifier:
    """DenseNet-BC (100, 12) trained on CIFAR-10."""
    model = load_weights(DenseNetBC(), shared_file("weights/densenet_bc_100_12_cifar10.pth"))
    return Classifier(model.eval(), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def resnet20() -> Classifier:
    """ResNet-20 trained on CIFAR-10."""
    model = load_weights(ResNetCifar(20), shared_file("weights/resnet20_cifar10.th"))
    return Classifier(model.eval(), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _first(count: int, mosaics: list[str], labels: str) -> tuple[Tensor, Tensor]:
    parts: list[Pixels] = []
    for mosaic in mosaics:
        if sum(map(len, parts)) < count:
            parts.append(_mosaic(shared_file(mosaic)))
    known = next(iter(np.load(shared_file(labels)).values()))
    pixels = np.concatenate(parts)[: min(count, len(known))]
    return _images(pixels), torch.from_numpy(known[: len(pixels)].astype(np.int64))


def _images(pixels: Pixels) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).contiguous()


@cache
def _mosaic(path: Path) -> Pixels:
    """The images (N, 32, 32, 3) of a mosaic that holds 100 of them to a row."""
    rows: Pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 32, 100, 32, 3)
    return rows.transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


@cache
def _tiny_imagenet(path: Path, count: int, side: int) -> tuple[Pixels, npt.NDArray[np.int64]]:
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.lower().endswith((".jpeg", ".jpg", ".png")))
        chosen = [names[i * len(names) // count] for i in range(count)] if count < len(names) else names
        images = [Image.open(archive.open(name)).convert("RGB").resize((side, side)) for name in chosen]
    classes = sorted({Path(name).parent.name for name in names})
    labels = [classes.index(Path(name).parent.name) for name in chosen]
    return np.stack([np.asarray(image) for image in images]), np.asarray(labels, dtype=np.int64)
