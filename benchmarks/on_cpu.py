"""What a CPU gains: portions, channels last and freed memory that is kept, each beside the same search without it.

    OMP_NUM_THREADS=2 python benchmarks/on_cpu.py DATA [OUT] [--count 100] [--large 12] [--steps 3] [--rounds 3]

DATA holds cifar10_test.npz, imagenet.npz, densenet_bc.safetensors and resnet50.safetensors, see `prepare.py`. Every
measurement is a process of its own, so that its peak memory is its own too; the rounds take turns, and the table has
medians. OUT, where given, is a JSON file of the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from speed import CIFAR, IMAGENET, densenet, images_of, resnet50

import gatecrash as gate
from gatecrash import portions
from gatecrash.memory import keep_freed_memory

WAYS = {
    "as it is": (),
    "without kept memory": ("memory",),
    "channels first": ("layout",),
    "all at once": ("portions",),
    "with none of them": ("memory", "layout", "portions"),
}
"""What is left out, by its title."""


def attack(data: Path, options: argparse.Namespace) -> tuple[int, Callable[[], object]]:
    """Inliers pushed out, MSP on DenseNet-BC: evaluations, and what makes them."""
    x = images_of(data, "cifar10_test", options.count)
    detector = gate.detectors.MSP(gate.Encoder(densenet(data), **CIFAR))
    precision = "float32" if "layout" in WAYS[options.way] else "auto"
    return len(x) * (options.steps + 1), lambda: gate.evict(
        detector, x, gate.Linf(1 / 255), steps=options.steps, precision=precision
    )


def scores(data: Path, options: argparse.Namespace) -> tuple[int, Callable[[], object]]:
    """The scores of MSP on DenseNet-BC."""
    detector, x = (
        gate.detectors.MSP(gate.Encoder(densenet(data), **CIFAR)),
        images_of(data, "cifar10_test", 3 * options.count),
    )
    return len(x), lambda: detector.scores(x)


def odin_scores(data: Path, options: argparse.Namespace) -> tuple[int, Callable[[], object]]:
    """The scores of ODIN there, which take a gradient."""
    x = images_of(data, "cifar10_test", options.count)
    detector = gate.detectors.ODIN(gate.Encoder(densenet(data), **CIFAR))
    return len(x), lambda: detector.scores(x)


def collision(data: Path, options: argparse.Namespace) -> tuple[int, Callable[[], object]]:
    """Noise that collides with ImageNet images on ResNet-50."""
    encoder, x = gate.Encoder(resnet50(data), **IMAGENET), images_of(data, "imagenet", options.large)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    precision = "float32" if "layout" in WAYS[options.way] else "auto"
    return len(x) * (options.steps + 1), lambda: gate.collide(
        encoder, noise, x, gate.L2(5.0), steps=options.steps, precision=precision
    )


JOBS = {
    "DenseNet-BC, attack on MSP": attack,
    "DenseNet-BC, scores of MSP": scores,
    "DenseNet-BC, scores of ODIN": odin_scores,
    "ResNet-50, 224 px, collision": collision,
}


def measure(options: argparse.Namespace) -> None:
    """One measurement, printed as JSON."""
    left_out = WAYS[options.way]
    if "memory" not in left_out:
        keep_freed_memory()
    if "portions" in left_out:
        portions.ON_CPU = portions.SCORED_ON_CPU = portions.NUMBERS = portions.STORED = portions.LARGEST = 1 << 60
    count, run = JOBS[options.job](options.data, options)
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rate": count / seconds, "peak_mib": peak}))


def main() -> None:
    """Measure every job in every way, round by round, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=100, help="CIFAR-10 images")
    parser.add_argument("--large", type=int, default=12, help="ImageNet images")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=list(JOBS), help="one measurement in this process")
    parser.add_argument("--way", choices=list(WAYS))
    options = parser.parse_args()
    if options.job:
        measure(options)
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    sizes = [f"--{name}={getattr(options, name)}" for name in ("count", "large", "steps")]
    for _ in range(options.rounds):
        for job in JOBS:
            for way in WAYS:
                command = [sys.executable, __file__, str(options.data), *sizes, f"--job={job}", f"--way={way}"]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.setdefault((job, way), []).append(json.loads(done.stdout))
    rows = []
    for (job, way), runs in found.items():
        rate, peak = (statistics.median(run[key] for run in runs) for key in ("rate", "peak_mib"))
        rows.append({"job": job, "way": way, "rate": rate, "peak_mib": peak})
        print(f"| {job} | {way} | {rate:.1f} | {peak:,.0f} MiB |", flush=True)
    if options.out:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rounds": options.rounds}
        options.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
