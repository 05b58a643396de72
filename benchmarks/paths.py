"""The fast path of a collision beside the plain one, on a GPU: what docs/results/speed.md says of the two.

    python benchmarks/paths.py DATA OUT [resnet50 densenet resnet18] [--doubts | --shares]

64 collisions each, as in steppers.py: with CUDA graphs and without, with other shares of the run in half precision, in
float32, and with a stop at which half of them leave; and how often the host waits for the device in so many steps.
With `--doubts`, which a CPU can run too, what it is good for that a search doubts half precision on its way. `resnet18`
has random weights, as in the throughput of speed.py. With `--shares`, on a CPU too, PGD with constant steps and APGD on
DenseNet-BC with other shares of the run in half precision instead. OUT gets paths.json after every row.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from speed import CIFAR, DEVICE, PIXEL, densenet, images_of, latent_of, mape_of, now
from torch import Tensor

import gatecrash as gate
from gatecrash import half
from gatecrash.files import write_text
from gatecrash.prepared import preparing

Row = dict[str, Any]


class Collision:
    """Images, targets and the way to bring them together."""

    def __init__(self, data: Path, name: str, count: int) -> None:
        self.encoder, self.start, self.target, self.eps = latent_of(data, name, count)

    def run(self, steps: int, precision: Any, far: float, **options: Any) -> tuple[gate.Found, Row]:
        """What was found, and what there is to say of it."""
        half.FAR_ANNEALED = far
        ball, began = gate.L2(self.eps), now()
        found = gate.collide(self.encoder, self.start, self.target, ball, steps=steps, precision=precision, **options)
        seconds, mape = now() - began, mape_of(self.encoder, found.x, self.target)  # type: ignore[arg-type]
        facts = {"median_mape": float(mape.median()), "p90_mape": float(mape.quantile(0.9)), "seconds": seconds}
        return found, {"steps": steps, "precision": precision, "far": far, **facts}


def rows_of(collision: Collision, long: int) -> Iterator[Row]:
    """Every comparison of one network."""
    for graphs in (0, 128):
        with preparing(devices=(DEVICE,), compile_after=1, graphs=graphs):
            collision.run(20, "mixed", 0.5)  # compiles
            for far in (0.7, 0.97):
                yield {"graphs": graphs, **collision.run(100, "mixed", far)[1]}
    plain, row = collision.run(100, "float32", 0.0)
    yield row
    with preparing(devices=(DEVICE,), compile_after=1, graphs=128):
        stop = plain.value.median()
        found, row = collision.run(100, "mixed", 0.9, stop=stop)
        yield {**row, "stop": float(stop), "success": int(found.success.sum()), "held": held(found, stop)}
        yield {"waits": {steps: waits(collision, steps) for steps in (40, 80, 160)}}
        for far in (0.7, 0.97, 1.0):
            yield collision.run(long, "mixed", far)[1]
    yield collision.run(long, "float32", 0.0)[1]


def doubted(collision: Collision) -> Iterator[Row]:
    """Half precision to the end, half precision as long as it is of use, and float32."""
    doubts, compile_after = half.DOUBTS, None if DEVICE == "cpu" else 1
    for steps in (40, 100):
        with preparing(devices=(DEVICE,), compile_after=compile_after):
            for looks in ((), doubts):
                half.DOUBTS = looks
                yield {"doubts": looks, **collision.run(steps, "mixed", 0.97)[1]}
        yield collision.run(steps, "float32", 0.0)[1]


def shared(data: Path, count: int) -> Iterator[Row]:
    """What PGD and APGD come to in float32, and with more and more of the run in half precision.

    A sample counts as weaker, or stronger, from 1 % of the median value on. A ball may be too small for half precision,
    which is then not taken unless asked for, as here.
    """
    encoder = gate.Encoder(densenet(data), **CIFAR)
    detector = gate.detectors.Energy(encoder)
    inliers, outliers = images_of(data, "cifar10_test", count), images_of(data, "gtsrb_test", count)
    with torch.no_grad():
        labels = encoder(inliers).argmax(1)
    for ball, step in ((gate.Linf(PIXEL), PIXEL / 4), (gate.Linf(8 * PIXEL), 2 * PIXEL), (gate.L2(0.5), 0.1)):
        ways: dict[str, Callable[[Any], gate.Found]] = {
            "pgd": lambda precision, ball=ball, step=step: gate.pgd(
                encoder, inliers, labels, ball, steps=60, step=step, precision=precision
            ),
            "evict": lambda precision, ball=ball: gate.evict(detector, inliers, ball, steps=60, precision=precision),
            "admit": lambda precision, ball=ball: gate.admit(detector, outliers, ball, steps=60, precision=precision),
        }
        for way, run in ways.items():
            plain = run("float32").value
            yield {"way": way, "ball": str(ball), "precision": "float32", "mean": float(plain.mean())}
            slack = 0.01 * plain.abs().median()
            for far in (0.7, 0.9, 0.97):
                half.FAR = half.FAR_EVEN = far
                value = run("mixed").value
                counts = {
                    "weaker": int((value > plain + slack).sum()),
                    "stronger": int((value < plain - slack).sum()),
                }
                yield {"way": way, "ball": str(ball), "far": far, "mean": float(value.mean()), **counts}


def held(found: gate.Found, stop: Tensor) -> bool:
    """Whether all that is called a success is one."""
    return bool((found.value[found.success] <= stop).all())


def waits(collision: Collision, steps: int) -> dict[str, int]:
    """Where in the code the host waits for the device during a search, and how often."""
    if DEVICE != "cuda":
        return {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            collision.run(steps, "mixed", 0.9)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]
    return dict(Counter(places))


def main() -> None:
    """All comparisons, one JSON file, written after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("latents", nargs="*", default=["resnet50", "densenet"])
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--long", type=int, default=1000, help="steps of the long runs")
    parser.add_argument("--doubts", action="store_true", help="with and without the doubts of half precision instead")
    parser.add_argument("--shares", action="store_true", help="PGD and APGD with other shares of it instead")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    rows: list[Row] = []
    for row in compared(options):
        rows.append(row)
        print(rows[-1], flush=True)
        write_text(options.out / "paths.json", json.dumps({"device": device, "rows": rows}, indent=1))


def compared(options: argparse.Namespace) -> Iterator[Row]:
    """All that was asked for."""
    if options.shares:
        with preparing(devices=(DEVICE,), compile_after=None if DEVICE == "cpu" else 1):
            yield from shared(options.data, options.count)
        return
    for name in options.latents:
        collision = Collision(options.data, name, options.count)
        for row in doubted(collision) if options.doubts else rows_of(collision, options.long):
            yield {"latent": name, **row}


if __name__ == "__main__":
    main()
