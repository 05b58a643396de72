from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gatecrash.data import drawn
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Material, Recipe, fit, seeded
from gatecrash.training import JointEnergy, sample_jem
from gatecrash.training.jem import langevin, own_slots
from small_models import one_thread, squares

assert one_thread


class Bowl(nn.Module):
    """Two equal logits −|y|² / 2v of y = 2x − 1: as a density, a Gaussian of variance v around mid-grey."""

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.variance = nn.Parameter(torch.tensor(variance))

    def forward(self, y: Tensor) -> Tensor:
        return (-y.flatten(1).square().sum(dim=1, keepdim=True) / (2 * self.variance)).expand(-1, 2)


def network(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Softplus(), nn.Linear(12, 3))


def encoder_of(model: nn.Module) -> Encoder:
    return Encoder(model, mean=[0.5], std=[0.5])


def batch(count: int = 5, seed: int = 0) -> Batch:
    x, y = squares(count)
    return Batch(x, y, torch.arange(count), None, 0, 1, torch.Generator().manual_seed(seed))


# Sampling


def test_the_step_and_the_noise_are_in_the_papers_pixels() -> None:
    """y ← y − αy/v + σn settles at variance σ² / (1 − (1 − α/v)²), with y from −1 to 1."""
    found = langevin(encoder_of(Bowl(2.0)), torch.full((200, 1, 8, 8), 0.5), steps=30, step=1.0, noise=0.1)
    y = 2 * found.x - 1
    assert float(y.var()) == pytest.approx(0.1**2 / (1 - 0.5**2), rel=0.03)
    assert float(y.mean()) == pytest.approx(0, abs=3e-3)
    still = langevin(encoder_of(Bowl(2.0)), torch.full((1, 1, 2, 2), 0.9), steps=3, step=1.0, noise=0.0)
    torch.testing.assert_close(2 * still.x - 1, torch.full((1, 1, 2, 2), 0.8 / 8))


def test_samples_stay_in_the_box_however_steep_the_density() -> None:
    found = langevin(encoder_of(Bowl(1e-4)), torch.rand(8, 1, 4, 4), steps=5, noise=1.0)
    assert float(found.x.min()) >= 0 and float(found.x.max()) <= 1


@pytest.mark.parametrize("start", ["noise", "spiral"])
def test_samples_begin_at_drawn_images_and_become_likelier(start: str) -> None:
    encoder = encoder_of(Bowl(4.0))
    found = sample_jem(encoder, start, 6, channels=3, size=8, noise=0.001, seed=5)
    expected = getattr(drawn, start)(6, 3, 8, torch.Generator().manual_seed(5))
    assert torch.equal(found.start, expected)
    with torch.no_grad():
        before, after = (encoder(x).logsumexp(dim=1) for x in (found.start, found.x))
    assert bool((after > before).all())
    torch.testing.assert_close(found.value, -after)
    again, other = (sample_jem(encoder, start, 6, channels=3, size=8, noise=0.001, seed=seed).x for seed in (5, 6))
    assert torch.equal(again, found.x) and not torch.equal(other, found.x)


def test_samples_begin_at_given_images_too() -> None:
    given = squares(3)[0]
    found = sample_jem(encoder_of(network()), given, steps=2)
    assert torch.equal(found.start, given) and not torch.equal(found.x, given)


def test_a_start_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown start 'spirals'; did you mean 'spiral'"):
        sample_jem(encoder_of(network()), "spirals")
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        sample_jem(encoder_of(network()), "noise", 0)


# The step


def test_one_step_is_the_papers_loss_written_out() -> None:
    """Without noise: samples from the buffer go uphill by α·∇f in the paper's pixels, and the loss is CE − f(x) + f(x̂)."""
    model, given = network(), batch()
    step = JointEnergy(encoder_of(model), steps=3, step=0.5, noise=0.0, buffer=8, anew=0.0, input_noise=0.0)
    begun = torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    step.restore({"samples": begun})
    outcome = step(lambda x: model(2 * x - 1), given)

    chosen = torch.randperm(8, generator=torch.Generator().manual_seed(0))[:5]
    y = 2 * begun[chosen] - 1
    for _ in range(3):
        y.requires_grad_()
        (uphill,) = torch.autograd.grad(model(y).exp().sum(dim=1).log().sum(), y)
        y = (y + 0.5 * uphill).detach().clamp(-1, 1)
    logits, sampled = model(2 * given.x - 1), model(y)
    gap = logits.exp().sum(dim=1).log().mean() - sampled.exp().sum(dim=1).log().mean()
    torch.testing.assert_close(outcome.loss, cross_entropy(logits, given.y) - gap)
    kept = step.state()["samples"]
    torch.testing.assert_close(kept[chosen], (y + 1) / 2)
    others = [row for row in range(8) if row not in chosen.tolist()]
    assert torch.equal(kept[others], begun[others])
    torch.testing.assert_close(outcome.facts["log-density"] - outcome.facts["log-density of samples"], gap.detach())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_share_of_the_samples_begins_anew() -> None:
    step = JointEnergy(encoder_of(Bowl(1e9)), steps=1, noise=0.0, buffer=1000, anew=0.05)
    step.restore({"samples": torch.full((1000, 1, 6, 6), 0.25)})
    with seeded(0):
        sampled = step.draw(batch(1000))
    anew = (sampled - 0.25).abs().flatten(1).amax(dim=1) > 1e-3
    assert 25 <= int(anew.sum()) <= 80
    assert float(sampled[anew].std()) == pytest.approx(12**-0.5, rel=0.05)


def test_images_get_noise_and_stay_in_the_box() -> None:
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x)
        return x.flatten(1)[:, :3]

    given = Batch(
        torch.full((400, 1, 6, 6), 0.5), torch.zeros(400).long(), torch.arange(400), None, 0, 1, torch.Generator()
    )
    white = Batch(torch.ones(400, 1, 6, 6), given.y, given.rows, None, 0, 1, torch.Generator())
    step = JointEnergy(encoder_of(network()), steps=1, buffer=400, input_noise=0.03)
    with seeded(0):
        step(model, given)
        step(model, white)
    assert float(seen[0][:400].std()) == pytest.approx(0.015, rel=0.05)
    assert float(seen[1][:400].max()) == 1 and float(seen[1][:400].std()) > 0


def test_training_makes_images_likelier_than_noise_and_keeps_the_classes() -> None:
    x, y = squares(60)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.Softplus(), nn.Linear(32, 3))
    with seeded(1):
        for layer in (model[1], model[3]):
            layer.reset_parameters()
    encoder = Encoder(model)
    noise = torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(2))

    def gap() -> float:
        with torch.no_grad():
            return float(encoder(x).logsumexp(dim=1).mean() - encoder(noise).logsumexp(dim=1).mean())

    before = gap()
    step = JointEnergy(encoder, steps=10, buffer=200)
    recipe = Recipe(15, 20, optimiser="adamw", lr=3e-3, weight_decay=0.0, schedule="constant")
    history = fit(model, step, Material(x, y), recipe)
    assert gap() > before + 0.4
    assert history[-1]["accuracy"] > 0.95


# Kills


class Killed(Exception):
    pass


def run(folder: Path | None, until: int | None = None, **options: Any) -> tuple[nn.Module, JointEnergy]:
    model = network(3)
    step = JointEnergy(encoder_of(model), steps=2, buffer=30, **options)
    left = until

    def evaluate(_: nn.Module) -> Mapping[str, float]:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                raise Killed
        return {}

    recipe = Recipe(3, 10, optimiser="adamw", lr=1e-3, seed=4)
    fit(model, step, Material(*squares(30)), recipe, folder=folder, resume=True, evaluate=evaluate)
    return model, step


def test_a_killed_run_goes_on_to_the_same_weights_and_the_same_buffer(tmp_path: Path) -> None:
    whole, its = run(None)
    with pytest.raises(Killed):
        run(tmp_path, until=2)
    resumed, step = run(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert torch.equal(step.state()["samples"], its.state()["samples"])
    assert not torch.equal(step.state()["samples"], run(None, noise=0.1)[1].state()["samples"])


def test_a_run_with_another_buffer_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ValueError, match=r"begun with other settings, step.noise"):
        run(tmp_path, noise=0.02)


def test_processes_share_the_buffer_and_each_place_is_of_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatecrash.training.jem.several", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    slots = []
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        slots += own_slots(8).tolist()
    assert sorted(slots) == list(range(8)) and slots[:3] == [0, 3, 6]


# Divergence


def test_energies_that_run_away_stop_at_a_named_batch() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight *= 1e6
    before = deepcopy(model.state_dict())
    step = JointEnergy(encoder_of(model), steps=2, buffer=30)
    with pytest.raises(ValueError, match="the loss is inf in batch 1 of epoch 1"):
        fit(model, step, Material(*squares(30)), Recipe(1, 10, lr=1e-3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_that_run_away_stop_at_a_named_batch() -> None:
    model = network()
    step = JointEnergy(encoder_of(model), steps=2, buffer=30)
    with pytest.raises(ValueError, match=r"batch \d of epoch 1"):
        fit(model, step, Material(*squares(30)), Recipe(1, 3, lr=1e20, momentum=0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"buffer": 0}, "buffer must be at least 1, got 0"),
        ({"step": 0.0}, "step must be positive, got 0"),
        ({"noise": -1.0}, "noise must not be negative, got -1"),
        ({"anew": 1.5}, "anew must be a share from 0 to 1, got 1.5"),
        ({"input_noise": -0.1}, "input_noise must not be negative, got -0.1"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JointEnergy(encoder_of(network()), **options)


def test_a_buffer_smaller_than_a_batch_or_of_other_images_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match="a buffer of 4 samples is smaller than a batch of 5; raise buffer"):
        JointEnergy(encoder_of(model), buffer=4)(model, batch())
    step = JointEnergy(encoder_of(model), buffer=8)
    step.restore({"samples": torch.rand(8, 3, 6, 6)})
    with pytest.raises(ValueError, match=r"samples of shape \(3, 6, 6\), the images have \(1, 6, 6\)"):
        step(model, batch())
