"""How the networks inside a block run: as they are, faster by preparation, faster in half precision, or exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import torch

Pace = Literal["plain", "prepared", "half"]
"""`plain`: the network itself. `prepared`: the same function in float32, rearranged for speed. `half`: that in bf16."""

T = TypeVar("T")

_pace: ContextVar[Pace] = ContextVar("pace", default="plain")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside the block, the variable has this value."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def at_pace(pace: Pace) -> AbstractContextManager[None]:
    """Inside the block, encoders run their networks at this pace where they can."""
    return holding(_pace, pace)


def current_pace() -> Pace:
    """The pace of the innermost block; `plain` outside any."""
    return _pace.get()


_plainly: ContextVar[bool] = ContextVar("plainly", default=False)


def plainly(*, really: bool = True) -> AbstractContextManager[None]:
    """Inside the block, searches whose precision is "auto" evaluate the networks as they are."""
    return holding(_plainly, really)


def is_plainly() -> bool:
    """Whether that holds here."""
    return _plainly.get()


_laid_out: ContextVar[bool] = ContextVar("laid_out", default=False)


def laid_out(*, really: bool = True) -> AbstractContextManager[None]:
    """Inside the block, networks with convolutions may get images with their channels last, which is faster on a CPU.

    They compute the same, rounded in another order.
    """
    return holding(_laid_out, really)


def is_laid_out() -> bool:
    """Whether that holds here."""
    return _laid_out.get()


_block: ContextVar[object] = ContextVar("unchanged", default=None)


def unchanged() -> AbstractContextManager[None]:
    """Inside the block no network changes, as its owner knows: each is looked at once, and not in every pass."""
    return holding(_block, object())


def current_block() -> object:
    """What stands for the innermost block in which no network changes; None outside any."""
    return _block.get()


def is_transformed() -> bool:
    """Whether torch.func's transforms or forward-mode differentiation are under way, which want the network itself."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside the block, float32 on a GPU is float32: where TF32 is on, which rounds to 10 bits, it is off.

    It can be on by torch's flags, by its newer `fp32_precision`, or both; what is off already is left alone.
    """
    with ExitStack() as back:
        products = _told(torch.get_float32_matmul_precision)
        if products not in (None, "highest"):
            for part in (_BACKENDS.mkldnn.matmul, _BACKENDS.cuda.matmul):  # which the flag writes to
                back.callback(_give_back, part, part.fp32_precision)
            back.callback(torch.set_float32_matmul_precision, products)
            torch.set_float32_matmul_precision("highest")
        if _told(lambda: torch.backends.cudnn.allow_tf32):
            back.callback(setattr, torch.backends.cudnn, "allow_tf32", True)
            torch.backends.cudnn.allow_tf32 = False
        for part in (_BACKENDS, _BACKENDS.cudnn, *_kinds_of_work()):
            if part.fp32_precision in _ROUNDED:
                back.callback(_give_back, part, part.fp32_precision)
                part.fp32_precision = "ieee"
        yield


def is_exact() -> bool:
    """Whether float32 on a GPU is float32 here, with nothing rounded to TF32."""
    return not any(part.fp32_precision in _ROUNDED for part in _kinds_of_work())


_BACKENDS: Any = torch.backends  # not all of which torch has types for
_ROUNDED = ("tf32", "bf16")


def _told(flag: Callable[[], T]) -> T | None:
    """What a flag of torch's says; None where the newer interface was used, which flags refuse to mix with."""
    try:
        return flag()
    except RuntimeError:
        return None


def _kinds_of_work() -> tuple[Any, ...]:
    """Where torch says how float32 is rounded on a GPU; its flags say it there too."""
    return _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn


def _give_back(part: Any, precision: str) -> None:
    """Set a part to the precision it had."""
    if part.fp32_precision != precision:
        part.fp32_precision = precision
