"""The detector of pixels: its score is the density's, whatever stands behind it, and attacks reach it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gatecrash as gate
from gatecrash.densities import PixelCNN, load_density, train_density
from gatecrash.detectors import MSP, PixelCNNLikelihood, ScoreEnsemble, build
from gatecrash.fitting import Recipe, seeded
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

SMALL = {"blocks": 0, "filters": 6, "mixtures": 2, "levels": 0}
QUICK = {"epochs": 15, "lr": 0.05, "batch_size": 60}


@pytest.fixture(scope="module")
def detector() -> PixelCNNLikelihood:
    return PixelCNNLikelihood(model=SMALL, training=QUICK).fit(squares(60)[0])


def test_the_score_is_the_bits_per_dimension_of_what_the_recipe_trains(detector: PixelCNNLikelihood) -> None:
    with seeded(0):
        model = PixelCNN((1, 6, 6), **SMALL)
    recipe = Recipe(15, 60, "adamw", lr=0.05, weight_decay=0.0, clip=1.0)
    history = train_density(model, squares(60)[0], recipe)
    x = blank(5)
    torch.testing.assert_close(detector.scores(x), model.bits_per_dimension(x))
    assert detector.losses.tolist() == pytest.approx([row["loss"] for row in history])


def test_no_encoder_is_needed_and_one_changes_nothing(detector: PixelCNNLikelihood) -> None:
    beside = PixelCNNLikelihood(trained_net(), model=SMALL, training=QUICK).fit(squares(60))
    assert torch.equal(beside.scores(blank(5)), detector.scores(blank(5)))
    with pytest.raises(ValueError, match="reads pixels and taps no layers"):
        PixelCNNLikelihood(trained_net(), layers="hidden")
    with pytest.raises(ValueError, match="reads pixels and taps no layers"):
        build({"name": "pixelcnn", "options": {"layers": "hidden"}}, trained_net())


def test_colour_images_and_odd_sides_are_fitted_too() -> None:
    x = torch.rand(12, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    found = PixelCNNLikelihood(model={**SMALL, "blocks": 1, "levels": 2}, training={"epochs": 1}).fit(x).scores(x)
    assert found.shape == (12,) and found.isfinite().all()


def test_images_of_another_size_are_refused(detector: PixelCNNLikelihood) -> None:
    with pytest.raises(ValueError, match=r"of samples of shape \(1, 6, 6\), got \(1, 8, 8\)"):
        detector(torch.rand(2, 1, 8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {"preset": "vast"}}, "preset must be 'paper' or 'small'"),
        ({"model": {"filter": 3}}, "model: unknown option 'filter'; did you mean 'filters'"),
        ({"training": {"epoch": 3}}, "training: .*epoch"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PixelCNNLikelihood(**options).fit(squares(12)[0])


def test_a_bundle_replaces_the_training(detector: PixelCNNLikelihood, tmp_path: Path) -> None:
    detector.save_bundle(tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert [row["loss"] for row in manifest["epochs"]] == pytest.approx(detector.losses.tolist())
    again = PixelCNNLikelihood(bundle=str(tmp_path / "bundle"))
    assert again.fitted and again.to_fit() == []
    assert torch.equal(again.scores(blank(4)), detector.scores(blank(4)))
    assert isinstance(load_density(tmp_path / "bundle"), PixelCNN)


def test_a_fit_that_was_killed_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {**SMALL, "blocks": 1, "dropout": 0.5}

    def made(folder: Path) -> PixelCNNLikelihood:
        training = {**QUICK, "epochs": 4, "batch_size": 20}
        return PixelCNNLikelihood(model=model, training=training, checkpoints=str(folder))

    whole = made(tmp_path / "whole").fit(squares(40)[0])
    passes = PixelCNN.forward
    count = 0

    def killed(self: PixelCNN, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return passes(self, x)

    monkeypatch.setattr(PixelCNN, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "parts").fit(squares(40)[0])
    monkeypatch.setattr(PixelCNN, "forward", passes)
    resumed = made(tmp_path / "parts").fit(squares(40)[0])
    assert count == 6
    assert torch.equal(resumed.scores(blank(4)), whole.scores(blank(4)))
    assert torch.equal(resumed.losses, whole.losses)


# Attacks


def test_the_score_is_brought_to_any_value(detector: PixelCNNLikelihood) -> None:
    x = blank(4)
    aim = float(detector.scores(x).mean()) + 0.5
    found = gate.score_to(detector, x, aim, gate.L2(2.0), steps=60)
    torch.testing.assert_close(found.score, torch.full((4,), aim), rtol=0, atol=0.01)


def test_the_outlier_gets_in_and_the_inlier_out(detector: PixelCNNLikelihood) -> None:
    inside, outside = squares(6, 3)[0], torch.rand(6, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    ball = gate.Linf(0.3)
    before_in, before_out = detector.scores(inside), detector.scores(outside)
    assert gate.admit(detector, outside, ball, steps=40).score.max() < before_out.min()
    assert gate.evict(detector, inside, ball, steps=40).score.min() > before_in.max()


def test_a_collision_of_pixels_is_the_image_itself(detector: PixelCNNLikelihood) -> None:
    start, target = blank(3), squares(3, 4)[0]
    found = gate.collide(detector.encode, start, target, gate.L2(10.0), steps=100)
    torch.testing.assert_close(found.x, target, rtol=0, atol=0.02)


def test_it_is_a_member_of_ensembles(detector: PixelCNNLikelihood, tmp_path: Path) -> None:
    network = trained_net()
    both = ScoreEnsemble([MSP(network), PixelCNNLikelihood(network, model=SMALL, training=QUICK)]).fit(squares(60))
    both.save(tmp_path / "both.safetensors")
    again = ScoreEnsemble.load(tmp_path / "both.safetensors", [network, network])
    assert torch.equal(again.scores(blank(5)), both.scores(blank(5)))
