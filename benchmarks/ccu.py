"""Certified certain uncertainty on CIFAR-10 against far outliers: docs/results/generative.md.

    python benchmarks/ccu.py DATA OUT [--epochs 30 | --seconds 100] [--train]
    python benchmarks/ccu.py DATA OUT --bundle OUT/bundle [--count 200] [--linf 8] [--l2 1]

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz and tiny.npz (x uint8 N×32×32×3, y), and
densenet_bc.safetensors. A WideResNet and both mixtures are trained together, the first half of Tiny ImageNet being the
outliers; beside it, the mixtures are fitted to the DenseNet as it is. OUT gets the trained network with its mixtures
(`bundle/`, which a plan takes as a model and as a detector's bundle) before anything is attacked, and ccu.json after
every row: clean AUROC, the one under worst_case, and the one that no attack comes below.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pace import TRIAL, epochs_within
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.audit.models import load_model
from gatecrash.audit.plan import ModelPlan
from gatecrash.data import drawn
from gatecrash.data.augment import Augmentation
from gatecrash.detectors.certified import CCU, FILE, log_posterior
from gatecrash.files import write_text
from gatecrash.fitting import Material, Recipe, fit, seeded
from gatecrash.metrics import auroc
from gatecrash.networks import DenseNetBC, WideResNet, load_weights, save_weights
from gatecrash.training import CertifiedUncertainty, Prepared

CIFAR = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.2010]}


class Setting:
    """The images, the options, and the rows found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, "cuda" if torch.cuda.is_available() else "cpu"
        self.began = time.monotonic()
        data = options.data
        options.out.mkdir(parents=True, exist_ok=True)
        self.train = read(data / "cifar10_train.npz", self.device, options.fit)
        self.test = read(data / "cifar10_test.npz", self.device, options.test)
        tiny = read(data / "tiny.npz", self.device, options.exposed)[0]
        self.exposed = tiny[: len(tiny) // 2]
        random, count = torch.Generator().manual_seed(0), options.count
        self.far = {
            kind: getattr(drawn, kind)(count, 3, 32, random).to(self.device)
            for kind in ("noise", "gaussian", "checkerboard", "spiral")
        }
        self.far["checkerboard 2×2"] = drawn.checkerboard(count, 3, 32, random, fields=2).to(self.device)
        self.near = {
            "gtsrb": read(data / "gtsrb_test.npz", self.device, count)[0],
            "tiny, other half": tiny[len(tiny) // 2 :][:count],
        }
        self.content: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """Print a row and write all of them, with the seconds since the start."""
        row = row | {"elapsed": round(time.monotonic() - self.began, 1)}
        self.content.setdefault(name, []).append(row)
        print(json.dumps({name: row}), flush=True)
        write_text(self.options.out / "ccu.json", json.dumps(self.content, indent=1) + "\n")


def read(path: Path, device: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first images of a file in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][:count]).permute(0, 3, 1, 2).float().div(255).contiguous()
    return x.to(device), torch.from_numpy(content["y"][:count]).long().to(device)


def trained(setting: Setting) -> CCU:
    """A network and its mixtures, trained together from nothing, the bundle written."""
    options = setting.options
    about = {"depth": options.depth, "width": options.width}
    with seeded(0):
        model = WideResNet(**about).to(setting.device, memory_format=torch.channels_last)
    encoder = gate.Encoder(model, None, **CIFAR)
    detector = CCU(encoder, components=options.components, ridge=options.ridge)
    step = CertifiedUncertainty(detector, setting.train[0], setting.exposed)
    began, folder = time.monotonic(), options.out / "training"
    step.begin_epoch(0, 1)  # the mixtures begin with what EM finds; once they are there, it does nothing
    setting.keep("mixtures", {"seconds": time.monotonic() - began, "stretch": float(detector.stretch)})
    epochs, used = options.epochs, len(setting.train[0])
    if options.seconds is not None:
        epochs, used = epochs_in(setting, copy.deepcopy(model), step, options.seconds - (time.monotonic() - began))
        shutil.rmtree(folder, ignore_errors=True)  # a run with other epochs could not go on from there
    print(f"training on {used} images for {epochs} epochs", flush=True)
    material, recipe = material_of(setting, used), recipe_of(setting, epochs)
    history = fit(Prepared(encoder), step, material, recipe, folder=folder, resume=True)
    row = {"seconds": time.monotonic() - began, "images": used, "network": about, "epochs": history}
    setting.keep("training", row)
    save(model, about, step.trained, options.out / "bundle")
    return step.trained


def material_of(setting: Setting, used: int) -> Material:
    """The first images, beside the outliers."""
    x, y = (tensor[:used] for tensor in setting.train)
    return Material(x, y, setting.exposed, outliers_per_image=1.0, augment=Augmentation(flip=True))


def recipe_of(setting: Setting, epochs: int) -> Recipe:
    """How the network is trained."""
    options, precision = setting.options, "bf16" if setting.device == "cuda" else "float32"
    return Recipe(epochs, options.batch_size, lr=options.lr, weight_decay=5e-4, warm_up=0.1, precision=precision)


def epochs_in(setting: Setting, model: nn.Module, step: CertifiedUncertainty, seconds: float) -> tuple[int, int]:
    """How many epochs of how many images the seconds are enough for, by a copy of the network and of the mixtures."""
    encoder, size = gate.Encoder(model, None, **CIFAR), setting.options.batch_size
    trial = CertifiedUncertainty(step.trained, setting.train[0], setting.exposed)
    trial.restore(step.state())
    few = material_of(setting, TRIAL * size)
    return epochs_within(
        seconds,
        lambda epochs: fit(Prepared(encoder), trial, few, recipe_of(setting, epochs)),
        -(-len(few.x) // size),
        len(setting.train[0]),
        size,
    )


def save(model: nn.Module, about: dict[str, Any], detector: CCU, folder: Path) -> None:
    """The network as a model bundle, with its mixtures."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / "model.safetensors")
    detector.save(folder / FILE)
    plan = {"name": "builtin:wide_resnet", "options": about, "layer": "avgpool", **CIFAR, "channels": 3, "size": 32}
    write_text(folder / "model.json", json.dumps(plan, indent=1) + "\n")


def post_hoc(setting: Setting) -> CCU:
    """The DenseNet as it is, with mixtures fitted to pixels."""
    options = setting.options
    network = load_weights(DenseNetBC(), options.data / "densenet_bc.safetensors").to(setting.device).eval()
    began = time.monotonic()
    detector = CCU(gate.Encoder(network, None, **CIFAR), components=options.components, ridge=options.ridge)
    detector.fit(setting.train[0], outliers=setting.exposed)
    setting.keep("fit", {"seconds": time.monotonic() - began, "stretch": float(detector.stretch)})
    return detector


def measured(setting: Setting, name: str, detector: CCU) -> None:
    """Clean, attacked and certified AUROC against every set, and whether a point was found above its bound."""
    options, (x, y) = setting.options, setting.test
    inside = detector.scores(x, 250)
    odds = torch.cat([detector.log_odds(part) for part in x.split(250)])
    with torch.no_grad():
        right = torch.cat([detector.encode(part)[1].argmax(dim=1) for part in x.split(250)]) == y
    facts = {"accuracy": float(right.float().mean()), "taken for in": float((odds > 0).float().mean())}
    setting.keep("inliers", {"detector": name, **facts, "stretch": float(detector.stretch)})
    softmax = gate.detectors.MSP(detector.encoder)
    sets = {**setting.far, **setting.near}
    for kind in options.sets.split(";") if options.sets else sets:
        images = sets[kind]
        clean = {"ccu": auroc(inside, detector.scores(images, 250))}
        clean["softmax"] = auroc(softmax.scores(x, 250), softmax.scores(images, 250))
        for ball in (gate.Linf(options.linf / 255), gate.L2(options.l2)):
            began = time.monotonic()
            found = gate.worst_case(detector, images, ball, "out", options.budget, others=x[:200], batch_size=250)
            baseline = gate.admit(softmax, images, ball, steps=50, batch_size=250)
            bound = detector.confidence_bound(images, ball.eps, ball.norm)
            least = detector.score_bound(images, ball.eps, ball.norm)
            reached = confidence(detector, found.x)
            setting.keep(
                "outliers",
                {
                    "detector": name,
                    "outliers": kind,
                    "ball": repr(ball),
                    "clean": clean["ccu"],
                    "attacked": auroc(inside, detector.scores(found.x, 250)),
                    "certified": auroc(inside, least.to(inside)),
                    "softmax, clean": clean["softmax"],
                    "softmax, attacked": auroc(softmax.scores(x, 250), softmax.scores(baseline.x, 250)),
                    "confidence, found": float(reached.mean()),
                    "confidence, bound": float(bound.mean()),
                    "below 0.11 by proof": float((bound < 0.11).float().mean()),
                    "above the bound": int((reached > bound + 1e-6).sum()),
                    "seconds": time.monotonic() - began,
                },
            )


def confidence(detector: CCU, x: Tensor) -> Tensor:
    """The largest p(y|x) of every image, (B,)."""
    with torch.no_grad():
        parts = [log_posterior(detector.encode(part)[1], detector.log_odds(part)) for part in x.split(250)]
    return torch.cat(parts).amax(dim=1).exp()


def main() -> None:
    """Train or read, fit, attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--no-post-hoc", action="store_true")
    parser.add_argument("--sets", default="", help="only these outliers, by their names, between semicolons")
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--exposed", type=int, default=5000)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--components", type=int, default=100)
    parser.add_argument("--ridge", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="of training, mixtures included, instead of epochs")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--linf", type=float, default=8.0, help="in 255ths")
    parser.add_argument("--l2", type=float, default=1.0)
    parser.add_argument("--budget", default="quick")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    setting = Setting(options)
    if options.bundle is None:
        joint = trained(setting)
    else:
        model = load_model(ModelPlan(name=f"bundle:{options.bundle.resolve()}"), Path()).to(setting.device)
        joint = CCU(gate.Encoder(model, None, **CIFAR), bundle=str(options.bundle))
    if options.train:
        return
    measured(setting, "joint", joint)
    if not options.no_post_hoc:
        measured(setting, "post hoc", post_hoc(setting))
    print(f"{time.monotonic() - setting.began:.0f} s on {setting.device}", flush=True)


if __name__ == "__main__":
    main()
