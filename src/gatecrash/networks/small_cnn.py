"""A small convolutional network with a narrow latent, for small grey images."""

from __future__ import annotations

from torch import Tensor, nn

from gatecrash.networks.registry import NETWORKS, at_least_one


@NETWORKS.register("small_cnn")
class SmallCNN(nn.Module):
    """Five 3×3 convolutions, a latent of a few dimensions and a linear layer on it.

    The logits of (N, in_channels, H, W) are (N, num_classes); any side will do. Layers worth a tap: `conv1`, `layer1`,
    `layer2` (maps of `width`, 2·`width` and 4·`width` channels at a half, a quarter and an eighth of the side),
    `avgpool` (the last map at 2×2) and `latent` (N, latent), rectified, what the linear layer `fc` reads.

    Raises:
        ValueError: a count is below one.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, latent: int = 32, width: int = 16) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, in_channels=in_channels, latent=latent, width=width)
        self.conv1 = _convolution(in_channels, width, stride=2)
        self.layer1 = _stage(width, 2 * width)
        self.layer2 = _stage(2 * width, 4 * width)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.latent = nn.Sequential(
            nn.Flatten(), nn.Linear(4 * 4 * width, latent, bias=False), nn.BatchNorm1d(latent), nn.ReLU()
        )
        self.fc = nn.Linear(latent, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, H, W)."""
        maps = self.layer2(self.layer1(self.conv1(x)))
        logits: Tensor = self.fc(self.latent(self.avgpool(maps)))
        return logits


def _convolution(channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())


def _stage(channels: int, out_channels: int) -> nn.Sequential:
    # Averaging before a convolution is cheaper, forwards and backwards, than a stride in it.
    halve = nn.AvgPool2d(2, ceil_mode=True)
    return nn.Sequential(halve, _convolution(channels, out_channels), _convolution(out_channels, out_channels))
