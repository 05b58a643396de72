from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

from gatecrash.encoder import Encoder
from gatecrash.networks import NETWORKS, WideResNet
from gatecrash.networks.wide_resnet import WideBlock


@pytest.mark.parametrize(
    ("options", "parameters"),
    # 36.5M, 2.2M and 0.6M in the paper.
    [({}, 36_479_194), ({"depth": 40, "width": 2}, 2_243_546), ({"depth": 40, "width": 1}, 563_930)],
)
def test_the_parameter_counts_are_those_of_the_paper(options: dict[str, int], parameters: int) -> None:
    with torch.device("meta"):
        model = NETWORKS["wide_resnet"](**options)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("depth", [10, 28, 40])
def test_the_depth_is_the_number_of_convolutions_projections_among_them(depth: int) -> None:
    with torch.device("meta"):
        kernels = [m.kernel_size for m in WideResNet(depth, 2).modules() if isinstance(m, nn.Conv2d)]
    assert (kernels.count((3, 3)), kernels.count((1, 1)), len(kernels)) == (depth - 3, 3, depth)


def test_taps_of_the_full_network_have_the_shapes_of_the_paper() -> None:
    layers = ["conv1", "block1", "block2", "block3", "relu", "avgpool", "fc"]
    with torch.device("meta"):
        taps = Encoder(WideResNet(), layers, pool=None)(torch.zeros(1, 3, 32, 32))
    assert [tuple(tap.shape[1:]) for tap in taps] == [
        *((16, 32, 32), (160, 32, 32), (320, 16, 16), (640, 8, 8), (640, 8, 8), (640, 1, 1), (10,))
    ]


def test_any_side_will_do() -> None:
    model = WideResNet(10, 1).eval()
    with torch.no_grad():
        assert model(torch.rand(2, 3, 28, 33)).shape == (2, 10)


def test_the_names_are_those_of_the_outlier_exposure_weights() -> None:
    with torch.device("meta"):
        names = WideResNet(40, 2).state_dict().keys()
    block = {"bn1.weight", "bn1.running_mean", "conv1.weight", "bn2.bias", "conv2.weight", "convShortcut.weight"}
    assert {f"block2.layer.0.{name}" for name in block} <= names
    assert {"conv1.weight", "bn1.running_var", "fc.weight", "fc.bias", "block3.layer.5.conv2.weight"} <= names
    assert "block1.layer.1.convShortcut.weight" not in names


def active(bn: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias).clamp(min=0)


def unsettle(block: nn.Module) -> None:
    """Norms that do something, so that a norm left out would be seen."""
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)


def test_a_block_that_changes_channels_projects_what_its_first_relu_gives() -> None:
    block, x = WideBlock(4, 6, stride=2, dropout=0.5).eval(), torch.randn(2, 4, 7, 7)
    unsettle(block)
    first = active(block.bn1, x)
    residual = conv2d(
        active(block.bn2, conv2d(first, block.conv1.weight, stride=2, padding=1)), block.conv2.weight, padding=1
    )
    assert block.convShortcut is not None
    expected = residual + torch.einsum("nchw,kc->nkhw", first[:, :, ::2, ::2], block.convShortcut.weight[:, :, 0, 0])
    torch.testing.assert_close(block(x), expected)


def test_a_block_that_keeps_channels_adds_to_what_came_in() -> None:
    block, x = WideBlock(4, 4, stride=1, dropout=0.0).eval(), torch.randn(2, 4, 6, 6)
    unsettle(block)
    residual = conv2d(
        active(block.bn2, conv2d(active(block.bn1, x), block.conv1.weight, padding=1)), block.conv2.weight, padding=1
    )
    torch.testing.assert_close(block(x), x + residual)
    nn.init.zeros_(block.conv2.weight)
    assert torch.equal(block(x), x)


def test_dropout_acts_between_the_convolutions_in_training_only() -> None:
    block, x = WideBlock(4, 32, stride=1, dropout=0.3), torch.randn(4, 4, 16, 16)
    nn.init.zeros_(block.bn2.weight)
    nn.init.ones_(block.bn2.bias)
    seen: list[Tensor] = []
    block.conv2.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    block.train()(x)
    block.eval()(x)
    assert (seen[0] == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    torch.testing.assert_close(seen[0][seen[0] != 0].unique(), torch.tensor([1 / 0.7]))
    assert torch.equal(seen[1], torch.ones_like(seen[1]))


def test_convolutions_start_with_the_variance_of_he_and_the_last_bias_at_zero() -> None:
    model = WideResNet(10, 4)
    weight = model.block3.layer.get_submodule("0.conv2").get_parameter("weight")
    assert weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.02)
    assert not model.fc.bias.any()


def test_without_norms_a_block_has_biases_and_leaks() -> None:
    block, x = WideBlock(4, 6, stride=2, dropout=0.0, norm="none"), torch.randn(2, 4, 7, 7)
    assert block.convShortcut is not None and block.conv1.bias is not None and block.conv2.bias is not None

    def leaky(values: Tensor) -> Tensor:
        return torch.where(values > 0, values, 0.2 * values)

    first = leaky(x)
    inner = leaky(conv2d(first, block.conv1.weight, block.conv1.bias, stride=2, padding=1))
    residual = conv2d(inner, block.conv2.weight, block.conv2.bias, padding=1)
    shortcut = conv2d(first, block.convShortcut.weight, block.convShortcut.bias, stride=2)
    torch.testing.assert_close(block(x), shortcut + residual)


def test_without_norms_the_network_is_the_same_in_training_as_in_use_and_starts_small() -> None:
    torch.manual_seed(0)
    model, x = WideResNet(28, 2, norm="none"), torch.rand(8, 3, 32, 32)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad():
        logits = model.train()(x)
        assert torch.equal(logits, model.eval()(x))
        one = model(x[:1])
    torch.testing.assert_close(one, logits[:1])
    assert float(logits.abs().max()) < 3  # He's start would grow with every block that nothing normalises


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "norm must be 'batch' or 'none', got 'layer'"),
        ({"depth": 30}, r"depth of a wide ResNet must be 6n \+ 4 .*, got 30"),
        ({"depth": 4}, r"depth .* got 4"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NETWORKS["wide_resnet"](**options)
