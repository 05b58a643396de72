"""Networks with convolutions in a search on a CPU: their images' channels come last, and what they compute stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import gatecrash as gate
from gatecrash import Encoder, Linf
from gatecrash.detectors import Energy
from gatecrash.speed import laid_out, plainly


class Backwards(torch.autograd.Function):
    """What is given, and a gradient that must be stored channels first."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.view(len(gradient), -1).view_as(gradient)


class Watched(nn.Module):
    """A convolution and a linear layer; it remembers whether the channels of what it read came last."""

    def __init__(self, how: str = "flattens") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.last: list[bool] = []
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(x.is_contiguous(memory_format=torch.channels_last))
        maps = torch.relu(self.conv(Backwards.apply(x) if self.how == "views on the way back" else x))
        if self.how == "views":
            return self.linear(maps.view(len(x), -1))
        return self.linear(maps.as_strided((len(x), 144), (144, 1)) if self.how == "strides" else maps.flatten(1))


def pictures(count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_a_search_on_a_cpu_takes_channels_last_and_finds_the_same() -> None:
    network = Watched()
    fast = gate.evict(Energy(network), pictures(), Linf(0.1), steps=5)
    assert network.last[0] is False and len(network.last) == 8 and all(network.last[1:])
    network.last.clear()
    plain = gate.evict(Energy(network), pictures(), Linf(0.1), steps=5, precision="float32")
    with plainly():
        checked = gate.evict(Energy(network), pictures(), Linf(0.1), steps=5)
    assert network.last and not any(network.last)
    assert torch.equal(plain.x, checked.x)
    torch.testing.assert_close(fast.x, plain.x, rtol=0, atol=1e-5)
    torch.testing.assert_close(fast.score, plain.score)
    assert fast.x.is_contiguous()


def test_scores_and_networks_of_their_own_are_read_as_they_are() -> None:
    network, x = Watched(), pictures()
    assert torch.equal(Encoder(network)(x), network(x))
    Energy(network).scores(x)
    assert not any(network.last)


@pytest.mark.parametrize("how", ["views", "strides", "views on the way back"])
def test_a_network_that_wants_its_channels_first_gets_them(how: str) -> None:
    network = Watched(how)
    found = gate.evict(Energy(network), pictures(), Linf(0.1), steps=5)
    assert network.last[:2] == [False, True] and len(network.last) == 8 and not any(network.last[2:])
    wanted = gate.evict(Energy(Watched()), pictures(), Linf(0.1), steps=5, precision="float32")
    torch.testing.assert_close(found.x, wanted.x, rtol=0, atol=1e-6)


class Sized(nn.Module):
    """A convolution after which small maps are seen as vectors, which wants channels first, and larger ones averaged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        maps = maps.view(len(x), -1) if maps.shape[-1] == 8 else maps.unflatten(2, (8, -1)).mean(3)[..., ::2].flatten(1)
        return self.linear(maps)


def test_images_of_another_size_are_tried_anew() -> None:
    detector = Energy(Sized())
    for side in (16, 8):
        x = torch.rand(4, 3, side, side)
        found = gate.evict(detector, x, Linf(0.1), steps=3)
        wanted = gate.evict(detector, x, Linf(0.1), steps=3, precision="float32")
        torch.testing.assert_close(found.x, wanted.x, rtol=0, atol=1e-6)


def test_forward_mode_differentiation_goes_through_the_network() -> None:
    encoder, x = Encoder(Watched()), pictures()

    def along(x: Tensor, rows: Tensor) -> Tensor:
        with forward_ad.dual_level():
            z = encoder(forward_ad.make_dual(x, torch.ones_like(x)))
            return forward_ad.unpack_dual(z).tangent.square().sum(dim=1)

    found = gate.search(along, x, Linf(0.1), stepper=gate.Sign(), steps=2, keep="last", measure=False)
    wanted = gate.search(along, x, Linf(0.1), stepper=gate.Sign(), steps=2, keep="last", precision="float32")
    torch.testing.assert_close(found.x, wanted.x)


def test_a_gradient_has_its_channels_first() -> None:
    encoder, x = Encoder(Watched()), pictures().requires_grad_()
    with laid_out():
        z = encoder(x)
        assert isinstance(z, Tensor)
        (gradient,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
    assert gradient.is_contiguous() and second.shape == x.shape


def test_a_network_is_tried_once_and_in_eval_mode() -> None:
    network = Watched().train()
    modes: list[bool] = []
    network.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    for _ in range(2):
        gate.pgd(network, pictures(), torch.zeros(6, dtype=torch.long), Linf(0.1), steps=2)
    assert network.last.count(False) == 1 and not any(modes) and network.training


@pytest.mark.parametrize("layer", ["conv", ["conv", None]])
def test_maps_that_are_tapped_have_their_channels_first(layer: str | list[str | None]) -> None:
    encoder, x = Encoder(Watched(), layer, pool=None), pictures()
    wanted = encoder(x)
    with laid_out():
        found = encoder(x)
    for one, other in zip(
        [found] if isinstance(found, Tensor) else found, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True
    ):
        assert isinstance(one, Tensor) and one.is_contiguous()
        torch.testing.assert_close(one, other)


def test_double_precision_and_networks_without_convolutions_are_left_alone() -> None:
    network = Watched().double()
    with laid_out():
        Encoder(network)(pictures(dtype=torch.float64))
        flat = nn.Flatten()
        flat.register_forward_pre_hook(lambda module, inputs: network.last.append(not inputs[0].is_contiguous()))
        Encoder(flat)(pictures())
    assert network.last == [False, False]


def test_a_wrong_shape_is_still_said() -> None:
    with laid_out(), pytest.raises(ValueError, match="does not take images of shape"):
        Encoder(Watched())(torch.rand(2, 3, 9, 9))
