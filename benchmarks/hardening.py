"""Hardened networks on real images: the numbers of docs/results/hardening.md.

    python benchmarks/hardening.py train DATA OUT --set cifar10 --methods ce,oe,adv,aoe,aloe --epochs 2 [--start FILE]
    python benchmarks/hardening.py evaluate DATA OUT --set cifar10 --methods ce,oe,adv,aoe,aloe
    python benchmarks/hardening.py ensemble DATA OUT --methods ce,ce-1,ce-2
    python benchmarks/hardening.py throughput DATA OUT

`train` is `gatecrash harden` with the plan that `plan_of` writes; OUT/SET/METHOD are the model bundles. A run that was
killed goes on. `evaluate` attacks every bundle as Chen et al. do, and writes OUT/SETTAG.json. DATA holds
cifar10_train.npz, cifar10_test.npz, gtsrb_train.npz, gtsrb_test.npz, tiny.npz (32×32) and fashion.npz (x uint8, y).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import gatecrash as gate
from gatecrash.attacks import attack_mahalanobis, attack_softmax, pgd
from gatecrash.audit.models import bundled, load_model
from gatecrash.data import load_source
from gatecrash.files import write_text
from gatecrash.fitting import Material, Recipe, fit
from gatecrash.harden import HardenPlan, harden_plan
from gatecrash.metrics import auroc, detection_error, fpr_at_tpr
from gatecrash.networks import DenseNetBC
from gatecrash.training.exposure import Exposure, Inner
from gatecrash.training.prepared import Prepared

PIXEL = 1 / 255
CLASSES = {"cifar10": 10, "gtsrb": 43}
NORMAL = {
    "cifar10": {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.2010]},
    "gtsrb": {"mean": [0.3403, 0.3121, 0.3214], "std": [0.2724, 0.2608, 0.2669]},
}
OTHERS = {
    "cifar10": {"GTSRB": "npz:gtsrb_test.npz", "Fashion-MNIST": "npz:fashion.npz"},
    "gtsrb": {"CIFAR-10": "npz:cifar10_test.npz", "Fashion-MNIST": "npz:fashion.npz"},
}
DRAWN = {
    "noise": "noise",
    "Gaussian noise": "gaussian",
    "blobs": "blobs",
    "spirals": "spiral",
    "boards": "checkerboard",
}
TAPS = ["conv1", "trans1", "trans2", "relu"]
MAGNITUDES = [0.0002 * i for i in range(21)]
TEMPERATURES = [1.0, 10.0, 100.0, 1000.0]


def plan_of(options: argparse.Namespace, methods: list[str], seed: int) -> HardenPlan:
    """The plan of a training run."""
    name = options.set
    model: dict[str, Any] = {
        "name": f"builtin:{options.network}",
        "options": {"num_classes": CLASSES[name], **special(options)},
        "channels": 3,
        "size": 32,
        **NORMAL[name],
    }
    if options.start:
        model["weights"] = options.start
    radius = {"eps": options.eps / 255}
    attacked = [{"name": method, **(radius if method in ("adv", "aoe", "aloe") else {})} for method in methods]
    return HardenPlan.model_validate(
        {
            "model": model,
            "data": {
                "train": {"source": f"npz:{name}_train.npz", "limit": options.limit},
                "balance": options.balance,
                "outliers": [{"source": "npz:tiny.npz"}],
                "test": {"source": f"npz:{name}_test.npz", "limit": 200},
                "test_outliers": {"noise": {"source": "noise", "limit": 200}},
            },
            "methods": attacked,
            "training": {
                "epochs": options.epochs,
                "batch_size": options.batch,
                "lr": options.lr,
                "warm_up": 0.05,
                "crop": 4 if name == "cifar10" else 2,
                "flip": name == "cifar10",
                "precision": options.precision,
                "weight_decay": 1e-4,
            },
            "seed": seed,
        }
    )


def special(options: argparse.Namespace) -> dict[str, Any]:
    """What the network is made with, besides its classes."""
    sizes = {name: getattr(options, name) for name in ("depth", "width") if getattr(options, name)}
    return sizes | ({"tanh": True} if options.tanh else {})


def train(options: argparse.Namespace) -> None:
    """Every method's network; a seed other than 0 has a folder of its own."""
    for said in options.methods.split(","):
        method, _, seed = said.partition("-")
        began = time.monotonic()
        plan = plan_of(options, [method], int(seed or 0))
        out = options.out / options.set / said
        harden_plan(plan, out=out, resume=(out / "plan.yaml").is_file(), folder=options.data)
        history = json.loads((out / method / "manifest.json").read_text())["epochs"]
        print(json.dumps({"run": said, "seconds": time.monotonic() - began, "epochs": history}), flush=True)


def bundle_of(options: argparse.Namespace, said: str) -> Path:
    """Where the model bundle of a run stands."""
    folder: Path = options.out / options.set / said / said.partition("-")[0]
    return folder


def encoder_of(folder: Path, device: str) -> gate.Encoder:
    """The network of a model bundle."""
    about = bundled(folder)
    return gate.Encoder(load_model(about, folder).to(device), None, about.mean, about.std)


def images_of(data: Path, source: str, limit: int, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Images at 32×32 in colour, with their labels."""
    kind, _, file = source.partition(":")
    found = load_source(f"{kind}:{data / file}" if file else kind, limit=limit, channels=3, size=32, seed=seed)
    return found.x, found.y


def evaluate(options: argparse.Namespace) -> None:
    """Accuracy and detection of every method's network, clean and attacked on both sides."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    x, y = images_of(options.data, f"npz:{options.set}_test.npz", 10**9)
    if y is None:
        raise SystemExit("the test images have no labels")
    sources = OTHERS[options.set] | DRAWN
    outliers = {title: images_of(options.data, source, options.outliers)[0] for title, source in sources.items()}
    rows: list[dict[str, Any]] = []
    for said in options.methods.split(","):
        encoder = encoder_of(bundle_of(options, said), device)
        few, labels = x[: options.inliers].to(device), y[: options.inliers].to(device)
        attacked = pgd(encoder, few, labels, gate.Linf(PIXEL), steps=10, batch_size=1000).x
        facts = {
            "method": said,
            "accuracy": right(encoder, x, y.to(device)),
            "pgd_accuracy": right(encoder, attacked, labels),
            "n": len(x),
        }
        print(json.dumps(facts), flush=True)
        detectors = {"msp": gate.detectors.MSP(encoder), "odin": chosen_odin(encoder, x[-options.choice :], device)}
        for eps in [float(part) for part in options.levels.split(",")]:
            if eps != 1 and said.partition("-")[0] not in ("ce", "oe", "aloe"):
                continue
            rows += [facts | row for row in two_sided(encoder, detectors, few, outliers, eps / 255)]
            written(options, rows, f"{said}, {eps:g} grey levels: {time.monotonic() - began:.1f} s since the start")
        if said == "ce" and not options.no_mahalanobis:
            rows += [facts | row for row in mahalanobis(options, encoder, x, few, outliers)]
            written(options, rows, f"{said}, mahalanobis: {time.monotonic() - began:.1f} s since the start")
    summary(rows)


def written(options: argparse.Namespace, rows: list[dict[str, Any]], stage: str) -> None:
    """Write the rows so far, and say which stage is done."""
    write_text(options.out / f"{options.set}{options.tag}.json", json.dumps({"rows": rows}, indent=1))
    print(stage, flush=True)


def right(encoder: gate.Encoder, x: Tensor, y: Tensor) -> float:
    """The share of images whose class the network gets right."""
    with torch.no_grad():
        predicted = torch.cat([encoder(part.to(y.device)).argmax(dim=1) for part in x.split(1000)])  # type: ignore[union-attr]
    return float((predicted == y).double().mean())


def chosen_odin(encoder: gate.Encoder, x: Tensor, device: str) -> gate.detectors.ODIN:
    """ODIN with the temperature and magnitude whose FPR95 on noise is smallest; of equal ones the better AUROC."""
    noise = images_of(Path(), "noise", len(x), seed=1)[0]
    x, noise, best = x.to(device), noise.to(device), ((2.0, 0.0), gate.detectors.ODIN(encoder))
    for temperature in TEMPERATURES:
        for magnitude in MAGNITUDES[::2]:
            detector = gate.detectors.ODIN(encoder, temperature=temperature, magnitude=magnitude)
            inside, outside = detector.scores(x, 1000), detector.scores(noise, 1000)
            best = min(
                best, ((fpr_at_tpr(inside, outside), -auroc(inside, outside)), detector), key=lambda pair: pair[0]
            )
    return best[1]


def two_sided(
    encoder: gate.Encoder, detectors: dict[str, Any], inliers: Tensor, outliers: dict[str, Tensor], eps: float
) -> list[dict[str, Any]]:
    """Chen et al.'s Algorithm 1 on both sides, 10 steps, read by every detector."""

    def moved(images: Tensor, side: Literal["in", "out"]) -> Tensor:
        ball = gate.Linf(eps)
        return attack_softmax(encoder, images.to(inliers.device), ball, side=side, steps=10, batch_size=1000).x

    led_out = moved(inliers, "in")
    rows = []
    for title, images in outliers.items():
        led_in = moved(images, "out")
        for name, detector in detectors.items():
            facts = {"detector": name, "outliers": title, "eps": round(255 * eps), **detector.options}
            clean, attacked = ((inliers, images), (led_out, led_in))
            rows.append(facts | numbers(detector, *clean, "") | numbers(detector, *attacked, "attacked "))
    return rows


def mahalanobis(
    options: argparse.Namespace, encoder: gate.Encoder, test: Tensor, inliers: Tensor, outliers: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Lee et al.'s detector at four layers under Chen et al.'s Algorithm 2."""
    x, y = images_of(options.data, f"npz:{options.set}_train.npz", 10**9)
    held_out, noise = test[-options.held_out :], images_of(Path(), "noise", options.held_out, seed=1)[0]
    if y is None:
        raise SystemExit("the training images have no labels")
    best = (2.0, 0.0)
    for magnitude in MAGNITUDES[::4]:
        detector = gate.detectors.Mahalanobis(encoder, layers=TAPS, magnitude=magnitude, combine="logistic")
        detector.fit((x[:10000], y[:10000]), held_out=held_out, outliers=noise)
        best = min(best, (fpr_at_tpr(detector.scores(held_out, 500), detector.scores(noise, 500)), magnitude))
    detector = gate.detectors.Mahalanobis(encoder, layers=TAPS, magnitude=best[1], combine="logistic")
    detector.fit((x, y), held_out=held_out, outliers=noise)

    def moved(images: Tensor, side: Literal["in", "out"]) -> Tensor:
        on = images.to(inliers.device)
        return attack_mahalanobis(detector, on, gate.Linf(PIXEL), side=side, steps=10, batch_size=500).x

    led_out, rows = moved(inliers, "in"), []
    for title, images in outliers.items():
        facts = {"detector": "mahalanobis", "outliers": title, "eps": 1, "magnitude": detector.options["magnitude"]}
        attacked = numbers(detector, led_out, moved(images, "out"), "attacked ")
        rows.append(facts | numbers(detector, inliers, images, "") | attacked)
    return rows


def numbers(detector: Any, inliers: Tensor, outliers: Tensor, prefix: str) -> dict[str, float]:
    """AUROC, FPR95 and detection error."""
    inside, outside = (detector.scores(x, 1000).cpu() for x in (inliers, outliers))
    return {
        f"{prefix}auroc": auroc(inside, outside),
        f"{prefix}fpr95": fpr_at_tpr(inside, outside),
        f"{prefix}error": detection_error(inside, outside),
    }


def summary(rows: list[dict[str, Any]]) -> None:
    """Means over the sets of outliers."""
    keys = list(dict.fromkeys((row["method"], row["detector"], row["eps"]) for row in rows))
    for method, detector, eps in keys:
        mine = [r for r in rows if (r["method"], r["detector"], r["eps"]) == (method, detector, eps)]
        names = ("auroc", "fpr95", "error", "attacked auroc", "attacked fpr95", "attacked error")
        means = {name: round(sum(row[name] for row in mine) / len(mine), 4) for name in names}
        facts = {"accuracy": mine[0]["accuracy"], "pgd_accuracy": mine[0]["pgd_accuracy"]}
        print(json.dumps({"method": method, "detector": detector, "eps": eps, **facts, **means}), flush=True)


def ensemble(options: argparse.Namespace) -> None:
    """A deep ensemble of several runs: noise made to collide with inliers in the logits of all of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    members = [encoder_of(bundle_of(options, said), device) for said in options.methods.split(",")]
    detector = gate.detectors.DeepEnsemble(members)
    x, y = images_of(options.data, f"npz:{options.set}_test.npz", options.inliers)
    noise = images_of(Path(), "noise", len(x))[0].to(device)
    x = x.to(device)
    found = gate.collide(detector.encode, noise, x, gate.L2(10.0), steps=100, batch_size=500)
    inside = detector.scores(x, 500)
    result = {
        "members": options.methods,
        "accuracies": [right(member, x, y.to(device)) for member in members if y is not None],
        "clean": auroc(inside, detector.scores(noise, 500)),
        "attacked": auroc(inside, detector.scores(found.x, 500)),
        "mape_median": None if found.mape is None else float(found.mape.median()),
    }
    print(json.dumps(result), flush=True)
    name = options.methods.replace(",", "_")
    (options.out / f"ensemble_{name}.json").write_text(json.dumps(result, indent=1))


def throughput(options: argparse.Namespace) -> None:
    """Images per second of ALOE, and of plain training on as many images."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {}
    for title in ("plain", "aloe"):
        encoder = gate.Encoder(DenseNetBC().to(device), None, NORMAL["cifar10"]["mean"], NORMAL["cifar10"]["std"])
        aloe = Exposure(encoder, inliers="attacked", outliers="attacked", inner=Inner(PIXEL))
        batches, batch = options.batches, options.batch
        shape = (3, 32, 32)
        total = 3 * batch * batches
        # As many images in a step: a third of them inliers beside two thirds outliers, or all of them plain.
        size = batch if title == "aloe" else 3 * batch
        x = torch.rand(size * batches, *shape, device=device)
        y = torch.randint(10, (len(x),), device=device)
        outliers = torch.rand(2 * batch * batches, *shape, device=device) if title == "aloe" else None
        step = aloe if title == "aloe" else Exposure(encoder)
        recipe = Recipe(1, batch_size=size, lr=0.01, precision=options.precision)
        seconds = []
        for _ in range(3):  # the first is for warming up
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.monotonic()
            fit(Prepared(encoder), step, Material(x, y, outliers), recipe)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
        results[title] = total / min(seconds[1:])
    steps = Inner(PIXEL).count
    ratio = results["plain"] / results["aloe"]
    found = {"images per second": results, "ratio": ratio, "inner steps": steps, "allowed": 1.3 * (1 + steps)}
    print(json.dumps(found), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "throughput.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["train", "evaluate", "ensemble", "throughput"])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", default="cifar10", choices=list(CLASSES))
    parser.add_argument("--network", default="densenet_bc")
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--tanh", action="store_true", help="features of a DenseNet-BC that end in a tanh")
    parser.add_argument("--methods", default="ce,oe,adv,aoe,aloe", help="a method, or METHOD-SEED")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--eps", type=float, default=1.0, help="of training, in grey levels")
    parser.add_argument("--levels", default="1,2,3,4", help="of the attacks, in grey levels")
    parser.add_argument("--start", default="", help="weights to begin with, relative to DATA")
    parser.add_argument("--balance", type=int, default=None)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "float32"])
    parser.add_argument("--inliers", type=int, default=1000)
    parser.add_argument("--outliers", type=int, default=500)
    parser.add_argument("--choice", type=int, default=200, help="inliers that ODIN is chosen on")
    parser.add_argument("--held-out", type=int, default=1000, help="inliers and noise that Mahalanobis is chosen on")
    parser.add_argument("--no-mahalanobis", action="store_true")
    parser.add_argument("--tag", default="", help="added to the name of the file that `evaluate` writes")
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    options.data, options.out = options.data.resolve(), options.out.resolve()
    {"train": train, "evaluate": evaluate, "ensemble": ensemble, "throughput": throughput}[options.part](options)


if __name__ == "__main__":
    main()
