"""What a network is made of at one moment, so that a change is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gatecrash.networks.folding import hooks_of

_TORCHS = frozenset(nn.Module().__dict__)
"""The attributes of every module, of which parameters, buffers, modules and hooks are looked at in their own right."""

_PLAIN = frozenset({bool, int, float, complex, str, tuple, type(None), torch.dtype, torch.Size})


class Stamp:
    """A network's modules with their plain attributes, functions and hooks, and its tensors with places and versions.

    Two stamps are equal when nothing was replaced by something else, moved or written to in between. What is written
    through `.data` leaves a tensor's version alone, and is found by comparing the weights only: `same_weights`. What
    other objects among the attributes hold is not looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self.things: list[Any] = []  # never a module: a stamp must not keep its network alive
        self.values: list[Any] = []
        self.numbers: list[int] = []
        self.tensors: list[Tensor] = []
        for module in model.modules():
            self.numbers.append(id(module))
            self.things.append(type(module))
            self.things += [_marked(hook) for hook in hooks_of(module)]
            for name, value in module.__dict__.items():
                if type(value) in _PLAIN:
                    self.values.append(value)
                elif name not in _TORCHS:
                    for part in _parts(value):
                        (self.values if _is_plain(part) else self.things).append(part)
            self.tensors += [
                tensor for tensor in chain(module._parameters.values(), module._buffers.values()) if tensor is not None
            ]
        for tensor in self.tensors:
            self.numbers += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stamp)
            and self.numbers == other.numbers
            and _identical(self.tensors, other.tensors)
            and _identical(self.things, other.things)
            and _alike(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]

    def weights(self) -> list[Tensor]:
        """Copies of the tensors as they are now, as few long ones: a look at each would make the host wait."""
        kinds: dict[Any, list[Tensor]] = {}
        for tensor in self.tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().flatten())
        return [torch.cat(kind) for kind in kinds.values()]

    def same_weights(self, weights: list[Tensor]) -> bool:
        """Whether the tensors still have the values of such copies."""
        now = self.weights()
        return len(weights) == len(now) and all(map(torch.equal, weights, now))


def _parts(value: Any) -> Iterator[Any]:
    """What is plain in an attribute, in lists and dictionaries too, and marks of the functions there."""
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield from _parts(key)
            yield from _parts(part)
    elif isinstance(value, list | set | frozenset):
        yield len(value)
        for part in list(value):
            yield from _parts(part)
    elif _is_plain(value):
        yield value
    elif callable(value) and not isinstance(value, nn.Module):
        yield _marked(value)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, np.generic)


def _marked(thing: Any) -> Any:
    """A weak reference, since a function may hold its module; it is one and the same while the function is there.

    An address is not: a new function may be given that of one that is gone.
    """
    try:
        return weakref.ref(thing)
    except TypeError:  # of a class without weak references
        return thing


def _identical(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _alike(first: Any, second: Any) -> bool:
    """Whether plain values are the same; a list or tuple of them is compared part by part."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    return _is_plain(first) and bool(first == second)
