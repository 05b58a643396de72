"""Folding leaves the function alone, every name in place, and what must not be folded unfolded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from gatecrash.networks import VGG13, DenseNetBC, SmallCNN, WideResNet
from gatecrash.networks.folding import folded, pairs


def lived_in(model: nn.Module) -> nn.Module:
    """The model with batch norms that have seen data."""
    source = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.copy_(torch.randn(module.num_features, generator=source) / 5)
            module.running_var.copy_(torch.rand(module.num_features, generator=source) + 0.5)
            if module.affine:
                module.weight.data.copy_(torch.rand(module.num_features, generator=source) + 0.5)
                module.bias.data.copy_(torch.randn(module.num_features, generator=source) / 5)
    return model


def small_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3)


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in model.modules())


def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What every layer gives in eval mode, by name."""
    found: dict[str, Tensor] = {}
    model = copy.deepcopy(model).eval()
    for name, module in model.named_modules():

        def hook(module: nn.Module, args: object, output: Tensor, name: str = name) -> None:
            found[name] = output.clone()

        module.register_forward_hook(hook)
    with torch.no_grad():
        model(x)
    return found


@pytest.mark.parametrize(
    ("make", "size", "before", "after"),
    [
        (torchvision.models.resnet50, 64, 53, 0),
        (lambda: DenseNetBC(16, dropout=0.2), 32, 15, 9),  # those in front of a ReLU and a convolution stay
        (lambda: WideResNet(depth=10, width=2, dropout=0.3), 32, 7, 3),
        (lambda: SmallCNN(in_channels=3, size=32), 32, 3, 0),
        (torchvision.models.mobilenet_v2, 64, 52, 0),
        (VGG13, 32, 0, 0),
        (small_vit, 32, 0, 0),
    ],
    ids=["resnet50", "densenet_bc", "wide_resnet", "small_cnn", "mobilenet", "vgg13", "vit"],
)
def test_a_folded_network_is_the_same_function(
    make: Callable[[], nn.Module], size: int, before: int, after: int
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lived_in(make().train())
        x = torch.rand(2, 3, size, size)
    kept = copy.deepcopy(model.state_dict())
    small = folded(model)
    assert (norms(model), norms(small)) == (before, after)
    expected, found = copy.deepcopy(model).eval()(x), small(x)
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 1e-5
    assert [name for name, _ in small.named_modules()] == [name for name, _ in model.named_modules()]
    assert not any(module.training for module in small.modules())
    assert not any(parameter.requires_grad for parameter in small.parameters())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


class Block(nn.Module):
    """A stem, dropout and batch norm, then a linear layer with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3))
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Sequential(nn.Linear(64, 5), nn.BatchNorm1d(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(relu(self.norm(self.drop(self.stem(x)))).flatten(1))


def block() -> Block:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Block()
    lived_in(model)
    return model


@pytest.mark.parametrize(
    ("tap", "folds"),
    [
        ("norm", [("stem.0", "norm"), ("fc.0", "fc.1")]),
        ("fc", [("stem.0", "norm"), ("fc.0", "fc.1")]),
        ("", [("stem.0", "norm"), ("fc.0", "fc.1")]),
        ("stem.0", [("fc.0", "fc.1")]),
        ("stem", [("fc.0", "fc.1")]),
        ("drop", [("fc.0", "fc.1")]),
        ("fc.0", [("stem.0", "norm")]),
    ],
)
def test_a_tap_sees_what_it_saw_before(tap: str, folds: list[tuple[str, str]]) -> None:
    model, x = block(), torch.rand(2, 3, 6, 6)
    module = model.get_submodule(tap)
    assert [tuple(pair) for pair in pairs(model, [module])] == folds
    torch.testing.assert_close(outputs(folded(model, [module]), x)[tap], outputs(model, x)[tap], rtol=1e-5, atol=1e-6)


def test_a_tap_between_a_layer_and_its_folded_norm_would_see_something_else() -> None:
    model, x = block(), torch.rand(2, 3, 6, 6)
    assert not torch.allclose(outputs(folded(model), x)["stem"], outputs(model, x)["stem"], atol=0.01)


class Given(nn.Module):
    """A convolution, a batch norm, and what a function makes of them and the images."""

    def __init__(self, forward: Callable[[Given, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm, self.make = nn.Conv2d(3, 3, 3, padding=1), norm or nn.BatchNorm2d(3), forward
        self.tokens, self.over = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, x)


class Scaled(nn.Conv2d):
    """A convolution that does more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def read_twice(net: Given, x: Tensor) -> Tensor:
    maps = net.conv(x)
    return net.norm(maps) + maps


def layer_twice(net: Given, x: Tensor) -> Tensor:
    return net.norm(net.conv(net.conv(x)))


def norm_twice(net: Given, x: Tensor) -> Tensor:
    return net.norm(net.norm(net.conv(x)))


def weight_read(net: Given, x: Tensor) -> Tensor:
    return net.norm(net.conv(x)) + conv2d(x, net.conv.weight, padding=1)


def active_between(net: Given, x: Tensor) -> Tensor:
    return net.norm(relu(net.conv(x)))


def norm_first(net: Given, x: Tensor) -> Tensor:
    return net.conv(relu(net.norm(x)))


def over_tokens(net: Given, x: Tensor) -> Tensor:
    return net.over(net.tokens(x.flatten(2)[:, :1, :6].expand(-1, 6, -1)))


def by_value(net: Given, x: Tensor) -> Tensor:
    return net.norm(net.conv(x)) if x.sum() > 0 else x


def straight(net: Given, x: Tensor) -> Tensor:
    return net.norm(net.conv(x))


FORMS = [read_twice, layer_twice, norm_twice, weight_read, active_between, norm_first, over_tokens, by_value]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_what_cannot_be_folded_is_left(form: Callable[[Given, Tensor], Tensor]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = lived_in(Given(form)).eval(), torch.rand(2, 3, 6, 6)
    assert pairs(model) == []
    torch.testing.assert_close(folded(model)(x), model(x), rtol=1e-6, atol=1e-6)


def test_a_norm_of_the_batch_and_layers_that_do_more_are_left() -> None:
    assert [tuple(pair) for pair in pairs(Given(straight))] == [("conv", "norm")]
    assert pairs(Given(straight, nn.BatchNorm2d(3, track_running_stats=False))) == []
    other = Given(straight)
    other.conv = Scaled(3, 3, 3, padding=1)
    assert pairs(other) == []
    other.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3))
    assert pairs(other) == []
    watched = Given(straight)
    watched.conv.register_forward_hook(lambda module, args, output: output * 2)
    assert pairs(watched) == []


def test_a_norm_without_weights_is_folded() -> None:
    model, x = lived_in(Given(straight, nn.BatchNorm2d(3, affine=False))).eval(), torch.rand(2, 3, 6, 6)
    small = folded(model)
    assert norms(small) == norms(model) - 1
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_without_weights_is_folded_into_a_linear_layer(bias: bool) -> None:
    model = lived_in(nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=bias), nn.BatchNorm1d(5, affine=False))).eval()
    small, x = folded(model), torch.rand(4, 3, 2, 2)
    assert norms(small) == 0
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)


class Noisy(nn.Module):
    """A network that draws a random number whenever it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(())


def test_tracing_draws_no_global_random_numbers() -> None:
    before = torch.get_rng_state()
    pairs(Noisy())
    assert torch.equal(torch.get_rng_state(), before)
