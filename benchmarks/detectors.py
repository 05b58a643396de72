"""How fast detectors score, against a peer in the same run.

    python benchmarks/detectors.py OUT [--parts mahalanobis,gram,gram_float32]

`mahalanobis`: features to scores, 100 classes × 512 features, 256 at a time, against pytorch-ood's. `gram`: maps to
scores, the network not counted, at two sets of layers of a DenseNet-BC, against the same score one image at a time with
the whole Gram matrix in float64, as Liang et al. have it (App. H), from its definition; `gram_float32`: the
same reference in float32. A ratio is the peer's median time over ours; scores must agree, or there is no ratio.
OUT gets one JSON file per part, with versions, threads and date.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.detectors import Mahalanobis
from gatecrash.encoder import Encoder
from gatecrash.networks import DenseNetBC

POWERS = range(1, 11)
TAPS = {"between the blocks": ["conv1", "trans1", "trans2", "relu"], "the blocks": ["block1", "block2", "block3"]}


def mahalanobis(repeats: int) -> dict[str, Any]:
    """Nearest of 100 classes under one covariance, for 256 × 512 features."""
    from pytorch_ood.detector import Mahalanobis as Peer

    classes, width, batch = 100, 512, 256
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    means = torch.randn(classes, width, generator=generator)
    y = torch.arange(200 * classes) % classes
    z = (0.1 * (means[y] + torch.randn(len(y), width, generator=generator) @ mixing) + 0.5).clamp(0, 1)
    new = (0.1 * torch.randn(batch, width, generator=generator) @ mixing + 0.5).clamp(0, 1)

    ours = Mahalanobis(Encoder(nn.Flatten())).fit((z[:, :, None, None], y))
    peer = Peer(None).fit_features(z, y)
    # pytorch-ood gives half the distance, and does not divide the covariance by the number of samples.
    compared = agreement(ours.judge(new), 2 * len(z) * peer.predict_features(new))
    times = alternating(
        {"gatecrash": lambda: ours.judge(new), "pytorch-ood": lambda: peer.predict_features(new)}, repeats
    )
    return {
        "sizes": f"{classes} classes, {width} features, batch {batch}",
        "agreement": compared,
        "seconds_per_sample": {name: seconds / batch for name, seconds in times.items()},
        "wanted": 50,
    }


class GramOneByOne:
    """Gram one image at a time, every power's whole matrix: in float64 as in Liang et al., App. H, or in float32."""

    def __init__(self, inliers: list[list[Tensor]], held_out: list[list[Tensor]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        found: dict[int | None, list[list[Tensor]]] = {None: []}  # None: of all classes, for one never predicted
        for *maps, logits in inliers:
            values = [self.values(part) for part in maps]
            found[None].append(values)
            found.setdefault(int(logits.argmax()), []).append(values)
        self.ranges: dict[int | None, list[tuple[Tensor, Tensor]]] = {}
        for label, rows in found.items():
            layers = [torch.stack(layer) for layer in zip(*rows, strict=True)]
            self.ranges[label] = [(layer.amin(dim=0), layer.amax(dim=0)) for layer in layers]
        self.floors = [1e-6 * max(low.abs().max(), high.abs().max()) for low, high in self.ranges[None]]
        self.scale = torch.stack([self.deviations(outputs) for outputs in held_out]).mean(dim=0)

    def values(self, maps: Tensor) -> Tensor:
        """The signed roots of the row sums of G_p = F^p (F^p)ᵀ, for all powers, (P, C)."""
        rows = []
        for power in POWERS:
            raised = maps.to(self.dtype).flatten(1) ** power
            sums = (raised @ raised.T).sum(dim=1)
            rows.append(sums.sign() * sums.abs() ** (1 / power))
        return torch.stack(rows)

    def deviations(self, outputs: list[Tensor]) -> Tensor:
        """Σ relu(min − g) / |min| + relu(g − max) / |max| over the largest softmax probability, (L,)."""
        *maps, logits = outputs
        total = []
        ranges = self.ranges.get(int(logits.argmax()), self.ranges[None])
        for part, (low, high), floor in zip(maps, ranges, self.floors, strict=True):
            g = self.values(part)
            below, above = (low - g).relu() / low.abs().clamp(floor), (g - high).relu() / high.abs().clamp(floor)
            total.append((below + above).sum())
        return torch.stack(total) / logits.softmax(dim=0).max()

    def score(self, outputs: list[Tensor]) -> Tensor:
        """The score of one image."""
        return (self.deviations(outputs) / self.scale).sum()


def gram(repeats: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The deviation of Gram matrices of a DenseNet-BC's maps, for images of 32 × 32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = DenseNetBC()
        for _ in range(20):  # without batch statistics, activations grow beyond what float32 holds to the 20th power
            network(torch.rand(32, 3, 32, 32))
        network.eval()
    found = {title: gram_at(network, taps, repeats, dtype) for title, taps in TAPS.items()}
    return {
        "sizes": f"DenseNet-BC, 10 powers, batch 64 against 1 in {dtype}",
        "taps": TAPS,
        "agreement": max(difference for difference, _ in found.values()),
        "seconds_per_sample": {f"{name}, {title}": t for title, (_, times) in found.items() for name, t in times},
        "wanted": 20,
    }


def gram_at(
    network: nn.Module, taps: list[str], repeats: int, dtype: torch.dtype
) -> tuple[float, list[tuple[str, float]]]:
    """How far the two scores differ, and the seconds an image takes, at some layers."""
    from gatecrash.detectors.gram import Gram

    batch, alone = 64, 8
    generator = torch.Generator().manual_seed(0)
    inliers, held_out = (torch.rand(count, 3, 32, 32, generator=generator) for count in (60, 20))
    new = 0.5 + 0.5 * torch.rand(batch, 3, 32, 32, generator=generator)
    ours = Gram(network, layers=taps, powers=10).fit(inliers, held_out=held_out)
    read = Encoder(network, [*taps, None], pool=None)

    def one_by_one(x: Tensor) -> list[list[Tensor]]:
        return [[part[0] for part in read(image[None])] for image in x]

    peer = GramOneByOne(one_by_one(inliers), one_by_one(held_out), dtype)
    maps, rows = read(new), one_by_one(new[:alone])
    difference = agreement(ours.judge(ours.summary(maps))[:alone], torch.stack([peer.score(row) for row in rows]))
    runs = {"gatecrash": lambda: ours.judge(ours.summary(maps)), "one by one": lambda: [peer.score(r) for r in rows]}
    times = alternating(runs, repeats)
    return difference, [("gatecrash", times["gatecrash"] / batch), ("one by one", times["one by one"] / alone)]


def agreement(ours: Tensor, peers: Tensor) -> float:
    """The largest relative difference between two sets of scores.

    Raises:
        SystemExit: it is too large for the two to be the same score, or all scores are the same.
    """
    difference = float(((ours - peers).abs() / peers.abs()).max())
    if not difference < 0.01 or not float(peers.std()) > 0:
        raise SystemExit(f"the scores do not agree: {ours[:4].tolist()} against {peers[:4].tolist()}")
    return difference


def alternating(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of every run, one after the other in every round, so that a busy moment hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if index:  # the first round is for warming up
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def circumstances() -> dict[str, Any]:
    """Versions, threads and date."""
    found = {}
    for package in ("gatecrash", "torch", "pytorch-ood"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return {"versions": found, "threads": torch.get_num_threads(), "date": datetime.now(UTC).isoformat("T", "seconds")}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mahalanobis": mahalanobis,
    "gram": gram,
    "gram_float32": partial(gram, dtype=torch.float32),
}


def main() -> None:
    """Run the parts asked for, print a table, and write one JSON file each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        try:
            with torch.no_grad():
                result = PARTS[part](options.repeats)
        except ModuleNotFoundError as missing:
            print(f"{part}: skipped, {missing.name} is not installed")
            continue
        # Ours and the peer take turns in the order of the table.
        names = list(result["seconds_per_sample"])
        pairs = list(zip(names[::2], names[1::2], strict=True))
        seconds = result["seconds_per_sample"]
        result["ratios"] = {ours: seconds[peer] / seconds[ours] for ours, peer in pairs}
        result |= circumstances() | {"repeats": options.repeats}
        (options.out / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{part}: {result['sizes']}; scores agree to {result['agreement']:.1e}")
        for ours, peer in pairs:
            for name in (ours, peer):
                print(f"  {name:<30} {1e6 * seconds[name]:12.1f} µs a sample")
            print(f"  {'ratio':<30} {result['ratios'][ours]:12.1f}")
        print(f"  {'wanted':<30} {result['wanted']:12.1f}")


if __name__ == "__main__":
    main()
