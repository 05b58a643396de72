"""Mistakes, adversarial images and outliers of a CIFAR-10 network: the quality numbers of docs/results/detectors.md.

    python benchmarks/triage.py DATA OUT [--repeats 5] [--fit 50000] [--test 10000] [--outliers 2000]
    python benchmarks/triage.py DATA OUT --bundle DIR          another DenseNet-BC, as a model bundle
    python benchmarks/triage.py DATA OUT --no-attacks --steps 1e-3 1e-4     other steps of purification than the paper's

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz, tiny.npz (32×32) and fashion.npz (x uint8, y), and
densenet_bc.safetensors. The first fifth of the test images is the validation set: temperature and thresholds come from
it; the rest is the test. OUT gets the bundle of the triage.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.audit.models import bundled, load_model
from gatecrash.data import load_source
from gatecrash.images import resized, to_channels
from gatecrash.networks import DenseNetBC, load_weights

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
LEVELS = [1 / 255, 4 / 255, 8 / 255]


def read(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """The first images of a file as RGB at 32×32, in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][:count]).float() / 255
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return resized(to_channels(x.contiguous(), 3), 32).clamp(0, 1), torch.from_numpy(content["y"][:count]).long()


def network_of(options: argparse.Namespace) -> nn.Module:
    """The shared network, or that of a model bundle with the same normalisation."""
    if options.bundle is not None:
        return load_model(bundled(options.bundle), options.bundle)
    return load_weights(DenseNetBC(), options.data / "densenet_bc.safetensors")


def main() -> None:
    """Run the triage and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--outliers", type=int, default=2000)
    parser.add_argument("--bundle", type=Path, default=None)
    parser.add_argument("--no-attacks", action="store_true", help="no adversarial images")
    parser.add_argument("--steps", type=float, nargs="*", default=None)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    network = network_of(options).to(device).eval()
    features, logits = gate.Encoder(network, "avgpool", **CIFAR), gate.Encoder(network, **CIFAR)
    kinds = gate.detectors
    detectors = {
        "GMM-1000": kinds.GMM(features, components=1000),
        "GMM-100": kinds.GMM(features, components=100),
        "Mahalanobis": kinds.Mahalanobis(features),
        "relative Mahalanobis": kinds.RelativeMahalanobis(features),
        "Zheng & Hong": kinds.ZhengHong(features),
        "logits": kinds.MaxLogit(logits),
        "calibrated": kinds.Temperature(logits),
    }
    x, y = read(options.data / "cifar10_test.npz", options.test)
    cut = len(x) // 5
    names = {"Tiny ImageNet": "tiny", "Fashion-MNIST": "fashion", "GTSRB": "gtsrb_test"}
    outliers = {name: read(options.data / f"{file}.npz", options.outliers)[0] for name, file in names.items()}
    noise = load_source("gaussian", limit=options.outliers, channels=3, size=32, seed=0).x
    try:
        gate.triage(
            detectors,
            (x[cut:], y[cut:]),
            held_out=(x[:cut], y[:cut]),
            fit=read(options.data / "cifar10_train.npz", options.fit),
            outliers={"Gaussian noise": noise, **outliers},
            adversarial=[]
            if options.no_attacks
            else [{"name": "fgsm", "eps": LEVELS}, {"name": "bim", "eps": LEVELS, "steps": 10}],
            purify={"detectors": ["GMM-1000"], **({"step": options.steps} if options.steps else {})},
            repeats=options.repeats,
            batch_size=1000,
            out=options.out,
        )
    except ModuleNotFoundError as missing:  # the report's charts; the results are written before them
        print("no report:", missing)
    results = json.loads((options.out / "results.json").read_text())
    for row in results["rows"]:
        kept = ("detector", "against", "auroc", "auroc_std", "aupr_in", "aupr_out", "p", "precision", "recall")
        print({key: row[key] for key in kept if key in row})
    for row in results["purified"]:
        print(row)
    print(results["accuracy"], results["checks"])
    print(f"{time.monotonic() - began:.0f} s on {results['manifest']['device']}")


if __name__ == "__main__":
    main()
