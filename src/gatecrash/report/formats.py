"""How numbers and lists of names are written in a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

ABSENT = "–"
"""What stands where there is no number."""

_TIED = "\N{NO-BREAK SPACE}"

_PLAIN, _SMALLEST = 0.001, 1e-300
"""p-values are written without an exponent from the first on, and not at all below the second."""

NORMS = {"l2": "L2", "linf": "L∞"}


def known(values: Iterable[float | None]) -> list[float]:
    """The finite numbers among `values`."""
    return [value for value in values if value is not None and math.isfinite(value)]


def decimal(value: float | None, places: int = 2) -> str:
    """A number with fixed places, 0.50."""
    return f"{value:.{places}f}" if known([value]) else ABSENT


def general(value: float | None, digits: int = 3) -> str:
    """A number of any size with a few significant digits."""
    return f"{value:.{digits}g}" if known([value]) else ABSENT


def percent(value: float | None) -> str:
    """A fraction in per cent with two significant digits, 0.023 %."""
    return f"{100 * value:.2g}{_TIED}%" if value is not None and known([value]) else ABSENT


def spread(mean: float | None, deviation: float | None, repeats: int, places: int = 3) -> str:
    """A mean with its standard deviation over the repeats, "0.912 ± 0.004"; the number alone where there is one."""
    text = decimal(mean, places)
    return text if repeats < 2 or text == ABSENT else f"{text} ±{_TIED}{decimal(deviation, places)}"


def probability(p: float | None) -> str:
    """A p-value with two significant digits, 0.013 or 9.6e-8."""
    if p is None or not known([p]):
        return ABSENT
    if p < _SMALLEST:
        return f"<{_TIED}{_SMALLEST:.0e}"
    if p >= _PLAIN:
        return f"{p:.2g}"
    digits, exponent = f"{p:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def span(values: Sequence[float]) -> str:
    """The range of the values, "0.48 to 0.52", or the one value where they all read the same."""
    low, high = decimal(min(values)), decimal(max(values))
    return low if low == high else f"{low} to {high}"


def radius(norm: str | None, eps: float | None) -> str:
    """A ball in a few signs, "L2 ε = 5" or "L∞ ε = 8/255"."""
    parts = [NORMS.get(norm, norm)] if norm else []
    if eps is not None:
        parts.append(f"ε{_TIED}={_TIED}{_eps(eps)}")
    return _TIED.join(parts)


def named(name: str, *details: str) -> str:
    """A name with its details behind it in brackets; empty ones are left out."""
    inside = ", ".join(detail for detail in details if detail)
    return f"{name} ({inside})" if inside else name


def cell(value: Any) -> str:
    """Any value of a row as text."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(cell(item) for item in value)
    return str(value)


def listed(names: Sequence[str], last: str = "and") -> str:
    """The names as a list in a sentence, "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def counted(count: int, noun: str) -> str:
    """A count with its noun, "1 detector" or "5 detectors"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _eps(eps: float) -> str:
    levels = eps * 255
    if 0 < eps < 1 and math.isclose(levels, round(levels), rel_tol=1e-6):
        return f"{round(levels)}/255"
    return general(eps, 4)
