"""Images with their channels last, as convolutions read them fastest on a CPU; for networks that bear it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gatecrash.speed import is_laid_out
from gatecrash.taps import evaluating, every_module, first_tensor

ROUNDING = 1e-3
"""How far, as a share of the largest, outputs may differ that are computed in two layouts."""

_bears: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a network has convolutions, and was seen to give the same in both layouts."""


def laid_out_for(model: nn.Module, x: Tensor) -> Tensor:
    """What a network reads, with its channels last where that is faster and changes nothing.

    The first two images are tried once for every network: `x.view(len(x), -1)` wants channels first, and
    `x.as_strided(…)` would take one pixel for another.
    """
    if not is_laid_out() or x.device.type != "cpu" or x.dtype != torch.float32 or x.shape[1] == 1:
        return x
    if torch._C._are_functorch_transforms_active():
        return x
    if model not in _bears:
        _bears[model] = _has_convolutions(model) and _agrees(model, x[:2].detach())
    return x.contiguous(memory_format=torch.channels_last) if _bears[model] else x


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in every_module(model))


def _agrees(model: nn.Module, x: Tensor) -> bool:
    """Whether the network gives the same in both layouts; where it does not run at all, it is to say so itself."""
    try:
        with torch.no_grad(), evaluating(model):
            one, other = (
                first_tensor(model(x.clone(memory_format=layout)), type(model).__name__)
                for layout in (torch.contiguous_format, torch.channels_last)
            )
    except (RuntimeError, ValueError):
        return False
    return one.shape == other.shape and bool((one - other).abs().amax() <= ROUNDING * one.abs().amax())
