"""A network with what stands before it: resize and normalisation, in training as in use."""

from __future__ import annotations

from torch import Tensor, nn

from gatecrash.encoder import Encoder
from gatecrash.images import resized

WITHOUT_AUXILIARY = "for a model with auxiliary heads give options: {aux_logits: false}"
"""What helps where a network has heads that only training uses."""


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
        """The logits of a batch of images.

        Raises:
            ValueError: the network gives anything else beside them.
        """
        if self.size is not None:
            x = resized(x, self.size)
        if isinstance(self.mean, Tensor):
            x = x - self.mean.to(x)
        if isinstance(self.std, Tensor):
            x = x / self.std.to(x)
        logits = self.model(x)
        if not isinstance(logits, Tensor):
            mode = "training" if self.training else "use"
            raise ValueError(
                f"{type(self.model).__name__} gives several outputs in {mode} ({type(logits).__name__}), and the "
                f"logits alone are needed; {WITHOUT_AUXILIARY}"
            )
        return logits
