"""What an attack cannot start with, each with its sentence."""

from __future__ import annotations

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
