"""A small convolutional network with a narrow latent, for small grey images."""

from __future__ import annotations

from typing import get_args

from torch import Tensor, nn

from gatecrash.networks.registry import NETWORKS, at_least_one
from gatecrash.networks.wide_resnet import LEAK, Norm


@NETWORKS.register("small_cnn")
class SmallCNN(nn.Module):
    """Three strided 3×3 convolutions, a linear latent of a few dimensions and a linear layer on it.

    The logits of (N, in_channels, size, size) are (N, num_classes). Layers worth a tap: `conv1`, `conv2`, `conv3` (maps
    of `width`, 2·`width` and 4·`width` channels at a half, a quarter and an eighth of the side) and `latent`
    (N, latent), what the linear layer `fc` reads. With `norm="none"` there is no batch norm, the convolutions have
    biases, and the ReLUs leak: a joint energy-based model wants a network that is the same in both modes.

    Raises:
        ValueError: a count is below one, or the norm is none.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        latent: int = 32,
        width: int = 16,
        size: int = 56,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, in_channels=in_channels, latent=latent, width=width, size=size)
        if norm not in get_args(Norm):
            raise ValueError(f"norm must be 'batch' or 'none', got {norm!r}")
        self.conv1 = _halving(in_channels, width, norm)
        self.conv2 = _halving(width, 2 * width, norm)
        self.conv3 = _halving(2 * width, 4 * width, norm)
        side = -(-size // 8)
        self.latent = nn.Sequential(nn.Flatten(), nn.Linear(4 * width * side * side, latent))
        self.fc = nn.Linear(latent, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, size, size)."""
        logits: Tensor = self.fc(self.latent(self.conv3(self.conv2(self.conv1(x)))))
        return logits


def _halving(channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    plain = norm == "none"
    convolution = nn.Conv2d(channels, out_channels, kernel_size=3, stride=2, padding=1, bias=plain)
    if plain:
        return nn.Sequential(convolution, nn.LeakyReLU(LEAK))
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())
