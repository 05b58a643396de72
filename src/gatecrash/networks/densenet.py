"""DenseNet-BC for small images (Huang et al., CVPR 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, dropout, relu

from gatecrash.networks.registry import NETWORKS, a_share, at_least_one


class Bottleneck(nn.Module):
    """A 1×1 and a 3×3 convolution whose `growth` new channels are appended to those that came in."""

    def __init__(self, channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, kernel_size=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, kernel_size=3, padding=1, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + growth, H, W)."""
        squeezed = dropout(self.conv1(relu(self.bn1(x))), self.dropout, self.training)
        new = dropout(self.conv2(relu(self.bn2(squeezed))), self.dropout, self.training)
        return torch.cat((x, new), dim=1)


class DenseBlock(nn.Module):
    """Bottlenecks in a row, each of which sees the output of all before it."""

    def __init__(self, count: int, channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(Bottleneck(channels + i * growth, growth, dropout) for i in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + count · growth, H, W)."""
        out: Tensor = self.layer(x)
        return out


class Transition(nn.Module):
    """Between two dense blocks: fewer channels, then half the side."""

    def __init__(self, channels: int, out_channels: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, H // 2, W // 2)."""
        return avg_pool2d(dropout(self.conv1(relu(self.bn1(x))), self.dropout, self.training), 2)


@NETWORKS.register("densenet_bc")
class DenseNetBC(nn.Module):
    """DenseNet-BC: three dense blocks of bottlenecks, with a compression by `reduction` after the first two.

    The logits of (N, in_channels, H, W) are (N, num_classes); H and W are at least 4, 32 in the paper. Layers worth a
    tap: `conv1`, `trans1`, `trans2`, `relu` (the last map) and `avgpool` (its mean, what the linear layer `fc` reads).
    With `tanh` the last ReLU is a tanh, under the same name, so that the features lie in (−1, 1).

    Raises:
        ValueError: `depth` is not 6n + 4, a count is below one, or `reduction` or `dropout` is out of range.
    """

    def __init__(
        self,
        depth: int = 100,
        growth: int = 12,
        reduction: float = 0.5,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        tanh: bool = False,
    ) -> None:
        super().__init__()
        count, rest = divmod(depth - 4, 6)
        if count < 1 or rest:
            raise ValueError(f"depth of a DenseNet-BC must be 6n + 4 (10, 16, ..., 100, ...), got {depth}")
        at_least_one(growth=growth, num_classes=num_classes, in_channels=in_channels)
        if not 0 < reduction <= 1:
            raise ValueError(f"reduction must be in (0, 1], got {reduction}")
        a_share(dropout=dropout)

        grown = count * growth
        first = 2 * growth
        second = max(1, int((first + grown) * reduction))
        third = max(1, int((second + grown) * reduction))
        self.conv1 = nn.Conv2d(in_channels, first, kernel_size=3, padding=1, bias=False)
        self.block1 = DenseBlock(count, first, growth, dropout)
        self.trans1 = Transition(first + grown, second, dropout)
        self.block2 = DenseBlock(count, second, growth, dropout)
        self.trans2 = Transition(second + grown, third, dropout)
        self.block3 = DenseBlock(count, third, growth, dropout)
        self.bn1 = nn.BatchNorm2d(third + grown)
        self.relu = nn.Tanh() if tanh else nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(third + grown, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, H, W)."""
        x = self.trans1(self.block1(self.conv1(x)))
        x = self.block3(self.trans2(self.block2(x)))
        logits: Tensor = self.fc(self.avgpool(self.relu(self.bn1(x))).flatten(1))
        return logits
