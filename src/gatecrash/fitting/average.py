"""The running mean of the weights, which is what is kept of a run that asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class RunningMean:
    """mean ← decay·mean + (1 − decay)·weights after every step, from the weights at the start; counters are copied.

    Without a decay there is no mean, and what is kept are the weights.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model, self.decay = model, decay
        state = {} if decay is None else model.state_dict()
        self.tensors = {name: tensor.detach().clone() for name, tensor in state.items()}
        pairs = [(self.tensors[name], tensor) for name, tensor in state.items()]
        self._moving = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def follow(self) -> None:
        """Move by one step."""
        if self.decay is None:
            return
        for mean, tensor in self._moving:
            mean.lerp_(tensor, 1 - self.decay)
        for mean, tensor in self._copied:
            mean.copy_(tensor)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The network has the mean as its weights in this block."""
        if self.decay is None:
            yield
            return
        learnt = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.keep()
        try:
            yield
        finally:
            self.model.load_state_dict(learnt)

    def keep(self) -> None:
        """The mean becomes the network's weights."""
        if self.decay is not None:
            self.model.load_state_dict(self.tensors)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` was.

        Raises:
            KeyError: it is of another network.
        """
        for name, mean in self.tensors.items():
            mean.copy_(tensors[name])
