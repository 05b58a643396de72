"""Arithmetic on a batch that is compiled into few passes over its memory, where a search runs at a fast pace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from gatecrash.errors import first_line
from gatecrash.preparation import current_preparation
from gatecrash.speed import current_pace

P = ParamSpec("P")
R = TypeVar("R")


def many_entries() -> AbstractContextManager[None]:
    """Torch compiles one function for as many networks, sizes and settings as there are."""
    setting: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16
    )
    return setting


def warn_uncompiled(name: str, error: Exception) -> None:
    """Say that something could not be compiled, and why."""
    reason = first_line(getattr(error, "inner_exception", error))
    message = f"{name} cannot be compiled, and runs uncompiled, which is slower: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class Fused(Generic[P, R]):
    """A function of tensors and flags, compiled once it was called often at another pace than "plain".

    It is compiled for the shapes it meets first, and once more, for a batch of any size, when that changes. A number
    that changes from call to call is to be a tensor, else each is compiled anew. Where compiling fails, the function
    itself runs, and it is said once.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.compiles, self.calls = True, 0
        self._code: dict[Any, Callable[P, R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function gives."""
        first = args[0]
        assert isinstance(first, Tensor)
        if self._is_due(first):
            try:
                with torch.no_grad():
                    return self._compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may raise anything
                self.compiles = False
                warn_uncompiled(getattr(self.function, "__name__", "a function"), error)
        return self.function(*args, **kwargs)

    def _is_due(self, x: Tensor) -> bool:
        if not self.compiles or current_pace() == "plain":
            return False
        preparation = current_preparation()
        if preparation.compile_after is None or x.device.type not in preparation.devices:
            return False
        self.calls += 1
        return self.calls > preparation.compile_after

    def _compiled(self, *args: P.args, **kwargs: P.kwargs) -> R:
        backend = current_preparation().backend
        if backend not in self._code:
            self._code[backend] = torch.compile(self.function, fullgraph=True, backend=backend)
        with many_entries():
            return self._code[backend](*args, **kwargs)


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """A function of tensors and flags as one that is compiled where that pays."""
    return Fused(function)
