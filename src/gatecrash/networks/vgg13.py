"""VGG13 for images of 32×32, laid out and named as in the release of Lee et al. (ICLR 2018)."""

from __future__ import annotations

from torch import Tensor, nn

from gatecrash.networks.registry import NETWORKS, a_share, at_least_one

WIDTHS = (64, 128, 256, 512, 512)
"""The channels of the five pairs of convolutions."""


@NETWORKS.register("vgg13")
class VGG13(nn.Module):
    """Ten 3×3 convolutions without norms, a max-pooling after every second one, and three linear layers.

    The logits of (N, in_channels, H, W) are (N, num_classes); H and W are at least 32, as in the release. Layers worth
    a tap: `features` (the last map), `avgpool` (512, what the classifier module reads; the release's own vector at
    32×32) and `classifier.5` (512, what the last linear layer `classifier.6` reads). Convolutions start as in He et al.
    (2015), scaled by what they feed, linear layers with a deviation of 0.01, biases at zero, as in the release.

    Raises:
        ValueError: a count is below one, or `dropout` is out of range.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, in_channels=in_channels)
        a_share(dropout=dropout)
        layers: list[nn.Module] = []
        for channels, width in zip((in_channels, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(width, width, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            *(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(512, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, num_classes) of normalised images (N, in_channels, H, W)."""
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits
