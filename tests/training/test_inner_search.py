"""The attacker inside training: what it reaches, and what it leaves alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gatecrash.ball import Linf
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Material, Recipe, fit, seeded
from gatecrash.objective import Misclassify
from gatecrash.training.exposure import Astray, Exposure, Inner
from small_models import one_thread

__all__ = ["one_thread"]


def aloe(model: nn.Module) -> Exposure:
    return Exposure(Encoder(model), inliers="attacked", outliers="attacked", inner=Inner(0.05))


def network(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(6 * 16, 4)
        )


def images(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def test_the_inner_search_raises_the_loss_and_stays_in_the_ball_and_the_box() -> None:
    model, x, y = network().train(), images(8), torch.arange(8) % 4
    encoder, inner = Encoder(model), Inner(4 / 255)
    for objective in (Misclassify(encoder, y), Astray(encoder, y[:5]), Astray(encoder, y[:0])):
        moved, rows = inner.attack(objective, x, torch.Generator().manual_seed(0)), torch.arange(8)
        assert bool((objective(moved, rows) < objective(x, rows)).all())
        assert float((moved - x).abs().max()) <= 4 / 255 + 1e-6
        assert float((moved - x).abs().max()) > 3.9 / 255
        assert float(moved.min()) >= 0 and float(moved.max()) <= 1
        assert bool(Linf(4 / 255).contains(moved, x).all())


def test_the_inner_search_takes_another_random_start_in_every_call() -> None:
    encoder, x, random = Encoder(network()), images(4), torch.Generator().manual_seed(0)
    inner, objective = Inner(0.1, step=1e-4, steps=1), Misclassify(encoder, torch.arange(4))
    first, second = (inner.attack(objective, x, random) for _ in range(2))
    again = inner.attack(objective, x, torch.Generator().manual_seed(0))
    assert torch.equal(first, again)
    assert float((first - second).abs().mean()) > 0.02


def test_attacking_leaves_batch_statistics_gradients_and_mode_alone() -> None:
    model = network().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    Inner(0.05).attack(Misclassify(Encoder(model), torch.arange(4)), images(4), generator)
    Inner(0.05).attack(Astray(Encoder(model), torch.arange(2)), images(4), generator)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_step_of_aloe_updates_batch_statistics_once_by_inliers_and_outliers_together() -> None:
    model = network().train()
    shown: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: shown.append(args[0]) if module.training else None)
    batch = Batch(
        images(5), torch.arange(5) % 4, torch.arange(5), images(10, seed=1), 0, 1, torch.Generator().manual_seed(0)
    )
    outcome = aloe(model)(model, batch)
    assert [len(x) for x in shown] == [15]
    maps = model[0](shown[0]).detach()
    torch.testing.assert_close(model[1].running_mean, 0.1 * maps.mean((0, 2, 3)))
    assert int(model[1].num_batches_tracked) == 1
    assert float((shown[0][:5] - batch.x).abs().max()) <= 0.05 + 1e-6
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sorted(outcome.facts) == ["accuracy", "attack success", "loss in", "loss out", "outlier attack gain"]
    assert float(outcome.facts["outlier attack gain"]) > 0


def test_inliers_and_outliers_are_attacked_together_as_they_would_be_alone() -> None:
    """By many steps along a linear network both end in the same corners of the ball, wherever they began.

    It is sure of its first class, so that no outlier comes to where both are equally likely and gradients turn round.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 2))
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([3.0, 0.0]))
    encoder, inner, y = Encoder(model), Inner(0.01, step=0.01, steps=4), torch.tensor([0, 1, 0])
    inside, outside = 0.3 + 0.4 * images(3), 0.3 + 0.4 * images(5, seed=1)
    together = inner.attack(Astray(encoder, y), torch.cat([inside, outside]), torch.Generator().manual_seed(0))
    apart = [
        inner.attack(Misclassify(encoder, y), inside, torch.Generator().manual_seed(1)),
        inner.attack(Astray(encoder, y[:0]), outside, torch.Generator().manual_seed(2)),
    ]
    torch.testing.assert_close(together, torch.cat(apart))
    rows = torch.arange(8)
    values = torch.cat([Misclassify(encoder, y)(apart[0], rows[:3]), Astray(encoder, y[:0])(apart[1], rows[:5])])
    torch.testing.assert_close(Astray(encoder, y)(together, rows), values)


def test_only_every_tenth_batch_is_measured_and_the_others_learn_the_same() -> None:
    outcomes = []
    for number in (0, 1, 10, 11):
        model, passed = network(), list[bool]()
        model.register_forward_pre_hook(lambda module, args, seen=passed: seen.append(module.training))
        random = torch.Generator().manual_seed(0)
        batch = Batch(images(5), torch.arange(5) % 4, torch.arange(5), images(10, seed=1), 0, 1, random, number=number)
        with seeded(3):
            outcomes.append(aloe(model.train())(model, batch))
        assert len(passed) == 13 + 1 + 2 * (number % 10 == 0)
    for name in ("attack success", "outlier attack gain"):
        assert [name in outcome.facts for outcome in outcomes] == [True, False, True, False]
    assert len({float(outcome.loss.detach()) for outcome in outcomes}) == 1


def test_bf16_attacks_and_learns() -> None:
    data = Material(images(8), torch.arange(8) % 4, images(16, seed=1))
    models = [network(), network()]
    for model, precision in zip(models, ("float32", "bf16"), strict=True):
        step = aloe(model)
        recipe = Recipe(epochs=2, batch_size=4, lr=0.05, precision="bf16" if precision == "bf16" else "float32")
        (history, *_) = fit(model, step, data, recipe)
        assert history["outlier attack gain"] > 0
    torch.testing.assert_close(models[1][5].weight, models[0][5].weight, rtol=0.1, atol=0.02)
    assert not torch.equal(models[1][5].weight, models[0][5].weight)
