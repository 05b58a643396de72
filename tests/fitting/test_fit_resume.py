"""Runs that are killed with signal 9 in the middle of an epoch, and go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_toys import Plain, material, network, same, weights
from torch import nn

from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Material, Outcome, Recipe, Step, fit, seeded
from gatecrash.fitting.checkpoint import read_checkpoint
from gatecrash.fitting.step import settings_of
from gatecrash.training.confident import ConfidentClassifier
from gatecrash.training.exposure import Exposure, Inner
from gatecrash.training.temporal import TemporalEnsembling, few_labels

Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Step], Material, Recipe]


def small_classifier() -> nn.Module:
    with seeded(3):
        return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 2))


def big_images() -> Material:
    random = torch.Generator().manual_seed(1)
    return Material(torch.rand(8, 1, 32, 32, generator=random), torch.arange(8) % 2)


def jitter(x: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return (x + 0.1 * torch.rand(x.shape, generator=random)).clamp(0, 1)


DATA = material(22, outliers=15)
CASES: dict[str, Case] = {
    "ema": (network, lambda _: Plain(), Material(DATA.x, DATA.y, augment=jitter), Recipe(3, 6, ema=0.8, clip=0.5)),
    "adamw": (network, lambda _: Plain(), DATA, Recipe(3, 6, optimiser="adamw", lr=0.01, warm_up=0.3)),
    "aloe": (
        network,
        lambda model: Exposure(Encoder(model), inliers="attacked", outliers="attacked", inner=Inner(0.1, 0.05, 2)),
        DATA,
        Recipe(3, 6, lr=0.05),
    ),
    "temporal": (
        network,
        lambda _: TemporalEnsembling(few_labels(DATA.y, 3, seed=0), 3, ramp=2),
        DATA,
        Recipe(3, 6, lr=0.05),
    ),
    "gan": (
        small_classifier,
        lambda model: ConfidentClassifier(Encoder(model), 1, width=2, seed=0),
        big_images(),
        Recipe(3, 4, optimiser="adamw", lr=0.01),
    ),
}


class Killed:
    """A step during whose given batch the whole process dies, without a chance to tidy up."""

    def __init__(self, step: Step, at: int) -> None:
        self.step, self.left = step, at
        self.begin_epoch, self.state, self.restore = step.begin_epoch, step.state, step.restore
        self.settings = settings_of(step)

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        outcome = self.step(model, batch)
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome


def killed(work: Callable[[], object]) -> bool:
    """Whether the work, done in a process of its own, was ended by signal 9."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("name", list(CASES))
def test_a_killed_run_goes_on_to_the_same_weights_to_the_last_bit(name: str, tmp_path: Path) -> None:
    make, step_for, data, recipe = CASES[name]
    whole = make()
    history = fit(whole, step_for(whole), data, recipe, folder=tmp_path / "whole")
    batches = -(-len(data.x) // recipe.batch_size)

    def until(at: int) -> object:
        model = make()
        step = Killed(step_for(model), at)
        return fit(model, step, data, recipe, folder=tmp_path / "cut", resume=True)

    assert killed(lambda: until(0))  # before there is any checkpoint
    assert not (tmp_path / "cut" / "checkpoint.json").exists()
    assert killed(lambda: until(batches + 1))  # in the middle of the second epoch
    assert json.loads((tmp_path / "cut" / "checkpoint.json").read_text())["epoch"] == 1
    assert killed(lambda: until(batches + batches - 1))  # at the end of the third, having resumed
    assert json.loads((tmp_path / "cut" / "checkpoint.json").read_text())["epoch"] == 2
    resumed = make()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()
    step = step_for(resumed)
    assert fit(resumed, step, data, recipe, folder=tmp_path / "cut", resume=True) == history
    assert same(weights(resumed), weights(whole))
    ends = [read_checkpoint(tmp_path / run) for run in ("whole", "cut")]
    assert ends[0] is not None and ends[1] is not None
    assert same(ends[0][0], ends[1][0])
    assert (tmp_path / "whole" / "epochs.csv").read_text() == (tmp_path / "cut" / "epochs.csv").read_text()


def test_a_kill_while_the_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of the second epoch are there, the JSON is not yet."""
    whole, recipe = network(), Recipe(3, 6)
    fit(whole, Plain(), DATA, recipe)

    def deadly(path: Path, text: str) -> None:
        if '"epoch": 2' in text:
            os.kill(os.getpid(), signal.SIGKILL)
        path.write_text(text)

    def work() -> None:
        monkeypatch.setattr("gatecrash.fitting.checkpoint.write_text", deadly)
        fit(network(), Plain(), DATA, recipe, folder=tmp_path)

    assert killed(work)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == [
        "checkpoint-1.safetensors",
        "checkpoint-2.safetensors",
        "checkpoint.json",
    ]
    (tmp_path / ".checkpoint-2.abc.safetensors").write_text("a draft that a kill left behind")
    resumed = network(seed=9)
    fit(resumed, Plain(), DATA, recipe, folder=tmp_path, resume=True)
    assert same(weights(resumed), weights(whole))
    assert [path.name for path in tmp_path.iterdir() if "safetensors" in path.name] == ["checkpoint-3.safetensors"]


def begun(folder: Path, **options: Any) -> None:
    model = network()
    fit(model, exposure(model), options.get("data", DATA), options.get("recipe", Recipe(2, 6)), folder=folder)


def exposure(model: nn.Module, weight: float = 0.5, eps: float = 0.1) -> Exposure:
    return Exposure(Encoder(model), outliers="attacked", inner=Inner(eps, 0.05, 1), weight=weight)


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    begun(tmp_path)
    model = network()
    before = weights(model)

    def refused(step: Step, data: Material, recipe: Recipe, what: str) -> None:
        with pytest.raises(ValueError, match=f"was begun with other settings, {what}; choose another folder"):
            fit(model, step, data, recipe, folder=tmp_path, resume=True)
        assert same(weights(model), before)

    refused(exposure(model), DATA, Recipe(2, 6, lr=0.2, ema=0.5), "recipe.ema, recipe.lr")
    refused(exposure(model, weight=1.0), DATA, Recipe(2, 6), "step.weight")
    refused(exposure(model, eps=0.2), DATA, Recipe(2, 6), "step.inner")
    refused(Plain(), DATA, Recipe(2, 6), "step.inliers, step.inner, step.kind, step.outliers, step.weight")
    refused(exposure(model), Material(DATA.x, 2 - DATA.y, DATA.outliers), Recipe(2, 6), "material.labels")
    refused(exposure(model), Material(DATA.x, DATA.y, DATA.x), Recipe(2, 6), "material.outliers")
    refused(exposure(model), Material(DATA.x.flip(0), DATA.y, DATA.outliers), Recipe(2, 6), "material.images")
    assert len(fit(model, exposure(model), DATA, Recipe(2, 6), folder=tmp_path, resume=True)) == 2


def test_temporal_ensembling_is_not_resumed_with_other_labels_known(tmp_path: Path) -> None:
    steps = [TemporalEnsembling(few_labels(DATA.y, 3, seed), 3) for seed in (0, 1)]
    fit(network(), steps[0], DATA, Recipe(1, 6), folder=tmp_path)
    with pytest.raises(ValueError, match=r"other settings, step\.known; choose"):
        fit(network(), steps[1], DATA, Recipe(1, 6), folder=tmp_path, resume=True)


def test_without_resume_a_run_begins_anew(tmp_path: Path) -> None:
    begun(tmp_path)
    step = Plain()
    fit(network(), step, DATA, Recipe(1, 6), folder=tmp_path)
    assert len(step.batches) == 4
    assert json.loads((tmp_path / "checkpoint.json").read_text())["epoch"] == 1


def damage_json(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text()[:-40])


def damage_key(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace('"history"', '"story"'))


def damage_shape(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("[1, 2]")


def damage_bit(folder: Path) -> None:
    path = folder / "checkpoint-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def damage_length(folder: Path) -> None:
    path = folder / "checkpoint-2.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_absence(folder: Path) -> None:
    (folder / "checkpoint-2.safetensors").unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_json, damage_key, damage_shape, damage_bit, damage_length, damage_absence],
    ids=lambda f: f.__name__,
)
def test_a_damaged_checkpoint_is_an_error_in_one_line(damage: Callable[[Path], None], tmp_path: Path) -> None:
    begun(tmp_path)
    damage(tmp_path)
    model = network()
    with pytest.raises(ValueError, match=r"the checkpoint in .* is damaged: ") as caught:
        fit(model, exposure(model), DATA, Recipe(2, 6), folder=tmp_path, resume=True)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    fit(network(), Plain(), DATA, Recipe(1, 6), folder=tmp_path)
    with pytest.raises(ValueError, match="does not fit this network") as caught:
        fit(network(classes=4), Plain(), DATA, Recipe(1, 6), folder=tmp_path, resume=True)
    assert "\n" not in str(caught.value)
