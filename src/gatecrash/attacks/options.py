"""What an attack cannot start with, each with its sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from gatecrash.ball import Ball


def check_side(side: object) -> None:
    """Raises a ValueError unless it is one of the two sides."""
    if side not in ("out", "in"):
        raise ValueError(f"side must be 'out' or 'in', got {side!r}")


def check_ball(ball: object) -> None:
    """Raises a TypeError for anything but a ball."""
    if not isinstance(ball, Ball):
        raise TypeError(f"ball must say norm and radius, such as Linf(8 / 255) or L2(0.5), got {ball!r}")


def check_counts(**counts: int | None) -> None:
    """Raises a ValueError for a number of things that is not a whole number from 1 on; None is the default."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")


def check_level(name: str, level: float | Tensor | None, count: int | None = None) -> None:
    """Raises a ValueError unless a score to reach is one number or, where `count` is given, one per sample, not NaN."""
    wanted = "one number" if count is None else f"one number or of shape ({count},)"
    if not isinstance(level, int | float | Tensor):
        raise ValueError(f"{name} must be {wanted}, got {level!r}")
    values = torch.as_tensor(level)
    if values.ndim and (count is None or values.shape != (count,)):
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(values.shape)}")
    if bool(values.isnan().any()):
        raise ValueError(f"{name} must be {wanted}, got NaN, which no score reaches; is the detector calibrated?")
