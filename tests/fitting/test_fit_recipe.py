from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fit_toys import Plain, linear, material, weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gatecrash.fitting import Material, Recipe, fit

DATA = material(dtype=torch.float64)


def replayed(step: Plain, recipe: Recipe, optimiser: type[torch.optim.Optimizer], **options: Any) -> list[Tensor]:
    """The weights after every step of a loop written out with torch alone, on the batches that `fit` showed."""
    model = linear()
    own = optimiser(model.parameters(), lr=recipe.lr, **options)
    total, held = len(step.batches), []
    for number, batch in enumerate(step.batches):
        own.param_groups[0]["lr"] = recipe.lr * 0.5 * (1 + math.cos(math.pi * number / total))
        own.zero_grad()
        cross_entropy(model(batch.x), batch.y).backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        own.step()
        held.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return held


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_rate_is_the_formula_at_every_step(schedule: Any) -> None:
    recipe, steps = Recipe(epochs=1, lr=0.3, schedule=schedule, warm_up=0.2), 20
    for step in range(steps):
        falling = 0.3 if schedule == "constant" else 0.3 * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))
        assert recipe.rate(step, steps) == pytest.approx(0.3 * (step + 1) / 4 if step < 4 else falling, abs=1e-15)


def test_without_warm_up_the_cosine_begins_at_its_top_and_ends_one_step_before_zero() -> None:
    recipe = Recipe(epochs=1, lr=0.1)
    assert recipe.rate(0, 50) == 0.1
    assert recipe.rate(25, 50) == pytest.approx(0.05)
    assert recipe.rate(49, 50) == pytest.approx(0.1 * math.sin(math.pi / 100) ** 2)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_sgd_is_torchs_own_with_nesterov_and_weight_decay(clip: float | None) -> None:
    model, step = linear(), Plain()
    recipe = Recipe(epochs=3, batch_size=8, lr=0.4, momentum=0.8, weight_decay=0.03, clip=clip)
    fit(model, step, DATA, recipe)
    expected = replayed(step, recipe, torch.optim.SGD, momentum=0.8, weight_decay=0.03, nesterov=True)
    assert len(expected) == 9
    assert torch.equal(flat(model), expected[-1])


def test_adamw_is_torchs_own() -> None:
    model, step = linear(), Plain()
    recipe = Recipe(epochs=2, batch_size=8, optimiser="adamw", lr=0.02, weight_decay=0.1)
    fit(model, step, DATA, recipe)
    assert torch.equal(flat(model), replayed(step, recipe, torch.optim.AdamW, weight_decay=0.1)[-1])


def test_clipping_bounds_the_way_of_a_step() -> None:
    model = linear()
    before = flat(model)
    fit(model, Plain(), DATA, Recipe(epochs=1, batch_size=22, lr=1.0, momentum=0, weight_decay=0, clip=0.01))
    assert float((flat(model) - before).norm()) == pytest.approx(0.01, rel=1e-4)


def test_the_running_mean_is_what_is_kept() -> None:
    model, step = linear(), Plain()
    recipe = Recipe(epochs=2, batch_size=8, lr=0.4, ema=0.7, momentum=0, weight_decay=0)
    mean = flat(model)
    fit(model, step, DATA, recipe)
    for held in replayed(step, recipe, torch.optim.SGD):
        mean = 0.7 * mean + 0.3 * held
    torch.testing.assert_close(flat(model), mean, rtol=1e-12, atol=1e-14)


def test_the_evaluation_sees_what_would_be_kept_and_learning_goes_on_from_the_weights() -> None:
    recipe, seen = Recipe(epochs=2, batch_size=8, lr=0.4, ema=0.7), []

    def look(model: nn.Module) -> dict[str, float]:
        seen.append((flat(model), model.training))
        return {"distance": float(flat(model).norm())}

    watched, alone = linear(), linear()
    history = fit(watched, Plain(), DATA, recipe, evaluate=look)
    fit(alone, Plain(), DATA, recipe)
    assert torch.equal(flat(watched), flat(alone))
    assert torch.equal(seen[-1][0], flat(alone))
    assert [training for _, training in seen] == [False, False]
    assert [row["distance"] for row in history] == [float(held.norm()) for held, _ in seen]


def test_frozen_parameters_stay() -> None:
    model = linear()
    model[1].bias.requires_grad_(False)
    before = weights(model)
    fit(model, Plain(), DATA, Recipe(epochs=1, lr=0.5))
    assert torch.equal(model[1].bias, before["1.bias"])
    assert not torch.equal(model[1].weight, before["1.weight"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"epochs": "three"}, "epochs must be a whole number, got 'three'"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"lr": "1e-3"}, "lr must be a number, got '1e-3'"),
        ({"clip": "none"}, "clip must be a number, got 'none'"),
        ({"momentum": None}, "momentum must be a number, got None"),
        ({"lr": 0.0}, "lr must be positive, got 0"),
        ({"lr": math.inf}, "lr must be positive, got inf"),
        ({"ema": 1.0}, "ema must be between 0 and 1, got 1"),
        ({"clip": 0.0}, "clip must be positive, got 0"),
        ({"warm_up": 1.0}, "warm_up must be a share of the steps, got 1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative, got -1"),
        ({"optimiser": "lion"}, "optimiser must be 'sgd' or 'adamw', got 'lion'"),
        ({"schedule": "step"}, "schedule must be 'cosine' or 'constant', got 'step'"),
        ({"precision": "fp16"}, "precision must be 'float32' or 'bf16', got 'fp16'"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"epochs": 1, **option})


def test_a_network_with_nothing_to_train_is_refused() -> None:
    for model in (nn.Flatten(), linear().requires_grad_(False)):
        with pytest.raises(ValueError, match="has no parameter that could be trained"):
            fit(model, Plain(), Material(DATA.x, DATA.y), Recipe(epochs=1))
