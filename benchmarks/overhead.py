"""What our loop costs beside the network's own work: PGD against a minimal loop, torchattacks and foolbox.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py [OUT] [--rounds 15] [--steps 20] [--batch 64] [--device cpu]

Networks with random weights on 32×32×3 noise, so no data is needed; a library that is not installed is left out. In
every round all take their turn, in an order drawn anew, and the table has the medians over the rounds of each one's
time divided by the minimal loop's, and by that of ours that does the same work, of the same round. OUT, where given, is
a JSON file of the same.

Memory that was freed stays with the process (glibc's MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ are set): else a
third of the conv net's time goes into fetching the same pages again and again, more or less of it for anyone by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gatecrash as gate

EPS, STEP = 8 / 255, 2 / 255
CLASSES = 10

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}  # glibc takes no more

Attack = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
Times = dict[str, dict[str, float]]


def conv_net() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, CLASSES),
    )


def linear_model() -> nn.Module:
    """One matrix: the least a network can do, so that everything else shows."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"conv net": conv_net, "linear model": linear_model}


def minimal_loop(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """PGD as a paper's appendix has it, and nothing more: no checks, no best point, no value of what comes out."""
    x = (images + torch.empty_like(images).uniform_(-EPS, EPS)).clamp(0, 1)
    for _ in range(steps):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(model(x), labels), x)
        moved = x.detach() + STEP * gradient.sign()
        x = (images + (moved - images).clamp(-EPS, EPS)).clamp(0, 1)
    return x


def ours(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """The same by `gate.pgd`: the last point, checked, nothing measured."""
    return gate.pgd(model, images, labels, gate.Linf(EPS), steps=steps, step=STEP, keep="last", measure=False).x


def ours_with_values(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """The same with every image's loss before and after."""
    return gate.pgd(model, images, labels, gate.Linf(EPS), steps=steps, step=STEP, keep="last").x


def ours_best(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """What `gate.pgd` does when nothing is said: the best point of every image, which no other here looks for."""
    return gate.pgd(model, images, labels, gate.Linf(EPS), steps=steps, step=STEP).x


def by_torchattacks(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """The same by torchattacks."""
    import torchattacks

    adversarial: Tensor = torchattacks.PGD(model, eps=EPS, alpha=STEP, steps=steps)(images, labels)
    return adversarial


def with_values(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """torchattacks, and then every image's loss before and after."""
    adversarial = by_torchattacks(model, images, labels, steps)
    with torch.no_grad():
        for x in (images, adversarial):
            cross_entropy(model(x), labels, reduction="none")
    return adversarial


def by_foolbox(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """The same by foolbox."""
    import foolbox

    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=images.device)
    attack = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=steps)
    adversarial: Tensor = attack.run(wrapped, images, foolbox.criteria.Misclassification(labels), epsilon=EPS)
    return adversarial


def contestants() -> dict[str, Attack]:
    """The attacks that can run here, the minimal loop first."""
    peers: dict[str, Attack] = {"torchattacks": by_torchattacks, "torchattacks, values": with_values}
    peers["foolbox"] = by_foolbox
    installed = {name: attack for name, attack in peers.items() if find_spec(name.split(",")[0])}
    own: dict[str, Attack] = {"gatecrash": ours, "gatecrash, values": ours_with_values, "gatecrash, best": ours_best}
    return {"minimal loop": minimal_loop, **own, **installed}


def seconds_of(run: Callable[[], object], device: str) -> tuple[float, float]:
    """How long it takes: on the clock, and of this process's own time."""
    began = time.perf_counter(), time.process_time()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def compare(network: str, rounds: int, steps: int, batch: int, device: str) -> Times:
    """Medians by attack: seconds, and the ratios to the minimal loop by the clock and by process time."""
    torch.manual_seed(0)
    model = NETWORKS[network]().eval().to(device)
    images, labels = torch.rand(batch, 3, 32, 32, device=device), torch.randint(CLASSES, (batch,), device=device)
    attacks = contestants()
    for attack in attacks.values():
        attack(model, images, labels, steps)
    names, taken = list(attacks), {name: list[tuple[float, float]]() for name in attacks}
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            attack = attacks[name]
            taken[name].append(seconds_of(lambda attack=attack: attack(model, images, labels, steps), device))
    return {
        name: {
            "seconds": statistics.median(clock for clock, _ in times),
            "ratio": statistics.median(a[0] / b[0] for a, b in zip(times, taken["minimal loop"], strict=True)),
            "process_ratio": statistics.median(a[1] / b[1] for a, b in zip(times, taken["minimal loop"], strict=True)),
            "of_gatecrash": statistics.median(a[0] / b[0] for a, b in zip(times, taken[twin_of(name)], strict=True)),
        }
        for name, times in taken.items()
    }


def twin_of(name: str) -> str:
    """Our loop that does the same work."""
    return "gatecrash, values" if name.endswith("values") else "gatecrash"


def main() -> None:
    """Compare on every network, print the table, save it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    asked = parser.parse_args()
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    for network in asked.networks:
        results[network] = compare(network, asked.rounds, asked.steps, asked.batch, asked.device)
        for name, numbers in results[network].items():
            print(
                f"{network:<14}{name:<22}{1000 * numbers['seconds']:9.1f} ms{numbers['ratio']:8.3f} × by the clock"
                f"{numbers['process_ratio']:8.3f} × by process time{numbers['of_gatecrash']:8.3f} × gatecrash"
            )
    if asked.out:
        facts = {**vars(asked), "out": str(asked.out), "torch": torch.__version__, "threads": torch.get_num_threads()}
        asked.out.write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    if KEEP_MEMORY.items() - os.environ.items():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    main()
