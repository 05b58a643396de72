"""PixelCNN++: what a pixel may see, its likelihood against the factors one by one, its sizes and its samples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatecrash.densities import PixelCNN, load_density, save_density, train_density
from gatecrash.densities.pixelcnn import Grow, Normed
from gatecrash.fitting import Recipe, seeded
from small_models import one_thread  # noqa: F401

TINY = {"filters": 4, "mixtures": 2}


def network(*shape: int, seed: int = 0, **options: object) -> PixelCNN:
    """With biases too, so that the first pixel, which sees nothing, has a mixture of its own."""
    with seeded(seed):
        model = PixelCNN(shape, **{**TINY, **options}).double().eval().requires_grad_(False)
        for layer in model.modules():
            if isinstance(layer, Normed):
                layer.bias.normal_(0, 0.3)
    return model


def some_images(count: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *shape), generator=generator).double() / 255


# What a pixel sees


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 6), (2, 5, 7), (1, 1, 5), (3, 3, 1), (1, 1, 1)])
@pytest.mark.parametrize("levels", [0, 2])
def test_no_conditional_depends_on_a_later_pixel_or_channel(shape: tuple[int, int, int], levels: int) -> None:
    model = network(*shape, levels=levels)
    channels, pixels = shape[0], shape[1] * shape[2]

    def conditionals(x: Tensor) -> Tensor:
        """(pixels, channels): a mixture of everything that decides on a channel of a pixel."""
        mixture = model.mixture(x)
        means = mixture.means_given(2 * x - 1)
        parts = means.sin() + mixture.log_scales.cos() + mixture.log_weights[:, :, None].exp()
        return parts.sum(dim=1)[0].permute(1, 2, 0).reshape(-1)

    x = some_images(1, *shape)
    jacobian = torch.autograd.functional.jacobian(conditionals, x)[:, 0].permute(0, 2, 3, 1)
    order = jacobian.reshape(pixels * channels, pixels * channels)
    assert not order.triu().any()
    if pixels * channels > 1:
        assert order.tril(-1)[-1].count_nonzero() > 0
        assert order.tril(-1).any(dim=1)[1:].all()


def test_the_last_pixel_sees_the_first_over_both_resolutions() -> None:
    model = network(1, 16, 16)
    x = some_images(1, 1, 16, 16).requires_grad_()
    (seen,) = torch.autograd.grad(model.network(2 * x - 1)[0, :, -1, -1].sum(), x)
    assert seen[0, 0, 0, 0] != 0
    flat = network(1, 16, 16, levels=0)
    (seen,) = torch.autograd.grad(flat.network(2 * x - 1)[0, :, -1, -1].sum(), x)
    assert seen[0, 0, 0, 0] == 0


@pytest.mark.parametrize("side", [1, 2, 5, 6])
@pytest.mark.parametrize("right", [False, True])
def test_a_pixel_grows_out_of_the_one_it_was_shrunk_into(side: int, right: bool) -> None:
    size = (2, 2) if right else (2, 3)
    shrink, grow = Normed(1, 1, size, right=right, stride=2), Grow(1, size, right=right)
    x = torch.rand(1, 1, side, side, requires_grad=True)
    small = shrink(x)
    assert small.shape[2:] == (math.ceil(side / 2), math.ceil(side / 2))
    large = grow(small, x)
    assert large.shape == x.shape
    for row in range(side):
        for column in range(side):
            (seen,) = torch.autograd.grad(large[0, 0, row, column], x, retain_graph=True)
            assert not seen[0, 0, row + 1 :].any()
            if right:
                assert not seen[0, 0, :, column + 1 :].any()


# The likelihood


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 2, 3)])
def test_the_likelihood_is_the_product_of_the_conditionals_of_unfinished_images(shape: tuple[int, int, int]) -> None:
    model, x = network(*shape), some_images(2, *shape)
    total = torch.zeros(2, dtype=torch.float64)
    for row in range(shape[1]):
        for column in range(shape[2]):
            unfinished = torch.full_like(x, 0.123)  # what comes later must not matter
            unfinished[:, :, :row], unfinished[:, :, row, :column] = x[:, :, :row], x[:, :, row, :column]
            total += model.mixture(unfinished).log_prob(2 * x - 1)[:, row, column]
    torch.testing.assert_close(model(x), total)


def test_all_images_of_two_pixels_have_a_probability_of_one_together() -> None:
    model = network(1, 1, 2, filters=2, levels=0)
    greys = torch.arange(256).double() / 255
    images = torch.cartesian_prod(greys, greys)[:, None, None]
    assert float(model(images).exp().sum()) == pytest.approx(1.0, abs=1e-9)


def test_bits_per_dimension_are_the_likelihood_in_another_unit() -> None:
    model, x = network(3, 4, 4), some_images(2, 3, 4, 4)
    torch.testing.assert_close(model.bits_per_dimension(x), -model(x) / math.log(2) / 48)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.0004, 0.9996])
def test_black_and_white_images_have_a_finite_gradient_in_32_bits(value: float) -> None:
    model = network(3, 6, 6).float()
    x = torch.full((2, 3, 6, 6), value, requires_grad=True)
    likelihood = model(x)
    (gradient,) = torch.autograd.grad(likelihood.sum(), x)
    assert likelihood.isfinite().all() and gradient.isfinite().all()


def test_the_gradient_between_grey_levels_is_that_of_finite_differences() -> None:
    model = network(3, 4, 4)
    x = (0.1 + 0.8 * torch.rand(2, 3, 4, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(model, (x,), eps=1e-6, atol=1e-5)


# Layers


def test_a_layers_weights_have_its_scale_as_their_length() -> None:
    layer = Normed(3, 5, (2, 3))
    with torch.no_grad():
        layer.scale.copy_(torch.tensor([1.0, 2.0, 0.5, -3.0, 0.0]))
    torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), layer.scale.abs())


def test_after_the_beginning_every_layer_has_mean_zero_and_its_deviation() -> None:
    model, x = network(3, 8, 8, filters=6), some_images(32, 3, 8, 8)
    model.begin(x)
    seen = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Normed) and name != "network.last":
            layer.register_forward_hook(lambda layer, _, output, name=name: seen.update({name: (layer.start, output)}))
    model(x)
    assert len(seen) > 30
    for start, output in seen.values():
        torch.testing.assert_close(output.mean(dim=(0, 2, 3)), torch.zeros_like(output[0, :, 0, 0]), atol=1e-9, rtol=0)
        deviations = output.std(dim=(0, 2, 3), correction=0) / start
        assert (deviations < 1 + 1e-6).all()
        assert float(deviations.max()) == pytest.approx(1.0)


def test_the_beginning_makes_images_of_the_data_likelier() -> None:
    model, x = network(1, 6, 6), some_images(40, 1, 6, 6) / 4
    before = model.bits_per_dimension(x).mean()
    model.begin(x)
    assert model.bits_per_dimension(x).mean() < before - 1


def test_a_beginning_with_one_black_image_leaves_everything_finite() -> None:
    model = network(1, 6, 6)
    model.begin(torch.zeros(1, 1, 6, 6, dtype=torch.float64))
    assert model(some_images(3, 1, 6, 6)).isfinite().all()


# Sizes


def test_the_papers_preset_has_the_papers_sizes() -> None:
    with torch.device("meta"):
        model = PixelCNN((3, 32, 32), preset="paper")
    assert model.options == {
        "preset": "paper", "blocks": 5, "filters": 160, "mixtures": 10, "dropout": 0.5, "levels": 2
    }  # fmt: skip
    assert [len(level.blocks) for level in model.network.down] == [5, 5, 5]
    assert [len(level.blocks) for level in model.network.up] == [5, 6, 6]
    assert model.network.last.bias.shape == (100,)
    assert {layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout)} == {0.5}


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 32), (1, 56, 56), (3, 64, 64)])
def test_the_small_preset_is_what_images_of_any_size_have_unless_the_papers_is_asked_for(
    shape: tuple[int, int, int],
) -> None:
    with torch.device("meta"):
        assert PixelCNN(shape).options == PixelCNN(shape, preset="small").options
        assert PixelCNN(shape, preset="paper").options["filters"] == 160
        assert PixelCNN(shape, blocks=2).options["blocks"] == 2


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((5,), {}, r"of images of shape \(C, H, W\), got \(5,\)"),
        ((1, 8, 8), {"preset": "huge"}, "preset must be 'paper' or 'small', got 'huge'"),
        ((1, 8, 8), {"filters": 0}, "filters must be a whole number of at least 1, got 0"),
        ((1, 8, 8), {"mixtures": 2.5}, "mixtures must be a whole number"),
        ((1, 8, 8), {"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ((1, 8, 8), {"dropout": "half"}, "dropout must be a number, got 'half'"),
        ((1, 8, 8), {"blocks": True}, "blocks must be a whole number of at least 0, got True"),
        ((1, 8, 8), {"levels": True}, "levels must be a whole number of at least 0, got True"),
        ((1, 0, 8), {}, "sides of at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused(shape: tuple[int, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PixelCNN(shape, **options)


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of samples of shape \(1, 8, 8\), got \(3, 8, 8\)"):
        network(1, 8, 8)(some_images(2, 3, 8, 8))


# Training


def stripes(count: int, side: int = 8) -> Tensor:
    """Columns that are black and white in turn; which comes first is a coin's toss."""
    columns = torch.arange(side) + torch.arange(count)[:, None] % 2
    return (columns % 2).float()[:, None, None, :].expand(count, 1, side, side).contiguous()


def test_a_rule_that_one_pixel_decides_is_learnt() -> None:
    with seeded(0):
        model = PixelCNN((1, 8, 8), filters=8, mixtures=2)
    history = train_density(model, stripes(32), Recipe(25, 16, "adamw", lr=0.03, weight_decay=0.0, clip=1.0))
    assert history[-1]["loss"] < history[0]["loss"] / 10
    # One bit for the first pixel is all that there is to say, and two images cannot both cost less.
    assert 1 <= float(model(stripes(2)).mean()) / -math.log(2) < 3
    assert model(stripes(2).transpose(2, 3)).max() < -100


def test_a_trained_model_draws_what_it_was_trained_on() -> None:
    with seeded(0):
        model = PixelCNN((1, 4, 4), filters=8, mixtures=2, levels=1)
    train_density(model, stripes(32, 4), Recipe(60, 32, "adamw", lr=0.02, weight_decay=0.0))
    drawn = model.sample(16, torch.Generator().manual_seed(1))
    kinds = {tuple(image.flatten().round().int().tolist()) for image in drawn}
    wanted = {tuple(image.flatten().int().tolist()) for image in stripes(2, 4)}
    assert len(kinds & wanted) == 2
    share = sum(tuple(image.flatten().round().int().tolist()) in wanted for image in drawn) / 16
    assert share > 0.7


def test_samples_depend_on_the_generator_alone() -> None:
    model = network(3, 3, 2)
    first = model.sample(2, torch.Generator().manual_seed(4))
    assert first.shape == (2, 3, 3, 2) and 0 <= float(first.min()) <= float(first.max()) <= 1
    torch.manual_seed(9)
    assert torch.equal(model.sample(2, torch.Generator().manual_seed(4)), first)
    assert not torch.equal(model.sample(2, torch.Generator().manual_seed(5)), first)
    torch.testing.assert_close(first * 255, (first * 255).round(), rtol=0, atol=1e-9)


def test_a_bundle_gives_back_the_same_model(tmp_path: Path) -> None:
    model, x = network(3, 4, 4).float(), some_images(3, 3, 4, 4).float()
    save_density(model, tmp_path / "bundle")
    again = load_density(tmp_path / "bundle")
    assert isinstance(again, PixelCNN) and again.options == model.options
    assert torch.equal(again(x), model(x))


def test_half_precision_around_the_network_leaves_the_mixture_in_32_bits() -> None:
    model, x = network(1, 8, 8).float(), some_images(2, 1, 8, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.mixture(x).means.dtype == torch.float32
        rough = model(x)
    torch.testing.assert_close(rough, model(x), rtol=0.02, atol=0.0)
