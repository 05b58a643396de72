from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import batch_norm

from gatecrash.encoder import Encoder
from gatecrash.networks import ResNet34Cifar
from gatecrash.networks.resnet_cifar import BasicBlock


def test_the_parameter_count_is_the_usual_one_and_that_of_the_layers() -> None:
    with torch.device("meta"):
        model = ResNet34Cifar()
    stages = [(3, 64, 64), (4, 64, 128), (6, 128, 256), (3, 256, 512)]
    convolutions = 9 * 3 * 64 + sum(9 * (c * d + (2 * n - 1) * d * d) for n, c, d in stages)
    projections = sum(c * d for _, c, d in stages[1:])
    norms = 2 * (64 + sum(2 * n * d for n, _, d in stages) + 128 + 256 + 512)
    expected = convolutions + projections + norms + 512 * 10 + 10
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 21_282_122


def test_taps_are_the_features_of_the_release_and_have_their_shapes() -> None:
    layers = ["relu", "layer1", "layer2", "layer3", "layer4", "avgpool"]
    with torch.device("meta"):
        taps = Encoder(ResNet34Cifar(100), layers, pool=None)(torch.zeros(1, 3, 32, 32))
    assert [tuple(tap.shape[1:]) for tap in taps] == [
        *((64, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4), (512, 1, 1))
    ]


def test_the_first_tap_is_the_first_convolution_normalised_and_rectified() -> None:
    model, x = ResNet34Cifar().eval(), torch.rand(1, 3, 8, 8)
    nn.init.normal_(model.bn1.bias)
    convolved, tapped = Encoder(model, ["conv1", "relu"], pool=None)(x)
    bn = model.bn1
    expected = batch_norm(convolved, bn.running_mean, bn.running_var, bn.weight, bn.bias).clamp(min=0)
    torch.testing.assert_close(tapped, expected)


def test_the_names_are_those_of_the_release() -> None:
    with torch.device("meta"):
        names = ResNet34Cifar().state_dict().keys()
    top = {"conv1.weight", "bn1.weight", "linear.weight", "linear.bias", "layer1.2.conv2.weight", "layer4.2.bn2.bias"}
    assert top | {"layer2.0.shortcut.0.weight", "layer2.0.shortcut.1.running_mean", "layer3.5.bn1.bias"} <= names
    assert {name.split(".")[0] for name in names} == {
        *("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "linear")
    }
    assert [name for name in names if "shortcut.0" in name] == [f"layer{i}.0.shortcut.0.weight" for i in (2, 3, 4)]


def test_a_projected_shortcut_is_a_normalised_projection_of_every_second_pixel() -> None:
    block, x = BasicBlock(4, 6, stride=2, projected=True).eval(), torch.randn(2, 4, 7, 7)
    nn.init.zeros_(block.bn2.weight)
    projection, bn = block.shortcut.get_submodule("0"), block.shortcut.get_submodule("1")
    nn.init.normal_(bn.get_parameter("bias"))
    projected = torch.einsum("nchw,kc->nkhw", x[:, :, ::2, ::2], projection.get_parameter("weight")[:, :, 0, 0])
    expected = projected / (1 + 1e-5) ** 0.5 + bn.get_parameter("bias")[:, None, None]
    torch.testing.assert_close(block(x), expected.clamp(min=0))


def test_a_projected_block_that_changes_nothing_has_no_projection() -> None:
    assert isinstance(BasicBlock(4, 4, stride=1, projected=True).shortcut, nn.Identity)
