"""A copy of a network made ready for speed, or the reason why there is none."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gatecrash.errors import first_line
from gatecrash.networks.folding import folded, hooked
from gatecrash.preparation import Preparation
from gatecrash.prepared.network import Plain, PreparedNetwork
from gatecrash.prepared.tapped import Outputs, Tapped
from gatecrash.speed import Pace

CLOSE, CLOSE_IN_HALF = 1e-2, 0.2
"""How far, relative to their length, a copy's outputs may be from the network's on the first images."""


class Unfit(Exception):
    """A network cannot be prepared; the message says why."""


def prepare(
    model: nn.Module,
    taps: Mapping[str, nn.Module],
    names: tuple[str | None, ...],
    x: Tensor,
    pace: Pace,
    plain: Plain,
    preparation: Preparation,
) -> PreparedNetwork:
    """A copy of a network made ready for images like x, checked against the network itself on the first of them.

    Where bf16 takes the outputs too far away, the copy stays in float32, and where they are probabilities: a softmax
    that is almost sure has a gradient that is small and, in bf16, little but rounding. Whoever follows that ends on the
    plateau, where nothing leads away.

    Raises:
        Unfit: the network cannot be copied, or its copy gives something else.
    """
    if reason := reason_against(model, taps):
        raise Unfit(reason)
    with torch.no_grad():
        probe = x[:2].detach()
        expected = plain(probe.clone())
        if not max(map(distance, plain(with_another(probe)), expected)) <= CLOSE:
            raise Unfit("its rows depend on each other, on how many there are, or on chance")
        if pace == "half":
            try:
                if any(map(are_probabilities, expected)):
                    raise Unfit("the gradients of probabilities are rounded away")
                return PreparedNetwork(_copy(model, taps, names, torch.bfloat16, probe, expected), preparation)
            except Unfit as reason:
                message = f"{type(model).__name__} runs in float32 throughout, which is slower; in bf16 {reason}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        return PreparedNetwork(_copy(model, taps, names, torch.float32, probe, expected), preparation)


def _copy(
    model: nn.Module,
    taps: Mapping[str, nn.Module],
    names: tuple[str | None, ...],
    dtype: torch.dtype,
    probe: Tensor,
    expected: Outputs,
) -> Tapped:
    """The copy, after a look at what it gives."""
    try:
        tapped = Tapped(folded(model, taps.values()), names, dtype)
        # With a row more than asked for: rows are the first dimension everywhere.
        with left_alone(model):
            found = tapped(with_another(probe))
        far = max(map(distance, found, expected))
    except (torch.OutOfMemoryError, Unfit):
        raise
    except Exception as error:  # a copy runs the user's code, which may raise anything
        raise Unfit(f"its copy raises {type(error).__name__}: {first_line(error)}") from error
    if not far <= (CLOSE if dtype == torch.float32 else CLOSE_IN_HALF):
        raise Unfit(f"its copy gives something else, {far:.2g} of the outputs' length away")
    return tapped


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """A block in which a copy must not run its network, as one does whose forward pass is a closure over that.

    Another thread may.

    Raises:
        Unfit: it does.
    """
    here = threading.get_ident()

    def refuse(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == here:
            raise Unfit(f"its copy runs the network itself ({type(module).__name__}), as a replaced forward pass may")

    handles = [module.register_forward_pre_hook(refuse) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_another(probe: Tensor) -> Tensor:
    """A few images and one more, unlike them: what a network makes of those is not to depend on it."""
    return torch.cat([probe, (1 - probe[:1]) / 2])


def are_probabilities(output: Tensor) -> bool:
    """Whether the numbers of every sample, one per class, are none below 0 and come to 1."""
    if output.ndim < 2 or output.shape[1] < 2 or not output.is_floating_point():
        return False
    return bool((output >= 0).all()) and bool(((output.sum(dim=1) - 1).abs() < 1e-4).all())


def distance(found: Tensor, expected: Tensor) -> float:
    """How far an output with a row more is from the expected one, relative to that; infinity for another shape."""
    if found.shape != (len(expected) + 1, *expected.shape[1:]):
        return math.inf
    exact = expected.double()
    return float((found[:-1].double() - exact).norm() / exact.norm().clamp_min(1e-12))


def reason_against(model: nn.Module, taps: Mapping[str, nn.Module]) -> str | None:
    """Why a copy could be, or become, something else than the network; None where nothing speaks against one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = [*model.parameters(), *model.buffers()]
    compiled = (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)
    reasons = {
        "it has hooks": any(map(hooked, modules.values())),
        "it is compiled already": any(isinstance(module, compiled) for module in modules.values()),
        "its weights are not float32": any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors),
        "it was made in inference mode": any(tensor.is_inference() for tensor in tensors),
        "it is on several devices": len({tensor.device for tensor in tensors}) > 1,
        "it holds tensors, arrays or modules that are not registered": any(map(any_outside, modules.values())),
        "it has a batch norm without running statistics": any(map(is_of_the_batch, modules.values())),
        "a tapped layer was replaced": any(modules.get(name) is not module for name, module in taps.items()),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_of_the_batch(module: nn.Module) -> bool:
    """Whether a module normalises by what the batch at hand has, in eval mode too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def any_outside(module: nn.Module) -> bool:
    """Whether plain attributes, or lists in them, hold tensors, arrays or modules: their changes would go unnoticed."""
    registered = ("_parameters", "_buffers", "_modules")
    return any(
        isinstance(part, Tensor | np.ndarray | nn.Module)
        for name, value in module.__dict__.items()
        if name not in registered
        for part in _parts(value)
    )


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    else:
        yield value
