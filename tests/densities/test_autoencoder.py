"""Autoencoder and decoder: shapes, what is likely, what they learn, and their bundles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatecrash.densities import Autoencoder, Decoder, load_density, save_density, train_density
from gatecrash.densities.autoencoder import halvings
from gatecrash.fitting import Recipe, seeded
from small_models import blank, one_thread, squares

assert one_thread


def autoencoder(shape: tuple[int, ...] = (1, 6, 6), **options: int) -> Autoencoder:
    with seeded(0):
        return Autoencoder(shape, **{"width": 4, "latent": 3, **options}).eval()


def decoder(features: int = 5, image: tuple[int, ...] = (1, 6, 6)) -> Decoder:
    with seeded(0):
        return Decoder((features + image[0] * image[1] * image[2],), image=image, width=4).eval()


def recipe(epochs: int = 15) -> Recipe:
    return Recipe(epochs, batch_size=20, optimiser="adamw", lr=0.01, weight_decay=0.0)


def test_images_are_halved_until_no_side_is_longer_than_four() -> None:
    assert halvings((3, 32, 32)) == [(32, 32), (16, 16), (8, 8), (4, 4)]
    assert halvings((1, 28, 28)) == [(28, 28), (14, 14), (7, 7), (4, 4)]
    assert halvings((1, 6, 9)) == [(6, 9), (3, 5), (2, 3)]
    assert halvings((1, 4, 1)) == [(4, 1)]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 8), (1, 10, 6), (2, 5, 17), (3, 64, 64)], ids=str)
def test_an_image_comes_back_in_its_own_shape_from_a_code_of_the_wanted_size(shape: tuple[int, ...]) -> None:
    density = autoencoder(shape, latent=7)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    assert density.encode(x).shape == (2, 7)
    assert density.reconstruct(x).shape == x.shape
    assert decoder(3, shape).decode(torch.zeros(2, 3)).shape == x.shape


def test_the_likelihood_is_minus_half_the_squared_error() -> None:
    density, x = autoencoder(), squares(5)[0]
    rebuilt = density.decode(density.encode(x)).detach()
    by_hand = torch.tensor(
        [-0.5 * sum(float(v) ** 2 for v in (a - b).flatten()) for a, b in zip(x, rebuilt, strict=True)]
    )
    torch.testing.assert_close(density(x), by_hand)


def test_the_likelihood_of_an_image_is_that_given_its_features() -> None:
    density = decoder()
    features, x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)), squares(4)[0]
    sample = torch.cat([features, x.flatten(1)], dim=1)
    expected = -0.5 * (x - density.decode(features)).square().sum(dim=(1, 2, 3))
    torch.testing.assert_close(density(sample), expected)
    assert torch.equal(density.split(sample)[0], features)
    assert torch.equal(density.split(sample)[1], x)


def test_the_first_batch_gives_the_mean_image() -> None:
    density, x = autoencoder(), squares(9)[0]
    density.begin(x)
    torch.testing.assert_close(density.centre, x.mean(dim=0))
    black = torch.zeros(1, 3)
    torch.testing.assert_close(density.decode(black), density.centre + density.up(black))


def test_features_are_standardised_and_one_that_does_not_vary_keeps_its_unit() -> None:
    density, x = decoder(3), squares(4)[0]
    features = torch.tensor([[1.0, 7.0, 0.0], [3.0, 7.0, 0.0], [1.0, 7.0, 4.0], [3.0, 7.0, 4.0]])
    density.begin(torch.cat([features, x.flatten(1)], dim=1))
    assert density.mean.tolist() == [2, 7, 2]
    assert density.scale.tolist() == [1, 1, 2]
    torch.testing.assert_close(
        density.decode(features), density.centre + density.up((features - density.mean) / density.scale)
    )


def test_what_is_learnt_is_rebuilt_and_the_rest_is_not() -> None:
    density, x = autoencoder(), squares(60)[0]
    spread = (x - x.mean(dim=0)).square().flatten(1).sum(dim=1).mean()
    history = train_density(density, x, recipe(25))
    error = -2 * density(squares(30, 5)[0])
    assert error.mean() < 0.15 * spread
    assert -2 * density(blank(30, 6)).max() > error.max()
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]
    assert not density.training
    assert not any(parameter.requires_grad for parameter in density.parameters())


def test_a_decoder_learns_the_image_that_belongs_to_the_features() -> None:
    x, y = squares(60)
    features = torch.nn.functional.one_hot(y, 3).float()
    density = decoder(3)
    train_density(density, torch.cat([features, x.flatten(1)], dim=1), recipe(25))
    means = torch.stack([x[y == label].mean(dim=0) for label in range(3)])
    torch.testing.assert_close(density.decode(torch.eye(3)), means, atol=0.1, rtol=0)


def test_the_gradient_reaches_pixels_both_ways() -> None:
    """d/dx ½‖x − x̂‖² = (I − J)ᵀ(x − x̂), with the Jacobian of the reconstruction by finite differences."""
    density = autoencoder((1, 2, 3)).double()
    x = torch.rand(1, 1, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(-density(x.requires_grad_()).sum(), x)
    with torch.no_grad():
        residual = (x - density.reconstruct(x)).flatten()
        step = 1e-6 * torch.eye(6, dtype=torch.float64).unflatten(1, (1, 2, 3))
        jacobian = (density.reconstruct(x + step) - density.reconstruct(x - step)).flatten(1).T / 2e-6
    expected = residual - jacobian.T @ residual
    torch.testing.assert_close(gradient.flatten(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["autoencoder", "decoder"])
def test_a_bundle_gives_back_the_same_likelihoods_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    x = squares(20)[0]
    sample: Tensor = x if kind == "autoencoder" else torch.cat([x.flatten(1)[:, :5], x.flatten(1)], dim=1)
    density = autoencoder() if kind == "autoencoder" else decoder()
    history = train_density(density, sample, recipe(2))
    save_density(density, tmp_path / "bundle", history)
    again = load_density(tmp_path / "bundle")
    assert type(again) is type(density)
    assert again.options == density.options
    assert torch.equal(again(sample), density(sample))


def test_half_precision_leaves_what_was_learnt_alone() -> None:
    density = autoencoder()
    before = {key: tensor.clone() for key, tensor in density.state_dict().items()}
    density.half()
    assert all(torch.equal(tensor, before[key]) for key, tensor in density.state_dict().items())
    assert density.double().centre.dtype == torch.float64


def test_shapes_and_options_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"an image has the shape \(C, H, W\), got \[5\]"):
        Autoencoder((5,))
    with pytest.raises(ValueError, match="latent must be a whole number of at least 1, got 0"):
        Autoencoder((1, 6, 6), latent=0)
    with pytest.raises(ValueError, match="width must be a whole number of at least 1, got 0"):
        Decoder((41,), image=(1, 6, 6), width=0)
    for shape in ((36,), (1, 41)):
        with pytest.raises(ValueError, match=r"features and an image of shape \(1, 6, 6\) as one vector"):
            Decoder(shape, image=(1, 6, 6))
    with pytest.raises(ValueError, match=r"of samples of shape \(1, 6, 6\), got \(1, 6, 7\)"):
        train_density(autoencoder(), torch.rand(4, 1, 6, 7), recipe(1))
