"""Reconstruction against collisions, blind and informed: numbers of docs/results/generative.md.

    python benchmarks/reconstruction.py DATA OUT [--bundle DIR] [--parts autoencoder,collision_residual]
    python benchmarks/reconstruction.py embedded OUT --width 8 --latent 32 --epochs 15 --decoder-epochs 5 --count 100

DATA holds cifar10_train.npz, cifar10_test.npz and gtsrb_test.npz (x uint8 N×32×32×3, y) and densenet_bc.safetensors;
`embedded` takes the package's own images and network instead. OUT gets reconstruction.json, written after every row,
and the trained autoencoder and decoder as bundles, which `--bundle OUT` takes in a later call, whatever that call's
options say of training. `--train` only trains; `--seconds` gives each training a time instead of a number of epochs.

Attacks on an outlier, all scored by the detector:

- collision: the latent (the autoencoder's code, the classifier's features) is made that of an inlier, nothing else;
- joint collision: latent and reconstruction error together are made those of an inlier;
- score: the detector's own score is lowered, from the outlier and from the joint collision; a maximum's along the sum;
- informed: the best of all these for every outlier;
- worst case: the suite, on the first `--worst` outliers.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pace import TRIAL, epochs_within
from torch import Tensor

import gatecrash as gate
from gatecrash.data import load_source
from gatecrash.data.embedded import fashion
from gatecrash.detectors import CollisionResidual, Detector, Mahalanobis, Reconstruction, fit_all
from gatecrash.files import write_text
from gatecrash.metrics import auroc
from gatecrash.networks import DenseNetBC, load_weights
from gatecrash.networks.pretrained import PRETRAINED

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}


class Setting:
    """The network, the images, and the outliers with the balls they may move in."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.device, self.options = device, options
        count, fit, held = options.count, options.fit, options.held_out
        if str(options.data) == "embedded":
            about = PRETRAINED["fashion_small_cnn"]
            self.features = gate.Encoder(about.load().to(device), "latent", about.mean, about.std, about.size)
            self.train = tuple(part[:fit].to(device) for part in fashion("train"))
            self.held_out = fashion("val")[0][:held].to(device)
            self.inliers = fashion("test")[0][:count].to(device)
            others, eps = load_source("digits", limit=count, channels=1, size=28, seed=0).x, 5.0
        else:
            network = load_weights(DenseNetBC(), options.data / "densenet_bc.safetensors")
            network = network.to(device, memory_format=torch.channels_last).eval()
            self.features = gate.Encoder(network, "avgpool", **CIFAR)
            self.train = read(options.data / "cifar10_train.npz", slice(fit), device)
            # Held-out images are the last of the test set, those attacked for are the first.
            self.held_out = read(options.data / "cifar10_test.npz", slice(-held, None), device)[0]
            self.inliers = read(options.data / "cifar10_test.npz", slice(count), device)[0]
            others, eps = read(options.data / "gtsrb_test.npz", slice(count), device)[0], 10.0
        noise = torch.rand(self.inliers.shape, generator=torch.Generator().manual_seed(0)).to(device)
        name = "digits" if str(options.data) == "embedded" else "GTSRB"
        self.outliers: dict[str, tuple[Tensor, gate.Ball]] = {
            "noise": (noise, gate.L2(eps)),
            name: (others.to(device), gate.Linf(8 / 255)),
        }
        self.collisions: dict[str, gate.Found] = {}  # of the features, which several detectors are scored on

    def recipe(self, epochs: int) -> dict[str, Any]:
        """How a density is trained here."""
        half = self.device == "cuda" and not self.options.float32
        return {
            "epochs": epochs,
            "batch_size": self.options.batch_size,
            "lr": self.options.lr,
            "precision": "bf16" if half else "float32",
        }


def read(path: Path, rows: slice, device: str) -> tuple[Tensor, Tensor]:
    """Some images of a file, in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][rows]).permute(0, 3, 1, 2).float() / 255
    return x.contiguous().to(device), torch.from_numpy(content["y"][rows]).long().to(device)


def learner(setting: Setting, part: str, epochs: int) -> Reconstruction | CollisionResidual:
    """The detector whose fit trains the density of a part."""
    options, training = setting.options, setting.recipe(epochs)
    if part == "autoencoder":
        model = {"width": options.width, "latent": options.latent}
        return Reconstruction(setting.features, model=model, training=training)
    return CollisionResidual(setting.features, model={"width": options.width}, training=training)


def trained(setting: Setting, part: str) -> tuple[str, dict[str, Any]]:
    """The folder with the density of a part, trained now unless `--bundle` has it, and what training came to."""
    options = setting.options
    if options.bundle is not None and (options.bundle / part / "model.json").is_file():
        return str(options.bundle / part), {"taken": str(options.bundle / part)}
    began, used = time.monotonic(), len(setting.train[0])
    epochs = options.epochs if part == "autoencoder" else options.decoder_epochs
    if options.seconds is not None:
        few = tuple(tensor[: TRIAL * options.batch_size] for tensor in setting.train)
        epochs, used = epochs_within(
            options.seconds,
            lambda epochs: learner(setting, part, epochs).fit(few),
            -(-len(few[0]) // options.batch_size),
            used,
            options.batch_size,
        )
    print(f"{part}: training on {used} images for {epochs} epochs", flush=True)
    detector = learner(setting, part, epochs).fit(tuple(tensor[:used] for tensor in setting.train))
    detector.save_bundle(options.out / part)
    pixels = setting.train[0][0].numel()
    errors = [2 * np.log(2) * pixels * row["loss"] for row in detector.history]
    about = {"trained": part, "images": used, "epochs": epochs, "seconds": time.monotonic() - began}
    about |= {"squared error per image": errors}
    print(json.dumps(about), flush=True)
    return str(options.out / part), about


def detectors_of(setting: Setting, part: str, bundle: str) -> dict[str, Detector]:
    """The detectors of a part, fitted; the latent detector alone is there to compare with."""
    if part == "autoencoder":
        named: dict[str, Detector] = {
            "autoencoder, l2": Reconstruction(setting.features, bundle=bundle),
            "autoencoder, mahalanobis": Reconstruction(setting.features, bundle=bundle, distance="mahalanobis"),
        }
    else:
        named = {
            "mahalanobis alone": Mahalanobis(setting.features),
            "collision_residual, sum": CollisionResidual(setting.features, bundle=bundle),
            "collision_residual, max": CollisionResidual(setting.features, bundle=bundle, combine="max"),
            "collision_residual, energy": CollisionResidual(setting.features, bundle=bundle, latent="energy"),
        }
    fit_all(list(named.values()), setting.train, held_out=setting.held_out)
    wanted = setting.options.detectors
    return {name: detector for name, detector in named.items() if not wanted or name in wanted.split(";")}


def collided(setting: Setting, detector: Detector, outliers: str) -> gate.Found:
    """The collision that knows nothing of reconstruction."""
    options, (start, ball) = setting.options, setting.outliers[outliers]
    common: dict[str, Any] = {"steps": options.steps, "batch_size": options.attack_batch}
    if isinstance(detector, Reconstruction):
        return gate.collide(detector.code, start, setting.inliers, ball, **common)
    if outliers not in setting.collisions:
        setting.collisions[outliers] = gate.collide(setting.features, start, setting.inliers, ball, **common)
    return setting.collisions[outliers]


def attacked(setting: Setting, detector: Detector, outliers: str) -> dict[str, Tensor]:
    """What every attack that knows the detector makes of the outliers."""
    options, (start, ball) = setting.options, setting.outliers[outliers]
    common: dict[str, Any] = {"steps": options.steps, "batch_size": options.attack_batch}
    found: dict[str, Tensor] = {}
    if isinstance(detector, Reconstruction | CollisionResidual):
        found["joint collision"] = gate.collide(detector.encode, start, setting.inliers, ball, **common).x
        found["score from the joint collision"] = gate.admit(
            detector, start, ball, first=found["joint collision"], **common
        ).x
    found["score"] = gate.admit(detector, start, ball, restarts=options.restarts, **common).x
    if isinstance(detector, CollisionResidual) and detector.combine == "max":
        twin = copy.deepcopy(detector)
        twin.combine = "sum"
        along = gate.admit(twin, start, ball, **common).x
        found["score along the sum"] = gate.admit(detector, start, ball, first=along, **common).x
    return found


def measured(setting: Setting, name: str, detector: Detector, outliers: str) -> dict[str, Any]:
    """AUROC of one detector against one set of outliers, clean and attacked."""
    options = setting.options
    (start, ball), began = setting.outliers[outliers], time.monotonic()
    inside, clean = (detector.scores(x, options.attack_batch) for x in (setting.inliers, start))
    collision, points = collided(setting, detector, outliers), attacked(setting, detector, outliers)
    scores = {how: detector.scores(x, options.attack_batch) for how, x in points.items()}
    scores["collision"] = detector.scores(collision.x, options.attack_batch)
    scores["informed"] = torch.stack(list(scores.values())).amin(dim=0)
    apart = ball.distance(start, setting.inliers)
    row: dict[str, Any] = {"detector": name, "outliers": outliers, "ball": str(ball), "clean": auroc(inside, clean)}
    row |= {how: auroc(inside, score) for how, score in scores.items()}
    row |= {"collision's median MAPE": float(collision.mape.median()), "nearest target": float(apart.min())}
    threshold = float(inside.quantile(0.95))
    row["accepted"] = {
        how: float((score <= threshold).float().mean()) for how, score in ({"clean": clean} | scores).items()
    }
    medians = {"inliers": inside, "clean": clean} | scores
    row["median score"] = {how: float(score.median()) for how, score in medians.items()}
    if isinstance(detector, CollisionResidual):
        row["median parts"] = {
            how: parts_of(detector, x).median(dim=0).values.tolist()
            for how, x in ({"inliers": setting.inliers, "clean": start, "collision": collision.x} | points).items()
        }
    if options.worst:
        few = start[: options.worst]
        suite = gate.worst_case(
            detector, few, ball, "out", options.budget, others=setting.inliers, batch_size=options.attack_batch
        )
        best = torch.minimum(suite.score, scores["informed"][: options.worst])
        row |= {
            "worst case": auroc(inside, suite.score),
            "informed, of the same": auroc(inside, scores["informed"][: options.worst]),
            "best of all": auroc(inside, best),
            "winners": dict(Counter(suite.winner)),
            "worst n": len(few),
        }
    row["seconds"] = time.monotonic() - began
    return row


@torch.no_grad()
def parts_of(detector: CollisionResidual, x: Tensor) -> Tensor:
    """The two standardised scores, latent and residual, (B, 2)."""
    return torch.cat([detector.parts(part) for part in x.split(256)])


def main() -> None:
    """Train or load, attack, write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="autoencoder,collision_residual")
    parser.add_argument("--detectors", default="", help="only these, by their names in the table, between semicolons")
    parser.add_argument("--bundle", type=Path, help="a folder with trained densities, as OUT of an earlier call")
    parser.add_argument("--train", action="store_true", help="train only")
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--decoder-epochs", type=int, default=40)
    parser.add_argument("--seconds", type=float, help="of training for each density, instead of epochs")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--latent", type=int, default=128)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--worst", type=int, default=100, help="outliers for the suite; 0 leaves it out")
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--attack-batch", type=int, default=500)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    setting = Setting(options, device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "options": {key: str(value) for key, value in vars(options).items()},
        "training": [],
        "rows": [],
    }

    def write() -> None:
        result["seconds"] = time.monotonic() - began
        write_text(options.out / "reconstruction.json", json.dumps(result, indent=1))

    for part in options.parts.split(","):
        bundle, about = trained(setting, part)
        result["training"].append(about)
        write()
        if options.train:
            continue
        for name, detector in detectors_of(setting, part, bundle).items():
            for outliers in setting.outliers:
                result["rows"].append(measured(setting, name, detector, outliers))
                print(json.dumps(result["rows"][-1]), flush=True)
                write()
    print(f"{time.monotonic() - began:.0f} s on {result['device']}", flush=True)


if __name__ == "__main__":
    main()
