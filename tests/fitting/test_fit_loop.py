from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fit_toys import Plain, linear, material, network, same, weights
from torch import nn
from torch.nn.functional import cross_entropy

from gatecrash.fitting import Batch, Outcome, Recipe, fit, loop
from gatecrash.fitting.watch import NotFinite, Watch

RECIPE = Recipe(epochs=2, batch_size=8, lr=0.1)


def test_the_seed_determines_every_weight_and_another_seed_others() -> None:
    models = [network() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        fit(model, Plain(), material(), Recipe(epochs=2, batch_size=8, seed=seed))
    assert same(weights(models[0]), weights(models[1]))
    assert not same(weights(models[0]), weights(models[2]))


def test_no_global_random_state_changes_and_none_is_used() -> None:
    first, second = network(), network()
    fit(first, Plain(), material(), RECIPE)
    torch.manual_seed(99)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    fit(second, Plain(), material(), RECIPE)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002
    assert same(weights(first), weights(second))


def test_the_history_has_means_over_images_and_not_over_batches() -> None:
    values: list[tuple[float, int]] = []

    class Known(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            outcome = super().__call__(model, batch)
            values.append((float(outcome.loss.detach()), len(batch.x)))
            return Outcome(outcome.loss, {"half": torch.tensor(0.5), "size": torch.tensor(float(len(batch.x)))})

    history = fit(linear(), Known(), material(dtype=torch.float64), RECIPE)
    assert [row["epoch"] for row in history] == [1, 2]
    for row, part in zip(history, (values[:3], values[3:]), strict=True):
        assert row["loss"] == pytest.approx(sum(loss * size for loss, size in part) / 22)
        assert row["half"] == 0.5
        assert row["size"] == pytest.approx((8 * 8 + 7 * 7 + 7 * 7) / 22)


def test_the_network_learns_in_training_mode_and_comes_back_in_eval_mode_without_gradients() -> None:
    model, modes = network(), []

    class Looking(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            modes.append(model.training)
            return super().__call__(model, batch)

    fit(model, Looking(), material(), RECIPE)
    assert modes == [True] * 6
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert int(model[1].num_batches_tracked) == 6


def test_bf16_computes_in_half_precision_and_learns_in_single() -> None:
    dtypes = []

    class Looking(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            outcome = super().__call__(model, batch)
            dtypes.append((torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype, outcome.loss.dtype))
            return outcome

    half, full = network(), network()
    fit(half, Looking(), material(), Recipe(epochs=2, batch_size=8, lr=0.1, precision="bf16"))
    fit(full, Plain(), material(), RECIPE)
    assert set(dtypes) == {(torch.bfloat16, torch.float32)}
    for name, tensor in weights(half).items():
        assert tensor.dtype == full.state_dict()[name].dtype
        torch.testing.assert_close(tensor, full.state_dict()[name], rtol=0.1, atol=0.1)
    assert not same(weights(half), weights(full))


def test_a_weight_cast_without_a_gradient_still_learns_in_bf16() -> None:
    class AfterLooking(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            with torch.no_grad():
                model(batch.x)
            return super().__call__(model, batch)

    model, data = linear().float(), material()
    before = weights(model)
    fit(model, AfterLooking(), data, Recipe(epochs=1, batch_size=22, lr=0.1, precision="bf16"))
    assert not torch.equal(model[1].weight, before["1.weight"])


@pytest.mark.parametrize("every", [1, 5, 20])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_batch_and_keeps_the_last_checkpoint(
    every: int, poison: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Watch", lambda epoch, _, kept: Watch(epoch, every, kept))
    recipe = Recipe(epochs=4, batch_size=3, lr=0.1)
    good = network()
    fit(good, Plain(), material(), recipe, folder=tmp_path / "good")
    bad = network()
    with pytest.raises(ValueError, match=f"loss is {poison} in batch 3 of epoch 3; the checkpoint of epoch 2 is kept"):
        fit(bad, Plain(poison={2 * 8 + 2: poison}), material(), recipe, folder=tmp_path / "bad")
    assert json.loads((tmp_path / "bad" / "checkpoint.json").read_text())["epoch"] == 2
    assert [path.name for path in (tmp_path / "bad").glob("*.safetensors")] == ["checkpoint-2.safetensors"]
    fit(bad, Plain(), material(), recipe, folder=tmp_path / "bad", resume=True)
    assert same(weights(bad), weights(good))


def test_on_a_cpu_the_bad_batch_never_reaches_the_weights() -> None:
    model, seen = network(), []

    class Looking(Plain):
        head = model[5]

        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            seen.append(self.head.weight.detach().clone())
            return super().__call__(model, batch)

    with pytest.raises(ValueError, match=r"the loss is nan in batch 2 of epoch 1\. A smaller lr, or clip, may help"):
        fit(model, Looking(poison={1: float("nan")}), material(), RECIPE)
    assert torch.equal(model[5].weight, seen[-1])


def test_a_step_that_fails_because_an_earlier_loss_was_nan_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            if not bool(model(batch.x).isfinite().all()):
                raise ValueError("Encoder gives NaN; are the model's weights finite?")
            return super().__call__(model, batch)

    monkeypatch.setattr(loop, "Watch", lambda epoch, _, kept: Watch(epoch, 20, kept))
    with pytest.raises(ValueError, match="the loss is nan in batch 2 of epoch 1"):
        fit(network(), Strict(poison={1: float("nan")}), material(), RECIPE)


class Exploding(Plain):
    """A loss that is finite while its gradient is not: √ at 0."""

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        outcome = super().__call__(model, batch)
        zero = sum(parameter.sum() for parameter in model.parameters()) * 0
        return Outcome(outcome.loss + zero.sqrt() if len(self.batches) == 3 else outcome.loss)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("every", [1, 20])
def test_a_gradient_that_is_not_finite_names_its_batch_and_not_the_next(
    clip: float | None, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Watch", lambda epoch, _, kept: Watch(epoch, every, kept))
    with pytest.raises(ValueError, match=r"the gradient is (nan|inf) in batch 3 of epoch 1"):
        fit(network(), Exploding(), material(), Recipe(epochs=1, batch_size=4, clip=clip), folder=tmp_path)
    assert not (tmp_path / "checkpoint.json").exists()


def test_weights_that_are_no_longer_finite_are_never_written(tmp_path: Path) -> None:
    """The gradient is finite, and the step as long as it is times 10³⁸ is not."""
    with pytest.raises(ValueError, match="a weight is no longer finite after batch 1 of epoch 1"):
        fit(network(), Plain(poison={0: 1e9}), material(), Recipe(1, 22, lr=1e38), folder=tmp_path)
    assert not (tmp_path / "checkpoint.json").exists()


class Overflowing(nn.Module):
    """A network whose output overflows in eval mode once its weight is no longer 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.scale * x.flatten(1)[:, :3]
        return z if self.training or float(self.scale) == 1 else z * torch.inf


def test_a_network_that_is_finite_in_training_only_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the network's output is no longer finite after batch 3 of epoch 1"):
        fit(Overflowing(), Plain(), material(), RECIPE, folder=tmp_path)
    assert not (tmp_path / "checkpoint.json").exists()


def test_a_step_that_fails_because_of_such_a_network_is_not_blamed(tmp_path: Path) -> None:
    class Attacked(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            self.batches.append(batch)
            if len(self.batches) == 3:
                raise ValueError("Encoder gives NaN for 8 of 8 starting images")
            return Outcome(cross_entropy(model(batch.x), batch.y))

    with pytest.raises(NotFinite, match="the network's output is no longer finite after batch 2 of epoch 1"):
        fit(Overflowing(), Attacked(), material(), RECIPE, folder=tmp_path)


def test_statistics_that_become_infinite_are_never_written_and_a_mask_may_be(tmp_path: Path) -> None:
    class Counting(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            if len(self.batches) == 4:
                norm.running_var.fill_(torch.inf)
            return super().__call__(model, batch)

    model = network()
    norm = model[1]
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    with pytest.raises(
        ValueError, match="a weight is no longer finite after batch 3 of epoch 2; the checkpoint of epoch 1 is kept"
    ):
        fit(model, Counting(), material(), RECIPE, folder=tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["checkpoint-1.safetensors"]


def test_a_fact_of_no_image_is_left_out_of_the_note_and_the_history() -> None:
    class Rare(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            outcome = super().__call__(model, batch)
            count = torch.tensor(3 * batch.epoch)
            return Outcome(outcome.loss, {"success": torch.tensor(0.25)}, {"success": count})

    history = fit(network(), Rare(), material(), RECIPE)
    assert ["success" in row for row in history] == [False, True]
    assert history[1]["success"] == 0.25
    watch = Watch(epoch=0, every=1)
    watch.add(0, 3, Outcome(torch.tensor(1.0), {"success": torch.tensor(0.0)}, {"success": torch.tensor(0)}))
    assert watch.note == "loss 1"


def test_other_errors_of_a_step_pass() -> None:
    class Broken(Plain):
        def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
            raise KeyError("mine")

    model = network()
    with pytest.raises(KeyError, match="mine"):
        fit(model, Broken(), material(), RECIPE)
    assert not model.training


def test_the_watch_looks_only_every_so_many_batches_and_then_names_the_first() -> None:
    watch = Watch(epoch=4, every=3, kept="; kept")
    watch.add(0, 2, Outcome(torch.tensor(1.0), {"accuracy": torch.tensor(0.5)}))
    watch.add(1, 2, Outcome(torch.tensor(torch.nan), {"accuracy": torch.tensor(1.0)}))
    assert watch.note == ""
    with pytest.raises(NotFinite, match="the loss is nan in batch 2 of epoch 5; kept"):
        watch.add(2, 1, Outcome(torch.tensor(torch.inf), {"accuracy": torch.tensor(1.0)}))


def test_the_note_has_the_means_so_far() -> None:
    watch = Watch(epoch=0, every=2)
    watch.add(0, 3, Outcome(torch.tensor(1.0), {"attack success": torch.tensor(0.25)}))
    watch.add(1, 1, Outcome(torch.tensor(3.0), {"attack success": torch.tensor(1.0)}))
    assert watch.note == "loss 1.5, attack success 0.438"


def test_a_mean_over_some_of_the_images_counts_those_alone() -> None:
    watch = Watch(epoch=0, every=1)
    for number, (share, count) in enumerate([(0.5, 2), (0.0, 0), (1.0, 1)]):
        facts = {"share": torch.tensor(share)}
        watch.add(number, 5, Outcome(torch.tensor(2.0), facts, {"share": torch.tensor(count)}))
    assert float(watch.means["share"]) == pytest.approx((0.5 * 2 + 1.0) / 3)
    assert float(watch.means["loss"]) == 2.0
    assert watch.note == "loss 2, share 0.667"


def test_the_bar_shows_every_batch_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, str]] = []
    monkeypatch.setattr("gatecrash.progress.Bar.advance", lambda self, amount=1, note="": shown.append((amount, note)))
    fit(linear(), Plain(), material(dtype=torch.float64), RECIPE)
    assert sum(amount for amount, _ in shown) == 6
    assert [note.partition(" ")[0] for _, note in shown[1:]] == ["1/2"] * 3 + ["2/2"] * 3
    assert all(note.partition(" ")[2].startswith("loss ") and ", accuracy " in note for _, note in shown[1:])


def test_a_step_learns_nothing_from_an_epoch_that_is_already_done(tmp_path: Path) -> None:
    step, model = Plain(), network()
    first = fit(model, Plain(), material(), RECIPE, folder=tmp_path)
    again = network(seed=5)
    assert fit(again, step, material(), RECIPE, folder=tmp_path, resume=True) == first
    assert step.batches == []
    assert same(weights(again), weights(model))


def test_cross_entropy_falls() -> None:
    data, model = material(dtype=torch.float64), linear()
    with torch.no_grad():
        before = float(cross_entropy(model(data.x), data.y))
    fit(model, Plain(), data, Recipe(epochs=40, batch_size=22, lr=0.5))
    with torch.no_grad():
        assert float(cross_entropy(model(data.x), data.y)) < 0.7 * before
