"""ResNet-34 for images of 32×32, laid out and named as in the release of Lee et al. (NeurIPS 2018)."""

from __future__ import annotations

from torch import Tensor, nn

from gatecrash.networks.registry import NETWORKS, at_least_one
from gatecrash.networks.resnet_cifar import stage


@NETWORKS.register("resnet34_cifar")
class ResNet34Cifar(nn.Module):
    """The 34 layers of He et al. (CVPR 2016) behind a 3×3 convolution that keeps the side, without a max-pooling.

    The logits of (N, in_channels, H, W) are (N, num_classes); any side will do, 32 in the release. Its Mahalanobis
    score reads `relu` (after the first convolution), `layer1`, `layer2`, `layer3`, `layer4`; the linear layer `linear`
    reads `avgpool` (512). Convolutions start as in He et al. (2015), scaled by what they feed.

    Raises:
        ValueError: a count is below one.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, in_channels=in_channels)
        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = stage(3, 64, 64, stride=1)
        self.layer2 = stage(4, 64, 128, stride=2, projected=True)
        self.layer3 = stage(6, 128, 256, stride=2, projected=True)
        self.layer4 = stage(3, 256, 512, stride=2, projected=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, H, W)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.linear(self.avgpool(x).flatten(1))
        return logits
