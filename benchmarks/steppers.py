"""Which way of moving collides best at equal evaluations: the convergence numbers of docs/results/speed.md.

    python benchmarks/steppers.py DATA OUT [--nets densenet,resnet50] [--count 64] [--evaluations 100 300 1000]

Start images are noise for the DenseNet-BC (CIFAR-10, avgpool, L2 10) and a chest x-ray for the ResNet-50 (ImageNet,
L2 5); the targets are test images. Every way may evaluate the network, forward and backward, as often as said; a line
search's evaluations count. What is compared is the MAPE on the latent, verified in float32, in the median and at the
worst tenth, and the share under 0.1 %. OUT gets steppers.json after every row, and steppers.svg.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speed import CIFAR, DEVICE, EPS, IMAGENET, densenet, imagenet, images_of, mape_of, resnet50
from torch import Tensor

import gatecrash as gate
from gatecrash.files import write_text
from gatecrash.protocols import State, Walk
from gatecrash.search import search
from gatecrash.stepper import Adamax, Apgd, Normalised, gradient_of


@dataclass(frozen=True)
class Setting:
    """A network, where the images start, and what they are to collide with."""

    title: str
    latent: gate.Encoder
    earlier: gate.Encoder
    start: Tensor
    target: Tensor
    eps: float


Way = Callable[[Setting, int], Tensor]
"""(setting, evaluations) → the images found."""


def moved(setting: Setting, evaluations: int, **options: Any) -> Tensor:
    """A collision by one run of a stepper."""
    ball = gate.L2(setting.eps)
    return gate.collide(setting.latent, setting.start, setting.target, ball, steps=evaluations - 1, **options).x


def earlier_layers_first(setting: Setting, evaluations: int) -> Tensor:
    """A third of the evaluations on an earlier layer, the rest on the latent from there."""
    first = max(2, evaluations // 3)
    ball = gate.L2(setting.eps)
    on_the_way = gate.collide(setting.earlier, setting.start, setting.target, ball, steps=first - 1).x
    return moved(setting, evaluations - first, first=on_the_way)


def continued_in_eps(setting: Setting, evaluations: int) -> Tensor:
    """Half of the evaluations in a ball of half the radius, the rest in the whole one from there."""
    first = evaluations // 2
    half = gate.L2(setting.eps / 2)
    near = gate.collide(setting.latent, setting.start, setting.target, half, steps=first - 1).x
    return moved(setting, evaluations - first, first=near)


def scaled_coordinates(setting: Setting, evaluations: int) -> Tensor:
    """Every coordinate of the latent in units of its standard deviation over the targets."""
    with torch.no_grad():
        z = torch.cat([setting.latent(part) for part in setting.target.split(50)])  # type: ignore[misc]
    scale = z.std(dim=0).clamp_min(1e-3 * float(z.std())).reciprocal()

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        return ((setting.latent(x) - z[rows]) * scale).square().sum(dim=1)  # type: ignore[operator]

    ball = gate.L2(setting.eps)
    stepper, steps = Adamax(), evaluations - 1
    return search(objective, setting.start, ball, stepper=stepper, steps=steps, random_start=True).x


@dataclass(frozen=True)
class Lbfgs:
    """Projected L-BFGS, every sample with pairs of its own, and a step that is halved until the value falls.

    The line search looks at values only; each look counts as an evaluation, so the run is told how many it may take.
    """

    pairs: int = 10
    looks: int = 5
    needs_gradient = True

    def begin(self, walk: Walk) -> State:
        """No pairs yet."""
        flat = walk.x.flatten(1)
        empty = flat.new_zeros(len(flat), self.pairs, flat.shape[1])
        return {"steps": empty, "changes": empty.clone(), "x": walk.x.clone(), "gradient": gradient_of(walk).clone()}

    def move(self, walk: Walk, state: State) -> Tensor:
        """The quasi-Newton direction, as far as it goes downhill."""
        gradient = gradient_of(walk)
        if walk.step > 0:
            step, change = ((a - b).flatten(1) for a, b in ((walk.x, state["x"]), (gradient, state["gradient"])))
            useful = ((step * change).sum(dim=1) > 1e-12)[:, None].float()
            state["steps"] = torch.cat([state["steps"][:, 1:], (useful * step)[:, None]], dim=1)
            state["changes"] = torch.cat([state["changes"][:, 1:], (useful * change)[:, None]], dim=1)
            state["x"], state["gradient"] = walk.x.clone(), gradient.clone()
        direction = two_loops(gradient.flatten(1), state["steps"], state["changes"]).view_as(walk.x)
        first = walk.ball.eps / 10 / direction.flatten(1).norm(dim=1).clamp_min(1e-12)
        size = torch.ones_like(first) if walk.step > 0 else first
        best, best_value = walk.x, walk.value
        for _ in range(self.looks):
            tried = walk.ball.project(walk.x - size.view(-1, 1, 1, 1) * direction, walk.centre)
            value = walk.evaluate(tried)
            better = value < best_value
            best = torch.where(better.view(-1, 1, 1, 1), tried, best)
            best_value = torch.where(better, value, best_value)
            size = torch.where(better, size, size / 4)
        return best


def two_loops(gradient: Tensor, steps: Tensor, changes: Tensor) -> Tensor:
    """L-BFGS's direction for every sample, (B, D), from its last pairs (B, M, D); pairs of zeros say nothing."""
    q, weights = gradient.clone(), []
    inner = (steps * changes).sum(dim=2)
    rho = torch.where(inner > 0, inner.clamp_min(1e-30).reciprocal(), torch.zeros_like(inner))
    for i in reversed(range(steps.shape[1])):
        weight = rho[:, i] * (steps[:, i] * q).sum(dim=1)
        q = q - weight[:, None] * changes[:, i]
        weights.append(weight)
    last = changes[:, -1].square().sum(dim=1)
    gamma = torch.where(last > 0, inner[:, -1] / last.clamp_min(1e-30), torch.ones_like(last))
    q = q * gamma[:, None]
    for i, weight in zip(range(steps.shape[1]), reversed(weights), strict=True):
        q = q + (weight - rho[:, i] * (changes[:, i] * q).sum(dim=1))[:, None] * steps[:, i]
    return q


def lbfgs(setting: Setting, evaluations: int) -> Tensor:
    """A step of L-BFGS is one gradient and five looks; a look, without a gradient, is counted as a third of one."""
    looks = Lbfgs().looks
    steps = max(2, round(evaluations / (1 + looks / 3)))
    return moved(setting, steps, stepper=Lbfgs())


WAYS: dict[str, Way] = {
    "Adamax, constant step (the paper)": lambda s, n: moved(s, n, schedule="constant", keep="last"),
    "Adamax, cosine, straight end (default)": moved,
    "Adamax, cosine": lambda s, n: moved(s, n, stepper=Adamax(straight=0.0)),
    "Adamax, linear": lambda s, n: moved(s, n, stepper=Adamax(schedule="linear")),
    "Adamax, cosine, longer steps": lambda s, n: moved(s, n, stepper=Adamax(step=s.eps / 30)),
    "normalised gradient, cosine": lambda s, n: moved(s, n, stepper=Normalised(schedule="cosine")),
    "APGD": lambda s, n: moved(s, n, stepper=Apgd()),
    "projected L-BFGS": lbfgs,
    "earlier layer first": earlier_layers_first,
    "scaled coordinates": scaled_coordinates,
    "half the radius first": continued_in_eps,
    "half of them from neighbours": lambda s, n: moved(s, n, neighbours=True),
}


def settings_of(data: Path, names: list[str], count: int) -> list[Setting]:
    """The networks asked for."""
    found = []
    if "densenet" in names:
        model, target = densenet(data), images_of(data, "cifar10_test", count)
        noise = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        latent, earlier = gate.Encoder(model, "avgpool", **CIFAR), gate.Encoder(model, "trans2", **CIFAR)
        found.append(Setting("DenseNet-BC", latent, earlier, noise, target, 10.0))
    if "resnet50" in names:
        network = resnet50(data)
        images, start = imagenet(data, count)
        latent, earlier = gate.Encoder(network, **IMAGENET), gate.Encoder(network, "layer3", **IMAGENET)
        found.append(Setting("ResNet-50", latent, earlier, start, images, EPS))
    return found


def drawn(rows: list[dict[str, Any]], target: Path) -> None:
    """Median MAPE against evaluations, one panel for every network; nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot, ticker

    titles = list(dict.fromkeys(row["network"] for row in rows))
    figure, panels = pyplot.subplots(1, len(titles), figsize=(6 * len(titles), 4.5), squeeze=False)
    for panel, title in zip(panels[0], titles, strict=True):
        for number, name in enumerate(WAYS):
            mine = [row for row in rows if row["network"] == title and row["way"] == name]
            points = [r["evaluations"] for r in mine], [100 * r["median_mape"] for r in mine]
            look = "s-" if number < 2 else "o--" if number < 10 else "^:"  # the paper's and the default, all others
            panel.loglog(*points, look, label=name, color=f"C{number % 10}", linewidth=2.5 if number < 2 else 1.2)
        panel.set(title=title, xlabel="evaluations", ylabel="median MAPE, %")
        plain = ticker.FuncFormatter(lambda value, place: f"{value:g}")
        panel.xaxis.set_major_locator(ticker.FixedLocator(sorted({r["evaluations"] for r in rows})))
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        for format_with in (
            panel.xaxis.set_major_formatter,
            panel.yaxis.set_major_formatter,
            panel.yaxis.set_minor_formatter,
        ):
            format_with(plain)
    panels[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    """Every way on every network with every number of evaluations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nets", default="densenet,resnet50")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--evaluations", type=int, nargs="*", default=[100, 300, 1000])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    about = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "torch": torch.__version__}
    for setting in settings_of(options.data, options.nets.split(","), options.count):
        for evaluations in options.evaluations:
            for name, way in WAYS.items():
                began = time.monotonic()
                mape = mape_of(setting.latent, way(setting, evaluations), setting.target)  # type: ignore[arg-type]
                facts = {"median_mape": float(mape.median()), "p90_mape": float(mape.quantile(0.9))}
                facts |= {"under_0.1_percent": float((mape < 1e-3).float().mean())}
                facts |= {"seconds": time.monotonic() - began}
                rows.append({"network": setting.title, "way": name, "evaluations": evaluations, **facts})
                print(rows[-1], flush=True)
                write_text(options.out / "steppers.json", json.dumps({**about, "rows": rows}, indent=1))
    drawn(rows, options.out / "steppers.svg")


if __name__ == "__main__":
    main()
