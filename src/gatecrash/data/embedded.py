"""The images that the package carries: a balanced sample of Fashion-MNIST and one fundus photograph."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gatecrash.registry import unknown

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FASHION_SPLITS = ("test", "train", "val")
_SIDE = 28


def fashion(split: str) -> tuple[Tensor, Tensor]:
    """The images (N, 1, 28, 28) and labels (N,) of a split: 6,000 of `train`, 1,000 each of `val` and `test`.

    Every ten images in a row hold each class once, so that the first n are balanced too.

    Raises:
        ValueError: there is no such split.
    """
    if split not in FASHION_SPLITS:
        raise ValueError(unknown("split of fashion", split, list(FASHION_SPLITS)))
    return _floats(_fashion_pixels(split)), torch.from_numpy(_fashion_table(f"{split}_labels"))


def fashion_rows(split: str) -> Tensor:
    """Where the images of a split stand in the original files (N,): `test` in t10k, `train` and `val` in train."""
    return torch.from_numpy(_fashion_table(f"{split}_rows"))


def fundus() -> Tensor:
    """A photograph of a healthy retina, (1, 3, 224, 224)."""
    return _floats(_pixels("fundus.png").transpose(2, 0, 1)[None])


@cache
def _fashion_pixels(split: str) -> NDArray[np.uint8]:
    mosaic = _pixels(f"fashion_{split}.png")
    rows, columns = mosaic.shape[0] // _SIDE, mosaic.shape[1] // _SIDE
    return mosaic.reshape(rows, _SIDE, columns, _SIDE).transpose(0, 2, 1, 3).reshape(-1, 1, _SIDE, _SIDE)


def _fashion_table(name: str) -> NDArray[np.int64]:
    with as_file(_embedded("fashion_labels.npz")) as path, np.load(path, allow_pickle=False) as tables:
        table: NDArray[np.int64] = tables[name].astype(np.int64)
    return table


@cache
def _pixels(name: str) -> NDArray[np.uint8]:
    with _embedded(name).open("rb") as file, Image.open(file) as picture:
        return np.array(picture)


def _embedded(name: str) -> Traversable:
    return files("gatecrash.data").joinpath("embedded", name)


def _floats(pixels: NDArray[np.uint8]) -> Tensor:
    # A fresh tensor every time: what is cached cannot be written to through it.
    return torch.from_numpy(pixels).float() / 255
