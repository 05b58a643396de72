"""How fast the networks inside a block run: as they are, prepared for speed, or prepared and in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Pace = Literal["plain", "prepared", "half"]
"""`plain`: the network itself. `prepared`: the same function in float32, rearranged for speed. `half`: that in bf16."""

_pace: ContextVar[Pace] = ContextVar("pace", default="plain")


@contextmanager
def at_pace(pace: Pace) -> Iterator[None]:
    """Inside the block, encoders run their networks at this pace where they can."""
    before = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(before)


def current_pace() -> Pace:
    """The pace of the innermost block; `plain` outside any."""
    return _pace.get()
