"""A network of our own, a copy, that gives the outputs of some of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from gatecrash.taps import first_tensor

Outputs: TypeAlias = tuple[Tensor, ...]


class Tapped(nn.Module):
    """A network with hooks for good, which takes and gives float32 whatever the precision it computes in.

    Args:
        model: the network; it is changed.
        names: the layers whose outputs are given, None for the network's.
        dtype: the precision to compute in.
    """

    def __init__(self, model: nn.Module, names: Sequence[str | None], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = convert(model, dtype).to(memory_format=torch.channels_last)
        if dtype == torch.bfloat16:
            widen(self.model)
        self.names, self.dtype = tuple(names), dtype
        self.seen: dict[str | None, Tensor] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in dict.fromkeys(names):
            if name is not None:
                modules[name].register_forward_hook(hook_into(self.seen, name))

    def forward(self, x: Tensor) -> Outputs:
        """The outputs of the layers, in the order of their names."""
        output = self.model(laid_out(x, self.dtype))
        if None in self.names:
            self.seen[None] = first_tensor(output, "the network")
        outputs = tuple(in_single(self.seen[name]) for name in self.names)
        self.seen.clear()  # what stays here would keep its graph alive
        return outputs


def laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in a precision, since a network may write into its input; channels last."""
    return x.to(dtype, copy=True, memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format)


WIDE = 4
"""The channels from which on a GPU is fast at the gradient of a convolution in half precision."""


def widen(model: nn.Module) -> None:
    """Give convolutions that read fewer channels, as the first does, more of them, which are zero."""
    for module in model.modules():
        if type(module) is nn.Conv2d and module.in_channels < WIDE and module.groups == 1:
            missing = WIDE - module.in_channels
            module.weight = nn.Parameter(pad(module.weight.detach(), (0, 0, 0, 0, 0, missing)), requires_grad=False)
            module.in_channels = WIDE
            module.register_forward_pre_hook(partial(_padded, missing))


def _padded(missing: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (pad(inputs[0], (0, 0, 0, 0, 0, missing)), *inputs[1:])


def hook_into(seen: dict[str | None, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that puts what a module gives into a dictionary; it knows no module, so that a copy is freed at once."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen[name] = first_tensor(output, name).clone()

    return hook


def in_single(tensor: Tensor) -> Tensor:
    """Floating point as float32."""
    return tensor.float() if tensor.is_floating_point() else tensor


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network itself, its weights in another precision; batch norms keep theirs, so that no variance is rounded."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, recurse=False)
    return model
