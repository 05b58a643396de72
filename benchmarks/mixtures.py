"""EM for mixtures of Gaussians against scikit-learn: seconds per step from the same start, and extra memory by N.

    OMP_NUM_THREADS=2 python benchmarks/mixtures.py OUT [--rows 50000] [--width 342] [--components 1000] [--threads 2]

OUT is a JSON file. Both run on the CPU with the same number of threads, in float32 and in float64; where there is a
CUDA device, ours runs there too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatecrash.mixture import Mixture, fit_mixture

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def features(rows: int, width: int, groups: int, dtype: torch.dtype, chunk: int = 4096) -> Tensor:
    """Features in groups, about as far from each other as they are wide; made in chunks, to leave memory alone."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(groups, width, generator=generator)
    z = torch.empty(rows, width, dtype=dtype)
    for part in z.split(chunk):
        which = torch.randint(groups, (len(part),), generator=generator)
        part.copy_(centres[which] + torch.randn(part.shape, generator=generator))
    return z


def first_guess(z: Tensor, components: int) -> Mixture:
    """The same start for both: some rows as means, and the variance of all."""
    chosen = z[torch.randperm(len(z), generator=torch.Generator().manual_seed(1))[:components]]
    roots = z.var(dim=0).rsqrt().repeat(components, 1)
    return Mixture(z.new_full((components,), 1 / components), chosen, roots, "diag")


def ours(z: Tensor, start: Mixture, steps: int) -> float:
    """The mean log-likelihood before the last step of our EM."""
    _, convergence = fit_mixture(z, len(start.weights), "diag", steps=steps, tol=0, start=start)
    return convergence.log_likelihoods[-1]


def theirs(z: Tensor, start: Mixture, steps: int) -> float:
    """The same of scikit-learn's."""
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    model = GaussianMixture(
        len(start.weights),
        covariance_type="diag",
        weights_init=start.weights.numpy(),
        means_init=start.means.numpy(),
        precisions_init=start.roots.square().numpy(),
        max_iter=steps,
        tol=0,
    )
    with warnings.catch_warnings(), threadpool_limits(torch.get_num_threads()):
        warnings.simplefilter("ignore")
        model.fit(z.numpy())
    if model.means_.dtype != z.numpy().dtype:
        raise RuntimeError(f"scikit-learn computed in {model.means_.dtype}, not {z.dtype}")
    return float(model.lower_bound_)


def seconds_per_step(fit: Callable[[int], float], few: int, many: int, repeats: int) -> tuple[float, float]:
    """Seconds of one step, what is done once left out, and the last log-likelihood.

    The best of some tries is taken of the short and of the long fit, not of their difference: on a machine that others
    use too, the smallest difference would be one with a disturbed short fit.
    """
    best, value = {few: float("inf"), many: float("inf")}, 0.0
    for _ in range(repeats):
        for steps in (few, many):
            began = time.perf_counter()
            value = fit(steps)
            best[steps] = min(best[steps], time.perf_counter() - began)
    return (best[many] - best[few]) / (many - few), value


def compare(z: Tensor, components: int, repeats: int) -> dict[str, float]:
    """Both on the CPU; ours on the GPU where there is one."""
    start = first_guess(z, components)
    theirs(z[: 2 * components], start, 1)  # imports
    row: dict[str, float] = {}
    row["theirs"], row["their_log_likelihood"] = seconds_per_step(lambda n: theirs(z, start, n), 1, 3, repeats)
    row["ours"], row["our_log_likelihood"] = seconds_per_step(lambda n: ours(z, start, n), 1, 3, repeats)
    row["ratio"] = row["theirs"] / row["ours"]
    if torch.cuda.is_available():
        there = z.cuda()
        beginning = start.to(there)
        ours(there, beginning, 3)
        row["ours_gpu"], row["gpu_log_likelihood"] = seconds_per_step(lambda n: ours(there, beginning, n), 5, 55, 3)
        row["ratio_gpu"] = row["theirs"] / row["ours_gpu"]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours(there, beginning, 2)
        row["gpu_extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return row


def extra_memory(rows: int, width: int, components: int, dtype: torch.dtype, start: str) -> float:
    """MiB beyond the features at the highest point of a fit in this process (Linux)."""
    z = features(rows, width, 100, dtype)
    fit_mixture(z[:100], 2, steps=1)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmHWM")
    if start == "kmeans++":
        fit_mixture(z, components, "diag", steps=2)
    else:
        ours(z, first_guess(z, components), 2)
    return (resident("VmHWM") - before) / 1024


def resident(key: str) -> int:
    """A line of this process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def measured_elsewhere(rows: int, width: int, components: int, dtype: str, start: str) -> float:
    """`extra_memory` in a process of its own."""
    arguments = [str(rows), str(width), str(components), dtype, start]
    done = subprocess.run(
        [sys.executable, __file__, "--memory", *arguments], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure, print and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=342)
    parser.add_argument("--components", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-time", action="store_true", help="leave the memory out")
    parser.add_argument("--memory", nargs=5, metavar=("ROWS", "WIDTH", "COMPONENTS", "DTYPE", "START"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        rows, width, components, dtype, start = options.memory
        print(extra_memory(int(rows), int(width), int(components), DTYPES[dtype], start))
        return
    result: dict[str, Any] = {"torch": torch.__version__, "threads": options.threads, "steps": {}, "extra_mib": {}}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result |= {"rows": options.rows, "width": options.width, "components": options.components}
    for name, dtype in DTYPES.items():
        z = features(options.rows, options.width, options.components, dtype)
        result["steps"][name] = compare(z, options.components, options.repeats)
        print(name, json.dumps(result["steps"][name]), flush=True)
    for rows in () if options.only_time else (options.rows // 4, options.rows, 4 * options.rows):
        for start in ("given", "kmeans++")[: 1 if rows > options.rows else 2]:
            extra = measured_elsewhere(rows, options.width, options.components, "float32", start)
            result["extra_mib"][f"{rows} rows, {start}"] = extra
            print(f"{rows} rows, start {start}: {extra:.0f} MiB beyond the features", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
