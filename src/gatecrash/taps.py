"""What the layers of a network give during one pass: eval mode for a block, outputs recorded by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class evaluating(AbstractContextManager[None]):
    """A block with the model in eval mode, every module's own mode put back afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.trained = in_training(self.model)
        for module in self.trained:
            module.training = False

    def __exit__(self, *exception: object) -> None:
        for module in self.trained:
            module.training = True


def in_training(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are in training mode; looked for in every pass, which on a small network shows."""
    found, waiting = list[nn.Module](), [model]
    for module in waiting:
        if getattr(module, "training", False):  # which frozen TorchScript has not
            found.append(module)
        if module._modules:
            waiting += [child for child in module._modules.values() if child is not None]
    return found


def every_module(model: nn.Module) -> Iterator[nn.Module]:
    """The model and the modules in it, in the order of definition, a shared one as often as it is there.

    `modules()` gives each once, and takes three times as long: on a small network, as long as the network.
    """
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(reversed(module._modules.values()))


def require_python(*modules: nn.Module) -> None:
    """Raises a ValueError for what is or holds TorchScript, which takes no hooks."""
    for module in modules:
        if any(isinstance(part, torch.jit.ScriptModule) for part in every_module(module)):
            raise ValueError(
                f"{type(module).__name__} is TorchScript, whose layers cannot be looked into; give the network as it "
                "was before torch.jit"
            )


@contextmanager
def recording(taps: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The outputs of some modules during the block, cloned, since a later in-place ReLU would write into them."""
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[name] = first_tensor(output, name).clone()

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in taps.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any, name: str) -> Tensor:
    """The tensor of a module's output: itself, the first of a sequence, or a named field of an output object."""
    if isinstance(output, Tensor):
        return output
    kind = type(output).__name__
    if isinstance(output, Mapping):
        for key in ("logits", "image_embeds", "pooler_output", "last_hidden_state"):
            tensor = output.get(key)
            if isinstance(tensor, Tensor):
                return tensor
        output = tuple(output.values())
    if isinstance(output, Sequence):
        for part in output:
            if isinstance(part, Tensor):
                return part
    raise ValueError(f"{name} gives {kind}, in which no tensor was found")
