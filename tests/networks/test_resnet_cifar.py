from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gatecrash.networks import NETWORKS, ResNetCifar
from gatecrash.networks.resnet_cifar import BasicBlock, Shortcut
from shared_data import cifar10_test, resnet20


def outputs(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The output of every layer as it was when the layer returned, and as it is after the forward pass."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    names = {module: name for name, module in model.named_modules() if name}

    def keep(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[names[module]] = (output.clone(), output)

    for module in names:
        module.register_forward_hook(keep)
    model(x)
    return seen


@pytest.mark.parametrize(
    ("name", "parameters"),
    # 0.27M, 0.46M, 0.66M, 0.85M and 1.7M in table 6 of the paper.
    [
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("resnet110", 1_727_962),
    ],
)
def test_every_depth_has_the_parameter_count_of_the_paper(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in NETWORKS[name]().parameters()) == parameters


def test_it_is_built_by_name_with_its_options() -> None:
    model = NETWORKS["resnet20"](num_classes=7, in_channels=1).eval()
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 7)


def test_taps_have_the_shapes_of_the_paper() -> None:
    seen = outputs(ResNetCifar(8).eval(), torch.randn(2, 3, 32, 32))
    shapes = {layer: tuple(seen[layer][1].shape[1:]) for layer in ("conv1", "layer1", "layer2", "layer3", "avgpool")}
    assert shapes == {
        "conv1": (16, 32, 32),
        "layer1": (16, 32, 32),
        "layer2": (32, 16, 16),
        "layer3": (64, 8, 8),
        "avgpool": (64, 1, 1),
    }


def test_no_layer_is_overwritten_by_the_one_after_it() -> None:
    for layer, (then, after) in outputs(ResNetCifar(8).eval(), torch.randn(2, 3, 16, 16)).items():
        assert torch.equal(then, after), layer


def test_the_logits_are_the_linear_layer_on_the_mean_of_the_last_map() -> None:
    model, x = ResNetCifar(8).eval(), torch.randn(3, 3, 16, 16)
    last = outputs(model, x)["layer3"][1]
    expected = torch.einsum("nchw,kc->nk", last, model.linear.weight) / (4 * 4) + model.linear.bias
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [6, 7])
def test_an_option_a_shortcut_subsamples_and_pads_with_zero_channels(side: int) -> None:
    x = torch.randn(2, 4, side, side)
    expected = torch.zeros(2, 8, (side + 1) // 2, (side + 1) // 2)
    for channel in range(4):
        for row in range(0, side, 2):
            for column in range(0, side, 2):
                expected[:, channel + 2, row // 2, column // 2] = x[:, channel, row, column]
    assert torch.equal(Shortcut(4, 8, stride=2)(x), expected)


def test_a_block_without_a_residual_is_its_shortcut_rectified() -> None:
    x = torch.randn(2, 16, 6, 6)
    for block in (BasicBlock(16, 16, stride=1).eval(), BasicBlock(16, 32, stride=2).eval()):
        nn.init.zeros_(block.bn2.weight)
        assert torch.equal(block(x), block.shortcut(x).clamp(min=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 18}, r"depth of a CIFAR ResNet must be 6n \+ 2 .*, got 18"),
        ({"depth": 2}, r"depth .* got 2"),
        ({"in_channels": 0}, "in_channels must be at least 1, got 0"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResNetCifar(**options)


def test_the_shared_weights_classify_cifar10() -> None:
    x, y = cifar10_test(1000)
    accuracy = (resnet20().logits(x).argmax(dim=1) == y).float().mean().item()
    assert accuracy >= 0.905
