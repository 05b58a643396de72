"""Checks on the options of densities and of how they are trained: every message names the option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gatecrash.registry import unknown


def whole(least: int = 1, **counts: Any) -> None:
    """Raises a ValueError that names the first of these that is no whole number, or below `least`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {count!r}")


def number(**values: Any) -> None:
    """Raises a ValueError that names the first of these that is no number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")


def flag(**values: Any) -> None:
    """Raises a ValueError that names the first of these that is neither true nor false."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def mapping(name: str, value: Any, known: list[str]) -> dict[str, Any]:
    """Options by name, as a dictionary of their own; none where `value` is None.

    Raises:
        ValueError: it is no mapping, or has a name that is not among the known ones.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping of {', '.join(known)}, got {value!r}")
    for key in value:
        if key not in known:
            raise ValueError(f"{name}: {unknown('option', str(key), known)}")
    return dict(value)


def names_of(made: Callable[..., Any]) -> list[str]:
    """The names of what a class or function takes by keyword alone."""
    parameters = inspect.signature(made).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
