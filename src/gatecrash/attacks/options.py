"""What an attack cannot start with, each with its sentence."""

from __future__ import annotations

from gatecrash.ball import Ball
from gatecrash.search import check_counts

__all__ = ["check_ball", "check_counts", "check_side"]


def check_side(side: object) -> None:
    """Raises a ValueError unless it is one of the two sides."""
    if side not in ("out", "in"):
        raise ValueError(f"side must be 'out' or 'in', got {side!r}")


def check_ball(ball: object) -> None:
    """Raises a TypeError for anything but a ball."""
    if not isinstance(ball, Ball):
        raise TypeError(f"ball must say norm and radius, such as Linf(8 / 255) or L2(0.5), got {ball!r}")
