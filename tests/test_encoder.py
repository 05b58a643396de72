from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers import StdConv2dSame
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer_hybrid import HybridEmbed
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from torchvision.models import DenseNet, ResNet
from torchvision.models.resnet import BasicBlock

import gatecrash as gate
from gatecrash.encoder import Encoder, Head, as_encoder
from gatecrash.images import resized

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Times(nn.Module):
    """Multiplies by a number, so that a tap's value is known on paper."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Tower(nn.Module):
    """×2, then ×3, then ×5; and a layer that is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.middle, self.high, self.spare = Times(2), Times(3), Times(5), Times(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.middle(self.low(x)))


class Giving(nn.Module):
    """A network with a layer, both of which give what a function makes of the images."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = Made(make)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Made(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Convolutional(nn.Module):
    """A small classifier with everything that a forward pass in train mode would change."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)
            self.relu = nn.ReLU(inplace=True)
            self.drop = nn.Dropout(0.5)
            self.lipschitz = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
            self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.relu(self.norm(self.conv(x)))
        return self.fc(self.lipschitz(self.drop(maps).mean(dim=(2, 3))))


def small_resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).eval()


def small_densenet() -> DenseNet:
    torch.manual_seed(0)
    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2, num_classes=5).eval()


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


def small_hybrid() -> nn.Module:
    """R50+ViT with one bottleneck a stage and narrow ones."""
    torch.manual_seed(0)
    backbone = ResNetV2(
        layers=(1, 1, 1),
        channels=(128, 128, 128),
        stem_chs=32,
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=partial(StdConv2dSame, eps=1e-8),
    )
    sizes = {"img_size": 32, "patch_size": 1, "depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    embed = partial(HybridEmbed, backbone=backbone)
    return timm.create_model("vit_tiny_r_s16_p8_224", embed_layer=embed, **sizes).eval()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two threads on tiny tensors mostly wait for each other when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeds_are_put_back() -> Iterator[None]:
    """The models' seeds are not seen outside a test."""
    with torch.random.fork_rng():
        yield


def assert_same_latent_and_gradient(encoder: Encoder, expected: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The encoder agrees with another way to compute the same, in value and in the gradient at the pixels."""
    found, by_hand = (x.clone().requires_grad_() for _ in range(2))
    z, z_by_hand = encoder(found), expected(by_hand)
    torch.testing.assert_close(z, z_by_hand)
    weights = images(*z_by_hand.shape, seed=1)
    (z * weights).sum().backward()
    (z_by_hand * weights).sum().backward()
    assert by_hand.grad is not None
    assert float(by_hand.grad.abs().max()) > 0
    torch.testing.assert_close(found.grad, by_hand.grad)


# Taps


@pytest.mark.parametrize(("layer", "factor"), [("low", 2), ("middle", 6), ("high", 30), (None, 30)])
def test_a_tap_is_the_output_of_the_layer_of_that_name(layer: str | None, factor: int) -> None:
    x = images(2, 3, 4, 5)
    torch.testing.assert_close(Encoder(Tower(), layer, pool=None)(x), factor * x)


def test_several_layers_come_in_the_order_asked() -> None:
    x = images(2, 3, 4, 5)
    latents = Encoder(Tower(), ["high", "low", "middle"], pool=None)(x)
    assert isinstance(latents, tuple)
    torch.testing.assert_close(latents, (30 * x, 2 * x, 6 * x))


def test_one_layer_in_a_list_gives_a_tuple_of_one() -> None:
    x = images(1, 1, 2, 2)
    torch.testing.assert_close(Encoder(Tower(), ["middle"], pool=None)(x), (6 * x,))
    assert Encoder(Tower(), ["middle"]).layers == Encoder(Tower(), "middle").layers == ("middle",)
    assert Encoder(Tower()).layers == ()


def test_a_layer_asked_for_twice_comes_twice() -> None:
    x = images(1, 1, 2, 2)
    torch.testing.assert_close(Encoder(Tower(), ["low", "high", "low"], pool=None)(x), (2 * x, 30 * x, 2 * x))


@pytest.mark.parametrize(
    ("layers", "factors"), [([None], [30]), (["low", None], [2, 30]), ([None, "middle", None], [30, 6, 30])], ids=str
)
def test_none_among_several_layers_is_the_networks_output(layers: list[str | None], factors: list[int]) -> None:
    x = images(2, 3, 4, 5)
    for encoder in (Encoder(Tower(), layers, pool=None), Encoder(Tower(), "low", pool=None).at(layers)):
        assert encoder.layers == encoder.layer == tuple(layers)
        latents = encoder(x)
        assert isinstance(latents, tuple)
        torch.testing.assert_close(latents, tuple(factor * x for factor in factors))


def test_the_output_is_not_pooled_beside_layers_that_are() -> None:
    x = images(2, 3, 4, 5)
    low, output = Encoder(Tower(), ["low", None])(x)
    torch.testing.assert_close(low, 2 * x.mean(dim=(2, 3)))
    torch.testing.assert_close(output, 30 * x)


def test_the_output_beside_layers_has_the_gradient_that_it_has_alone() -> None:
    model, x = Convolutional().eval(), images(2, 3, 6, 6).requires_grad_()
    conv, logits = Encoder(model, ["conv", None], MEAN, STD)(x)
    alone = Encoder(model, None, MEAN, STD)(x)
    assert torch.equal(logits, alone) and conv.shape == (2, 4)
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), x)
    (wanted,) = torch.autograd.grad(alone[:, 1].sum(), x)
    assert torch.equal(gradient, wanted) and gradient.abs().max() > 0


@pytest.mark.parametrize("layer", [[], (), [3], ["low", 3], [["low"]]], ids=str)
def test_a_layer_that_is_neither_a_name_nor_none_is_refused(layer: Any) -> None:
    message = f"layer must be a name, several names, or None for the network's output, got {layer!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Encoder(Tower(), layer)


def test_of_a_module_that_runs_twice_the_last_output_is_taken() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again = Times(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.again(x)) + 1

    x = images(1, 3, 2, 2)
    torch.testing.assert_close(Encoder(Twice(), "again", pool=None)(x), 4 * x)


def test_a_module_with_two_names_is_found_under_both() -> None:
    model = Tower()
    model.high = model.low
    x = images(1, 3, 2, 2)
    torch.testing.assert_close(Encoder(model, "high", pool=None)(x), 12 * x)


def test_a_layer_deep_inside_is_found_by_its_dotted_name() -> None:
    model = nn.Sequential(Tower(), nn.Sequential(Times(7), Times(11)))
    x = images(1, 3, 2, 2)
    torch.testing.assert_close(Encoder(model, ["1.0", "0.low"], pool=None)(x), (210 * x, 2 * x))


def test_a_bare_network_becomes_an_encoder_and_an_encoder_stays_one() -> None:
    encoder, x = Encoder(Tower(), "low", pool=None), images(1, 3, 2, 2)
    assert as_encoder(encoder) is encoder
    torch.testing.assert_close(as_encoder(Tower())(x), 30 * x)


# Taps of libraries' networks


@pytest.mark.parametrize("layer", ["bn1", "layer1.0.bn2", "layer2.0.downsample", "layer2.0.downsample.1"])
def test_a_tap_of_resnet_is_not_written_into_by_what_follows(layer: str) -> None:
    model = small_resnet()

    def by_hand(x: Tensor) -> Tensor:
        stem = model.bn1(model.conv1(x))
        if layer == "bn1":
            return stem
        start, block = model.maxpool(relu(stem)), model.layer1[0]
        branch = block.bn2(block.conv2(relu(block.bn1(block.conv1(start)))))
        return branch if layer == "layer1.0.bn2" else model.layer2[0].downsample(relu(branch + start))

    x = images(2, 3, 32, 32)
    assert float(by_hand(x).detach().min()) < 0  # an in-place ReLU on it would show
    assert_same_latent_and_gradient(Encoder(model, layer, pool=None), by_hand, x)


@pytest.mark.parametrize("layer", ["features.norm0", "features.transition1.norm", "features.norm5", "features"])
def test_a_tap_of_densenet_is_not_written_into_by_what_follows(layer: str) -> None:
    model = small_densenet()
    clean = copy.deepcopy(model)
    for module in clean.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    features = clean.features
    before = {
        "features.norm0": features[:2],
        "features.transition1.norm": nn.Sequential(features[:5], features.transition1.norm),
    }
    by_hand = before.get(layer, features)
    x = images(2, 3, 32, 32)
    assert float(by_hand(x).detach().min()) < 0
    assert_same_latent_and_gradient(Encoder(model, layer, pool=None), by_hand, x)


@pytest.mark.parametrize("make", [small_resnet, small_densenet])
def test_without_a_layer_the_latent_is_the_logits(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert_same_latent_and_gradient(Encoder(model), model, images(2, 3, 32, 32))


@pytest.mark.parametrize(("make", "side"), [(small_vit, 16), (small_hybrid, 32)])
def test_taps_of_timms_transformers(make: Callable[[], Any], side: int) -> None:
    model, x = make(), images(2, 3, side, side)
    assert_same_latent_and_gradient(Encoder(model, "norm", pool=None), model.forward_features, x)
    first = partial(model.forward_intermediates, indices=[0], output_fmt="NLC", intermediates_only=True)
    places = Encoder(model, "blocks.0", pool=None)
    torch.testing.assert_close(places(x)[:, model.num_prefix_tokens :], first(x)[0])

    def penultimate(x: Tensor) -> Tensor:
        return model.forward_head(model.forward_features(x), pre_logits=True)

    assert_same_latent_and_gradient(Encoder(model, "head_drop"), penultimate, x)
    assert_same_latent_and_gradient(Encoder(model), model, x)


def test_the_convolutional_part_of_a_hybrid_is_tapped_as_maps() -> None:
    model, x = small_hybrid(), images(2, 3, 32, 32)
    backbone = model.patch_embed.backbone
    torch.testing.assert_close(Encoder(model, "patch_embed.backbone", pool=None)(x), backbone(x))
    assert_same_latent_and_gradient(Encoder(model, "patch_embed.backbone"), lambda x: backbone(x).mean(dim=(2, 3)), x)


def test_taps_of_clip() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=6)
    model = transformers.CLIPVisionModelWithProjection(config).eval()
    x = images(2, 3, 16, 16)
    assert_same_latent_and_gradient(Encoder(model), lambda x: model(x).image_embeds, x)
    assert_same_latent_and_gradient(Encoder(model, "vision_model"), lambda x: model.vision_model(x).pooler_output, x)
    tokens = Encoder(model, "vision_model.encoder.layers.0", pool=None)
    assert_same_latent_and_gradient(tokens, lambda x: model(x, output_hidden_states=True).hidden_states[1], x)
    head = Encoder(model).head
    assert head is not None
    assert head.bias is None
    torch.testing.assert_close(linear(Encoder(model, "vision_model")(x), head.weight), model(x).image_embeds)


def test_taps_of_a_transformers_classifier_fresh_in_train_mode() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5, hidden_dropout_prob=0.5)
    model = transformers.ViTForImageClassification(config).train()
    evaluated = copy.deepcopy(model).eval()
    x = images(2, 3, 16, 16)
    assert_same_latent_and_gradient(Encoder(model), lambda x: evaluated(x).logits, x)
    tokens, head = Encoder(model, "vit.layernorm", pool=None)(x), Encoder(model).head
    assert head is not None
    assert tokens.shape == (2, 5, 16)
    torch.testing.assert_close(linear(tokens[:, 0], *head), evaluated(x).logits)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (("loss", "logits", "hidden"), "logits"),
        (("last_hidden_state", "pooler_output"), "pooler_output"),
        (("last_hidden_state", "pooler_output", "image_embeds"), "image_embeds"),
        (("anything", "else"), "anything"),
    ],
)
def test_of_an_output_object_the_field_that_classifies_is_taken(keys: tuple[str, ...], taken: str) -> None:
    model = Giving(lambda x: {key: x * index for index, key in enumerate(keys, start=1)})
    x = images(2, 3)[:, :, None, None]
    expected = x * (1 + keys.index(taken))
    torch.testing.assert_close(Encoder(model)(x), expected)
    torch.testing.assert_close(Encoder(model, "layer", pool=None)(x), expected)


def test_of_a_sequence_the_first_tensor_is_taken() -> None:
    x = images(2, 3, 1, 1)
    assert torch.equal(Encoder(Giving(lambda x: (None, x * 2, x * 3)), "layer", pool=None)(x), 2 * x)
    assert torch.equal(Encoder(Giving(lambda x: {"logits": None, "aux": x * 2}))(x), 2 * x)


# Pooling


def test_maps_are_pooled_over_their_places() -> None:
    x = images(2, 3, 4, 5)
    torch.testing.assert_close(Encoder(Tower(), "low")(x), 2 * x.mean(dim=(2, 3)))
    assert torch.equal(Encoder(Tower(), "low", pool="flatten")(x), 2 * x.reshape(2, 60))
    assert torch.equal(Encoder(Tower(), "low", pool=None)(x), 2 * x)


def test_tokens_are_pooled_over_their_places() -> None:
    x = images(2, 3, 4, 5)
    model, tokens = Giving(lambda x: x.flatten(2).transpose(1, 2)), x.flatten(2).transpose(1, 2)
    torch.testing.assert_close(Encoder(model, "layer")(x), x.mean(dim=(2, 3)))
    assert torch.equal(Encoder(model, "layer", pool="flatten")(x), tokens.reshape(2, 60))
    assert torch.equal(Encoder(model, "layer", pool=None)(x), tokens)


@pytest.mark.parametrize("pool", ["mean", "flatten", None])
def test_vectors_are_not_pooled(pool: Any) -> None:
    x = images(2, 3, 4, 5)
    assert torch.equal(Encoder(Giving(lambda x: x.flatten(1)), "layer", pool=pool)(x), x.flatten(1))


def test_every_layer_is_pooled_by_its_own_shape() -> None:
    model = nn.Sequential(Times(2), nn.Flatten())
    x = images(2, 3, 4, 5)
    torch.testing.assert_close(Encoder(model, ["0", "1"])(x), (2 * x.mean(dim=(2, 3)), 2 * x.flatten(1)))


# Resize and normalisation


@pytest.mark.parametrize("size", [12, 5, (6, 11)])
def test_resizing_inside_equals_resizing_first(size: int | tuple[int, int]) -> None:
    model = small_densenet()
    plain = Encoder(model, "features.norm0", MEAN, STD, pool="flatten")
    inside = Encoder(model, "features.norm0", MEAN, STD, size, pool="flatten")
    assert_same_latent_and_gradient(inside, lambda x: plain(resized(x, size)), images(2, 3, 9, 8))


def test_the_gradient_that_arrives_at_the_small_image_is_that_of_finite_differences() -> None:
    encoder = Encoder(Convolutional().double(), None, MEAN, STD, size=7)
    x = images(2, 3, 4, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(encoder, x)
    (gradient,) = torch.autograd.grad(encoder(x)[:, 0].sum(), x)
    assert gradient.shape == x.shape
    assert bool((gradient != 0).all())


def test_normalisation_is_that_of_the_textbook() -> None:
    x = images(2, 3, 4, 5)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    plain = Giving(lambda x: x)
    torch.testing.assert_close(Encoder(plain, None, MEAN, STD)(x), (x - mean) / std)
    torch.testing.assert_close(Encoder(plain, None, MEAN)(x), x - mean)
    torch.testing.assert_close(Encoder(plain, None, None, STD)(x), x / std)


def test_one_number_normalises_every_channel() -> None:
    x = images(2, 3, 4, 5)
    torch.testing.assert_close(Encoder(Giving(lambda x: x), None, [0.5], [0.25])(x), (x - 0.5) / 0.25)


def test_the_normalisation_is_no_part_of_the_saved_state() -> None:
    model = Convolutional()
    assert set(Encoder(model, None, MEAN, STD).state_dict()) == {f"model.{name}" for name in model.state_dict()}


# Head


@pytest.mark.parametrize(
    ("make", "layer"), [(small_resnet, "avgpool"), (small_vit, "head_drop"), (Convolutional, "lipschitz")]
)
def test_the_head_makes_logits_of_the_penultimate_features(make: Callable[[], nn.Module], layer: str) -> None:
    model = make().eval()
    x = images(2, 3, 16, 16)
    head = Encoder(model).head
    assert isinstance(head, Head)
    assert head.weight.shape[0] == 5
    torch.testing.assert_close(linear(Encoder(model, layer)(x), head.weight, head.bias), model(x))


def test_a_network_without_a_linear_layer_has_no_head() -> None:
    assert Encoder(nn.Sequential(nn.Conv2d(3, 5, 1), nn.Flatten())).head is None


# At


def test_an_encoder_tapped_elsewhere_keeps_network_normalisation_size_and_pooling() -> None:
    model = small_densenet()
    encoder = Encoder(model, None, MEAN, STD, size=12, pool="flatten")
    x = images(2, 3, 8, 8)
    moved = encoder.at("features.norm0")
    assert moved.model is model
    assert torch.equal(moved(x), Encoder(model, "features.norm0", MEAN, STD, 12, "flatten")(x))
    assert torch.equal(moved.at(None)(x), encoder(x))
    assert torch.equal(
        encoder.at("features.norm0", pool=None)(x), Encoder(model, "features.norm0", MEAN, STD, 12, None)(x)
    )
    assert encoder.layer is None
    assert torch.equal(moved.at(["features.norm0"])(x)[0], moved(x))


def test_an_encoder_without_normalisation_has_none_elsewhere_either() -> None:
    x = images(1, 3, 2, 2)
    torch.testing.assert_close(Encoder(Tower(), pool=None).at("low")(x), 2 * x)


# The network is never changed

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a network that a caller could see change, the times its tensors were written to included."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"{name} mode"] = module.training
        state[f"{name} hooks"] = [list(getattr(module, kind)) for kind in HOOKS]
    for name, parameter in model.named_parameters():
        state[f"{name} requires_grad"] = parameter.requires_grad
        state[f"{name} grad"] = None if parameter.grad is None else parameter.grad.clone()
        state[f"{name} grad's place"] = id(parameter.grad)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"{name} value"] = tensor.detach().clone()
        state[f"{name} writes"] = tensor._version
        state[f"{name} place"] = id(tensor)
    return state


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Asserts that the block leaves the network as it was."""
    before = snapshot(model)
    yield
    after = snapshot(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, f"{key}: {value} became {after[key]}"


def lived_in() -> Convolutional:
    """A network in the middle of its training: mixed modes, some gradients, a frozen layer, a hook of its owner's."""
    model = Convolutional().train()
    model.norm(images(4, 4, 3, 3))
    model.drop.eval()
    model.lipschitz.eval()
    model.fc.requires_grad_(False)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    model.relu.register_forward_hook(lambda module, args, output: output * 2)
    return model


def encode(encoder: Encoder) -> None:
    encoder(images(3, 3, 6, 6))


def encode_without_gradients(encoder: Encoder) -> None:
    with torch.inference_mode():
        encoder(images(3, 3, 6, 6))


def ask_for_the_gradient(encoder: Encoder) -> None:
    x = images(3, 3, 6, 6).requires_grad_()
    torch.autograd.grad(encoder(x).sum(), x)


def run_collide(encoder: Encoder) -> None:
    start, target = images(3, 3, 6, 6), images(3, 3, 6, 6, seed=1)
    found = gate.collide(encoder, start, target, gate.L2(1.0), step=0.1, steps=10)
    assert bool(found.success.all())


def run_admit(encoder: Encoder) -> None:
    found = gate.admit(gate.detectors.Energy(encoder), images(3, 3, 6, 6), gate.Linf(0.1), steps=5)
    assert bool((found.score < found.start_score).all())


ACTIONS = [encode, encode_without_gradients, ask_for_the_gradient, run_collide, run_admit]
each_action = pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)


@each_action
@pytest.mark.parametrize("layer", [None, "norm"])
def test_the_network_is_the_same_after_as_before(action: Callable[[Encoder], None], layer: str | None) -> None:
    model = lived_in()
    with unchanged(model):
        action(Encoder(model, layer, MEAN, STD, size=8))


def test_the_check_above_sees_what_a_plain_call_changes() -> None:
    model = lived_in()
    with pytest.raises(AssertionError, match=r"norm\.(running_mean|num_batches_tracked) value"), unchanged(model):
        model(images(3, 3, 6, 6))
    with pytest.raises(AssertionError, match=r"conv\.weight grad"), unchanged(model):
        Encoder(model)(images(3, 3, 6, 6)).sum().backward()


@pytest.mark.parametrize("layer", [None, "norm", "fc"])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_network_is_the_same_when_its_forward_pass_raises(layer: str | None, gradients: bool) -> None:
    model = lived_in()
    model.fc = nn.Linear(7, 5)  # the features have 6 entries
    with (
        unchanged(model),
        torch.set_grad_enabled(gradients),
        pytest.raises(ValueError, match=r"does not take images of shape .*shapes"),
    ):
        encode(Encoder(model, layer, MEAN, STD))


def test_the_network_is_the_same_when_a_tap_raises() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), Giving(lambda x: "nothing")).train()
    with unchanged(model), pytest.raises(ValueError, match="no tensor"):
        encode(Encoder(model, ["0", "1.layer"]))


def test_the_network_is_the_same_when_an_attack_raises_half_way() -> None:
    model, calls = lived_in(), []

    def stumble(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("out of memory")

    model.conv.register_forward_hook(stumble)
    with unchanged(model), pytest.raises(RuntimeError, match="out of memory"):
        run_collide(Encoder(model, "norm"))
    assert len(calls) == 5


@each_action
def test_global_random_numbers_are_not_drawn(action: Callable[[Encoder], None]) -> None:
    def states() -> tuple[bytes, object, bytes]:
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002

    encoder = Encoder(lived_in(), "norm")
    before = states()
    action(encoder)
    assert states() == before


def test_the_network_runs_in_eval_mode_whatever_its_own() -> None:
    model = Convolutional()
    model.norm.running_mean += 0.3
    evaluated = copy.deepcopy(model).eval()
    x = images(4, 3, 6, 6)
    expected = evaluated(x)
    assert torch.equal(Encoder(model.train())(x), expected)
    assert torch.equal(Encoder(model.train(), "fc")(x), expected)
    assert torch.equal(Encoder(model.eval())(x), expected)


def test_the_encoders_mode_is_not_the_networks() -> None:
    model = lived_in()
    encoder = Encoder(model)
    with unchanged(model):
        assert encoder.train() is encoder
        assert encoder.training
        assert not encoder.eval().training
        nn.Sequential(encoder).train()
        gate.detectors.Energy(encoder).train().eval()


def test_the_callers_images_are_not_changed() -> None:
    x = images(2, 3, 6, 6)
    kept = x.clone()
    Encoder(Convolutional(), ["conv", "norm"], MEAN, STD, size=8)(x)
    assert torch.equal(x, kept)


class InPlace(nn.Module):
    """A network that normalises its input in place, as many do."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return x.flatten(1)


def test_a_network_that_writes_into_its_input_does_not_reach_the_callers_images() -> None:
    x = images(2, 3, 2, 2)
    kept = x.clone()
    torch.testing.assert_close(Encoder(InPlace())(x), kept.flatten(1) - 0.5)
    assert torch.equal(x, kept)


def test_a_network_that_writes_into_its_input_can_be_attacked() -> None:
    start, target = images(2, 3, 2, 2), images(2, 3, 2, 2, seed=1)
    found = gate.collide(Encoder(InPlace()), start, target, gate.L2(10.0), steps=100)
    torch.testing.assert_close(found.x, target, rtol=0, atol=0.05)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_in_half_precision_gives_latents_in_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5)).to(dtype)
    x = images(2, 3, 6, 6).requires_grad_()
    latents = Encoder(model, ["0", "2"], pool="flatten")(x)
    assert [z.dtype for z in latents] == [torch.float32, torch.float32]
    assert torch.equal(latents[0], model[0](x.to(dtype)).float().flatten(1))
    assert torch.equal(latents[1], model(x.to(dtype)).float())
    assert torch.equal(Encoder(model)(x), latents[1])
    (gradient,) = torch.autograd.grad(latents[1].sum(), x)
    assert gradient.dtype == torch.float32
    assert float(gradient.abs().max()) > 0


def test_the_mean_over_places_is_taken_in_float32() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False)).bfloat16()
    model[0].weight.data.fill_(1)
    x = torch.linspace(0, 1, 1000).view(1, 1, 40, 25)
    exact = x.bfloat16().double().mean().float()
    torch.testing.assert_close(Encoder(model, "0")(x).squeeze(), exact, rtol=1e-6, atol=0)


def test_a_float64_network_computes_in_float64() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    x = images(2, 3, 2, 2, dtype=torch.float64)
    z = Encoder(model)(x)
    assert z.dtype == torch.float64
    assert torch.equal(z, model(x))
    assert Encoder(model)(x.float()).dtype == torch.float64


def test_float64_images_are_taken_by_a_float32_network() -> None:
    model = Convolutional().eval()
    x = images(2, 3, 6, 6, dtype=torch.float64).requires_grad_()
    z = Encoder(model)(x)
    assert torch.equal(z, model(x.float()))
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert gradient.dtype == torch.float64
    found = gate.collide(model, x.detach(), x.detach().flip(0), gate.L2(1.0), step=0.1, steps=10)
    assert found.x.dtype == torch.float64
    assert bool(found.success.all())


def test_a_network_without_parameters_takes_images_of_either_precision() -> None:
    for dtype in (torch.float32, torch.float64):
        x = images(1, 3, 2, 2, dtype=dtype)
        assert torch.equal(Encoder(Tower())(x), x * 2 * 3 * 5)
    assert Encoder(Tower()).device is None


# Errors


def test_an_unknown_layer_is_answered_with_near_names_and_the_list() -> None:
    message = (
        "Convolutional has no layer 'normm'; did you mean 'norm'? Its layers: conv, norm, relu, drop, lipschitz, "
        "lipschitz.parametrizations, lipschitz.parametrizations.weight, lipschitz.parametrizations.weight.0, fc"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Encoder(Convolutional(), ["conv", "normm"])


def test_a_layer_like_no_other_is_answered_with_the_list() -> None:
    message = "Tower has no layer 'xyz'. Its layers: low, middle, high, spare"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Encoder(Tower(), "xyz")
    with pytest.raises(ValueError, match="Tower has no layer 'xyz'"):
        Encoder(Tower()).at("xyz")
    with pytest.raises(ValueError, match="Tower has no layer ''"):
        Encoder(Tower(), "")


def test_the_list_of_a_big_networks_layers_is_short() -> None:
    stage = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(10)))
    model = nn.ModuleDict({"stem": nn.Identity(), "one": stage, "two": copy.deepcopy(stage)})
    with pytest.raises(ValueError, match="no layer") as caught:
        Encoder(model, "one.3.7")
    hint, listed = str(caught.value).split(" Its layers: ")
    assert hint.startswith("ModuleDict has no layer 'one.3.7'; did you mean 'one.3")
    names, _, rest = listed.partition(" and ")
    assert names.split(", ") == [
        "stem",
        *(f"{s}{i}" for s in ("one", "two") for i in ["", *(f".{n}" for n in range(10))]),
    ]
    assert rest == "40 deeper ones"


def test_a_layer_that_does_not_run_is_named() -> None:
    with pytest.raises(ValueError, match=r"^layer 'spare' of Tower did not run in the forward pass$"):
        Encoder(Tower(), ["low", "spare"])(images(1, 3, 2, 2))


@pytest.mark.parametrize(("output", "kind"), [(None, "NoneType"), ("text", "str"), ((1, [2]), "tuple"), (3.0, "float")])
def test_an_output_without_a_tensor_is_refused(output: Any, kind: str) -> None:
    model, x = Giving(lambda x: output), images(1, 3, 2, 2)
    with pytest.raises(ValueError, match=f"^Giving gives {kind}, in which no tensor was found$"):
        Encoder(model)(x)
    with pytest.raises(ValueError, match=f"^layer gives {kind}, in which no tensor was found$"):
        Encoder(model, "layer")(x)


def test_a_dictionary_without_a_tensor_is_called_one() -> None:
    with pytest.raises(ValueError, match=r"^Giving gives dict, in which no tensor was found$"):
        Encoder(Giving(lambda x: {"a": 1}))(images(1, 3, 2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": (0.2, 0.0, 0.3)}, "std must be positive in every channel, got (0.2, 0.0, 0.3)"),
        ({"std": (0.2, -0.1)}, "std must be positive in every channel, got (0.2, -0.1)"),
        ({"mean": (0.2, torch.nan)}, "mean must be one finite number per channel, got (0.2, nan)"),
        ({"mean": 0.5}, "mean must be one finite number per channel, got 0.5"),
        ({"std": [[0.5]]}, "std must be one finite number per channel, got [[0.5]]"),
        ({"pool": "max"}, "pool must be 'mean', 'flatten' or None, got 'max'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Encoder(Tower(), **options)


@pytest.mark.parametrize("size", [0, -3, 3.5, (3,), (3, 0), "32"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"^size must be"):
        Encoder(Tower(), size=size)


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model must be a torch\.nn\.Module, got function$"):
        Encoder(images)


@pytest.mark.parametrize(("name", "options"), [("mean", {"mean": MEAN}), ("std", {"std": STD})])
def test_normalisation_for_other_channels_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name} has 3 channels, the images have 1$"):
        Encoder(Tower(), **options)(images(1, 1, 2, 2))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
            "images must be float in [0, 1], got uint8; divide by 255: images.float() / 255",
        ),
        (
            torch.zeros(3, 2, 2),
            "images must have shape (N, C, H, W), got (3, 2, 2); one image needs a batch dimension: image[None]",
        ),
    ],
)
def test_what_are_no_images_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Encoder(Tower())(x)


def test_mean_and_std_move_once_to_where_the_images_are() -> None:
    encoder = Encoder(nn.Conv2d(3, 4, 1, device="meta"), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    assert encoder.mean is not None and encoder.mean.device.type == "cpu"
    encoder(torch.rand(2, 3, 4, 4, device="meta"))
    mean, std = encoder.mean, encoder.std
    assert mean is not None and std is not None and {mean.device.type, std.device.type} == {"meta"}
    encoder(torch.rand(2, 3, 4, 4, device="meta"))
    assert encoder.mean is mean and encoder.std is std


def test_images_on_another_device_are_refused() -> None:
    encoder = Encoder(nn.Conv2d(3, 4, 1, device="meta"))
    assert encoder.device == torch.device("meta")
    message = "the images are on cpu, the network on meta; move one: x.to('meta')"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        encoder(images(1, 3, 2, 2))


class WritesNowAndThen(nn.Module):
    """Writes into its input from the second pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return (x.mul_(2) if self.passes > 1 else x).flatten(1)


def test_a_network_that_writes_into_its_input_gets_a_copy_every_time() -> None:
    encoder = Encoder(nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()))
    x = torch.rand(2, 1, 2, 2) - 0.5
    before = x.clone()
    for _ in range(3):
        encoder(x)
        assert torch.equal(x, before)


def test_a_network_that_begins_to_write_into_its_input_is_caught() -> None:
    encoder = Encoder(WritesNowAndThen())
    x = torch.rand(2, 1, 2, 2)
    encoder(x)
    with pytest.raises(ValueError, match="writes into its input in some passes"):
        encoder(x)


def test_a_search_leaves_a_training_network_alone_that_two_encoders_share() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    backbone = nn.Sequential(*layers)  # in training mode, as torch makes it
    features = Encoder(backbone)
    classifier = Encoder(nn.Sequential(features, nn.Linear(8, 4)))
    x, y = torch.rand(16, 3, 8, 8), torch.arange(16) % 4
    members = [gate.detectors.MSP(classifier), gate.detectors.Mahalanobis(features).fit((x, y))]
    both = gate.detectors.ScoreEnsemble(members).fit((x, y))
    scores = both.scores(x)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    found = gate.evict(both, x, gate.Linf(8 / 255), steps=5)
    torch.testing.assert_close(found.start_score, scores, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.score, both.scores(found.x), rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert all(module.training for module in backbone.modules())


def test_a_network_that_changes_its_mode_inside_a_search_runs_in_eval_mode_all_the_same() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    encoder, images = Encoder(network), torch.rand(3, 3, 2, 2)
    calm = encoder(images)

    def restless(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        before = encoder(x)
        network.train()
        z = encoder(x)
        network.eval()
        assert torch.equal(z, before)
        return z.sum(dim=1)

    found = gate.search(
        restless, images, gate.Linf(0.1), stepper=gate.Sign(), steps=1, keep="last", precision="float32"
    )
    torch.testing.assert_close(found.start_value, calm.sum(dim=1))
    torch.testing.assert_close(found.value, encoder(found.x).sum(dim=1))
    assert int(network[2].num_batches_tracked) == 0
