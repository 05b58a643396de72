"""A classifier of traffic signs with spatial transformers, after Arcos-García et al. (Neural Networks 99, 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from gatecrash.networks.registry import NETWORKS, at_least_one

SMALLEST = 32
"""The side below which the last localisation network would have no pixel left."""


class SpatialTransformer(nn.Module):
    """Maps of one affine view each, chosen by a small localisation network that looks at them.

    `widths` are the channels of its two 5×5 convolutions and the units of its hidden linear layer. It starts as the
    identity: the weights of its last layer are zero, and the bias is the matrix (1 0 0; 0 1 0). What lies outside of a
    map is zero.
    """

    def __init__(self, channels: int, side: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        first, second, hidden = widths
        self.localise = nn.Sequential(
            nn.MaxPool2d(2),
            *(nn.Conv2d(channels, first, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(second * (side // 8) ** 2, hidden), nn.ReLU()),
        )
        self.affine = nn.Linear(hidden, 6)
        nn.init.zeros_(self.affine.weight)
        with torch.no_grad():
            self.affine.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, side, side) to the same shape."""
        matrices = self.affine(self.localise(x)).view(-1, 2, 3)
        return grid_sample(x, affine_grid(matrices, list(x.shape), align_corners=False), align_corners=False)


@NETWORKS.register("gtsrb_stn")
class GtsrbStn(nn.Module):
    """Three convolutions, each behind a spatial transformer, a latent of a few dimensions and a linear layer on it.

    The widths are those of Arcos-García et al.; the side, the latent and batch norms for their local contrast
    normalisation are ours, since "An algorithm for out-of-distribution attack" says only that its 32×32 classifier is
    similar. The logits of (N, in_channels, size, size) are (N, num_classes). Layers worth a tap: `transform1`, `conv1`,
    `transform2`, `conv2`, `transform3`, `conv3` (maps) and `latent` (N, latent), what the linear layer `fc` reads.
    Convolutions start as in He et al. (2015), scaled by what they read.

    Raises:
        ValueError: a count is below one, or `size` is below 32.
    """

    def __init__(self, num_classes: int = 43, in_channels: int = 3, latent: int = 128, size: int = 32) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, in_channels=in_channels, latent=latent)
        if size < SMALLEST:
            raise ValueError(f"size must be at least {SMALLEST}, got {size}")
        # A 7×7 convolution with two pixels of padding takes two pixels off the side, a 4×4 one adds one.
        second = (size - 2) // 2
        third = (second + 1) // 2
        last = (third + 1) // 2
        self.transform1 = SpatialTransformer(in_channels, size, (250, 250, 250))
        self.conv1 = _halving(in_channels, 200, kernel_size=7)
        self.transform2 = SpatialTransformer(200, second, (150, 200, 300))
        self.conv2 = _halving(200, 250, kernel_size=4)
        self.transform3 = SpatialTransformer(250, third, (150, 200, 300))
        self.conv3 = _halving(250, 350, kernel_size=4)
        self.latent = nn.Sequential(nn.Flatten(), nn.Linear(350 * last * last, latent), nn.ReLU())
        self.fc = nn.Linear(latent, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, size, size)."""
        x = self.conv1(self.transform1(x))
        x = self.conv2(self.transform2(x))
        x = self.conv3(self.transform3(x))
        logits: Tensor = self.fc(self.latent(x))
        return logits


def _halving(channels: int, out_channels: int, kernel_size: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out_channels, kernel_size=kernel_size, padding=2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2))
