"""A network with what stands before it: resize and normalisation, in training as in use."""

from __future__ import annotations

from torch import Tensor, nn

from gatecrash.encoder import Encoder
from gatecrash.images import resized


class Prepared(nn.Module):
    """The network that an encoder wraps, for images in [0, 1], in whatever mode it is: the encoder's is always eval.

    Its state dict is that of the network, under `model`; the normalisation is no part of it.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.model, self.size = encoder.model, encoder.size
        self.register_buffer("mean", encoder.mean, persistent=False)
        self.register_buffer("std", encoder.std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        if self.size is not None:
            x = resized(x, self.size)
        if isinstance(self.mean, Tensor):
            x = x - self.mean.to(x)
        if isinstance(self.std, Tensor):
            x = x / self.std.to(x)
        logits: Tensor = self.model(x)
        return logits
