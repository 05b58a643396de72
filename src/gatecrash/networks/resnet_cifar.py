"""The ResNets for CIFAR (He et al., CVPR 2016, section 4.2), with shortcuts that have no parameters (option A)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from gatecrash.networks.registry import NETWORKS, at_least_one


class Shortcut(nn.Module):
    """Option A: every `stride`-th pixel, with channels of zeros on both sides up to `out_channels`."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - channels) // 2
        self.after = out_channels - channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, ⌈H / stride⌉, ⌈W / stride⌉)."""
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions added to a shortcut: option A, or with `projected` a strided 1×1 convolution (option B)."""

    def __init__(self, channels: int, out_channels: int, stride: int, *, projected: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module
        if stride == 1 and channels == out_channels:
            self.shortcut = nn.Identity()
        elif projected:
            projection = nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))
        else:
            self.shortcut = Shortcut(channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, ⌈H / stride⌉, ⌈W / stride⌉)."""
        residual = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(residual + self.shortcut(x))


class ResNetCifar(nn.Module):
    """A ResNet of depth 6n + 2: three stages of n blocks with 16, 32 and 64 channels.

    The logits of (N, in_channels, H, W) are (N, num_classes); any side will do, 32 in the paper. Layers worth a tap:
    `conv1`, `layer1`, `layer2`, `layer3` (maps) and `avgpool` (what the linear layer `linear` reads).

    Raises:
        ValueError: `depth` is not 6n + 2, or a count is below one.
    """

    def __init__(self, depth: int = 20, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        count, rest = divmod(depth - 2, 6)
        if count < 1 or rest:
            raise ValueError(f"depth of a CIFAR ResNet must be 6n + 2 (8, 14, 20, ...), got {depth}")
        at_least_one(num_classes=num_classes, in_channels=in_channels)

        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(count, 16, 16, stride=1)
        self.layer2 = stage(count, 16, 32, stride=2)
        self.layer3 = stage(count, 32, 64, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, H, W)."""
        x = relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(self.avgpool(x).flatten(1))
        return logits


def stage(count: int, channels: int, out_channels: int, stride: int, *, projected: bool = False) -> nn.Sequential:
    """Blocks in a row, the first of which changes the number of channels and the side."""
    first = BasicBlock(channels, out_channels, stride, projected=projected)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels, 1) for _ in range(count - 1)))


for _depth in (20, 32, 44, 56, 110):
    NETWORKS.register(f"resnet{_depth}")(partial(ResNetCifar, _depth))
