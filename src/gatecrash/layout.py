"""Images with their channels last, as convolutions read them fastest on a CPU; for networks that bear it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gatecrash.speed import is_laid_out, is_transformed
from gatecrash.taps import evaluating, every_module, first_tensor

ROUNDING = 1e-3
"""How far, as a share of the largest, outputs may differ that two passes of one network give."""

_bears: WeakKeyDictionary[nn.Module, dict[torch.Size, bool]] = WeakKeyDictionary()
"""Whether a network has convolutions, and was seen to give the same in both layouts, for images of a shape."""


def laid_out_for(model: nn.Module, x: Tensor) -> Tensor:
    """What a network reads, with its channels last where that is faster and changes nothing.

    The first two images of a shape are tried once for every network: `x.view(len(x), -1)` wants channels first, and
    `x.as_strided(…)` would take one pixel for another.
    """
    if not is_laid_out() or x.device.type != "cpu" or x.dtype != torch.float32 or x.shape[1] == 1:
        return x
    known, shape = _bears.get(model), x.shape[1:]
    bears = None if known is None else known.get(shape)
    if bears is False or is_transformed():
        return x
    if bears is None:
        bears = _has_convolutions(model) and _agrees(model, x[:2].detach())
        _bears.setdefault(model, {})[shape] = bears
    return _laid_out(x) if bears else x


def _laid_out(x: Tensor) -> Tensor:
    laid: Tensor = _ChannelsLast.apply(x)
    return laid


class _ChannelsLast(torch.autograd.Function):
    """The same numbers with their channels last, and a gradient with its channels first, as it is used to be."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.channels_last)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in every_module(model))


def _agrees(model: nn.Module, x: Tensor) -> bool:
    """Whether outputs and gradients are the same in both layouts; where there are none, the network is to say so."""
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), evaluating(model):
            one, other = _tried(model, x), _tried(model, _laid_out(x))
    except Exception:  # a network may raise anything
        return False
    return all(alike(first, second) for first, second in zip(one, other, strict=True))


def _tried(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output for images, and the gradient of its squares; the network may write into what it reads."""
    x = x.detach().requires_grad_()
    output = first_tensor(model(x.clone()), type(model).__name__)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    return output.detach(), gradient


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return not one.numel() or bool((one - other).abs().amax() <= ROUNDING * other.abs().amax())
