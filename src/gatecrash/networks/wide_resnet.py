"""Wide residual networks for small images (Zagoruyko and Komodakis, BMVC 2016)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import dropout, leaky_relu

from gatecrash.networks.registry import NETWORKS, a_share, at_least_one

Norm = Literal["batch", "none"]

LEAK = 0.2
"""The slope of the ReLU below zero in a network without norms."""


class WideBlock(nn.Module):
    """Two 3×3 convolutions, each after a norm and a ReLU, added to a shortcut, with dropout between them.

    Where the number of channels changes, the shortcut is a 1×1 convolution of what the first ReLU gives. Without norms
    the convolutions have biases, and the ReLU leaks.
    """

    def __init__(self, channels: int, out_channels: int, stride: int, dropout: float, norm: Norm = "batch") -> None:
        super().__init__()
        bias = norm == "none"
        self.leak = LEAK if bias else 0.0
        self.bn1 = normed(channels, norm)
        self.conv1 = nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=bias)
        self.bn2 = normed(out_channels, norm)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=bias)
        self.dropout = dropout
        # The weights of Outlier Exposure have this name.
        self.convShortcut = (
            None
            if channels == out_channels
            else nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, ⌈H / stride⌉, ⌈W / stride⌉)."""
        active = leaky_relu(self.bn1(x), self.leak)
        shortcut: Tensor = x if self.convShortcut is None else self.convShortcut(active)
        inner = leaky_relu(self.bn2(self.conv1(active)), self.leak)
        residual: Tensor = self.conv2(dropout(inner, self.dropout, self.training))
        return shortcut + residual


class WideStage(nn.Module):
    """Blocks in a row, the first of which changes the number of channels and the side."""

    def __init__(
        self, count: int, channels: int, out_channels: int, stride: int, dropout: float, norm: Norm = "batch"
    ) -> None:
        super().__init__()
        first = WideBlock(channels, out_channels, stride, dropout, norm)
        self.layer = nn.Sequential(
            first, *(WideBlock(out_channels, out_channels, 1, dropout, norm) for _ in range(count - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, ⌈H / stride⌉, ⌈W / stride⌉)."""
        out: Tensor = self.layer(x)
        return out


@NETWORKS.register("wide_resnet")
class WideResNet(nn.Module):
    """A ResNet of depth 6n + 4: three stages of n blocks with 16, 32 and 64 times `width` channels.

    The logits of (N, in_channels, H, W) are (N, num_classes); any side will do, 32 in the paper. Layers worth a tap:
    `conv1`, `block1`, `block2`, `block3`, `relu` (maps) and `avgpool` (64 · width, what the linear layer `fc` reads).
    Convolutions start as in He et al. (2015), scaled by what they feed; the bias of `fc` starts at zero. With `norm`
    "none" there are no batch norms but biases and leaky ReLUs, and convolutions start as torch has them: the network of
    joint energy-based models (Grathwohl et al., ICLR 2020), which is the same in training as in use.

    Raises:
        ValueError: `depth` is not 6n + 4, a count is below one, `dropout` is out of range, or there is no such norm.
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        dropout: float = 0.0,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        count, rest = divmod(depth - 4, 6)
        if count < 1 or rest:
            raise ValueError(f"depth of a wide ResNet must be 6n + 4 (10, 16, ..., 28, ..., 40, ...), got {depth}")
        at_least_one(width=width, num_classes=num_classes, in_channels=in_channels)
        a_share(dropout=dropout)
        if norm not in ("batch", "none"):
            raise ValueError(f"norm must be 'batch' or 'none', got {norm!r}")

        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=norm == "none")
        self.block1 = WideStage(count, 16, 16 * width, 1, dropout, norm)
        self.block2 = WideStage(count, 16 * width, 32 * width, 2, dropout, norm)
        self.block3 = WideStage(count, 32 * width, 64 * width, 2, dropout, norm)
        self.bn1 = normed(64 * width, norm)
        self.relu = nn.ReLU() if norm == "batch" else nn.LeakyReLU(LEAK)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and norm == "batch":
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, H, W)."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        logits: Tensor = self.fc(self.avgpool(self.relu(self.bn1(x))).flatten(1))
        return logits


def normed(channels: int, norm: Norm) -> nn.Module:
    """A batch norm, or nothing."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.Identity()
