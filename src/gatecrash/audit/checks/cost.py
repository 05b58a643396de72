"""What an audit and its checks cost: images passed through the networks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.audit.job import Job
from gatecrash.audit.plan import AttackPlan
from gatecrash.audit.run import Measured, attack_key
from gatecrash.encoder import Encoder
from gatecrash.protocols import Detector


class Meter:
    """Counts the images that pass through networks; one image through one network is one pass."""

    def __init__(self) -> None:
        self.passes = 0


@contextmanager
def counting(networks: Iterable[nn.Module]) -> Iterator[Meter]:
    """A meter on some networks for the time of the block; copies made inside it are counted too."""
    meter = Meter()

    # A closure and not a method: a copy of a network keeps its hooks, and must not get a meter of its own.
    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        meter.passes += len(args[0])

    handles = [network.register_forward_pre_hook(count) for network in networks]
    try:
        yield meter
    finally:
        for handle in handles:
            handle.remove()


def networks_of(detectors: Iterable[object]) -> list[nn.Module]:
    """Every network that some detectors read, once."""
    found: dict[int, nn.Module] = {}
    for detector in detectors:
        inner = detector if isinstance(detector, nn.Module) else getattr(detector, "detector", None)
        for part in inner.modules() if isinstance(inner, nn.Module) else ():
            if isinstance(part, Encoder):
                found[id(part.model)] = part.model
    return list(found.values())


def passes_of(detector: Detector, image: Tensor) -> int:
    """The passes that one score takes, at least 1: two for a detector that preprocesses, more for an ensemble."""
    with counting(networks_of([detector])) as meter, torch.no_grad():
        detector.judge(detector.encode(image))
    return max(1, meter.passes)


def spent_by(job: Job, measured: Measured, passes: dict[str, int]) -> int:
    """The passes that an audit's attacks and scorings took; fitting and pictures are not counted."""
    shared = {attack_key(attack): serves_all(attack) for attack in job.attacks}
    total = sum(passes[title] * len(scores) for (title, _), scores in measured.clean.items())
    seen = set()
    for (title, key, name, rung), outcome in measured.attacked.items():
        total += passes[title] * len(outcome.scores)
        work = int(outcome.evaluations.sum())
        if not shared[key]:
            total += passes[title] * work
        elif (key, name, rung) not in seen:
            seen.add((key, name, rung))
            total += work
    return total


def serves_all(attack: AttackPlan) -> bool:
    """Whether one run of an attack serves every detector, because it reads the network alone."""
    return attack.name == "softmax" or (attack.name == "collide" and attack.target != "detector")
