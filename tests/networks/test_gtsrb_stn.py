from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gatecrash.encoder import Encoder
from gatecrash.networks import NETWORKS, GtsrbStn
from gatecrash.networks.gtsrb_stn import SpatialTransformer


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small(side: int = 16) -> SpatialTransformer:
    torch.manual_seed(0)
    return SpatialTransformer(2, side, (3, 4, 5))


def test_the_parameter_count_is_that_of_the_layers() -> None:
    with torch.device("meta"):
        model = GtsrbStn()
    first = (75 * 250 + 250) + (25 * 250 * 250 + 250) + (250 * 4 * 4 * 250 + 250) + (250 * 6 + 6)
    second = (25 * 200 * 150 + 150) + (25 * 150 * 200 + 200) + (200 * 300 + 300) + (300 * 6 + 6)
    third = (25 * 250 * 150 + 150) + (25 * 150 * 200 + 200) + (200 * 300 + 300) + (300 * 6 + 6)
    trunk = 49 * 3 * 200 + 16 * 200 * 250 + 16 * 250 * 350 + 2 * (200 + 250 + 350)
    linear = (350 * 4 * 4 * 128 + 128) + (128 * 43 + 43)
    assert parameters(model) == first + second + third + trunk + linear == 8_849_393


def test_the_transformers_have_the_parameters_published_for_48_pixels() -> None:
    with torch.device("meta"):
        model = GtsrbStn(size=48, latent=400)
    # The network of the paper has 14,629,801 parameters with all three, and these without one of them.
    without = [10_796_295, 12_887_345, 12_879_845]
    transformers = [model.transform1, model.transform2, model.transform3]
    assert [parameters(transformer) for transformer in transformers] == [14_629_801 - rest for rest in without]


@pytest.mark.parametrize(("size", "sides"), [(32, (15, 8, 4)), (48, (23, 12, 6))])
def test_taps_have_the_shapes_of_the_paper(size: int, sides: tuple[int, int, int]) -> None:
    first, second, third = sides
    layers = ["transform1", "conv1", "transform2", "conv2", "transform3", "conv3", "latent", "fc"]
    with torch.device("meta"):
        taps = Encoder(GtsrbStn(size=size), layers, pool=None)(torch.zeros(2, 3, size, size))
    assert [tuple(tap.shape[1:]) for tap in taps] == [
        *((3, size, size), (200, first, first), (200, first, first), (250, second, second)),
        *((250, second, second), (350, third, third), (128,), (43,)),
    ]


def test_a_fresh_network_sees_what_it_would_see_without_transformers() -> None:
    model, x = GtsrbStn().eval(), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.transform1(x), x, rtol=0, atol=1e-5)
        without = model.fc(model.latent(model.conv3(model.conv2(model.conv1(x)))))
        torch.testing.assert_close(model(x), without, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("right", "down"), [(1, 0), (0, 3), (-2, 1)])
def test_a_translation_by_whole_pixels_moves_the_map_and_fills_with_zeros(right: int, down: int) -> None:
    transformer, x = small(), torch.rand(2, 2, 16, 16)
    with torch.no_grad():
        # The map spans 2 in the transformer's units, and the matrix says where to look.
        transformer.affine.bias += torch.tensor([0, 0, -2 * right / 16, 0, 0, -2 * down / 16])
        moved = transformer(x)
    torch.testing.assert_close(moved, pad(x, (right, -right, down, -down)), rtol=0, atol=1e-5)


def test_a_flip_and_a_turn_are_affine() -> None:
    transformer, x = small(), torch.rand(2, 2, 16, 16)
    with torch.no_grad():
        transformer.affine.bias.copy_(torch.tensor([-1.0, 0, 0, 0, 1, 0]))
        torch.testing.assert_close(transformer(x), x.flip(3), rtol=0, atol=1e-5)
        transformer.affine.bias.copy_(torch.tensor([0.0, 1, 0, 1, 0, 0]))
        torch.testing.assert_close(transformer(x), x.transpose(2, 3), rtol=0, atol=1e-5)


def test_every_map_gets_the_view_that_its_own_localisation_chooses() -> None:
    transformer = small().double()
    nn.init.normal_(transformer.affine.weight)
    x = torch.rand(3, 2, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        together = transformer(x)
        assert not torch.allclose(together, x, atol=0.05)
        torch.testing.assert_close(together, torch.cat([transformer(one[None]) for one in x]))


def test_the_gradient_goes_through_the_samples_and_through_the_choice_of_the_view() -> None:
    transformer = small().double()
    nn.init.normal_(transformer.affine.weight, std=0.3)
    weights = torch.randn(1, 2, 16, 16, dtype=torch.float64)
    x = torch.rand(1, 2, 16, 16, dtype=torch.float64, requires_grad=True)

    def value(images: Tensor) -> Tensor:
        return (transformer(images) * weights).sum()

    (gradient,) = torch.autograd.grad(value(x), x)
    direction = torch.randn_like(gradient)
    with torch.no_grad():
        slope = (value(x + 1e-7 * direction) - value(x - 1e-7 * direction)) / 2e-7
        matrices = transformer.affine(transformer.localise(x)).view(-1, 2, 3)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-5)

    grid = nn.functional.affine_grid(matrices, [1, 2, 16, 16], align_corners=False)
    fixed = (nn.functional.grid_sample(x, grid, align_corners=False) * weights).sum()
    (of_samples,) = torch.autograd.grad(fixed, x)
    assert not torch.allclose(gradient, of_samples, rtol=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"size": 31}, "size must be at least 32, got 31"), ({"latent": 0}, "latent must be at least 1, got 0")],
)
def test_an_option_out_of_range_is_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NETWORKS["gtsrb_stn"](**options)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GtsrbStn does not take images of shape \(3, 48, 48\)"):
        Encoder(GtsrbStn())(torch.rand(1, 3, 48, 48))
