"""A density is trained by the fit loop, and its bundle gives it back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gatecrash.densities import DENSITIES, Density, load_density, save_density, train_density
from gatecrash.fitting import Recipe
from gatecrash.networks import save_weights


class Bell(Density):
    """A Gaussian of variance ½ with a mean that is learnt: −‖x − m‖² up to a constant."""

    name = "bell"

    def __init__(self, shape: list[int], kept: int = 0) -> None:
        super().__init__(shape, kept=kept)
        self.mean = nn.Parameter(torch.zeros(self.shape))
        self.begun: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return -(x - self.mean).flatten(1).square().sum(dim=1)

    def begin(self, x: Tensor) -> None:
        self.begun = x


class Wide(Bell):
    name = "wide"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DENSITIES._entries, "bell", Bell)


SAMPLES = torch.rand(64, 1, 2, 2, generator=torch.Generator().manual_seed(0))
RECIPE = Recipe(epochs=60, batch_size=64, lr=0.5, weight_decay=0.0)


def test_the_mean_is_learnt_and_then_frozen() -> None:
    bell = Bell([1, 2, 2])
    history = train_density(bell, SAMPLES, RECIPE)
    assert torch.allclose(bell.mean, SAMPLES.mean(dim=0), atol=0.01)
    assert not bell.training and not bell.mean.requires_grad
    assert len(history) == 60 and history[-1]["bits per dimension"] < history[0]["bits per dimension"]


def test_bits_per_dimension_are_the_likelihood_over_ln_2_and_the_dimensions() -> None:
    x = torch.full((1, 1, 2, 2), 0.5)
    assert float(Bell([1, 2, 2]).bits_per_dimension(x).detach()) == pytest.approx(4 * 0.25 / (4 * math.log(2)))


def test_a_density_begins_with_samples_of_its_own_that_the_seed_chooses() -> None:
    first, again, other = Bell([1, 2, 2]), Bell([1, 2, 2]), Bell([1, 2, 2])
    for bell, seed in ((first, 0), (again, 0), (other, 1)):
        train_density(bell, SAMPLES, Recipe(epochs=1, seed=seed))
    assert first.begun is not None and again.begun is not None and other.begun is not None
    assert torch.equal(first.begun, again.begun) and not torch.equal(first.begun, other.begun)


def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    whole, broken = Bell([1, 2, 2]), Bell([1, 2, 2])
    recipe = Recipe(epochs=4, batch_size=16, lr=0.05)
    train_density(whole, SAMPLES, recipe)

    def fail(x: Tensor, generator: torch.Generator) -> Tensor:
        calls.append(len(x))
        if len(calls) == 11:  # in the third epoch
            raise KeyboardInterrupt
        return x

    calls: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train_density(broken, SAMPLES, recipe, folder=tmp_path, augment=fail)
    resumed = Bell([1, 2, 2])
    train_density(resumed, SAMPLES, recipe, folder=tmp_path)
    assert torch.equal(resumed.mean, whole.mean)


def test_a_training_on_other_samples_or_of_another_density_is_not_gone_on_with(tmp_path: Path) -> None:
    train_density(Bell([1, 2, 2]), SAMPLES, Recipe(epochs=1), folder=tmp_path)
    with pytest.raises(ValueError, match=r"was begun with other settings, material\.images; choose another folder"):
        train_density(Bell([1, 2, 2]), SAMPLES.flip(0), Recipe(epochs=1), folder=tmp_path)
    for other, what in ((Wide([1, 2, 2]), r"step\.density"), (Bell([1, 2, 2], kept=3), r"step\.options")):
        with pytest.raises(ValueError, match=f"was begun with other settings, {what}; choose another folder"):
            train_density(other, SAMPLES, Recipe(epochs=1), folder=tmp_path)


def test_samples_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \(1, 3, 3\), got \(1, 2, 2\)"):
        train_density(Bell([1, 3, 3]), SAMPLES, RECIPE)


@pytest.mark.parametrize("shape", [[], [3, 0, 4]])
def test_a_shape_without_room_is_refused(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="sides of at least 1"):
        Bell(shape)


@pytest.mark.usefixtures("known")
def test_a_bundle_gives_the_density_back(tmp_path: Path) -> None:
    bell = Bell([1, 2, 2])
    history = train_density(bell, SAMPLES, Recipe(epochs=2))
    save_density(bell, tmp_path / "bundle", history)
    back = load_density(tmp_path / "bundle")
    assert torch.equal(back(SAMPLES), bell(SAMPLES)) and not back.training
    assert not any(parameter.requires_grad for parameter in back.parameters())
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["epochs"] == history


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no bundle of a density: model.json is missing"),
        ("{", "does not describe a density"),
        ('{"name": "builtin:small_cnn"}', "does not describe a density: it is of another kind of model"),
        ('{"schema": 99, "density": "bell"}', "it has schema 99, this version reads 1"),
        ('{"density": "bell"}', "does not describe a density: 'shape'"),
        ('{"density": "bel", "shape": [1], "options": {}}', "did you mean 'bell'"),
        ('{"density": "bell", "shape": [1], "options": {"width": 3}}', "width"),
        ('{"density": "bell", "shape": [1, 3, 3], "options": {}}', "mean"),
        ('{"density": "bell", "shape": 5, "options": {}}', "does not describe a density"),
    ],
)
def test_a_damaged_bundle_is_one_clear_line(tmp_path: Path, content: str | None, message: str) -> None:
    save_density(Bell([1, 2, 2]), tmp_path)
    about = tmp_path / "model.json"
    about.unlink() if content is None else about.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_density(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("known")
def test_weights_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path) -> None:
    bell = Bell([1, 2, 2])
    save_density(bell, tmp_path)
    with torch.no_grad():
        next(bell.parameters()).add_(1e-3)
    save_weights(bell, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors was changed: its weights are not those of") as error:
        load_density(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("content", "message"), [(None, "manifest.json is missing"), ("{", "is damaged"), ("{}", "is damaged")]
)
def test_a_manifest_that_says_nothing_of_the_weights_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    save_density(Bell([1, 2, 2]), tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_density(tmp_path)


@pytest.mark.usefixtures("known")
def test_a_density_in_double_precision_is_read_back_in_single(tmp_path: Path) -> None:
    bell = Bell([1, 2, 2]).double()
    with torch.no_grad():
        next(bell.parameters()).fill_(1 / 3)
    save_density(bell, tmp_path)
    assert next(load_density(tmp_path).parameters()).flatten()[0] == torch.tensor(1 / 3, dtype=torch.float32)


def test_a_training_whose_last_step_breaks_it_is_said_to_have_diverged() -> None:
    with pytest.raises(ValueError, match=r"the training of bell diverged: .* after batch 1 of epoch 1.*smaller lr"):
        train_density(Bell([1, 2, 2]), SAMPLES, Recipe(epochs=1, batch_size=len(SAMPLES), lr=1e30, momentum=0))
