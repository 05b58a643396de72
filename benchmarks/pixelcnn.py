"""PixelCNN++ of CIFAR-10: which images does it prefer? Numbers of docs/results/generative.md.

    python benchmarks/pixelcnn.py DATA OUT [--preset paper] [--epochs 10 | --seconds 480] [--checkpoints DIR] [--train]
    python benchmarks/pixelcnn.py DATA OUT --bundle OUT/pixelcnn [--attack 100]

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz, tiny.npz (x uint8 N×32×32×3) and fashion.npz (N×28×28),
and densenet_bc.safetensors, whose mistakes are looked for. OUT gets pixelcnn.json, written after every row, and the
trained density as the bundle OUT/pixelcnn, before anything is scored; `--bundle` starts from one, and `--train` ends
there. `--seconds` measures a step and trains for as many epochs as fit. With `--checkpoints` a call that was cut off
goes on in the next one, if that has the same options (and `--epochs` rather than `--seconds`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pace import TRIAL, epochs_within, wait
from torch import Tensor

import gatecrash as gate
from gatecrash.data import load_source
from gatecrash.densities import PixelCNN, save_density, train_density
from gatecrash.detectors import Detector, PixelCNNLikelihood
from gatecrash.files import write_text
from gatecrash.fitting import Recipe, seeded
from gatecrash.images import resized, to_channels
from gatecrash.metrics import aupr_in, aupr_out, auroc, mann_whitney
from gatecrash.networks import DenseNetBC, load_weights

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
OUTLIERS = {"Fashion-MNIST": "fashion", "GTSRB": "gtsrb_test", "Tiny ImageNet": "tiny"}
PAPER = {"Fashion-MNIST": 0.0061, "SVHN": 0.1973, "Tiny ImageNet": 0.8501, "Gaussian noise": 1.0, "mistakes p": 8.58e-5}
"""AUROCs of Table 2 of Shao, Song & Ermon (2020), and p of the U test on CIFAR-100."""


class Rows:
    """The results so far, in a file that is written anew with each."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.content = path, {**about, "paper": PAPER, "rows": []}
        self.began = time.monotonic()

    def add(self, **row: Any) -> None:
        """Print and keep a row, with the seconds since the start."""
        row["elapsed"] = round(time.monotonic() - self.began, 1)
        print(json.dumps(row), flush=True)
        self.content["rows"].append(row)
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")


def read(path: Path, count: int, device: str) -> tuple[Tensor, Tensor]:
    """The first images of a file as RGB at 32×32, in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][:count]).float() / 255
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    x = resized(to_channels(x.contiguous(), 3), 32).clamp(0, 1)
    return x.to(device), torch.from_numpy(content["y"][:count]).long().to(device)


def recipe_of(options: argparse.Namespace, epochs: int) -> Recipe:
    """How it is trained."""
    return Recipe(
        epochs,
        options.batch,
        "adamw",
        lr=options.lr,
        weight_decay=0.0,
        warm_up=0.02,
        clip=1.0,
        ema=options.ema,
        precision=options.precision,
        seed=options.seed,
    )


def trained(options: argparse.Namespace, device: str) -> tuple[Path, dict[str, Any]]:
    """Train, and write the bundle; what the training came to."""
    x = read(options.data / "cifar10_train.npz", options.fit, device)[0]
    x = x[: max(1, len(x) // options.batch) * options.batch]  # batches of one size
    sizes = {name: getattr(options, name) for name in ("blocks", "filters", "mixtures", "dropout", "levels")}
    with seeded(options.seed):
        density = PixelCNN(
            x.shape[1:], preset=options.preset, **{name: size for name, size in sizes.items() if size is not None}
        )
    density = density.to(device, memory_format=torch.channels_last)
    began, epochs = time.monotonic(), options.epochs
    if options.compile:
        density.network.compile()
    if options.seconds is not None:
        fresh = {name: tensor.clone() for name, tensor in density.state_dict().items()}
        few = x[: TRIAL * options.batch]
        epochs, used = epochs_within(
            options.seconds,
            lambda epochs: train_density(density, few, recipe_of(options, epochs)),
            -(-len(few) // options.batch),
            len(x),
            options.batch,
        )
        x = x[:used]
        density.load_state_dict(fresh)  # into the network that is compiled already
    print(f"training on {len(x)} images for {epochs} epochs", flush=True)
    history = train_density(density, x, recipe_of(options, epochs), folder=options.checkpoints)
    folder = options.out / "pixelcnn"
    save_density(density, folder, history)
    wait()
    losses = [row["loss"] for row in history]
    return folder, {"count": len(x), "epochs": epochs, "losses": losses, "seconds": time.monotonic() - began}


def preferences(detector: Detector, inside: Tensor, sets: dict[str, Tensor], rows: Rows, batch: int) -> None:
    """Every set of outliers against the inliers."""
    for name, x in sets.items():
        outside = detector.scores(x, batch)
        rows.add(
            set=name,
            count=len(x),
            auroc=auroc(inside, outside),
            aupr_in=aupr_in(inside, outside),
            aupr_out=aupr_out(inside, outside),
            bits_mean=float(outside.mean()),
            bits_quartiles=outside.quantile(outside.new_tensor([0.25, 0.5, 0.75])).tolist(),
            likelier_than_median_inlier=float((outside < inside.median()).float().mean()),
        )


def mistakes(scores: Tensor, x: Tensor, y: Tensor, options: argparse.Namespace, rows: Rows, device: str) -> None:
    """The classifier's mistakes against what it gets right."""
    network = load_weights(DenseNetBC(), options.data / "densenet_bc.safetensors").to(device).eval()
    encoder = gate.Encoder(network, **CIFAR)
    with torch.no_grad():
        predicted = torch.cat([encoder(part).argmax(dim=1) for part in x.split(options.score_batch)])
    right = predicted == y
    if bool(right.all()):
        rows.add(set="mistakes", count=0, accuracy=1.0)
        return
    test = mann_whitney(scores[right], scores[~right])
    rows.add(
        set="mistakes",
        count=int((~right).sum()),
        accuracy=float(right.float().mean()),
        auroc=auroc(scores[right], scores[~right]),
        u=test.u,
        p=test.p,
    )


def attacked(detector: Detector, inside: Tensor, outliers: Tensor, options: argparse.Namespace, rows: Rows) -> None:
    """Outliers whose bits per dimension are made those of inliers, and inliers that are made likelier than outliers."""
    few = outliers[: options.attack]
    targets = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(0))[: len(few)]]
    clean = detector.scores(few, options.score_batch)
    for eps in (1.0, 3.0, 10.0):
        found = gate.score_to(
            detector, few, targets, gate.L2(eps), steps=options.steps, batch_size=options.attack_batch
        )
        rows.add(
            set="score_to, L2",
            count=len(few),
            eps=eps,
            clean=auroc(inside, clean),
            auroc=auroc(inside, found.score),
            targets=auroc(inside, targets),
            gap_median=float((found.score - targets).abs().median()),
            gap_90=float((found.score - targets).abs().quantile(0.9)),
        )


def main() -> None:
    """Train or load, then score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--train", action="store_true", help="only train")
    parser.add_argument("--preset", default="paper")
    for name, kind in (("blocks", int), ("filters", int), ("mixtures", int), ("dropout", float), ("levels", int)):
        parser.add_argument(f"--{name}", type=kind, help="where it is other than the preset's")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seconds", type=float, help="of training, instead of epochs")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ema", type=float, help="decay of the running mean of the weights, which is then kept")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "float32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--outliers", type=int, default=5000)
    parser.add_argument("--score-batch", type=int, default=250)
    parser.add_argument("--attack", type=int, default=0, help="GTSRB images to be attacked")
    parser.add_argument("--attack-batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows = Rows(options.out / "pixelcnn.json", {"options": json.loads(json.dumps(vars(options), default=str))})
    folder = options.bundle
    if folder is None:
        folder, facts = trained(options, device)
        rows.add(set="training", **facts)
    if options.train:
        return
    x, y = read(options.data / "cifar10_test.npz", options.test, device)
    network = load_weights(DenseNetBC(), options.data / "densenet_bc.safetensors").to(device)
    detector = PixelCNNLikelihood(network, bundle=str(folder)).to(device)
    manifest = json.loads((folder / "manifest.json").read_text())
    rows.content |= {"model": detector.trained.options, "epochs": manifest["epochs"]}
    inside = detector.scores(x, options.score_batch)
    rows.add(set="CIFAR-10 test", count=len(x), bits_mean=float(inside.mean()), bits_median=float(inside.median()))
    sets = {name: read(options.data / f"{file}.npz", options.outliers, device)[0] for name, file in OUTLIERS.items()}
    sets["Gaussian noise"] = load_source("gaussian", limit=min(500, options.outliers), channels=3, size=32, seed=0).x
    preferences(detector, inside, sets, rows, options.score_batch)
    mistakes(inside, x, y, options, rows, device)
    if options.attack:
        attacked(detector, inside, sets["GTSRB"], options, rows)
    rows.add(set="all", seconds=time.monotonic() - began, device=device)


if __name__ == "__main__":
    main()
