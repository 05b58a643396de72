"""An encoder at another pace: the same latents and gradients, never from old weights, and nothing left on the network."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from small_networks import Smooth, fast, images, with_gradient
from torch import Tensor, nn
from torch.autograd import forward_ad

import gatecrash as gate
from gatecrash.encoder import Encoder
from gatecrash.prepared import PreparedNetwork, preparing
from gatecrash.prepared.make import Unfit, left_alone
from gatecrash.prepared.run import KEPT, SETTLED, _records
from gatecrash.prepared.stamp import Stamp
from gatecrash.speed import at_pace, unchanged
from gatecrash.taps import recording


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """A network that is not prepared says so in a warning, and tests of prepared networks would compare it to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def copies(model: nn.Module) -> list[PreparedNetwork]:
    """The prepared copies that there are of a network."""
    return [] if model not in _records else [network for network in _records[model].networks.values() if network]


def small_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, depth=2, embed_dim=24, num_heads=3)


FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "logits": (Smooth, {}),
    "normalised": (Smooth, {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}),
    "resized": (Smooth, {"size": 12, "layer": "act"}),
    "before a norm": (Smooth, {"layer": "conv2", "pool": "flatten"}),
    "behind a folded norm": (Smooth, {"layer": "norm2", "pool": None}),
    "several": (Smooth, {"layer": ["conv1", "norm2", None, "fc"]}),
    "twice the same": (Smooth, {"layer": [None, "fc", None]}),
    "tokens": (small_vit, {"layer": ["blocks.0", "norm", None]}),
}
each_form = pytest.mark.parametrize("form", FORMS)


def encoder_of(form: str) -> Encoder:
    make, options = FORMS[form]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(make(), **options)


@each_form
@pytest.mark.parametrize(
    "settings", [{}, {"compile_after": 0, "backend": "aot_eager"}], ids=["uncompiled", "aot_eager"]
)
@pytest.mark.parametrize("count", [3, 8, 19])
def test_the_prepared_network_gives_the_same_latents_and_gradients(
    form: str, settings: dict[str, Any], count: int
) -> None:
    encoder, x = encoder_of(form), images(count)
    latents, gradient = with_gradient(encoder, x)
    with fast(**settings):
        found, other = with_gradient(encoder, x)
        with torch.no_grad():
            silent = encoder(x)
    assert len(copies(encoder.model)) == 1
    torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(silent) if isinstance(silent, tuple) else [silent], latents, rtol=1e-4, atol=1e-5)


@each_form
def test_half_precision_is_near_and_gives_float32(form: str) -> None:
    """Within 2 % of the latents' length and 5 % of the gradient's, and not the float32 network again."""
    encoder, x = encoder_of(form), images(11)
    latents, gradient = with_gradient(encoder, x)
    with fast("half"):
        found, other = with_gradient(encoder, x)
    for near, exact in [*zip(found, latents, strict=True), (other, gradient)]:
        assert near.dtype == torch.float32
        assert not torch.equal(near, exact)
    assert all(float((near - exact).norm() / exact.norm()) < 0.02 for near, exact in zip(found, latents, strict=True))
    assert float((other - gradient).norm() / gradient.norm()) < 0.05
    assert copies(encoder.model)[0].tapped.dtype == torch.bfloat16


def test_the_plain_pace_is_the_network_itself() -> None:
    encoder, x = Encoder(Smooth(), ["norm1", None]), images(3)
    before = with_gradient(encoder, x)
    with fast():
        encoder(x)
    after = with_gradient(encoder, x)
    assert all(map(torch.equal, before[0], after[0]))
    assert torch.equal(before[1], after[1])


def test_networks_on_the_cpu_are_left_alone_unless_asked() -> None:
    encoder, x = Encoder(Smooth()), images(3)
    with at_pace("prepared"):
        assert torch.equal(encoder(x), Encoder(encoder.model)(x))
    assert copies(encoder.model) == []


# Weights that change


def replace_a_weight(model: Smooth) -> None:
    model.fc.weight = nn.Parameter(model.fc.weight.detach() * 2)


def write_into_a_weight(model: Smooth) -> None:
    with torch.no_grad():
        model.conv1.weight.mul_(2)


def write_behind_autograds_back(model: Smooth) -> None:
    model.conv1.weight.data.neg_()


def point_at_other_data(model: Smooth) -> None:
    model.conv1.weight.data = model.conv1.weight.data * 2


def write_into_a_buffer(model: Smooth) -> None:
    model.norm1.running_mean.add_(1)


def load_a_state(model: Smooth) -> None:
    model.load_state_dict(Smooth(seed=1).state_dict())


def load_a_state_by_assigning(model: Smooth) -> None:
    model.load_state_dict(Smooth(seed=1).state_dict(), assign=True)


def take_an_optimiser_step(model: Smooth) -> None:
    model(images(2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def replace_a_layer(model: Smooth) -> None:
    model.act = nn.ReLU()


def set_an_attribute(model: Smooth) -> None:
    model.scale = 3.0


CHANGES = [
    replace_a_weight,
    write_into_a_weight,
    write_behind_autograds_back,
    point_at_other_data,
    write_into_a_buffer,
    load_a_state,
    load_a_state_by_assigning,
    take_an_optimiser_step,
    replace_a_layer,
    set_an_attribute,
]


class Functional(Smooth):
    """A network with functions that are no modules, and with numbers: alone, in a list, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.one: Callable[[Tensor], Tensor] = torch.sigmoid
        self.some, self.named = [torch.sigmoid], {"last": torch.sigmoid}
        self.factors, self.settings = [1.0, 2.0], {"last": 3.0}
        self.nested, self.root = {"some": [[1.0]]}, np.sqrt(1.0)

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        first, second = self.factors
        z = z * self.nested["some"][0][0] * float(self.root)
        return self.one(first * z) + self.some[0](second * z) + self.named["last"](self.settings["last"] * z)


def replace_a_function(model: Functional) -> None:
    model.one = torch.tanh


def replace_a_function_in_a_list(model: Functional) -> None:
    model.some[0] = torch.tanh


def replace_a_function_in_a_dictionary(model: Functional) -> None:
    model.named["last"] = torch.tanh


def replace_a_number_in_a_list(model: Functional) -> None:
    model.factors[0] = 4.0


def replace_a_number_in_a_dictionary(model: Functional) -> None:
    model.settings["last"] = 4.0


def replace_a_number_in_a_list_in_a_list(model: Functional) -> None:
    model.nested["some"][0][0] = 2.0


def replace_a_number_of_numpys(model: Functional) -> None:
    model.root = np.sqrt(4.0)


def replace_the_forward_pass(model: Functional) -> None:
    model.forward = MethodType(lambda self, x: 2 * Functional.forward(self, x), model)  # type: ignore[method-assign]


FUNCTIONS = [
    replace_a_function,
    replace_a_function_in_a_list,
    replace_a_function_in_a_dictionary,
    replace_a_number_in_a_list,
    replace_a_number_in_a_dictionary,
    replace_a_number_in_a_list_in_a_list,
    replace_a_number_of_numpys,
    replace_the_forward_pass,
]


@pytest.mark.parametrize(
    ("kind", "change"),
    [*((Smooth, change) for change in CHANGES), *((Functional, change) for change in FUNCTIONS)],
    ids=lambda part: part.__name__,
)
def test_what_a_network_was_is_never_used(kind: type[Smooth], change: Callable[[Any], None]) -> None:
    model, x = kind().eval(), images(3)
    encoder = Encoder(model)
    with fast():
        before = encoder(x)
    if change is write_behind_autograds_back:
        encoder(x)  # as at the end of a search, and what such a change is noticed by
    change(model)
    expected = copy.deepcopy(model).eval()(x).detach()
    assert not torch.allclose(before, expected, rtol=0.01)
    with fast():
        for _ in range(SETTLED + 2):
            torch.testing.assert_close(encoder(x).detach(), expected, rtol=1e-4, atol=1e-5)
    assert len(copies(model)) == 1  # prepared anew, once the weights had stayed the same for a while


@pytest.mark.parametrize("hang", [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook])
def test_a_hook_is_noticed_when_it_comes_and_when_it_goes(hang: Callable[..., Any]) -> None:
    model, x = Smooth().eval(), images(3)
    encoder = Encoder(model)
    plain = encoder(x)
    with fast():
        torch.testing.assert_close(encoder(x), plain)
        hook = hang(model.fc, lambda module, args, *output: 2 * (output or args)[0])
        expected = model(x)
        assert not torch.allclose(plain, expected, rtol=0.01)
        for _ in range(SETTLED):
            assert torch.equal(encoder(x), expected)
        with pytest.warns(RuntimeWarning, match="it has hooks"):
            assert torch.equal(encoder(x), expected)
        hook.remove()
        for _ in range(SETTLED + 1):
            torch.testing.assert_close(encoder(x), plain)
    assert len(copies(model)) == 1


def test_in_a_block_where_nothing_changes_a_changed_network_is_copied_at_once() -> None:
    encoder, x = Encoder(Smooth()), images(3)
    with fast(), torch.no_grad():
        encoder(x)
        write_into_a_weight(encoder.model)  # type: ignore[arg-type]
        expected = copy.deepcopy(encoder.model).eval()(x)
        with unchanged():
            torch.testing.assert_close(encoder(x), expected)
    assert len(copies(encoder.model)) == 1


def test_a_mixed_search_is_the_same_after_a_change() -> None:
    def found(encoder: Encoder) -> gate.Found:
        return gate.collide(encoder, images(6), images(6, seed=1), gate.L2(0.5), steps=60, precision="mixed")

    new, changed = Encoder(Smooth()), Encoder(Smooth())
    with preparing(devices=("cpu",), compile_after=None):
        found(changed)
        with torch.no_grad():
            changed.model.fc.weight.mul_(1)
        assert torch.equal(found(changed).x, found(new).x)
    assert len(copies(changed.model)) == 2


class Noting(Smooth):
    """Notes what it saw last, and how often."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.seen = counts, 0
        self.shape: tuple[int, ...] = ()
        self.sizes: list[Any] = []
        self.facts: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.sizes, self.facts = tuple(x.shape), [float(len(x)), [1e9]], {"size": 1000.0 * len(x)}
        self.seen += self.counts
        return super().forward(x)


@pytest.mark.parametrize("counts", [False, True])
def test_a_network_that_notes_what_it_saw_has_copies(counts: bool) -> None:
    encoder, x, seen = Encoder(Noting(counts)), images(3), []
    with preparing(devices=("cpu",), compile_after=None):
        encoder(x)
        for _ in range(3):
            with unchanged(), at_pace("prepared"):
                encoder(x)
            seen += copies(encoder.model)
            encoder(x)  # plainly
    assert len(seen) == 3
    assert all(network is seen[0] for network in seen) == (not counts)


def test_an_encoders_own_hooks_in_another_thread_change_nothing() -> None:
    encoder, x = Encoder(Smooth()), images(3)
    with fast():
        encoder(x)
        (before,) = copies(encoder.model)
        with recording({"conv1": encoder.model.conv1}), left_alone(encoder.model):
            encoder(x)
    assert copies(encoder.model) == [before]


def test_a_new_function_at_the_address_of_an_old_one_is_noticed() -> None:
    model, x = Smooth().eval(), images(3)
    encoder = Encoder(model)
    for factor in (1.0, -1.0, 3.0, -2.0):
        model.forward = MethodType(lambda self, x, by=factor: by * Smooth.forward(self, x), model)  # type: ignore[method-assign]
        expected = model(x).detach()
        with fast():
            for _ in range(SETTLED + 2):
                torch.testing.assert_close(encoder(x).detach(), expected, rtol=1e-4, atol=1e-5)
        assert len(copies(model)) == 1
        del model.forward


@pytest.mark.parametrize("pace", ["prepared", "half"])
def test_a_copy_that_would_run_the_network_itself_is_none(pace: Any) -> None:
    model, x = Smooth(), images(3)  # in training mode
    plain = model.forward
    model.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    encoder = Encoder(model)
    expected = encoder(x)
    with warnings.catch_warnings(record=True) as said, fast(pace):
        warnings.simplefilter("always")
        assert torch.equal(encoder(x), expected)
    assert any("its copy runs the network itself" in str(warning.message) for warning in said)
    assert copies(model) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The networks that are looked at for changes, one after the other."""
    looked, make = [], Stamp.__init__

    def counted(stamp: Stamp, model: nn.Module) -> None:
        looked.append(model)
        make(stamp, model)

    monkeypatch.setattr(Stamp, "__init__", counted)
    return looked


def test_where_nothing_changes_a_network_is_looked_at_once_and_in_the_next_block_again(
    looked: list[nn.Module],
) -> None:
    encoder, x = Encoder(Smooth()), images(3)
    with fast(), torch.no_grad():
        with unchanged():
            first = [encoder(x) for _ in range(4)]
        assert len(looked) == 1
        encoder.model.fc.bias += 1
        with unchanged():
            second = [encoder(x) for _ in range(3)]
        assert len(looked) == 2
        encoder(x), encoder(x)
    assert len(looked) == 4
    for z in second:
        torch.testing.assert_close(z, first[0] + 1)


def test_a_mixed_search_looks_at_its_network_once(looked: list[nn.Module]) -> None:
    encoder = Encoder(Smooth())
    with preparing(devices=("cpu",), compile_after=None):
        gate.collide(encoder, images(4), images(4, seed=1), gate.L2(0.5), steps=30, precision="mixed")
    assert looked == [encoder.model]
    assert len(copies(encoder.model)) == 2


@pytest.mark.parametrize("pace", ["prepared", "half"])
def test_a_copy_has_its_images_and_its_convolutions_with_their_channels_last(pace: Any) -> None:
    model, seen = Smooth(), []
    encoder = Encoder(model)
    with fast(pace):
        encoder(images(3))
        (copied,) = copies(model)
        for layer in (copied.tapped.model.conv1, copied.tapped.model.conv2):
            layer.register_forward_pre_hook(lambda module, args: seen.append((module.weight, args[0])))
        encoder(images(3))
    assert len(seen) == 2
    for tensor in (tensor for pair in seen for tensor in pair):
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_a_network_in_training_is_not_prepared_again_and_again() -> None:
    model, x = Smooth(), images(3)
    encoder, made = Encoder(model), 0
    with fast():
        for _ in range(5):
            for _ in range(SETTLED):
                encoder(x)
            made += len(copies(model))
            take_an_optimiser_step(model)
    assert made == 1


def test_a_network_in_another_precision_computes_in_it() -> None:
    encoder, x = Encoder(Smooth()), images(3)
    with fast():
        encoder(x)
        encoder.double()
        z = encoder(x.double())
    assert z.dtype == torch.float64
    assert torch.equal(z, encoder(x.double()))


def test_a_network_on_another_device_is_not_served_by_its_copy() -> None:
    encoder, x = Encoder(Smooth()), images(3)
    with fast():
        encoder(x)
        encoder.to("meta")
        assert encoder(x.to("meta")).is_meta


# What stays behind


def test_the_network_is_untouched() -> None:
    model = Smooth().train()
    model.norm1.eval()
    model.fc.requires_grad_(False)
    kept, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    wants = [parameter.requires_grad for parameter in model.parameters()]
    with fast("half"):
        with_gradient(Encoder(model, "norm1"), images(5))
    with fast(compile_after=0, backend="aot_eager"):
        with_gradient(Encoder(model, "norm1"), images(5))
    assert len(copies(model)) == 2
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wants
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())
    assert not any(module._forward_hooks for module in model.modules())


def test_no_parameter_of_a_copy_gets_a_gradient() -> None:
    encoder, x = Encoder(Smooth()), images(3).requires_grad_()
    with fast():
        encoder(x).sum().backward()
    (network,) = copies(encoder.model)
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in [*encoder.parameters(), *network.tapped.parameters()])


def test_the_copy_is_no_part_of_the_encoder() -> None:
    encoder, x = Encoder(Smooth()), images(3)
    names, size = list(encoder.state_dict()), len(pickle.dumps(encoder))
    modules = [name for name, _ in encoder.named_modules()]
    with fast():
        z = encoder(x)
        assert len(pickle.dumps(encoder)) == size
        other = copy.deepcopy(encoder)
        assert copies(other.model) == []
        torch.testing.assert_close(other(x), z)
    assert list(encoder.state_dict()) == names
    assert [name for name, _ in encoder.named_modules()] == modules


def test_the_copy_goes_with_the_network() -> None:
    encoder = Encoder(Smooth(), ["norm1", None])
    with fast():
        with_gradient(encoder, images(3))
    (network,) = copies(encoder.model)
    gone = weakref.ref(network.tapped)
    del encoder, network
    gc.collect()
    assert gone() is None


def test_encoders_of_one_network_share_a_copy_and_few_are_kept() -> None:
    model, x = Smooth(), images(3)
    with fast():
        Encoder(model)(x)
        Encoder(model, mean=(0.5, 0.5, 0.5))(x)
        assert len(copies(model)) == 1
        for side in range(8, 8 + 2 * KEPT):
            Encoder(model)(images(1, side=side))
    assert len(copies(model)) == KEPT


# More than a first derivative


@pytest.mark.parametrize(("pace", "tolerance"), [("prepared", 1e-5), ("half", 0.01)])
def test_a_gradient_that_is_differentiated_is_the_networks(pace: Any, tolerance: float) -> None:
    """The score of JEM is the length of a gradient; compiled code could not be differentiated twice."""
    detector, x = gate.detectors.JEM(Encoder(Smooth()), score="gradient"), images(3).requires_grad_()
    (expected,) = torch.autograd.grad(detector(x).sum(), x)
    with fast(pace, compile_after=0, backend="aot_eager"):
        (found,) = torch.autograd.grad(detector(x).sum(), x)
    assert 0 < float((found - expected).norm() / expected.norm()) < tolerance


def test_odin_takes_its_own_gradient_and_is_followed() -> None:
    detector, x = gate.detectors.ODIN(Encoder(Smooth()), temperature=10.0, magnitude=0.01), images(3)
    plain = with_gradient(detector, x)
    with fast(compile_after=0, backend="aot_eager"):
        found = with_gradient(detector, x)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-6)


def test_transforms_of_torch_func_go_through_the_network() -> None:
    encoder, x = Encoder(Smooth()), images(2)
    expected = torch.func.jacrev(encoder)(x)
    with fast():
        assert torch.equal(torch.func.jacrev(encoder)(x), expected)


def test_forward_mode_differentiation_goes_through_the_network() -> None:
    encoder, x = Encoder(Smooth()), images(2)

    def along(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(encoder(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    expected = along(x)
    with fast():
        assert torch.equal(along(x), expected)


def test_inference_mode_is_left_alone() -> None:
    encoder, x = Encoder(Smooth()), images(2)
    with fast(), torch.inference_mode():
        assert torch.equal(encoder(x), encoder(x.clone()))
    assert copies(encoder.model) == []


def test_an_image_of_the_wrong_shape_is_still_named() -> None:
    encoder = Encoder(Smooth())
    with fast(), pytest.raises(ValueError, match=r"^Smooth does not take images of shape \(1, 8, 8\)"):
        encoder(images(2)[:, :1])


def test_another_thread_may_run_the_network_while_it_is_copied() -> None:
    model, x = Smooth().eval(), images(2)
    expected = model(x)
    with left_alone(model), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model, x).result(), expected)
        with pytest.raises(Unfit, match="its copy runs the network itself"):
            model(x)
    assert torch.equal(model(x), expected)


class Slotted:
    """A function without weak references."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_functions_without_weak_references_are_known_too() -> None:
    model = Functional().eval()
    model.one = Slotted(2.0)
    stamp = Stamp(model)
    assert stamp == Stamp(model)
    model.one = Slotted(2.0)
    assert stamp != Stamp(model)
