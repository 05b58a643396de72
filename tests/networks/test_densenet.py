from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, batch_norm, conv2d

from gatecrash.networks import NETWORKS, DenseNetBC
from gatecrash.networks.densenet import Bottleneck, Transition
from shared_data import cifar10_test, densenet_bc


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


def test_the_default_has_the_parameter_count_of_the_paper() -> None:
    # 0.8M in table 2 of the paper.
    assert sum(parameter.numel() for parameter in DenseNetBC().parameters()) == 769_162


def test_it_is_built_by_name_with_its_options() -> None:
    model = NETWORKS["densenet_bc"](depth=10, growth=4, num_classes=7, in_channels=1).eval()
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 7)


def test_taps_of_the_full_network_have_the_shapes_of_the_paper() -> None:
    seen = outputs(DenseNetBC().eval(), torch.randn(1, 3, 32, 32))
    shapes = {layer: tuple(seen[layer][1].shape[1:]) for layer in ("conv1", "trans1", "trans2", "relu", "avgpool")}
    assert shapes == {
        "conv1": (24, 32, 32),
        "trans1": (108, 16, 16),
        "trans2": (150, 8, 8),
        "relu": (342, 8, 8),
        "avgpool": (342, 1, 1),
    }


def test_no_layer_is_overwritten_by_the_one_after_it() -> None:
    for layer, (then, after) in outputs(DenseNetBC(depth=16, growth=4).eval(), torch.randn(2, 3, 16, 16)).items():
        assert torch.equal(then, after), layer


def test_the_logits_are_the_linear_layer_on_the_mean_of_the_last_relu() -> None:
    model = DenseNetBC(depth=10, growth=4).eval()
    x = torch.randn(3, 3, 16, 16)
    seen = outputs(model, x)
    last = seen["relu"][1]
    assert torch.equal(last, seen["bn1"][1].clamp(min=0))
    expected = torch.einsum("nchw,kc->nk", last, model.fc.weight) / (4 * 4) + model.fc.bias
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def normalised(bn: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias).clamp(min=0)


def test_a_bottleneck_appends_its_channels_to_those_that_came_in() -> None:
    block, x = Bottleneck(5, growth=3, dropout=0.0).eval(), torch.randn(2, 5, 6, 6)
    new = conv2d(
        normalised(block.bn2, conv2d(normalised(block.bn1, x), block.conv1.weight)), block.conv2.weight, padding=1
    )
    out = block(x)
    assert torch.equal(out[:, :5], x)
    torch.testing.assert_close(out[:, 5:], new)


def test_a_transition_is_a_projection_then_a_mean_over_two_by_two() -> None:
    block, x = Transition(5, 2, dropout=0.0).eval(), torch.randn(2, 5, 6, 6)
    projected = torch.einsum("nchw,kc->nkhw", normalised(block.bn1, x), block.conv1.weight[:, :, 0, 0])
    torch.testing.assert_close(block(x), avg_pool2d(projected, 2))


def test_dropout_acts_on_new_channels_in_training_only() -> None:
    block, x = Bottleneck(5, growth=8, dropout=0.25), torch.randn(4, 5, 16, 16)
    trained = block.train()(x)
    assert torch.equal(trained[:, :5], x)
    assert (trained[:, 5:] == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert not (block.eval()(x)[:, 5:] == 0).any()


def test_with_tanh_the_features_are_the_means_of_bounded_maps() -> None:
    model = DenseNetBC(depth=10, growth=4, tanh=True).eval()
    nn.init.normal_(model.bn1.bias, std=2.0)
    x = torch.randn(3, 3, 16, 16)
    seen = outputs(model, x)
    features = seen["avgpool"][1].flatten(1)
    torch.testing.assert_close(features, seen["bn1"][1].tanh().mean(dim=(2, 3)))
    assert features.abs().max() < 1
    assert features.min() < 0
    torch.testing.assert_close(model(x), features @ model.fc.weight.T + model.fc.bias)


def test_tanh_and_dropout_have_no_weights_and_change_no_name() -> None:
    plain, other = DenseNetBC(depth=10), DenseNetBC(depth=10, tanh=True, dropout=0.2)
    assert plain.state_dict().keys() == other.state_dict().keys()
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in other.named_modules()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 99}, r"depth of a DenseNet-BC must be 6n \+ 4 .*, got 99"),
        ({"depth": 4}, r"depth .* got 4"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"reduction": 0.0}, r"reduction must be in \(0, 1\], got 0.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NETWORKS["densenet_bc"](**options)


def test_the_shared_weights_classify_cifar10() -> None:
    x, y = cifar10_test(1000)
    accuracy = (densenet_bc().logits(x).argmax(dim=1) == y).float().mean().item()
    assert accuracy >= 0.925
