"""How networks are prepared for speed: on which devices, for which batch sizes, and when they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Preparation:
    """How networks are prepared.

    Args:
        devices: the kinds of device on which they are.
        sizes: the batch sizes for which code is compiled, from small to large. A larger batch is split, one of another
            size is filled up, and one below half the smallest runs uncompiled.
        compile_after: calls of one size after which the code for it is compiled. Compiling takes up to a minute, so it
            pays in long searches only. None is never.
        backend: torch.compile's.
        graphs: record compiled code as CUDA graphs, which small batches gain from: they are launched as a whole. What
            comes out of one is copied, since the next launch writes there.
    """

    devices: tuple[str, ...] = ("cuda",)
    sizes: tuple[int, ...] = (64, 128, 256, 512)
    compile_after: int | None = 200
    backend: str | Callable[..., Any] = "inductor"
    graphs: bool = False


_DEFAULT = Preparation()
_preparation: ContextVar[Preparation] = ContextVar("preparation", default=_DEFAULT)


@contextmanager
def preparing(**changes: Any) -> Iterator[None]:
    """Inside the block, networks are prepared with other settings, those of `Preparation`."""
    before = _preparation.set(replace(_preparation.get(), **changes))
    try:
        yield
    finally:
        _preparation.reset(before)


def current_preparation() -> Preparation:
    """The settings of the innermost block."""
    return _preparation.get()
