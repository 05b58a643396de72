"""The masked autoregressive flow: a density that integrates to one, its determinant, its sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gatecrash.densities import MAF, train_density
from gatecrash.fitting import Recipe, seeded
from small_models import one_thread  # noqa: F401


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(dimensions: int = 3, **options: object) -> MAF:
    with seeded(0):
        return MAF((dimensions,), **{"transforms": 3, "hidden": [8], **options}).double().eval().requires_grad_(False)


def test_the_likelihood_is_the_normals_times_the_determinant_of_the_whole_map() -> None:
    model = made(4)
    model.standardise(2 * numbers(50, 4) + numbers(1, 4, seed=1))

    def latent(x: Tensor) -> Tensor:
        return model.flow.transform()((x - model.mean) / model.deviation)

    for x in numbers(3, 4, seed=2):
        jacobian = torch.autograd.functional.jacobian(latent, x)
        exact = torch.distributions.Normal(0.0, 1.0).log_prob(latent(x)).sum() + jacobian.det().abs().log()
        torch.testing.assert_close(model(x[None])[0], exact)


def test_the_density_integrates_to_one() -> None:
    model = made(2)
    model.standardise(torch.tensor([[0.0, 3.0], [1.0, 4.0]], dtype=torch.float64))
    ticks = torch.linspace(-12, 12, 601, dtype=torch.float64)
    total = model(torch.cartesian_prod(ticks, ticks + 3)).exp().sum() * (24 / 600) ** 2
    assert float(total) == pytest.approx(1.0, abs=1e-3)


def test_training_finds_a_bent_density() -> None:
    first = numbers(500, 1)
    bent = torch.cat([first, first.square() + 0.1 * numbers(500, 1, seed=1)], dim=1)
    model = made(2, hidden=[32])
    train_density(model, bent, Recipe(60, 100, "adamw", lr=0.02, weight_decay=0.0))
    # h(first) + h(second | first) of the distribution that the samples come from
    exact = -0.5 * math.log(2 * math.pi * math.e) - 0.5 * math.log(2 * math.pi * math.e * 0.01)
    assert exact - 0.5 < float(model(bent).mean()) < exact + 0.2
    assert float(model(torch.tensor([[0.0, 2.0]], dtype=torch.float64))) < exact - 20


@pytest.mark.parametrize("dimensions", [1, 2, 300])
def test_any_number_of_features_works(dimensions: int) -> None:
    model = made(dimensions)
    x = numbers(5, dimensions)
    model.begin(x)
    assert model(x).shape == (5,) and model(x).isfinite().all()


def test_the_default_sizes_are_the_papers() -> None:
    model = MAF((342,))
    assert model.options == {"transforms": 5, "hidden": [128]}
    hidden = [part.hyper[0].weight.shape for part in model.flow.transform.transforms]
    assert hidden == 5 * [(128, 342)]


def test_a_nan_stays_one_and_is_no_error_of_another_library() -> None:
    assert made(3)(torch.full((2, 3), torch.nan).double()).isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transforms": 0}, "transforms must be a whole number of at least 1, got 0"),
        ({"hidden": []}, "hidden must be the sizes of one layer or more"),
        ({"hidden": 128}, "hidden must be the sizes of one layer or more, as a list, got 128"),
        ({"hidden": [128, 0]}, "hidden must be a whole number of at least 1, got 0"),
        ({"hidden": [True]}, "hidden must be a whole number of at least 1, got True"),
    ],
)
def test_sizes_that_are_none_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MAF((3,), **options)
