"""How fast a search is on a GPU, against the same search written by hand: the numbers of docs/results/speed.md.

    python benchmarks/speed.py DATA OUT --parts collide,throughput,curve,agree,audit,growth

DATA holds imagenet.npz (x uint8 250×224×224×3), chest_xray.jpg and resnet50.safetensors (with the stride in the first
convolution of a block); cifar10_test.npz, cifar10_train.npz, gtsrb_test.npz and densenet_bc.safetensors. OUT gets one
JSON file per part, written after every stage; without a GPU, networks are prepared for the CPU, to see that all parts
run. A network is compiled after 200 calls of a size, which a short part does not reach: `--compile-after 1` times
compiled code, beside `first_seconds` with the compiling. `float32`: no TF32 anywhere; `default`: torch's flags as they
are, TF32 in convolutions only.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gatecrash as gate
from gatecrash import half, prepared
from gatecrash.files import write_text
from gatecrash.networks import DenseNetBC, load_weights
from gatecrash.prepared import Preparation, preparing
from gatecrash.search import Precision

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
IMAGENET = {"mean": (123.68 / 255, 116.779 / 255, 103.939 / 255)}
EPS = 5.0
PIXEL = 1 / 255
SHARES = half.FAR, half.FAR_EVEN, half.FAR_ANNEALED
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Results = Iterator[dict[str, Any]]
"""What a part found so far, after each of its stages."""


@contextmanager
def flags(kind: str) -> Iterator[None]:
    """Torch's flags for matrix products and convolutions inside the block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = kind != "float32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def now() -> float:
    """The time when all work on the device is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def resnet50(data: Path) -> nn.Module:
    """ResNet-50 up to its pooled features, with the layout of the shared weights."""
    from torchvision.models import resnet50 as build

    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    state = {name: tensor.float() for name, tensor in load_file(data / "resnet50.safetensors").items()}
    model.load_state_dict(state, strict=False)
    model.fc = nn.Identity()
    return model.to(DEVICE).eval().requires_grad_(False)


def resnet18(images: Tensor) -> nn.Module:
    """ResNet-18 with random weights; its batch norm has the statistics of the images."""
    from torchvision.models import resnet18 as build

    torch.manual_seed(0)
    model: nn.Module = build().to(DEVICE).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean over all batches
    with torch.no_grad():
        for part in images.split(64):
            model.train()(part)
    return model.eval()


def imagenet(data: Path, count: int) -> tuple[Tensor, Tensor]:
    """ImageNet images, and the x-ray as often as there are images."""
    x = torch.from_numpy(np.load(data / "imagenet.npz")["x"][:count]).permute(0, 3, 1, 2).float().div(255)
    with Image.open(data / "chest_xray.jpg") as picture:
        ray = torch.from_numpy(np.array(picture.convert("RGB").resize((224, 224)))).permute(2, 0, 1).float().div(255)
    return x.to(DEVICE).contiguous(), ray.to(DEVICE).expand(len(x), -1, -1, -1).contiguous()


def images_of(data: Path, name: str, count: int) -> Tensor:
    """The first images of a file, as many as asked for."""
    found = np.load(data / f"{name}.npz")["x"][:count]
    if len(found) < count:
        raise SystemExit(f"{count} images are needed, and {name}.npz has {len(found)}")
    return torch.from_numpy(found).permute(0, 3, 1, 2).float().div(255).to(DEVICE).contiguous()


def densenet(data: Path) -> nn.Module:
    """DenseNet-BC on CIFAR-10."""
    return load_weights(DenseNetBC(), data / "densenet_bc.safetensors").to(DEVICE).eval().requires_grad_(False)


def by_hand(
    f: Callable[[Tensor], Tensor], start: Tensor, target: Tensor, eps: float, steps: int, batch: int, watch: Any = None
) -> Tensor:
    """Liang et al.'s Algorithm 1 as they describe it: Adamax with a constant step on the normalised gradient."""
    out = []
    for x0, wanted in zip(start.split(batch), target.split(batch), strict=True):
        with torch.no_grad():
            z = f(wanted)
        generator = torch.Generator(DEVICE).manual_seed(0)
        delta = eps * (2 * torch.rand(x0.shape, generator=generator, device=DEVICE) - 1)
        x = inside(x0 + delta, x0, eps).requires_grad_()
        optimiser = torch.optim.Adamax([x], lr=eps / 100)
        for step in range(steps):
            loss = (f(x) - z).square().sum()
            (gradient,) = torch.autograd.grad(loss, x)
            x.grad = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
            optimiser.step()
            with torch.no_grad():
                x.copy_(inside(x, x0, eps))
            if watch is not None:
                watch(step + 1, x.detach(), z)
        out.append(x.detach())
    return torch.cat(out)


def inside(x: Tensor, centre: Tensor, eps: float) -> Tensor:
    """Back into the L2 ball, then into the box."""
    delta = x - centre
    length = delta.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
    return (centre + delta * (eps / length).clamp(max=1)).clamp(0, 1)


def mape_of(f: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Tensor:
    """mean|z′ − z| / max|z| of every sample, in float32 without TF32."""
    with flags("float32"), torch.no_grad():
        parts = [(f(a), f(b)) for a, b in zip(x.split(50), target.split(50), strict=True)]
    z, wanted = (torch.cat(leaf) for leaf in zip(*parts, strict=True))
    return (z - wanted).abs().mean(dim=1) / wanted.abs().amax(dim=1)


def collide(data: Path, options: argparse.Namespace) -> Results:
    """The time to the median MAPE that the paper's recipe reaches in 1,000 steps."""
    images, start = imagenet(data, options.count)
    model = resnet50(data)
    encoder = gate.Encoder(model, **IMAGENET)
    f: Any = encoder
    rows: list[dict[str, Any]] = []
    with flags("float32"):
        by_hand(f, start[:50], images[:50], EPS, 3, 50)
        began, tenth = now(), max(1, options.steps // 10)
        by_hand(f, start, images, EPS, tenth, options.batch)
        strict = options.steps / tenth * (now() - began)
    result = {"count": len(images), "eps": EPS, "rows": rows}
    rows.append({"what": "by hand, float32", "steps": options.steps, "seconds": strict, "of": "a tenth, times ten"})
    yield result
    with flags("default"):
        began = now()
        x = by_hand(f, start, images, EPS, options.steps, options.batch)
        seconds = now() - began
    goal = float(mape_of(f, x, images).median())
    rows.append({"what": "by hand, default", "steps": options.steps, "seconds": seconds, "median_mape": goal})
    yield result
    tries = [
        (steps, "mixed", far, schedule)
        for schedule in options.schedules
        for far in options.far or [half.FAR_ANNEALED]
        for steps in options.tries
    ]
    for steps, precision, far, schedule in [*tries, (options.tries[-1], "float32", 0.0, options.schedules[0])]:
        half.FAR_ANNEALED = far
        times = []
        for _ in range(3 if len(rows) > 2 else 8):  # the first compiles, and one of the next what a run does once
            began = now()
            found = gate.collide(
                encoder,
                start[:1],
                images,
                gate.L2(EPS),
                steps=steps,
                schedule=schedule,
                batch_size=options.batch,
                precision=precision,
            )
            times.append(now() - began)
        median, best = float(mape_of(f, found.x, images).median()), min(times[1:])
        row = {"what": f"gatecrash, {precision}, {schedule}", "steps": steps, "far": far}
        row |= {"seconds": best, "median_mape": median}
        row |= {"first_seconds": times[0], "reported_mape": float(found.mape.median())}  # type: ignore[union-attr]
        row |= {"times_float32": strict / best, "times_default": seconds / best, "reached": median <= goal}
        rows.append(row | {"copies": prepared.facts(model)})
        yield result
    half.FAR_ANNEALED = SHARES[-1]
    if options.defaults:
        with preparing(compile_after=Preparation().compile_after):
            times = []
            for _ in range(2):
                began = now()
                found = gate.collide(encoder, start[:1], images, gate.L2(EPS))
                times.append(now() - began)
        median = float(mape_of(f, found.x, images).median())
        rows.append({"what": "gatecrash, nothing set", "seconds": times, "median_mape": median})
        yield result


def throughput(data: Path, options: argparse.Namespace) -> Results:
    """Images times steps per second on ResNet-18 at 224 px: a collision, and PGD as the peers have it.

    The weights are random, and batch norm has the statistics of the images: with those of no images at all a network
    tells them hardly apart. Even so a collision may come so near that it gives half precision up. The rate is that
    of the steps beyond a run of half the length, so that what a run does once is left out; `whole` has it in. The share
    of steps in half precision is the attack's own; with those of `--far` there are rows of their own.
    """
    images, rays = imagenet(data, options.count)
    model, rows = resnet18(images), []
    encoder = gate.Encoder(model)
    for batch in options.batches:
        x, target = repeated(rays, batch), repeated(images, batch)
        labels = torch.zeros(batch, dtype=torch.long, device=DEVICE)

        def hand(steps: int, x: Tensor = x, target: Tensor = target, batch: int = batch) -> object:
            return by_hand(model, x, target, EPS, steps, batch)

        def hand_pgd(steps: int, x: Tensor = x, labels: Tensor = labels) -> object:
            return pgd_by_hand(model, x, labels, steps)

        def ours(
            precision: Any, steps: int, x: Tensor = x, target: Tensor = target, far: float = half.FAR_ANNEALED
        ) -> object:
            half.FAR_ANNEALED = far
            return gate.collide(encoder, x, target, gate.L2(EPS), steps=steps, precision=precision)

        def ours_pgd(
            precision: Any, steps: int, x: Tensor = x, labels: Tensor = labels, far: float = half.FAR_EVEN
        ) -> object:
            half.FAR_EVEN, ball = far, gate.Linf(8 * PIXEL)
            return gate.pgd(encoder, x, labels, ball, steps=steps, step=2 * PIXEL, precision=precision)

        def peer(name: str, steps: int, x: Tensor = x, labels: Tensor = labels) -> object:
            return peers()[name](model, x, labels, steps)

        runs: dict[str, tuple[str, Callable[[int], object]]] = {
            "collision by hand, float32": ("float32", hand),
            "collision by hand, default": ("default", hand),
        }
        for far in options.far:
            runs[f"collision, mixed, far {far:g}"] = ("default", partial(ours, "mixed", far=far))
            runs[f"PGD, mixed, far {far:g}"] = ("default", partial(ours_pgd, "mixed", far=far))
        runs |= {
            "collision, mixed": ("default", partial(ours, "mixed")),
            "PGD, mixed": ("default", partial(ours_pgd, "mixed")),
            "PGD by hand, default": ("default", hand_pgd),
            **{f"PGD by {name}, default": ("default", partial(peer, name)) for name in peers()},
            "PGD by hand, float32": ("float32", hand_pgd),
            "PGD, float32": ("default", partial(ours_pgd, "float32")),
            "collision, float32": ("default", partial(ours, "float32")),
        }
        for name, (kind, run) in runs.items():
            if not name.startswith(tuple(options.loops)):
                continue
            with flags(kind):
                run(options.length)  # prepares and compiles
                shorter, whole = (seconds_of(partial(run, steps)) for steps in (options.length // 2, options.length))
            rate = batch * (options.length - options.length // 2) / (whole - shorter)
            row = {"batch": batch, "what": name, "image_steps_per_second": rate}
            rows.append(row | {"whole": batch * options.length / whole, "copies": prepared.facts(model)})
            yield {"far": options.far, "rows": rows}


def repeated(images: Tensor, count: int) -> Tensor:
    """So many images, over and over the same."""
    return images.repeat(-(-count // len(images)), 1, 1, 1)[:count].contiguous()


def seconds_of(run: Callable[[], object], repeats: int = 2) -> float:
    """How long it takes, at best."""
    times = []
    for _ in range(repeats):
        began = now()
        run()
        times.append(now() - began)
    return min(times)


def pgd_by_hand(f: Callable[[Tensor], Tensor], start: Tensor, labels: Tensor, steps: int) -> Tensor:
    """PGD in L∞ as a paper's appendix has it."""
    eps = 8 * PIXEL
    x = (start + torch.empty_like(start).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(steps):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(f(x), labels), x)
        moved = x.detach() + 2 * PIXEL * gradient.sign()
        x = (start + (moved - start).clamp(-eps, eps)).clamp(0, 1)
    return x


@cache
def peers() -> dict[str, Callable[[nn.Module, Tensor, Tensor, int], object]]:
    """PGD of the libraries that are installed."""
    found: dict[str, Callable[[nn.Module, Tensor, Tensor, int], object]] = {}
    try:
        import torchattacks

        found["torchattacks"] = lambda model, x, y, steps: torchattacks.PGD(model, 8 / 255, 2 / 255, steps)(x, y)
    except Exception as error:  # not there, or made for other versions
        print("no torchattacks:", error)
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # else foolbox does not import where there is no git
    try:
        import foolbox

        def by_foolbox(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> object:
            attack = foolbox.attacks.LinfPGD(steps=steps)
            return attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=8 / 255)

        found["foolbox"] = by_foolbox
    except Exception as error:  # likewise
        print("no foolbox:", error)
    return found


def curve(data: Path, options: argparse.Namespace) -> Results:
    """MAPE against evaluations, ours and the paper's recipe, and the share of samples under 0.1 %."""
    rows: list[dict[str, Any]] = []
    result = {"count": options.few, "rows": rows}
    for name in options.latents:
        encoder, begin, target, eps = latent_of(data, name, options.few)
        f: Any = encoder

        def watch(step: int, x: Tensor, z: Tensor, name: str = name, f: Any = f, target: Tensor = target) -> None:
            if step in options.marks:
                mape = mape_of(f, x, target)
                rows.append({"latent": name, "what": "by hand", "steps": step, **facts(mape)})
                print(rows[-1], flush=True)  # the next stage is far

        if "hand" in options.ways:
            by_hand(f, begin, target, eps, max(options.marks), len(begin), watch)
            yield result
        for steps in options.marks if "ours" in options.ways else []:
            found = gate.collide(encoder, begin, target, gate.L2(eps), steps=steps, precision=options.precision)
            mape = mape_of(f, found.x, target)
            rows.append({"latent": name, "what": "gatecrash", "steps": steps, **facts(mape)})
            yield result


def latent_of(data: Path, name: str, count: int) -> tuple[gate.Encoder, Tensor, Tensor, float]:
    """An encoder, starting points, targets and the radius: the x-ray and ImageNet, or noise and CIFAR-10."""
    if name.startswith("resnet"):
        images, start = imagenet(data, count)
        encoder = gate.Encoder(resnet18(images)) if name == "resnet18" else gate.Encoder(resnet50(data), **IMAGENET)
        return encoder, start, images, EPS
    targets = images_of(data, "cifar10_test", count)
    noise = torch.rand(targets.shape, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    return gate.Encoder(densenet(data), "avgpool", **CIFAR), noise, targets, 10.0


def facts(mape: Tensor) -> dict[str, float]:
    """Median, and the share under 0.1 %."""
    return {"median_mape": float(mape.median()), "under_0.1_percent": float((mape < 1e-3).float().mean())}


def agree(data: Path, options: argparse.Namespace) -> Results:
    """AUROC after both sides were attacked, and the time, on the plain and on the fast path."""
    model = densenet(data)
    encoder, features = gate.Encoder(model, **CIFAR), gate.Encoder(model, "avgpool", **CIFAR)
    inliers, outliers = images_of(data, "cifar10_test", options.agreed), images_of(data, "gtsrb_test", options.agreed)
    labels = torch.from_numpy(np.load(data / "cifar10_train.npz")["y"][: options.fit]).long().to(DEVICE)
    detectors = {
        "msp": gate.detectors.MSP(encoder),
        "energy": gate.detectors.Energy(encoder),
        "mahalanobis": gate.detectors.Mahalanobis(features),
    }
    gate.fit_all(list(detectors.values()), (images_of(data, "cifar10_train", options.fit), labels))
    rows = []
    precisions: tuple[Precision, ...] = get_args(Precision)
    for name, detector in detectors.items():
        for ball in (gate.Linf(PIXEL), gate.Linf(8 * PIXEL), gate.L2(0.5)):
            row: dict[str, Any] = {"detector": name, "ball": str(ball)}
            for precision in precisions:
                began = now()
                into = gate.admit(detector, outliers, ball, steps=options.length, precision=precision)
                out = gate.evict(detector, inliers, ball, steps=options.length, precision=precision)
                row[f"{precision}_seconds"] = now() - began
                scores = detector.scores(out.x, 500), detector.scores(into.x, 500)
                row[precision] = gate.metrics.auroc(*scores)
            rows.append(row)
            yield {"count": len(inliers), "steps": options.length, "rows": rows}


def audit(data: Path, options: argparse.Namespace) -> Results:
    """A two-sided audit of five detectors, and what of its time is the network's own: that of its passes, alone.

    `attack_share` is that of the gradients of whole batches, which only the attacks take.
    """
    model = densenet(data)
    encoder, features = gate.Encoder(model, **CIFAR), gate.Encoder(model, "avgpool", **CIFAR)
    inliers, outliers = images_of(data, "cifar10_test", options.audited), images_of(data, "gtsrb_test", options.audited)
    content = np.load(data / "cifar10_train.npz")
    labels = torch.from_numpy(content["y"][: options.fit]).long().to(DEVICE)
    train = images_of(data, "cifar10_train", options.fit), labels
    kinds = gate.detectors
    detectors = {
        "msp": kinds.MSP(encoder),
        "energy": kinds.Energy(encoder),
        "odin": kinds.ODIN(encoder),
        "mahalanobis": kinds.Mahalanobis(features),
        "rmd": kinds.RelativeMahalanobis(features),
    }
    gate.fit_all(list(detectors.values()), train)
    attack = {"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": PIXEL}, "steps": 10}
    passes: Counter[Pass] = Counter()
    hook = model.register_forward_pre_hook(lambda _, given: passes.update([pass_of(given[0])]))
    began = now()
    with tempfile.TemporaryDirectory() as folder:
        try:
            gate.audit(
                detectors, inliers, {"gtsrb": outliers}, out=folder, attacks=[attack], batch_size=options.batch_audit
            )
        except ModuleNotFoundError as missing:  # the report's charts; the results are written before them
            print("no report:", missing)
        seconds = now() - began
        samples = gate_samples(Path(folder))
    hook.remove()
    print(f"{seconds:.1f} s, {passes.total()} passes of {len(passes)} kinds", flush=True)
    alone = {kind: pass_seconds(model, inliers, kind) for kind in passes}
    own = sum(count * alone[kind] for kind, count in passes.items())
    size = min(options.batch_audit, len(inliers))
    attacking = sum(count * alone[kind] for kind, count in passes.items() if kind[:2] == (size, True))
    yield {
        "inliers": len(inliers),
        "outliers": len(outliers),
        "seconds": seconds,
        "network_seconds": own,
        "share": own / seconds,
        "attack_share": attacking / seconds,
        "evaluations": samples,
        "passes": [[*kind[:2], str(kind[2]), kind[3], count, alone[kind]] for kind, count in passes.items()],
    }


def gate_samples(folder: Path) -> dict[str, int]:
    """Evaluations of every detector in an audit."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "samples.parquet", columns=["detector", "evaluations"]).to_pydict()
    spent: dict[str, int] = {}
    for name, count in zip(table["detector"], table["evaluations"], strict=True):
        spent[name] = spent.get(name, 0) + int(count or 0)
    return spent


Pass = tuple[int, bool, torch.dtype, bool]
"""What the time of a pass depends on: how many images, whether there is a gradient, the numbers' kind, and TF32."""


def pass_of(x: Tensor) -> Pass:
    """The pass of a network on such images."""
    return len(x), x.requires_grad and torch.is_grad_enabled(), x.dtype, torch.backends.cudnn.allow_tf32


def pass_seconds(model: nn.Module, images: Tensor, kind: Pass, repeats: int = 5) -> float:
    """Seconds of such a pass of the network alone, backward included where a gradient is asked for."""
    size, grad, dtype, rounds = kind
    network = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    x = repeated(images, size).to(dtype)

    def run() -> None:
        y = x.detach().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            value = network(y).logsumexp(dim=1).sum()
        if grad:
            torch.autograd.grad(value, y)

    with flags("default" if rounds else "float32"):
        run()
        began = now()
        for _ in range(repeats):
            run()
        return (now() - began) / repeats


def growth(data: Path, options: argparse.Namespace) -> Results:
    """How time and memory grow with images, steps and components."""
    encoder = gate.Encoder(densenet(data), **CIFAR)
    rows: list[dict[str, Any]] = []
    few, short = options.grown_images, options.grown_steps
    targets = images_of(data, "cifar10_test", 10 * few)
    noise = torch.rand(targets.shape, device=DEVICE)

    def measured(count: int, steps: int) -> dict[str, float]:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = now()
        gate.collide(
            encoder, noise[:count], targets[:count], gate.L2(10.0), steps=steps, batch_size=few, precision="float32"
        )
        seconds = now() - began
        peak = torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else 0.0
        return {"seconds": seconds, "peak_mib": peak}

    measured(few, 5)
    for count, steps in ((few, short), (10 * few, short), (few, 10 * short)):
        rows.append({"images": count, "steps": steps, **measured(count, steps)})
        yield {"rows": rows}
    from gatecrash.mixture import fit_mixture

    z = torch.randn(500 * options.components, 342, device=DEVICE)
    for components in (options.components, 10 * options.components):
        fit_mixture(z, components, steps=1)
        seconds = seconds_of(partial(fit_mixture, z, components, steps=10, tol=0.0))
        rows.append({"components": components, "seconds": seconds})
        yield {"rows": rows}


PARTS = {
    "collide": collide,
    "throughput": throughput,
    "curve": curve,
    "agree": agree,
    "audit": audit,
    "growth": growth,
}


def main() -> None:
    """Run the parts asked for, one JSON file each, written after every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--count", type=int, default=250, help="images of the collision")
    parser.add_argument("--steps", type=int, default=1000, help="of the recipe that is to be beaten")
    parser.add_argument("--tries", type=int, nargs="*", default=[54, 55, 56, 58], help="steps that may beat it")
    parser.add_argument("--schedules", nargs="*", default=["linear"], help="of their size, likewise")
    parser.add_argument("--far", type=float, nargs="*", default=[], help="other shares of steps in half precision")
    parser.add_argument("--defaults", action="store_true", help="a collision with no option set as well, twice")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--loops", nargs="*", default=["collision", "PGD"], help="likewise: how their names begin")
    parser.add_argument("--length", type=int, default=100, help="steps of a run of the throughput, and of agree")
    parser.add_argument("--agreed", type=int, default=500, help="images on either side of agree")
    parser.add_argument("--few", type=int, default=64, help="images of the curve")
    parser.add_argument("--marks", type=int, nargs="*", default=[100, 300, 1000, 3000, 10000], help="steps, likewise")
    parser.add_argument("--latents", nargs="*", default=["resnet50", "densenet"], help="likewise")
    parser.add_argument("--ways", nargs="*", default=["hand", "ours"], help="likewise")
    parser.add_argument("--precision", default="float32", help="of ours, likewise")
    parser.add_argument("--audited", type=int, default=10000)
    parser.add_argument("--batch-audit", type=int, default=500)
    parser.add_argument("--fit", type=int, default=5000, help="images that the detectors of the audit are fitted to")
    parser.add_argument("--grown-images", type=int, default=200, help="of the growth; ten times as many are next")
    parser.add_argument("--grown-steps", type=int, default=60, help="likewise")
    parser.add_argument("--components", type=int, default=100, help="likewise, of the mixture, each for 500 latents")
    parser.add_argument("--compile-after", type=int, default=Preparation().compile_after, help="calls of one size")
    parser.add_argument("--graphs", type=int, default=Preparation().graphs, help="sizes up to this as CUDA graphs")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="for all, so for the loops by hand too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        began = time.monotonic()
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
        half.FAR, half.FAR_EVEN, half.FAR_ANNEALED = SHARES
        with preparing(devices=(DEVICE,), compile_after=options.compile_after, graphs=options.graphs):
            for result in PARTS[part](options.data, options):
                seconds = time.monotonic() - began
                result |= {
                    "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
                    "torch": torch.__version__,
                    "compile_after": options.compile_after,
                    "graphs": options.graphs,
                    "cudnn_benchmark": options.cudnn_benchmark,
                    "total_seconds": seconds,
                }
                write_text(options.out / f"{part}.json", json.dumps(result, indent=1))
                print(result["rows"][-1] if "rows" in result else result, flush=True)
                print(f"{part}: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
