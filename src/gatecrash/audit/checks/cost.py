"""What an audit and its checks cost: images passed through the networks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.audit.job import Job
from gatecrash.audit.run import Measured, attack_key
from gatecrash.detectors import Detector
from gatecrash.encoder import Encoder


class Meter:
    """Counts the images that pass through networks; one image through one network is one pass."""

    def __init__(self) -> None:
        self.passes = 0
        self.blind = False
        """Whether some detector runs nothing that could be counted."""


@contextmanager
def counting(networks: Iterable[nn.Module]) -> Iterator[Meter]:
    """A meter on some networks for the time of the block; copies made inside it are counted too."""
    meter = Meter()

    # A closure and not a method: a copy of a network keeps its hooks, and must not get a meter of its own.
    def count(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (part for value in (*args, *named.values()) for part in parts_in(value))
        meter.passes += next((len(part) for part in given if isinstance(part, Tensor) and part.ndim > 0), 0)

    handles = [network.register_forward_pre_hook(count, with_kwargs=True) for network in networks]
    try:
        yield meter
    finally:
        for handle in handles:
            handle.remove()


def parts_in(value: object) -> Sequence[object]:
    """What a network is given by one argument: several things, or one."""
    return value if isinstance(value, tuple | list) else (value,)


def networks_of(detectors: Iterable[Detector], images: Tensor) -> list[nn.Module]:
    """Every network that the scores of some detectors run, once; `images`, one or two, are scored to see which."""
    found: dict[int, nn.Module] = {}
    for detector in detectors:
        networks = encoded_by(detector)
        if not passes_through(networks, detector, images):
            networks = called_by(detector, images)
        found |= {id(network): network for network in networks}
    return list(found.values())


def encoded_by(detector: Detector) -> list[nn.Module]:
    """The networks of a detector's encoders."""
    return [part.model for part in parts_of(detector) if isinstance(part, Encoder)]


def called_by(detector: Detector, images: Tensor) -> list[nn.Module]:
    """The parts of a detector that its score calls, less those that are called by another: a density, or its halves."""
    called: dict[int, nn.Module] = {}
    running: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not running:
            called[id(module)] = module
        running.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()

    with ExitStack() as hooks:
        for part in parts_of(detector):
            hooks.callback(part.register_forward_pre_hook(enter).remove)
            hooks.callback(part.register_forward_hook(leave).remove)
        score(detector, images)
    return list(called.values())


def parts_of(detector: Detector) -> list[nn.Module]:
    """The modules that a detector is made of, itself excepted."""
    return [part for part in detector.modules() if part is not detector]


def passes_of(detector: Detector, images: Tensor) -> int:
    """The passes that one score takes: two for a detector that preprocesses, more for an ensemble."""
    return passes_through(networks_of([detector], images), detector, images)


def passes_through(networks: Iterable[nn.Module], detector: Detector, images: Tensor) -> int:
    """The passes through some networks that the score of each of some images takes, a part of one counted whole."""
    with counting(networks) as meter:
        score(detector, images)
    return -(-meter.passes // len(images))


def score(detector: Detector, images: Tensor) -> None:
    """Score images for what happens on the way; an error is for the checks to find, which name the detector."""
    with torch.no_grad(), suppress(Exception):
        detector.judge(detector.encode(images))


def spent_by(job: Job, measured: Measured, passes: dict[str, int]) -> int:
    """The passes that an audit's attacks and scorings took; fitting and pictures are not counted."""
    shared = {attack_key(attack): attack.reads_network for attack in job.attacks}
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
