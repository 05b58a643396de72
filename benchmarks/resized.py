"""How outliers were made smaller, and what a detector makes of it: a part of docs/results/detectors.md.

    python benchmarks/resized.py DATA OUT [--bundle DIR] [--fit 10000] [--count 1000]

DATA holds cifar10_train.npz, cifar10_test.npz, densenet_bc.safetensors and tiny64.npz, Tiny ImageNet at 64×64 (x uint8,
y). The same images at 32×32 by the mean of four pixels, and by taking every second pixel, which leaves the jagged edges
of sets that were resized without smoothing. OUT is a JSON file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

import gatecrash as gate
from gatecrash.metrics import auroc
from triage import CIFAR, network_of, read


def large(path: Path, count: int) -> Tensor:
    """Images as they are, evenly over the file, in [0, 1]."""
    x = np.load(path)["x"]
    chosen = x[np.linspace(0, len(x) - 1, min(count, len(x))).round().astype(int)]
    return torch.from_numpy(chosen).permute(0, 3, 1, 2).float() / 255


def main() -> None:
    """One row per detector."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", type=Path, default=None)
    parser.add_argument("--fit", type=int, default=10000)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network_of(options).to(device).eval()
    features, logits = gate.Encoder(network, "avgpool", **CIFAR), gate.Encoder(network, **CIFAR)
    kinds = gate.detectors
    detectors = {
        "GMM-100": kinds.GMM(features, components=100),
        "Mahalanobis": kinds.Mahalanobis(features),
        "relative Mahalanobis": kinds.RelativeMahalanobis(features),
        "logits": kinds.MaxLogit(logits),
    }
    gate.fit_all(list(detectors.values()), read(options.data / "cifar10_train.npz", options.fit))
    inliers = read(options.data / "cifar10_test.npz", options.count)[0]
    tiny = large(options.data / "tiny64.npz", options.count)
    sets = {"mean of four": avg_pool2d(tiny, 2), "every second": tiny[:, :, ::2, ::2].contiguous()}
    rows = []
    for name, detector in detectors.items():
        inside = detector.scores(inliers)
        rows.append({"detector": name} | {how: auroc(inside, detector.scores(x)) for how, x in sets.items()})
        print(rows[-1], flush=True)
    options.out.write_text(json.dumps({"count": len(inliers), "fit": options.fit, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
