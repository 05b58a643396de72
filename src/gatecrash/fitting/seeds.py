"""Random numbers that depend on a seed and on where a run stands, and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*parts: object) -> int:
    """A seed that depends on all parts."""
    text = " ".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def generator_of(*parts: object) -> torch.Generator:
    """A generator on the CPU, seeded by all parts."""
    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """The random numbers of the CPU and of `device` depend on `seed` in this block, and are as before after it."""
    device = torch.device(device)
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
