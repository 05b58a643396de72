"""The three scores of a joint energy-based model, clean and under collision of logits: docs/results/generative.md.

    python benchmarks/jem.py DATA OUT [--seconds 480 | --epochs 10] [--train]
    python benchmarks/jem.py DATA OUT --bundle OUT/bundle [--count 200] [--eps 10] [--attack-steps 1000]

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz and tiny.npz (x uint8 N×32×32×3, y). The paper's network
is a WideResNet-28-10 without batch norm, trained for days; this one has `--depth` 16 and `--width` 4, also without. OUT
gets the trained network (`bundle/`, which any plan takes) before anything is attacked, jem.json after every row, and
images.npz with samples and collisions. `--train` only trains; `--seconds` gives the training a time instead of a number
of epochs. A training that diverges is told, and goes on with its last good epoch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pace import MARGIN, within
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.audit.models import load_model
from gatecrash.audit.plan import ModelPlan
from gatecrash.data import drawn
from gatecrash.data.augment import crop, flip
from gatecrash.files import write_text
from gatecrash.fitting import Batch, Material, Recipe, fit, generator_of, seeded
from gatecrash.fitting.checkpoint import read_checkpoint
from gatecrash.metrics import auroc
from gatecrash.networks import WideResNet, save_weights
from gatecrash.training import JointEnergy, Prepared, sample_jem

SCORES = ("logsumexp", "softmax", "gradient")
TABLE_8 = {"logsumexp": 0.559, "softmax": 0.513, "gradient": 0.203}
HALF = [0.5, 0.5, 0.5]


class Setting:
    """The images, the options, and the rows found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, "cuda" if torch.cuda.is_available() else "cpu"
        self.began = time.monotonic()
        data = options.data
        options.out.mkdir(parents=True, exist_ok=True)
        self.train = read(data / "cifar10_train.npz", self.device, options.fit)
        self.test = read(data / "cifar10_test.npz", self.device, options.test)
        self.content: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}
        self.images: dict[str, Any] = {}

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """Print a row and write all of them, with the seconds since the start."""
        row = row | {"elapsed": round(time.monotonic() - self.began, 1)}
        self.content.setdefault(name, []).append(row)
        print(json.dumps({name: row}), flush=True)
        write_text(self.options.out / "jem.json", json.dumps(self.content, indent=1) + "\n")

    def show(self, name: str, images: Tensor) -> None:
        """Keep images for the page."""
        self.images[name] = (255 * images[:64]).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        np.savez_compressed(self.options.out / "images.npz", **self.images)


def read(path: Path, device: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first images of a file in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][:count]).permute(0, 3, 1, 2).float().div(255).contiguous()
    return x.to(device), torch.from_numpy(content["y"][:count]).long().to(device)


def trained(setting: Setting) -> gate.Encoder:
    """A network trained from nothing, its bundle written."""
    options = setting.options
    about = {"depth": options.depth, "width": options.width, "norm": "none"}
    with seeded(0):
        model = WideResNet(**about).to(setting.device, memory_format=torch.channels_last)
    encoder = gate.Encoder(model, None, HALF, HALF)
    step = JointEnergy(encoder, steps=options.langevin, buffer=options.buffer)
    epochs, used, folder = options.epochs, len(setting.train[0]), options.out / "training"
    began = time.monotonic()
    if options.seconds is not None:
        each = pace(encoder, setting)
        left = options.seconds - (time.monotonic() - began)
        epochs, used = within(max(0.0, left / each), used, options.batch_size)
        shutil.rmtree(folder, ignore_errors=True)  # a run with other epochs could not go on from there
    print(f"training on {used} images for {epochs} epochs", flush=True)
    material = Material(
        *(tensor[:used] for tensor in setting.train),
        augment=lambda x, random: flip(crop(x, 4, random, mode="reflect"), random),
    )
    count = -(-used // options.batch_size)
    recipe = Recipe(
        epochs, options.batch_size, "adamw", options.lr, weight_decay=0.0, warm_up=min(0.3, 1000 / (count * epochs)),
        clip=options.clip, precision="bf16" if setting.device == "cuda" else "float32",
    )  # fmt: skip
    network = Prepared(encoder)
    try:
        fit(network, step, material, recipe, folder=folder, resume=True)
    except ValueError as error:
        found = read_checkpoint(folder)
        if found is None:
            raise
        setting.keep("diverged", {"message": str(error), "epoch": found[1]["epoch"]})
        network.load_state_dict({k.removeprefix("model/"): v for k, v in found[0].items() if k.startswith("model/")})
        network.eval()
    written = read_checkpoint(folder)
    history = [] if written is None else written[1]["history"]
    row = {"seconds": time.monotonic() - began, "images": used, "network": about, "epochs": history}
    setting.keep("training", row)
    save(model, about, options.out / "bundle")
    return encoder


def pace(encoder: gate.Encoder, setting: Setting) -> float:
    """Seconds that a batch takes, measured on a copy's few."""
    options, (x, y) = setting.options, setting.train
    step, size = JointEnergy(encoder, steps=options.langevin, buffer=options.batch_size), options.batch_size
    model, times = Prepared(encoder).train(), []
    for number in range(6):
        batch = Batch(x[:size], y[:size], torch.arange(size), None, 0, 1, generator_of(number))
        began = time.monotonic()
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.device == "cuda", cache_enabled=False):
            loss = step(model, batch).loss
        torch.autograd.grad(loss, list(model.parameters()))
        if setting.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    print(f"{min(times):.3f} s per batch of {size}", flush=True)
    return min(times) * MARGIN


def save(model: nn.Module, about: dict[str, Any], folder: Path) -> None:
    """The network as a model bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / "model.safetensors")
    plan = {"name": "builtin:wide_resnet", "options": about, "layer": "avgpool", "mean": HALF, "std": HALF}
    write_text(folder / "model.json", json.dumps(plan | {"channels": 3, "size": 32}, indent=1) + "\n")


def clean(setting: Setting, encoder: gate.Encoder) -> None:
    """Accuracy, and the scores against images that are not attacked."""
    options, device = setting.options, setting.device
    x, y = setting.test
    with torch.no_grad():
        right = torch.cat([encoder(part).argmax(dim=1) for part in x.split(500)]) == y
    setting.keep("accuracy", {"accuracy": float(right.float().mean()), "images": len(x)})
    random = torch.Generator().manual_seed(0)
    outliers = {name: read(options.data / f"{name}.npz", device, options.test)[0] for name in ("gtsrb_test", "tiny")}
    outliers |= {
        kind: getattr(drawn, kind)(500, 3, 32, random).to(device) for kind in ("spiral", "noise", "checkerboard")
    }
    for score in SCORES:
        detector = gate.detectors.JEM(encoder, score=score)
        inside = detector.scores(x, 250)
        aurocs = {name: auroc(inside, detector.scores(images, 250)) for name, images in outliers.items()}
        setting.keep("clean", {"score": score, **aurocs})


def collided(setting: Setting, encoder: gate.Encoder) -> None:
    """The scores after the logits of inliers were given to one spiral, as in the paper, and to one image of noise."""
    options, x = setting.options, setting.test[0][: setting.options.count]
    for start in ("spiral", "noise"):
        first = getattr(drawn, start)(1, 3, 32, torch.Generator().manual_seed(1)).to(setting.device)
        began = time.monotonic()
        ball = gate.L2(options.eps)
        found = gate.collide(
            encoder, first.expand_as(x).contiguous(), x, ball, steps=options.attack_steps, batch_size=500
        )
        setting.show(f"collided from {start}", found.x)
        facts = {"start": start, "count": len(x), "seconds": time.monotonic() - began}
        facts |= {"mape": float(found.mape.median()), "l2": float(found.distance("l2").median())}
        for score in SCORES:
            detector = gate.detectors.JEM(encoder, score=score)
            inside, before, after = (detector.scores(images, 250) for images in (x, first.expand_as(x), found.x))
            row = {"score": score, "clean": auroc(inside, before), "collided": auroc(inside, after)}
            setting.keep("collision", {**row, "paper": TABLE_8[score], **facts})


def sampled(setting: Setting, encoder: gate.Encoder) -> None:
    """Samples from noise and from spirals, and how likely they become beside inliers."""
    inside = gate.detectors.JEM(encoder).scores(setting.test[0][:500], 250)
    for start in ("noise", "spiral"):
        found = sample_jem(encoder, start, 64, steps=setting.options.sample_steps)
        setting.show(f"sampled from {start}", found.x)
        row = {"before": float(-found.start_value.mean()), "after": float(-found.value.mean())}
        setting.keep("samples", {"start": start, **row, "inliers": float(-inside.mean())})


def main() -> None:
    """Train, or read, and attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--fit", type=int, default=50000)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--langevin", type=int, default=20)
    parser.add_argument("--buffer", type=int, default=10000)
    parser.add_argument("--sample-steps", type=int, default=100)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--eps", type=float, default=10.0)
    parser.add_argument("--attack-steps", type=int, default=1000)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    setting = Setting(options)
    if options.bundle is None:
        encoder = trained(setting)
    else:
        model = load_model(ModelPlan(name=f"bundle:{options.bundle.resolve()}"), Path())
        encoder = gate.Encoder(model.to(setting.device), None, HALF, HALF)
    if options.train:
        return
    encoder.model.requires_grad_(False)
    clean(setting, encoder)
    sampled(setting, encoder)
    collided(setting, encoder)
    print(f"{time.monotonic() - setting.began:.0f} s on {setting.device}", flush=True)


if __name__ == "__main__":
    main()
