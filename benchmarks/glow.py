"""Glow's likelihood and NLL − complexity, moved at will: numbers of docs/results/generative.md.

    python benchmarks/glow.py DATA OUT [--inliers cifar10] [--seconds 500 | --epochs 60] [--bits 8] [--train]
    python benchmarks/glow.py DATA OUT --bundle OUT/bundle [--count 160] [--eps 10] [--attack-steps 500]

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz, tiny.npz (x uint8 N×32×32×3, y) and fashion.npz
(N×28×28). With `--inliers gtsrb` a Glow of the first half of gtsrb_test.npz is trained, and the second half is tested.
OUT gets the trained density (`bundle/`) before anything is attacked, glow.json after every row, and images.npz with
what was found. `--train` only trains; `--seconds` gives the training a time instead of a number of epochs.

- matched: the NLL of every one of `--count` inliers is given to a colour spiral, each its own or all the same one;
- range: one spiral and one 2×2 checkerboard are brought to values from 0 to beyond where they were.
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
from gatecrash.data import drawn
from gatecrash.data.augment import flip
from gatecrash.densities import Glow, load_density, save_density, train_density
from gatecrash.densities.glow import Step
from gatecrash.detectors import Detector, GlowLikelihood, InputComplexity
from gatecrash.files import write_text
from gatecrash.fitting import Recipe, seeded
from gatecrash.images import resized, to_channels
from gatecrash.metrics import auroc

SIDE = 32
BINS = 40


class Setting:
    """The images, the options, and the rows found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, "cuda" if torch.cuda.is_available() else "cpu"
        self.began = time.monotonic()
        data = options.data
        if options.inliers == "cifar10":
            self.train = read(data / "cifar10_train.npz", self.device, options.fit)
            self.test = read(data / "cifar10_test.npz", self.device, options.test)
            others = ("gtsrb_test", "tiny", "fashion")
        else:
            everything = read(data / "gtsrb_test.npz", self.device)
            half = len(everything) // 2
            self.train, self.test = everything[:half][: options.fit], everything[half:][: options.test]
            others = ("cifar10_test", "tiny", "fashion")
        self.outliers = {name: read(data / f"{name}.npz", self.device, options.test) for name in others}
        self.content: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}
        self.images: dict[str, Any] = {}

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """Print a row and write all of them, with the seconds since the start."""
        row = row | {"elapsed": round(time.monotonic() - self.began, 1)}
        self.content.setdefault(name, []).append(row)
        short = {key: value for key, value in row.items() if not isinstance(value, dict)}
        print(json.dumps({name: short}), flush=True)
        write_text(self.options.out / "glow.json", json.dumps(self.content, indent=1) + "\n")

    def show(self, name: str, images: Tensor) -> None:
        """Keep images for the page."""
        self.images[name] = (255 * images).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        np.savez_compressed(self.options.out / "images.npz", **self.images)


def read(path: Path, device: str, count: int | None = None) -> Tensor:
    """The first images of a file as RGB at 32×32, in [0, 1]."""
    x = torch.from_numpy(np.load(path)["x"][:count])
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return resized(to_channels(x.float().div(255).contiguous(), 3), SIDE).clamp(0, 1).to(device)


def fresh(options: argparse.Namespace, device: str) -> Glow:
    """A Glow that has learnt nothing."""
    with seeded(0):
        return Glow(
            (3, SIDE, SIDE),
            levels=options.levels,
            steps=options.steps,
            hidden=options.hidden,
            coupling=options.coupling,
            bits=options.bits,
        ).to(device)


def recipe_of(options: argparse.Namespace, device: str, epochs: int) -> Recipe:
    """How it is trained."""
    return Recipe(
        epochs=epochs,
        batch_size=options.batch_size,
        optimiser="adamw",
        lr=options.lr,
        weight_decay=0.0,
        warm_up=0.05,
        clip=1.0,
        precision="bf16" if device == "cuda" and not options.float32 else "float32",
    )


def compiled(glow: Glow) -> None:
    """Compile the steps of the flow; steps of one shape share what is compiled."""
    torch._dynamo.config.recompile_limit = 64  # levels × batch sizes × first batch or not
    for part in glow.modules():
        if isinstance(part, Step):
            part.inverse = torch.compile(part.inverse, dynamic=False)  # type: ignore[method-assign]


def trained(setting: Setting) -> Glow:
    """The density, from a bundle or trained now."""
    options, device = setting.options, setting.device
    if options.bundle is not None:
        density = load_density(options.bundle)
        if not isinstance(density, Glow):
            raise ValueError(f"{options.bundle} holds a {density.name}, not a glow")
        return density.to(device)
    glow, epochs, used = fresh(options, device), options.epochs, len(setting.train)
    if options.compile:
        compiled(glow)
    if options.seconds is not None:
        few = setting.train[: TRIAL * options.batch_size]
        epochs, used = epochs_within(
            options.seconds,
            lambda epochs: train_density(glow, few, recipe_of(options, device, epochs), augment=flip),
            -(-len(few) // options.batch_size),
            used,
            options.batch_size,
        )
        glow.load_state_dict(fresh(options, device).state_dict())
    print(f"training on {used} images for {epochs} epochs", flush=True)
    began = time.monotonic()
    history = train_density(glow, setting.train[:used], recipe_of(options, device, epochs), augment=flip)
    wait()
    seconds = time.monotonic() - began
    save_density(glow, options.out / "bundle", history)
    losses = [row["loss"] for row in history]
    size = sum(parameter.numel() for parameter in glow.parameters())
    row = {"epochs": epochs, "images": used, "seconds": seconds, "parameters": size, "losses": losses}
    setting.keep("training", row)
    return load_density(options.out / "bundle").to(device)  # type: ignore[return-value]


def quality(setting: Setting, glow: Glow) -> None:
    """Bits per dimension of test images, and how exact the inverse is."""
    still, noisy = [], []
    with torch.no_grad(), seeded(0, setting.device):
        for x in setting.test.split(250):
            still.append(glow.eval().bits_per_dimension(x))
            noisy.append(glow.train().bits_per_dimension(x))
    glow.eval()
    x = setting.test[:100]
    with torch.no_grad():
        inverse = (glow.images(glow.latents(x)) - x).abs().max()
    row = {
        "bits": glow.options["bits"],
        "test_images": len(setting.test),
        "bits_per_dimension": float(torch.cat(noisy).mean()),
        "at_midpoints": float(torch.cat(still).mean()),
        "inverse_error": float(inverse),
    }
    setting.keep("quality", row)
    with seeded(0, setting.device):
        setting.show("samples", glow.sample(16, 0.7))


def clean(setting: Setting, name: str, detector: Detector) -> None:
    """AUROC on the usual outliers, nothing attacked."""
    inside = detector.scores(setting.test)
    for other, x in setting.outliers.items():
        outside = detector.scores(x)
        row = {"detector": name, "outliers": other, "auroc": auroc(inside, outside)}
        setting.keep("clean", row | {"inliers_mean": float(inside.mean()), "outliers_mean": float(outside.mean())})


def matched(setting: Setting, name: str, detector: Detector) -> None:
    """Every inlier's score given to a spiral of its own, and to one spiral for all."""
    options = setting.options
    inliers = setting.test[: options.count]
    goals = detector.scores(inliers)
    many = drawn.spiral(len(inliers), 3, SIDE, torch.Generator().manual_seed(0)).to(setting.device)
    for label, start in (("a spiral each", many), ("one spiral", many[:1].expand(len(inliers), -1, -1, -1).clone())):
        began = time.monotonic()
        found = gate.score_to(detector, start, goals, gate.L2(options.eps), steps=options.attack_steps)
        wait()
        seconds = time.monotonic() - began
        before, after = detector.scores(start), detector.scores(found.x)
        files = detector.scores((255 * found.x).round() / 255)
        miss, moved = (after - goals).abs(), found.distance("l2")
        apart = (start - inliers).flatten(1).norm(dim=1)
        row = {
            "detector": name,
            "start": label,
            "count": len(inliers),
            "eps": options.eps,
            "auroc_clean": auroc(goals, before),
            "auroc_attacked": auroc(goals, after),
            "auroc_attacked_8_bit": auroc(goals, files),
            "miss_median": float(miss.median()),
            "miss_max": float(miss.max()),
            "l2_median": float(moved.median()),
            "l2_max": float(moved.max()),
            "target_distance_min": float(apart.min()),
            "target_distance_median": float(apart.median()),
            "seconds": seconds,
            "histograms": histograms({"inliers": goals, "spirals": before, "attacked": after}),
        }
        setting.keep("matched", row)
        setting.show(f"{name}, {label}", torch.cat([start[:8], found.x[:8]]))


def across(setting: Setting, name: str, detector: Detector) -> None:
    """One spiral and one 2×2 checkerboard brought to values from 0, or the lowest, to beyond where they were."""
    options, random = setting.options, torch.Generator().manual_seed(1)
    starts = {
        "spiral": drawn.spiral(1, 3, SIDE, random),
        "checkerboard": drawn.checkerboard(1, 3, SIDE, random, fields=2),
    }
    inliers = detector.scores(setting.test[: options.count])
    for label, image in starts.items():
        start = image.to(setting.device)
        own = float(detector.scores(start))
        low, high = min(0.0, own, float(inliers.min())), max(own, float(inliers.max())) + 2
        goals = torch.linspace(low, high, options.values, device=setting.device)
        copies = start.expand(len(goals), -1, -1, -1).clone()
        found = gate.score_to(detector, copies, goals, gate.L2(options.eps), steps=options.attack_steps)
        row = {
            "detector": name,
            "start": label,
            "clean": own,
            "inliers_lowest": float(inliers.min()),
            "inliers_highest": float(inliers.max()),
            "wanted": goals.tolist(),
            "reached": detector.scores(found.x).tolist(),
            "l2": found.distance("l2").tolist(),
        }
        setting.keep("range", row)
        setting.show(f"{name}, {label}, range", torch.cat([start, found.x]))


def histograms(scores: dict[str, Tensor]) -> dict[str, Any]:
    """Counts of several sets of scores in bins that they share."""
    both = torch.cat([scores["inliers"], scores["attacked"]])
    edges = np.linspace(float(both.min()), float(both.max()), BINS + 1)
    counts = {name: np.histogram(values.cpu().numpy(), edges)[0].tolist() for name, values in scores.items()}
    beyond = {name: int((values.cpu() > edges[-1]).sum()) for name, values in scores.items()}
    return {"edges": edges.tolist(), "counts": counts, "beyond": beyond}


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--inliers", choices=["cifar10", "gtsrb"], default="cifar10")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--coupling", choices=["affine", "additive"], default="affine")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--eps", type=float, default=10.0)
    parser.add_argument("--attack-steps", type=int, default=500)
    parser.add_argument("--values", type=int, default=12)
    return parser.parse_args()


def main() -> None:
    """Train, measure, attack."""
    options = options_of()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    setting = Setting(options)
    glow = trained(setting)
    quality(setting, glow)
    if options.train:
        return
    folder = str(options.bundle or options.out / "bundle")
    for kind in (GlowLikelihood, InputComplexity):
        detector = kind(bundle=folder).to(setting.device)
        clean(setting, kind.name, detector)
        matched(setting, kind.name, detector)
        across(setting, kind.name, detector)
    print(f"{time.monotonic() - setting.began:.0f} s on {setting.device}", flush=True)


if __name__ == "__main__":
    main()
