"""The DATA folder of all other benchmarks, from image sets and weights as they are found.

    python benchmarks/prepare.py IMAGES WEIGHTS DATA [--probes PICTURES] [--limit 2000]

IMAGES holds cifar10_train.npz (or cifar10_train20k.npz), cifar10_test.npz, gtsrb_train13k.npz, gtsrb_test.npz,
tiny_imagenet_val5k_32.npz, imagenet_sample_250_224.npz (x uint8 N×H×W×3, y) and fashion_test.npz (N×28×28; without it
the package's own thousand are taken); WEIGHTS the checkpoints densenet_bc_100_12_cifar10.pth, resnet20_cifar10.th and
resnet50_imagenet_fp16.pth; PICTURES chest_xray_a.jpg, from which collisions on ResNet-50 start. What is not there is
left out. Test sets other than CIFAR-10's stand in the order of their classes or tracks, so they are shuffled with seed
0: the first n of a file are a random sample. `--limit` cuts the shuffled ones off there; the first images stay the
same.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from gatecrash.data import load_source

AS_THEY_ARE = {
    "cifar10_train20k.npz": "cifar10_train.npz",
    "cifar10_train.npz": "cifar10_train.npz",  # all 50,000, where they are there
    "cifar10_test.npz": "cifar10_test.npz",
    "gtsrb_train13k.npz": "gtsrb_train.npz",
    "imagenet_sample_250_224.npz": "imagenet.npz",
    "fashion_test.npz": "fashion.npz",
}
SHUFFLED = {"gtsrb_test.npz": "gtsrb_test.npz", "tiny_imagenet_val5k_32.npz": "tiny.npz"}
X_RAY = "chest_xray_a.jpg"
WEIGHTS = {
    "densenet_bc_100_12_cifar10.pth": "densenet_bc.safetensors",
    "resnet20_cifar10.th": "resnet20.safetensors",
    "resnet50_imagenet_fp16.pth": "resnet50.safetensors",
}


def images(source: Path, target: Path, limit: int | None, shuffled: bool) -> None:
    """One set of images, compressed."""
    content = np.load(source)
    x, y = content["x"], content["y"]
    order = np.random.default_rng(0).permutation(len(x))[:limit] if shuffled else np.arange(len(x))
    np.savez_compressed(target, x=x[order], y=y[order])
    print(target.name, x[order].shape)


def weights(source: Path, target: Path) -> None:
    """One checkpoint as safetensors, without the prefix that DataParallel leaves."""
    content = torch.load(source, map_location="cpu", weights_only=True)
    state = content.get("state_dict", content)
    tensors: dict[str, Tensor] = {name.removeprefix("module."): value.contiguous() for name, value in state.items()}
    save_file(tensors, target)
    print(target.name, len(tensors), "tensors")


def main() -> None:
    """Write what can be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--probes", type=Path, default=None)
    parser.add_argument("--limit", type=int, default=None)
    options = parser.parse_args()
    options.data.mkdir(parents=True, exist_ok=True)
    for name, target in (AS_THEY_ARE | SHUFFLED).items():
        if (options.images / name).is_file():
            images(options.images / name, options.data / target, options.limit, name in SHUFFLED)
    for name, target in WEIGHTS.items():
        if (options.weights / name).is_file():
            weights(options.weights / name, options.data / target)
    if options.probes is not None and (options.probes / X_RAY).is_file():
        shutil.copyfile(options.probes / X_RAY, options.data / "chest_xray.jpg")
        print("chest_xray.jpg")
    if not (options.data / "fashion.npz").is_file():
        embedded(options.data / "fashion.npz", options.limit)


def embedded(target: Path, limit: int | None) -> None:
    """The Fashion-MNIST test images that come with the package."""
    fashion = load_source("fashion:test", limit=limit)
    x = (255 * fashion.x[:, 0]).round().to(torch.uint8).numpy()
    np.savez_compressed(target, x=x, y=fashion.y if fashion.y is None else fashion.y.numpy())
    print(target.name, x.shape)


if __name__ == "__main__":
    main()
