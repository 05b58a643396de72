"""Batch normalisation folded into the layer before it: the same function with fewer layers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.functional import dropout, dropout2d
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

# Exact types: a subclass may compute something else.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
"""What does nothing in eval mode."""
_ROW_BY_ROW = (nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, *_NOTHING)
"""What leaves a tensor (B, D) with two dimensions."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module has its hooks."""


class Pair(NamedTuple):
    """The names of a layer and of the batch norm that can be folded into it."""

    layer: str
    norm: str


def folded(model: nn.Module, taps: Iterable[nn.Module] = ()) -> nn.Module:
    """A copy in eval mode, its parameters frozen, with every batch norm folded that directly follows a layer.

    A batch norm is folded when it alone reads the output of a convolution, or of a linear layer on vectors, and both
    run once; it is an identity under its name then. Other modules keep their names and outputs, and so do those in
    `taps`, which are modules of `model`: a pair with a tap in between stays. Of a network that torch.fx cannot trace
    the copy is unfolded.

    Raises:
        Exception: whatever copying the network raises.
    """
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        for pair in pairs(model, taps):
            layer, norm = copied.get_submodule(pair.layer), copied.get_submodule(pair.norm)
            _put(copied, pair.layer, _fused(layer, norm))
            _put(copied, pair.norm, nn.Identity().eval())
    return copied.requires_grad_(False)


def pairs(model: nn.Module, taps: Iterable[nn.Module] = ()) -> list[Pair]:
    """The layers and batch norms that can be folded; none where the network cannot be traced."""
    graph = _graph_of(model)
    if graph is None:
        return []
    modules = dict(model.named_modules(remove_duplicate=False))
    runs = Counter(id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    inside = [set(tap.modules()) for tap in taps]
    found = []
    for node in graph.nodes:
        chain = list(_chain_before(node, modules))
        if not chain or not _fit(chain[-1], node, modules):
            continue
        pair = Pair(str(chain[-1].target), str(node.target))
        before = {modules[str(link.target)] for link in chain if link.op == "call_module"}
        tapped = any(before & part and modules[pair.norm] not in part for part in inside)
        alone = all(runs[id(modules[name])] == 1 and name not in read and not hooked(modules[name]) for name in pair)
        if alone and not tapped:
            found.append(pair)
    return found


def _graph_of(model: nn.Module) -> fx.Graph | None:
    """What the network does in eval mode, or None; traced on a copy, since a forward pass may leave things behind."""
    with torch.random.fork_rng(devices=[]):
        try:
            return fx.Tracer().trace(copy.deepcopy(model).eval())
        except Exception:  # a tracer runs any code with stand-ins for tensors, and that may raise anything
            return None


def _chain_before(node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[fx.Node]:
    """From what a batch norm reads back to the first node that does something; nothing where another reads it too."""
    if not _is(node, modules, _NORMS) or not _reads_one(node):
        return
    while isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if len(node.users) > 1:
            return
        yield node
        if not _does_nothing(node, modules):
            return


def _does_nothing(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    off = node.op == "call_function" and node.target in (dropout, dropout2d) and node.kwargs.get("training") is False
    return (off or _is(node, modules, _NOTHING)) and bool(node.args)


def _fit(layer: fx.Node, norm: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether one can be folded into the other: running statistics, as many channels, dimensions that agree."""
    statistics = modules[str(norm.target)]
    if getattr(statistics, "running_mean", None) is None or not _reads_one(layer):
        return False
    if _is(layer, modules, (nn.Conv2d,)):
        return type(statistics) is nn.BatchNorm2d
    # The batch norm of tokens (B, T, D) is over T, the linear layer's outputs are D.
    flat = _is(layer, modules, (nn.Linear,)) and _is_flat(layer.args[0], modules)
    return type(statistics) is nn.BatchNorm1d and (flat or _is(layer, modules, (nn.Conv1d,)))


def _is_flat(value: object, modules: dict[str, nn.Module]) -> bool:
    """Whether a value certainly has two dimensions: it was flattened, and only went through layers that keep that."""
    while isinstance(value, fx.Node) and value.args:
        if value.target in (torch.flatten, "flatten"):
            return value.args[1:] == (1,) and not value.kwargs
        if _is(value, modules, (nn.Flatten,)):
            flatten = modules[str(value.target)]
            return isinstance(flatten, nn.Flatten) and (flatten.start_dim, flatten.end_dim) == (1, -1)
        if not _is(value, modules, _ROW_BY_ROW):
            return False
        value = value.args[0]
    return False


def _is(node: fx.Node, modules: dict[str, nn.Module], kinds: tuple[type[nn.Module], ...]) -> bool:
    return node.op == "call_module" and type(modules[str(node.target)]) in kinds


def _reads_one(node: fx.Node) -> bool:
    return len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def hooked(module: nn.Module) -> bool:
    """Whether hooks are registered on a module, other than those of an encoder's pass in another thread."""
    return any(True for _ in hooks_of(module))


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """A module's hooks, without those that this package hangs there for the length of a pass."""
    for name in _HOOKS:
        for hook in list((module.__dict__.get(name) or {}).values()):
            if not str(getattr(hook, "__module__", "")).startswith("gatecrash."):
                yield hook


def _fused(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """One layer that does what the two do, computed in double precision."""
    dtype = next(layer.parameters()).dtype
    first, second = copy.deepcopy(layer).double(), copy.deepcopy(norm).double()
    if isinstance(second, nn.BatchNorm1d) and second.running_var is not None:  # torch wants both for a linear layer
        second.weight = nn.Parameter(torch.ones_like(second.running_var)) if second.weight is None else second.weight
        second.bias = nn.Parameter(torch.zeros_like(second.running_var)) if second.bias is None else second.bias
    if isinstance(first, nn.Linear) and isinstance(second, nn.BatchNorm1d):
        return fuse_linear_bn_eval(first, second).to(dtype)
    if isinstance(first, nn.Conv1d | nn.Conv2d) and isinstance(second, nn.BatchNorm1d | nn.BatchNorm2d):
        return fuse_conv_bn_eval(first, second).to(dtype)
    raise TypeError(f"{type(norm).__name__} cannot be folded into {type(layer).__name__}")


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Another module under a name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
