"""ResNet-18 with instance norms, for batches too small for batch norms."""

from __future__ import annotations

from functools import partial

from torch import nn

from gatecrash.networks.registry import NETWORKS, at_least_one


@NETWORKS.register("resnet18_in")
def resnet18_in(num_classes: int = 2, in_channels: int = 3, affine: bool = True) -> nn.Module:
    """The ResNet-18 of torchvision with an instance norm for every batch norm, as for CT images of 224×224.

    The logits of (N, in_channels, H, W) are (N, num_classes); H and W are at least 33, since an instance norm needs two
    pixels. Layers worth a tap: `layer1`, `layer2`, `layer3`, `layer4` (maps) and `avgpool` (512, what the linear layer
    `fc` reads). `affine` keeps the scale and shift per channel that the batch norms had. Convolutions start as in He et
    al. (2015), scaled by what they feed: torchvision's way.

    Raises:
        ValueError: a count is below one.
    """
    from torchvision.models import resnet18

    at_least_one(num_classes=num_classes, in_channels=in_channels)
    model: nn.Module = resnet18(num_classes=num_classes, norm_layer=partial(nn.InstanceNorm2d, affine=affine))
    if in_channels != 3:
        model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
