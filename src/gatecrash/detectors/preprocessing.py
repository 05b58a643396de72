"""Input gradients that a detector takes of itself before it scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def input_gradients(values: Callable[[Tensor], list[Tensor]], x: Tensor) -> list[Tensor]:
    """The gradient with respect to x of each of several values per image, (B,) each; works where gradients are off."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        outputs = values(leaf)
        return [
            torch.autograd.grad(output.sum(), leaf, retain_graph=i + 1 < len(outputs))[0]
            for i, output in enumerate(outputs)
        ]


def input_gradient(value: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient with respect to x of one value per image, (B,); works where gradients are off."""
    return input_gradients(lambda leaf: [value(leaf)], x)[0]
