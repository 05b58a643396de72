"""How networks are prepared for speed: on which devices, for which batch sizes, and when they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from gatecrash.speed import holding


@dataclass(frozen=True)
class Preparation:
    """How networks are prepared.

    Args:
        devices: the kinds of device on which they are.
        sizes: the batch sizes for which code is compiled, from small to large, and that of the first batch. A larger
            batch is split, one of another size is filled up, and one below half the smallest runs uncompiled.
        compile_after: calls of one size after which the code for it is compiled. Compiling takes up to a minute, so it
            pays in long searches only. None is never.
        backend: torch.compile's.
        graphs: the largest size whose compiled code is recorded as a CUDA graph, which is launched as a whole, so that
            small batches gain; inductor's only. What comes out of one is copied, since the next launch writes there.
    """

    devices: tuple[str, ...] = ("cuda",)
    sizes: tuple[int, ...] = (64, 128, 256, 512)
    compile_after: int | None = 200
    backend: str | Callable[..., Any] = "inductor"
    graphs: int = 128


_DEFAULT = Preparation()
_preparation: ContextVar[Preparation] = ContextVar("preparation", default=_DEFAULT)


def preparing(**changes: Any) -> AbstractContextManager[None]:
    """Inside the block, networks are prepared with other settings, those of `Preparation`."""
    return holding(_preparation, replace(_preparation.get(), **changes))


def current_preparation() -> Preparation:
    """The settings of the innermost block."""
    return _preparation.get()
