"""The table of networks that a plan can name as `builtin:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from gatecrash.registry import Registry

Builder: TypeAlias = Callable[..., nn.Module]
"""What a name stands for: called with keyword options such as `num_classes`, it gives a network with fresh weights."""

NETWORKS: Registry[Builder] = Registry("network")


def at_least_one(**counts: int) -> None:
    """Raises a ValueError that names the first count below one."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def a_share(**shares: float) -> None:
    """Raises a ValueError that names the first share outside [0, 1)."""
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name} must be in [0, 1), got {share}")
