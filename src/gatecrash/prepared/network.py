"""How a prepared copy runs: compiled for few batch sizes once they were seen often, and differentiable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from gatecrash.fused import many_entries, warn_uncompiled
from gatecrash.preparation import Preparation
from gatecrash.prepared.tapped import Outputs, Tapped

RARE = 10
"""How many times more often a pass without a gradient is to be seen: a search has two of them beside its steps."""

Plain: TypeAlias = Callable[[Tensor], Outputs]
"""The network itself: the same outputs as its copy's."""


class PreparedNetwork:
    """A copy of a network, compiled for few batch sizes, to which others are filled up.

    Compiled code has no second derivative, and one in bf16 would be worth little. So where a gradient is itself to be
    differentiated (`create_graph=True`), the network itself runs once more, and is what is differentiated. Where
    compiling fails, the copy runs uncompiled.
    """

    def __init__(self, tapped: Tapped, preparation: Preparation) -> None:
        self.tapped, self.preparation = tapped, preparation
        self.compiles = preparation.compile_after is not None
        self.first: int | None = None
        """The size of the first batch of some size, which most will have: no smaller one is filled up beyond it."""
        self.calls: Counter[tuple[int, bool]] = Counter()
        self._code: dict[bool, Any] = {}
        """The compiled code, as CUDA graphs or not."""

    def __call__(self, x: Tensor, plain: Plain) -> Outputs:
        """The outputs for a batch of any size."""
        follow = torch.is_grad_enabled() and x.requires_grad
        parts = x.split(self.preparation.sizes[-1])
        found: list[Outputs] = [_Once.apply(part, self, plain) if follow else self.run(part) for part in parts]
        return found[0] if len(found) == 1 else tuple(torch.cat(outputs) for outputs in zip(*found, strict=True))

    def run(self, x: Tensor) -> Outputs:
        """The outputs for a batch that is not larger than the largest size."""
        if self.first is None and len(x) >= self.preparation.sizes[0]:
            self.first = len(x)
        if self._is_due(x):
            try:
                return self._compiled(x)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may raise anything
                self.give_up_compiling(error)
        outputs: Outputs = self.tapped(x)
        return outputs

    @property
    def facts(self) -> dict[str, Any]:
        """The precision, whether there is compiled code, and how often which size was asked for."""
        sizes = {f"{size}{', gradient' if gradient else ''}": count for (size, gradient), count in self.calls.items()}
        return {"precision": str(self.tapped.dtype), "compiled": bool(self._code), "calls": sizes}

    def give_up_compiling(self, error: Exception) -> None:
        """Run uncompiled from now on, and say so."""
        self.compiles, self._code = False, {}
        warn_uncompiled(type(self.tapped.model).__name__, error)

    def _is_due(self, x: Tensor) -> bool:
        """Whether a batch is for compiled code: its size was seen often, and filling it up at most doubles the work."""
        size = self._size(x)
        self.calls[kind := (size, x.requires_grad)] += 1
        after = (self.preparation.compile_after or 0) * (1 if x.requires_grad else RARE)
        return self.compiles and 2 * len(x) >= size and self.calls[kind] > after

    def is_recorded(self, x: Tensor) -> bool:
        """Whether compiled code for such a batch is a CUDA graph, where no other one still has a gradient to give."""
        return self.preparation.backend == "inductor" and self._size(x) <= self.preparation.graphs

    def _size(self, x: Tensor) -> int:
        size = next(size for size in self.preparation.sizes if size >= len(x))
        return min(size, self.first) if self.first is not None and len(x) <= self.first else size

    def _compiled(self, x: Tensor) -> Outputs:
        recorded = self.is_recorded(x) and not _waiting
        if recorded not in self._code:
            mode = "reduce-overhead" if recorded else None
            compiled = torch.compile(self.tapped, dynamic=False, backend=self.preparation.backend, mode=mode)
            self._code[recorded] = compiled
        with many_entries(), several_gradients():
            if recorded:
                torch.compiler.cudagraph_mark_step_begin()
            outputs = self._code[recorded](filled(x, self._size(x)).contiguous())
        return tuple(output[: len(x)].clone() if recorded else output[: len(x)] for output in outputs)


class Wait:
    """Stands for outputs out of a graph whose gradient is still to come: the next launch would write over it."""


_waiting: WeakSet[Wait] = WeakSet()


class _Once(torch.autograd.Function):
    """A prepared network's outputs, whose first derivative is its own and whose higher ones are the network's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, network: PreparedNetwork, plain: Plain) -> Outputs:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.network, ctx.plain = network, plain
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_()
            ctx.outputs = network.run(ctx.leaf)
        if network.is_recorded(x):
            ctx.wait = Wait()  # gone with this, where no gradient is asked for
            _waiting.add(ctx.wait)
        given = tuple(output.detach() for output in ctx.outputs)
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in zip(given, ctx.outputs, strict=True) if not output.requires_grad)
        )
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors  # raises for a second gradient of a graph that was not kept
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph=True
        if not keep:
            ctx.wait = None
        if torch.is_grad_enabled():  # create_graph=True
            return gradient_of(ctx.plain(x.clone()), x, gradients, create_graph=True), None, None
        try:
            with several_gradients():
                found = gradient_of(ctx.outputs, ctx.leaf, gradients, retain_graph=keep)
            return found.clone() if found is not None and ctx.network.is_recorded(x) else found, None, None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a gradient's code may be compiled only when it is asked for
            if not ctx.network.compiles:
                raise
            ctx.network.give_up_compiling(error)
        with torch.enable_grad():
            ctx.outputs = ctx.network.run(ctx.leaf)
        return gradient_of(ctx.outputs, ctx.leaf, gradients, retain_graph=keep), None, None


def several_gradients() -> AbstractContextManager[None]:
    """Compiled code keeps what it needs for a gradient where that is asked for, instead of using its memory again."""
    setting: AbstractContextManager[None] = torch._functorch.config.patch(donated_buffer=False)
    return setting


def gradient_of(
    outputs: Outputs,
    x: Tensor,
    upstream: Sequence[Tensor | None],
    *,
    retain_graph: bool = True,
    create_graph: bool = False,
) -> Tensor | None:
    """What the gradients of outputs come to at x, None among them for zero; None where nothing reaches x."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, upstream, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if not pairs:
        return None
    followed, gradients = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(
        followed, x, gradients, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
    )
    return gradient


def filled(x: Tensor, size: int) -> Tensor:
    """A batch of a certain size: the rows of x, then copies of the first, which no gradient reaches."""
    return x if len(x) == size else torch.cat([x, x[:1].detach().expand(size - len(x), *x.shape[1:])])
