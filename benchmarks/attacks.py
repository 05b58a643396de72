"""The attack suite on real networks and images: the numbers of docs/results/attacks.md.

    python benchmarks/attacks.py DATA OUT --parts short,worst,collisions,curves,minimal [--count 500]

A part can be of some detectors only, as in `worst:odin+msp`, whose file is worst_odin_msp.json. `short` and `worst` are
audits, with attacks of 10 steps and with the suite, so their files have the checks' verdicts too; `verdicts_curves` and
`verdicts_collisions` are audits with the attacks of `curves` and of `collisions`.

DATA holds cifar10_train.npz, cifar10_test.npz, gtsrb_test.npz and tiny.npz (x uint8 N×H×W×3, y) at 32×32, and
densenet_bc.safetensors and resnet20.safetensors. OUT gets one JSON file per part, written after every stage, and the
folders of the audits; an audit that was killed goes on in the next call with the same options.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.attacks.curve import curve_of, recorded
from gatecrash.attacks.minimal import minimal
from gatecrash.audit.checks.gradients import beside, gradient_at, probed
from gatecrash.files import write_text
from gatecrash.metrics import auroc
from gatecrash.networks import DenseNetBC, ResNetCifar, load_weights
from gatecrash.speed import is_plainly, plainly

CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PIXEL = 1 / 255

Results = Iterator[dict[str, Any]]
"""What a part found so far, after each of its stages."""


class Setting:
    """Networks, images and detectors, fitted."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        data, count = options.data, options.count
        self.train = read(data / "cifar10_train.npz", options.fit, device)
        self.inliers = read(data / "cifar10_test.npz", count, device)[0]
        self.outliers = {name: read(data / f"{name}.npz", count, device)[0] for name in ("gtsrb_test", "tiny")}
        densenet = load_weights(DenseNetBC(), data / "densenet_bc.safetensors").to(
            device, memory_format=torch.channels_last
        )
        resnet = load_weights(ResNetCifar(20), data / "resnet20.safetensors").to(
            device, memory_format=torch.channels_last
        )
        made = SPEEDS[options.speed]
        trunk = made(trunk_of(densenet))
        self.logits = gate.Encoder(nn.Sequential(trunk, densenet.fc), **CIFAR)
        self.features = gate.Encoder(trunk, **CIFAR)
        self.resnet_features = gate.Encoder(made(trunk_of(resnet)), **IMAGENET)
        kinds = gate.detectors
        self.fitted = {
            "msp": kinds.MSP(self.logits),
            "energy": kinds.Energy(self.logits),
            "mahalanobis": kinds.Mahalanobis(self.features).fit(self.train),
            "rmd": kinds.RelativeMahalanobis(self.features).fit(self.train),
            "odin": kinds.ODIN(self.logits, temperature=1000.0, magnitude=0.0014),
        }
        self.detectors = self.fitted
        """Those of the part that is run."""

    @cached_property
    def ensembles(self) -> dict[str, Any]:
        """Both Mahalanobis kinds on two networks, made where they are asked for."""
        kinds, features = gate.detectors, self.resnet_features
        second = {"mahalanobis": kinds.Mahalanobis(features), "rmd": kinds.RelativeMahalanobis(features)}
        return {
            f"{name}, two networks": kinds.ScoreEnsemble([self.fitted[name], other.fit(self.train)])
            for name, other in second.items()
        }


class Filled(nn.Module):
    """A network that sees few batch sizes: a batch is filled up with black images, so that each is prepared once.

    On a CPU the network as it is.
    """

    def __init__(self, model: nn.Module, sizes: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.model, self.sizes = model.eval().requires_grad_(False), sizes

    def run(self, x: Tensor) -> Tensor:
        """The output for a batch of one of the sizes."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The network's output for every image."""
        if not x.is_cuda or len(x) > self.sizes[-1] or x.dtype != torch.float32:  # what is prepared is for float32
            output: Tensor = self.model(x)
            return output
        size = next(size for size in self.sizes if size >= len(x))
        black = x.new_zeros(size - len(x), *x.shape[1:])
        return self.run(torch.cat([x, black]).contiguous(memory_format=torch.channels_last))[: len(x)]


class Compiled(Filled):
    """The network as torch.compile makes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, sizes=(32, 128, 512))
        torch._dynamo.config.cache_size_limit = 16
        self.fast = torch.compile(self.model, dynamic=False)

    def run(self, x: Tensor) -> Tensor:
        """The output for a batch of one of the sizes."""
        output: Tensor = self.fast(x)
        return output


class Graphed(Filled):
    """The network as CUDA graphs: what a batch launches is recorded once, and launched as a whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.graphs: dict[tuple[int, bool, bool], Any] = {}

    def run(self, x: Tensor) -> Tensor:
        """The output for a batch of one of the sizes; a copy, since the graph writes the next one in its place."""
        grad = x.requires_grad and torch.is_grad_enabled()
        key = len(x), grad, torch.backends.cudnn.allow_tf32  # a graph rounds as it did when it was recorded
        if key not in self.graphs:
            self.graphs[key] = self.with_gradient(x) if grad else self.without_gradient(x)
        output: Tensor = self.graphs[key](x)
        return output.clone()

    def with_gradient(self, x: Tensor) -> Any:
        """Forward and backward as a graph each."""
        sample = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(True)
        return torch.cuda.make_graphed_callables(copy.deepcopy(self.model), (sample,))

    def without_gradient(self, x: Tensor) -> Any:
        """Forward as a graph."""
        place, graph = x.detach().clone(memory_format=torch.preserve_format), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(3):
                self.model(place)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad(), torch.cuda.graph(graph):
            output = self.model(place)

        def launch(images: Tensor) -> Tensor:
            place.copy_(images)
            graph.replay()
            return output

        return launch


SPEEDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compile": Compiled,
    "graph": Graphed,
}


def trunk_of(model: nn.Module) -> nn.Module:
    """A copy of a network that ends in its pooled features."""
    trunk = copy.deepcopy(model)
    setattr(trunk, next(name for name in ("fc", "linear") if hasattr(model, name)), nn.Identity())
    return trunk


def read(path: Path, count: int, device: str) -> tuple[Tensor, Tensor]:
    """The first images of a file, in [0, 1], with their labels."""
    content = np.load(path)
    x = torch.from_numpy(content["x"][:count]).permute(0, 3, 1, 2).float() / 255
    return x.contiguous().to(device), torch.from_numpy(content["y"][:count]).long().to(device)


def collisions(setting: Setting, eps: float = 10.0) -> Results:
    """Noise made to collide with inliers in the logits of ODIN's preprocessed input, for each of sixteen settings."""
    table, steps, noise = [], setting.options.steps, noise_like(setting)
    apart = (noise - setting.inliers).flatten(1).norm(dim=1)
    for name, detector in sixteen(setting).items():
        found = gate.collide(detector.encode, noise, setting.inliers, gate.L2(eps), steps=steps)
        inside, clean, after = (detector.scores(x, 500) for x in (setting.inliers, noise, found.x))
        table.append(
            {
                "detector": name,
                "clean": auroc(inside, clean),
                "attacked": auroc(inside, after),
                "mape_median": float(found.mape.median()),
                "mape_p90": float(found.mape.quantile(0.9)),
                "target_distance_min": float(apart.min()),
                "target_distance_median": float(apart.median()),
            }
        )
        print(json.dumps(table[-1]), flush=True)
        yield {"eps": eps, "steps": steps, "rows": table}


def sixteen(setting: Setting) -> dict[str, Any]:
    """ODIN with every temperature and magnitude of Liang et al.'s Table 2."""
    return {
        f"T {temperature:g}, magnitude {magnitude:g}": gate.detectors.ODIN(
            setting.logits, temperature=temperature, magnitude=magnitude
        )
        for temperature in (1.0, 10.0, 100.0, 1000.0)
        for magnitude in (0.0, 0.001, 0.002, 0.004)
    }


def noise_like(setting: Setting) -> Tensor:
    """As many images of uniform noise as there are inliers."""
    return torch.rand(setting.inliers.shape, generator=torch.Generator().manual_seed(0)).to(setting.device)


def curves(setting: Setting) -> Results:
    """AUROC against the size of the perturbation, in the shape of Fort's tables, both directions and both norms."""
    table, count = [], len(setting.inliers)
    for name, detector in curved(setting).items():
        inside, thrown_out = detector.scores(setting.inliers, 500), recorded(detector, setting.inliers, "out")
        for key, outliers in setting.outliers.items():
            pairs = {
                "in": (inside, recorded(detector, outliers, "in")),
                "out": (thrown_out, detector.scores(outliers, 500)),
            }
            for direction, pair in pairs.items():
                for norm, at in (("linf", [PIXEL]), ("l2", [0.04, 0.1, 0.2])):
                    curve = curve_of(*pair, norm=norm, at=at)
                    points = [curve.row(curve.reach * i / 20) for i in range(20)]
                    table.append(
                        {
                            "detector": name,
                            "outliers": key,
                            "direction": direction,
                            "norm": norm,
                            "reach": curve.reach,
                            "rows": [
                                {"at": r.at, "before": r.before, "after": r.after, "reached": r.reached}
                                for r in curve.rows
                            ],
                            "curve": [[p.at, p.after] for p in points],
                        }
                    )
                    print(name, key, direction, norm, table[-1]["rows"], flush=True)
                    yield {"count": count, "rows": table}


def curved(setting: Setting) -> dict[str, Any]:
    """The detectors of Fort's tables, of those that are asked for, and their ensembles."""
    named = {name: setting.detectors[name] for name in ("msp", "mahalanobis", "rmd") if name in setting.detectors}
    return named | {title: both for title, both in setting.ensembles.items() if title.partition(",")[0] in named}


def smallest(setting: Setting) -> Results:
    """The smallest perturbation that carries an outlier below the threshold of 95 % of the inliers, and the reverse."""
    table = []
    for name, detector in setting.detectors.items():
        detector.calibrate(setting.inliers)
        for side in setting.options.sides:
            images = setting.outliers["gtsrb_test"] if side == "out" else setting.inliers
            for norm in setting.options.norms:
                began = time.monotonic()
                found = minimal(detector, images, norm, float(detector.threshold), side=side)
                table.append(
                    {
                        "detector": name,
                        "side": side,
                        "norm": norm,
                        "median": found.median,
                        "quartiles": list(found.quantiles((0.25, 0.75)).values()),
                        "never": int(found.distance.isinf().sum()),
                        "across already": int((found.distance == 0).sum()),
                        "evaluations": float(found.evaluations.double().mean()),
                        "n": len(images),
                        "seconds": time.monotonic() - began,
                    }
                )
                print(json.dumps(table[-1]), flush=True)
                yield {"rows": table}


def short(setting: Setting) -> Results:
    """An audit with attacks of 10 steps on both sides, and with noise that collides."""
    pixel, noise = {"norm": "linf", "eps": PIXEL}, {"noise": noise_like(setting)}
    attacks = [
        {"name": "softmax", "ball": pixel, "steps": 10},
        {"name": "admit", "side": "both", "ball": pixel, "steps": 10},
        from_noise(setting),
    ]
    yield from audited(setting, "10 steps and collisions", attacks, setting.outliers | noise)


def worst(setting: Setting) -> Results:
    """An audit with the suite on both sides; images that have passed all of the other side are left alone."""
    budget = setting.options.budget
    ball = {"norm": "linf", "eps": PIXEL}
    attack = {"name": "worst_case", "ball": ball, "budget": budget, "until": "crossed"}
    yield from audited(setting, f"worst case, {budget}", [attack], setting.outliers)


def verdicts_curves(setting: Setting) -> Results:
    """The same of Fort's attack, in the ball that its steps can reach, on the detectors of the curves."""
    attack = {"name": "admit", "side": "both", "steps": 30, "step": 3e-4, "ball": {"norm": "linf", "eps": 30 * 3e-4}}
    setting.detectors = curved(setting)
    yield from audited(setting, "30 steps of 3e-4", [attack], setting.outliers)


def verdicts_collisions(setting: Setting) -> Results:
    """The same of the sixteen collisions."""
    setting.detectors, noise = sixteen(setting), {"noise": noise_like(setting)}
    yield from audited(setting, "sixteen collisions", [from_noise(setting)], noise)


def from_noise(setting: Setting, eps: float = 10.0) -> dict[str, Any]:
    """The collision of noise with inliers in what each detector reads, as a plan has it."""
    ball = {"norm": "l2", "eps": eps}
    return {"name": "collide", "of": "detector", "ball": ball, "start": ["noise"], "steps": setting.options.steps}


def precision(setting: Setting) -> Results:
    """What rounding does to 10 steps on few images, and to gradients: for a CPU, which does not round to TF32."""
    attacks = [{"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": PIXEL}, "steps": 10}]
    found: dict[str, Any] = {}
    for result in audited(setting, "10 steps", attacks, {"gtsrb_test": setting.outliers["gtsrb_test"]}, count=64):
        found |= result
        yield found
    for row in gradients(setting.detectors, setting.inliers[:8], setting.outliers["gtsrb_test"][:8]):
        yield found | row


def gradients_collisions(setting: Setting) -> Results:
    """What gradient_flows finds of the sixteen collisions' detectors, on 8 inliers and 8 images of noise."""
    yield from gradients(sixteen(setting), setting.inliers[:8], noise_like(setting)[:8])


def gradients(detectors: dict[str, Any], inliers: Tensor, outliers: Tensor) -> Results:
    """What differences and rounding make of gradients, for every detector."""
    found, few = {}, beside(torch.cat([inliers, outliers]), 0)
    for name, detector in detectors.items():
        gradient = gradient_at(detector, few, len(few))
        if gradient is not None:
            probe = probed(detector, few, gradient, 0)
            found[f"gradients of {name}"] = {
                "wrong": int(probe.wrong.sum()),
                "cannot tell": int(probe.unsure.sum()),
                "spoilt by rounding": int(probe.lost.sum()),
            }
            print(name, found[f"gradients of {name}"], "of", len(few), flush=True)
            yield dict(found)


def audited(
    setting: Setting,
    title: str,
    attacks: list[dict[str, Any]],
    outliers: dict[str, Tensor],
    count: int | None = None,
) -> Results:
    """The checks and rows of an audit with some attacks and sets of outliers, and so many images of each set."""
    began, count = time.monotonic(), len(setting.inliers[:count])
    named = [name for name in setting.detectors if name in setting.fitted]
    name = "_".join([title.replace(", ", "_").replace(" ", "_"), str(count), *named])
    folder = setting.options.out / f"audit_{name}"
    if not (folder / "results.json").is_file():
        try:
            gate.audit(
                setting.detectors,
                setting.inliers[:count],
                {name: x[:count] for name, x in outliers.items()},
                out=folder,
                attacks=attacks,
                batch_size=500,
                precision="float32" if is_plainly() else "auto",
                resume=(folder / "plan.yaml").is_file(),
            )
        except ModuleNotFoundError as missing:  # the report's charts; the results are written before them
            print("no report:", missing)
    results = json.loads((folder / "results.json").read_text())
    found = {
        "audit": title,
        "count": count,
        "seconds": time.monotonic() - began,
        "checks": results["checks"],
        "rows": [
            {key: row[key] for key in ("detector", "outliers", "attack", "side", "auroc")} for row in results["rows"]
        ],
    }
    for check in found["checks"]:
        print(check["status"], check["name"], check["sentence"], flush=True)
    yield found


PARTS = {
    "collisions": collisions,
    "curves": curves,
    "minimal": smallest,
    "short": short,
    "worst": worst,
    "verdicts_curves": verdicts_curves,
    "verdicts_collisions": verdicts_collisions,
    "precision": precision,
    "gradients_collisions": gradients_collisions,
}


def paced(results: Results, speed: str) -> Results:
    """The same; a network that is fast already is not prepared for speed once more."""
    with plainly(really=speed != "plain"):
        yield from results


def main() -> None:
    """Run the parts asked for, one JSON file each, written after every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="short,worst,collisions,curves,minimal")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--budget", default="standard", choices=["quick", "standard", "thorough"], help="of the suite")
    parser.add_argument("--steps", type=int, default=100, help="of the collisions")
    parser.add_argument("--sides", nargs="*", default=["out", "in"], choices=["out", "in"], help="of minimal")
    parser.add_argument("--norms", nargs="*", default=["linf", "l2"], choices=["linf", "l2"], help="likewise")
    parser.add_argument("--fit", type=int, default=8000)
    parser.add_argument("--speed", default="plain", choices=SPEEDS)
    parser.add_argument("--tag", default="")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.speed != "plain"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    setting = Setting(options, device)
    print(f"networks, images and fitted detectors: {time.monotonic() - began:.1f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for said in options.parts.split(","):
        start = time.monotonic()
        part, _, names = said.partition(":")
        chosen = names.split("+") if names else []
        setting.detectors = {name: setting.fitted[name] for name in chosen or setting.fitted}
        for result in paced(PARTS[part](setting), options.speed):
            seconds = time.monotonic() - start
            result |= {
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "torch": torch.__version__,
                "count": result.get("count", options.count),
                "seconds": seconds,
            }
            write_text(options.out / f"{'_'.join([part, *chosen])}{options.tag}.json", json.dumps(result, indent=1))
            print(f"{said}: {seconds:.1f} s, {time.monotonic() - began:.1f} s since the start", flush=True)


if __name__ == "__main__":
    main()
