"""What is timed, in one table: each measure beside its goal, and whether the goal is met here.

    python benchmarks/bench.py OUT [--data DATA] [--quick] [--parts overhead,detectors,searches]

`make bench` does this with the peers installed. Without DATA: the overhead of the loop over a minimal one and over the
peers, and the speed of detectors. With DATA (see `benchmarks/prepare.py`) and a GPU also the collision, its throughput,
the audit and how cost grows (`searches`). OUT gets `table.md`, and the JSON files of the benchmarks it is made of.
`--quick` shows whether everything runs, on a CPU too; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
PARTS = ("overhead", "detectors", "searches")
SMALL = {
    "count": 2,
    "steps": 10,
    "tries": 2,
    "batch": 2,
    "batches": 2,
    "length": 3,
    "audited": 4,
    "batch-audit": 4,
    "fit": 200,
    "grown-images": 2,
    "grown-steps": 2,
    "components": 2,
}
"""The sizes of `speed.py` that a CPU can bear."""


class Line(NamedTuple):
    """A line of the table."""

    what: str
    value: float
    goal: float
    least: bool
    """Whether the goal is the least that will do, or the most."""

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the goal."""
        return self.value >= self.goal if self.least else self.value <= self.goal

    def __str__(self) -> str:
        sign = "≥" if self.least else "≤"
        return f"| {self.what} | {self.value:.3g} | {sign} {self.goal:g} | {'yes' if self.met else 'no'} |"


def run(script: str, *options: str) -> bool:
    """Whether a benchmark ran to its end; what it prints is shown."""
    print(f"{script} {' '.join(options)}", flush=True)
    return subprocess.run([sys.executable, str(HERE / script), *options], check=False).returncode == 0


def overhead(out: Path, quick: bool) -> Iterator[Line]:
    """The loop beside a minimal one and torchattacks, on a CPU."""
    file = out / "overhead.json"
    if not run("overhead.py", str(file), "--rounds", "5" if quick else "25"):
        return
    for network, goal in (("conv net", 1.05), ("linear model", 1.15)):
        found = json.loads(file.read_text())["results"][network]
        ours, best = found["gatecrash"]["ratio"], found["gatecrash, best"]["ratio"]
        yield Line(f"CPU, {network}: time of 20 steps of PGD over a minimal loop's", ours, goal, least=False)
        yield Line(f"CPU, {network}: the same with the best point kept", best, goal, least=False)
        for peer in ("torchattacks", "torchattacks, values", "foolbox"):
            if peer in found:
                yield Line(f"CPU, {network}: the same over {peer}", 1 / found[peer]["of_gatecrash"], 1.0, least=False)


def detectors(out: Path, quick: bool) -> Iterator[Line]:
    """Scores from features, against pytorch-ood and against a reference one image at a time."""
    parts = ("mahalanobis", "gram")
    if not run("detectors.py", str(out), "--parts", ",".join(parts), "--repeats", "3" if quick else "9"):
        return
    for part in parts:
        file = out / f"{part}.json"
        if file.is_file():
            found = json.loads(file.read_text())
            for name, ratio in found["ratios"].items():
                yield Line(f"CPU, {part}, {name}: times as fast as the peer", ratio, found["wanted"], least=True)


def searches(data: Path, out: Path, quick: bool) -> Iterator[Line]:
    """The collision on ResNet-50, its throughput, the audit and how cost grows, on a GPU."""
    sizes = [f"--{name}={size}" for name, size in SMALL.items()] if quick else []
    # Searches as short as these are not compiled unless it is asked for.
    if not run("speed.py", str(data), str(out), "--parts", "collide,throughput", "--compile-after=1", *sizes):
        return
    if not run("speed.py", str(data), str(out), "--parts", "audit,growth", *sizes):
        return
    rows = json.loads((out / "collide.json").read_text())["rows"]
    reached = [row for row in rows if row.get("reached") and "mixed" in row["what"]]
    for flags, goal in (("float32", 100), ("default", 50)):
        best = max((row[f"times_{flags}"] for row in reached), default=0.0)
        yield Line(f"collision on ResNet-50: times as fast as the paper's recipe, {flags}", best, goal, least=True)
    rates: dict[int, dict[str, float]] = {}
    for row in json.loads((out / "throughput.json").read_text())["rows"]:
        rates.setdefault(row["batch"], {})[row["what"]] = row["image_steps_per_second"]
    for batch, rate in rates.items():
        for kind in ("collision", "PGD"):
            ours, title = rate[f"{kind}, mixed"], f"ResNet-18, {kind}, batch {batch}: image-steps per second over"
            yield Line(f"{title} the eager float32 loop's", ours / rate[f"{kind} by hand, float32"], 4, least=True)
            peers = [rate[name] for name in rate if name.startswith(f"{kind} by") and name.endswith("default")]
            yield Line(f"{title} the fastest at default flags", ours / max(peers), 2, least=True)
    audit = json.loads((out / "audit.json").read_text())
    yield Line("audit of five detectors: the network's share of the time", audit["share"], 0.85, least=True)
    growth = json.loads((out / "growth.json").read_text())["rows"]
    few, images, steps, hundred, thousand = growth
    for title, more in (("images", images), ("steps", steps)):
        yield Line(f"{title} × 10: time ×", more["seconds"] / few["seconds"], 10.5, least=False)
        yield Line(f"{title} × 10: time × likewise", more["seconds"] / few["seconds"], 9.5, least=True)
    yield Line("images × 10: memory ×", images["peak_mib"] / max(few["peak_mib"], 1.0), 1.05, least=False)
    yield Line("mixture, K = 100 → 1000: time ×", thousand["seconds"] / hundred["seconds"], 11, least=False)


def main() -> None:
    """Run what can run here, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see whether everything runs")
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts, quick, lines = options.parts.split(","), options.quick, list[Line]()
    if "overhead" in parts:
        lines += overhead(options.out, quick)
    if "detectors" in parts:
        lines += detectors(options.out, quick)
    if "searches" in parts and options.data is not None and (quick or torch.cuda.is_available()):
        lines += searches(options.data, options.out, quick)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    head = f"{datetime.now(UTC):%Y-%m-%d}, {device}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    table = "\n".join([head, "", "| what | here | goal | met |", "|---|---|---|---|", *map(str, lines)])
    (options.out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nsaved as {options.out / 'table.md'}")
    if not lines:
        sys.exit("nothing could be timed")


if __name__ == "__main__":
    main()
