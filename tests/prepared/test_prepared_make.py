"""Which networks are prepared, which run as they are, and that both give what they should."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from small_networks import Smooth, fast, images, with_gradient
from torch import Tensor, nn
from torch.nn.functional import batch_norm, linear

import gatecrash as gate
from gatecrash.encoder import Encoder
from gatecrash.prepared import preparing
from gatecrash.prepared.run import _records
from gatecrash.prepared.tapped import WIDE


class Branching(Smooth):
    """Control flow that depends on the values, so that no tracer can follow it."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z * 2 if bool(z.sum() > 0) else z * 3


def prepared(model: nn.Module) -> bool:
    return any(network is not None for network in _records[model].networks.values())


def assert_same(encoder: Encoder, x: Tensor, **settings: Any) -> None:
    latents, gradient = with_gradient(encoder, x)
    with fast(**settings):
        for _ in range(2):
            found, other = with_gradient(encoder, x)
            torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"compile_after": 0, "backend": "eager"}], ids=["uncompiled", "compiled"])
def test_a_network_that_cannot_be_traced_is_prepared_unfolded(settings: dict[str, Any]) -> None:
    encoder = Encoder(Branching(), ["norm1", None])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert_same(encoder, images(4), **settings)
    assert prepared(encoder.model)


class InPlace(Smooth):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return super().forward(x)


@pytest.mark.parametrize("settings", [{}, {"compile_after": 0, "backend": "eager"}], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("count", [3, 4])
def test_a_network_that_writes_into_its_input_is_prepared(settings: dict[str, Any], count: int) -> None:
    encoder, x = Encoder(InPlace()), images(count)
    kept = x.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert_same(encoder, x, **settings)
    assert prepared(encoder.model)
    assert torch.equal(x, kept)
    points = x.requires_grad_()
    (expected,) = torch.autograd.grad(slope(encoder, points), points)
    with fast(**settings):
        (found,) = torch.autograd.grad(slope(encoder, points), points)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def slope(encoder: Encoder, x: Tensor) -> Tensor:
    """The squared length of a gradient, to be differentiated itself."""
    (gradient,) = torch.autograd.grad(encoder(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


class Outside(Smooth):
    """Keeps a weight where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.kept[0]


class Holding(Smooth):
    """Computes with an array, which may be written to without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = np.array([2.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.factor[0])


class Narrow(Smooth):
    """Has memory for few images at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("there is none left")
        return super().forward(x)


class Heavy(Smooth):
    """A network beside which a second one has no room."""

    def __deepcopy__(self, memo: Any) -> Heavy:
        raise torch.OutOfMemoryError("there is none left")


class OfTheBatch(Smooth):
    """Normalises by the batch at hand, with no module that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(batch_norm(x, None, None, training=True))


class Leaning(Smooth):
    """Every image's output depends a little on the others: less than bf16 rounds."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z + 0.05 * z.sum(dim=0)


class Remembering(Smooth):
    """Keeps what it computed last, which cannot be copied."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Together(Smooth):
    """Every image's output depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z - z.mean(dim=0)


class PlacesFirst(nn.Module):
    """Gives as many rows as there are places, as some transformers do inside."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = Turned()

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x).sum(dim=0)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).permute(2, 0, 1)


def hooked() -> nn.Module:
    model = Smooth()
    model.act.register_forward_hook(lambda module, args, output: output * 2)
    return model


def of_batches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten())


def weighed() -> nn.Module:
    """A weight made anew by a hook in every pass."""
    model = Smooth()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fc = nn.utils.weight_norm(model.fc)
    return model


CASES: list[tuple[Callable[[], nn.Module], str | None, str]] = [
    (hooked, None, "it has hooks"),
    (weighed, None, "it has hooks"),
    (Outside, None, "it holds tensors, arrays or modules that are not registered"),
    (Holding, None, "it holds tensors, arrays or modules that are not registered"),
    (Together, None, "its rows depend on each other, on how many there are, or on chance"),
    (Leaning, None, "its rows depend on each other, on how many there are, or on chance"),
    (of_batches, None, "it has a batch norm without running statistics"),
    (PlacesFirst, "turn", "its rows depend on each other, on how many there are, or on chance"),
    (lambda: torch.compile(Smooth(), backend="eager"), None, "it is compiled already"),
]


@pytest.mark.parametrize(("make", "layer", "reason"), CASES)
def test_what_could_become_wrong_runs_as_it_is_and_says_why_once(
    make: Callable[[], nn.Module], layer: str | None, reason: str
) -> None:
    encoder = Encoder(make(), layer, pool=None)
    with pytest.warns(RuntimeWarning, match=f"runs as it is, without being prepared for speed: {reason}") as caught:
        assert_same(encoder, images(3))
    assert len([warning for warning in caught if "runs as it is" in str(warning.message)]) == 1
    assert not prepared(encoder.model)


@pytest.mark.parametrize("make", [Leaning, of_batches])
def test_what_depends_on_the_batch_is_not_taken_for_rounding_in_half_precision(make: Callable[[], nn.Module]) -> None:
    encoder = Encoder(make(), pool=None)
    with pytest.warns(RuntimeWarning, match="runs as it is"):
        assert_same(encoder, images(3), pace="half")
    assert not prepared(encoder.model)


@pytest.mark.parametrize("pace", ["prepared", "half"])
def test_one_image_tells_whether_rows_depend_on_each_other(pace: Any) -> None:
    encoder = Encoder(OfTheBatch())
    with pytest.warns(RuntimeWarning, match="its rows depend on each other"):
        assert_same(encoder, images(1), pace=pace)
    assert not prepared(encoder.model)


@pytest.mark.parametrize("make", [Heavy, lambda: Narrow(1)], ids=["copy", "pass"])
@pytest.mark.parametrize("pace", ["prepared", "half"])
def test_a_network_with_memory_for_one_image_runs_as_it_is(make: Callable[[], nn.Module], pace: Any) -> None:
    encoder = Encoder(make())
    with pytest.warns(RuntimeWarning, match="there is no memory for a copy of it"):
        assert_same(encoder, images(1), pace=pace)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_mixed_search_needs_memory_for_one_image(most: int) -> None:
    encoder = Encoder(Narrow(most).eval())
    with preparing(devices=("cpu",), compile_after=None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gate.collide(encoder, images(6), images(6, seed=1), gate.L2(1.0), steps=60, precision="mixed")
        plain = gate.collide(encoder, images(6), images(6, seed=1), gate.L2(1.0), steps=60, precision="float32")
    assert bool((found.mape < 1.5 * plain.mape + 0.001).all())


def test_what_cannot_be_copied_runs_as_it_is() -> None:
    model, x = Remembering(), images(3)
    model(x)
    with pytest.warns(RuntimeWarning, match="not registered"):
        assert_same(Encoder(model), x)


class OnlySingle(nn.Module):
    """Its own code insists on float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5 * 192).view(5, 192))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.flatten(1).float(), self.weight)


class Cancelling(nn.Module):
    """A small difference of large numbers: nothing is left of it in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) + 1000) - 1000


@pytest.mark.parametrize("make", [OnlySingle, Cancelling])
def test_where_half_precision_does_not_work_the_copy_stays_in_float32(make: Callable[[], nn.Module]) -> None:
    encoder = Encoder(make())
    with pytest.warns(RuntimeWarning, match=f"{make.__name__} runs in float32 throughout, which is slower; in bf16 "):
        assert_same(encoder, images(3), pace="half")
    (network,) = _records[encoder.model].networks.values()
    assert network is not None
    assert network.tapped.dtype == torch.float32


def test_batch_norms_keep_their_precision_in_half() -> None:
    encoder = Encoder(Smooth(), "conv2")  # its norm is not folded
    with fast("half"):
        encoder(images(3))
    (network,) = _records[encoder.model].networks.values()
    assert network is not None
    dtypes = {name: tensor.dtype for name, tensor in network.tapped.model.state_dict().items()}
    assert dtypes["norm2.running_var"] == dtypes["norm2.weight"] == torch.float32
    assert dtypes["conv2.weight"] == dtypes["fc.bias"] == torch.bfloat16


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_convolution_on_few_channels_has_more_in_half_and_gives_the_same(mode: Literal["zeros", "reflect"]) -> None:
    model = Smooth()
    model.conv1.padding_mode = mode
    expected = with_gradient(Encoder(copy.deepcopy(model).bfloat16()), images(3))
    encoder = Encoder(model)
    with fast("half"):
        (latent,), gradient = with_gradient(encoder, images(3))
    (network,) = _records[model].networks.values()
    assert network is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in network.tapped.model.state_dict().items()}
    assert shapes["conv1.weight"] == (8, WIDE, 3, 3) and shapes["conv2.weight"] == (6, 8, 3, 3)
    assert model.conv1.weight.shape == (8, 3, 3, 3) and not model.conv1._forward_pre_hooks
    torch.testing.assert_close(latent, expected[0][0], rtol=0.05, atol=0.01)
    torch.testing.assert_close(gradient, expected[1], rtol=0.1, atol=0.1 * float(expected[1].abs().max()))


def test_a_tapped_layer_that_was_replaced_is_the_plain_paths_to_name() -> None:
    model = Smooth()
    encoder = Encoder(model, "fc")
    model.fc = nn.Linear(6, 5)
    with (
        fast(),
        pytest.warns(RuntimeWarning, match="a tapped layer was replaced"),
        pytest.raises(ValueError, match="layer 'fc' of Smooth did not run"),
    ):
        encoder(images(2))


def test_weights_that_are_still_to_be_made_are_made_by_the_network_itself() -> None:
    encoder, x = Encoder(nn.Sequential(nn.Flatten(), nn.LazyLinear(3))), images(2)
    with fast():
        first, second = encoder(x), encoder(x)
    torch.testing.assert_close(second, first)
    assert prepared(encoder.model)
