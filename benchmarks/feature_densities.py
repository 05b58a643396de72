"""VAE, MAF and mixtures of Gaussians on a classifier's features: numbers of docs/results/generative.md.

    python benchmarks/feature_densities.py DATA OUT [--seeds 5] [--epochs 100 | --seconds 10] [--bundle OUT]

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz, tiny.npz (x uint8 N×32×32×3, y) and fashion.npz
(N×28×28), and densenet_bc.safetensors. The features are those of `avgpool`, computed once. OUT gets
feature_densities.json, written after every row, and every VAE and MAF as a bundle right after its training; `--bundle`
takes those that are there already. Mistakes are those on the test images; the last rows are means over the seeds, in
the order that was found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pace import TRIAL, epochs_within
from torch import Tensor

import gatecrash as gate
from gatecrash.detectors import GMM, Detector, FeatureMAF, FeatureVAE
from gatecrash.detectors.learned import Learned
from gatecrash.files import write_text
from gatecrash.images import resized, to_channels
from gatecrash.metrics import aupr_out, auroc, mann_whitney
from gatecrash.networks import DenseNetBC, load_weights

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
OUTLIERS = {"Fashion-MNIST": "fashion", "GTSRB": "gtsrb_test", "Tiny ImageNet": "tiny"}
NAMES = ("GMM-100", "GMM-1000", "VAE", "VAE, importance-weighted", "MAF")
PAPER = {"GMM-100 p": 1.9e-13, "PixelCNN p": 8.58e-5, "order": "GMM before VAE and MAF (Figures 3 and 8, CIFAR-100)"}


def read(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """The first images of a file as RGB at 32×32, in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][:count]).float() / 255
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return resized(to_channels(x.contiguous(), 3), 32).clamp(0, 1), torch.from_numpy(content["y"][:count]).long()


class Features:
    """The features of every set, and which test images the network gets right."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        network = load_weights(DenseNetBC(), options.data / "densenet_bc.safetensors").to(device).eval()
        self.encoder = gate.Encoder(network, "avgpool", **CIFAR)
        head = self.encoder.head
        assert head is not None and head.bias is not None
        self.train = self.of(read(options.data / "cifar10_train.npz", options.fit)[0])
        x, y = read(options.data / "cifar10_test.npz", options.test)
        self.test = self.of(x)
        predicted = (self.test @ head.weight.T + head.bias).argmax(dim=1)
        self.right = predicted == y.to(device)
        self.outliers = {
            name: self.of(read(options.data / f"{file}.npz", options.outliers)[0]) for name, file in OUTLIERS.items()
        }

    @torch.no_grad()
    def of(self, x: Tensor) -> Tensor:
        """(N, D)."""
        device = self.encoder.device
        return torch.cat([self.encoder(part.to(device)) for part in x.split(1000)])


def trainer(name: str, seed: int, epochs: int, features: Features, options: argparse.Namespace) -> Learned:
    """A VAE or MAF that learns for so many epochs."""
    kind: type[Learned] = FeatureMAF if name == "MAF" else FeatureVAE
    rate = options.maf_lr if name == "MAF" else options.vae_lr
    training = {"epochs": epochs, "batch_size": options.batch, "lr": rate, "seed": seed}
    return kind(features.encoder, training=training)


def epochs_of(name: str, features: Features, options: argparse.Namespace) -> int:
    """How many epochs a VAE or MAF is trained for: as said, or what the seconds are enough for, with any seed."""
    if options.seconds is None:
        return int(options.epochs)
    kind = "MAF" if name == "MAF" else "VAE"
    if kind not in options.known:
        few = features.train[: TRIAL * options.batch]
        options.known[kind], _ = epochs_within(
            options.seconds,
            lambda epochs: trainer(name, 0, epochs, features, options).fit_latents(few, None),
            -(-len(few) // options.batch),
            len(features.train),
            options.batch,
        )
    return int(options.known[kind])


def made(name: str, seed: int, features: Features, options: argparse.Namespace) -> Detector:
    """A detector with a seed; from its bundle, where there is one."""
    if name.startswith("GMM"):
        components = min(int(name.removeprefix("GMM-")), max(1, len(features.train) // 2))
        return GMM(features.encoder, components=components, seed=seed)
    kind: type[Learned] = FeatureMAF if name == "MAF" else FeatureVAE
    folder = None if options.bundle is None else options.bundle / f"{kind.density_name}-{seed}"
    if folder is not None and (folder / "model.json").is_file():
        return kind(features.encoder, bundle=str(folder))
    return trainer(name, seed, epochs_of(name, features, options), features, options)


def fitted(name: str, seed: int, features: Features, options: argparse.Namespace) -> Detector:
    """A detector that has learnt; the importance-weighted VAE is the other one with another bound."""
    detector = made(name, seed, features, options)
    if detector.to_fit():
        with torch.no_grad():
            detector.fit_latents(features.train, None)
        if isinstance(detector, Learned):
            detector.save_bundle(options.out / f"{detector.density_name}-{seed}")
    return detector


@torch.no_grad()
def scores(detector: Detector, z: Tensor) -> Tensor:
    """Of features, (N,)."""
    return torch.cat([detector.judge(part) for part in z.split(2000)])


def row_of(name: str, seed: int, detector: Detector, features: Features) -> dict[str, Any]:
    """Mistakes and outliers of one detector."""
    inside = scores(detector, features.test)
    right, wrong = inside[features.right], inside[~features.right]
    test = mann_whitney(right, wrong)
    return {
        "detector": name,
        "seed": seed,
        "mistakes": len(wrong),
        "auroc": auroc(right, wrong),
        "aupr_out": aupr_out(right, wrong),
        "p": test.p,
        "bits_train": float(scores(detector, features.train).mean()),
        "bits_test": float(inside.mean()),
        **{f"auroc {key}": auroc(inside, scores(detector, z)) for key, z in features.outliers.items()},
    }


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and deviations over the seeds, medians of p, the best at mistakes first."""
    found = []
    for name in dict.fromkeys(row["detector"] for row in rows):
        own = [row for row in rows if row["detector"] == name]
        numbers = {
            key: statistics.fmean(row[key] for row in own)
            for key in own[0]
            if key not in ("detector", "seed", "p", "seconds")
        }
        spread = statistics.stdev([row["auroc"] for row in own]) if len(own) > 1 else 0.0
        p = statistics.median(row["p"] for row in own)
        found.append({"detector": name, "seeds": len(own), **numbers, "auroc_std": spread, "p": p})
    return sorted(found, key=lambda row: -row["auroc"])


def main() -> None:
    """Fit every detector with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--detectors", default="|".join(NAMES), help="separated by |")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seconds", type=float, help="of training for each VAE and MAF, instead of epochs")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vae-lr", type=float, default=1e-3)
    parser.add_argument("--maf-lr", type=float, default=1e-3)
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--outliers", type=int, default=5000)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    options.known = {}
    began = time.monotonic()
    features = Features(options, device)
    results: dict[str, Any] = {
        "options": json.loads(json.dumps(vars(options), default=str)),
        "paper": PAPER,
        "accuracy": float(features.right.float().mean()),
        "rows": [],
    }
    print(f"features in {time.monotonic() - began:.0f} s, accuracy {results['accuracy']:.4f}", flush=True)
    for seed in range(options.seeds):
        plain: Detector | None = None
        for name in options.detectors.split("|"):
            began = time.monotonic()
            if name.startswith("VAE") and plain is not None:
                detector = plain
            else:
                detector = fitted(name, seed, features, options)
                plain = detector if name.startswith("VAE") else plain
            if isinstance(detector, FeatureVAE):
                detector.trained.importance = name != "VAE"
            row = {**row_of(name, seed, detector, features), "seconds": time.monotonic() - began}
            print(json.dumps(row), flush=True)
            results["rows"].append(row)
            results["means"] = means(results["rows"])
            results["epochs"] = options.known or options.epochs
            write_text(options.out / "feature_densities.json", json.dumps(results, indent=1) + "\n")
    for row in results["means"]:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
