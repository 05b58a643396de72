"""Plans with detectors that model the data: trained by the audit, or taken from a bundle beside the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gatecrash.audit import audit_plan, example_plan
from gatecrash.audit.plan import read_plan
from gatecrash.bundle import Bundle
from gatecrash.data import load_source
from gatecrash.densities import Autoencoder, Glow, save_density, train_density
from gatecrash.fitting import Recipe

PLAN: dict[str, Any] = {
    "model": {"name": "builtin:small_cnn", "weights": "default", "channels": 1, "size": 28, "resize": 56},
    "data": {"inliers": {"source": "fashion:test", "limit": 6}, "outliers": {"noise": {"source": "noise", "limit": 6}}},
    "attacks": [{"name": "admit", "ball": {"norm": "linf", "eps": 0.03}, "steps": 2}],
}


def written(folder: Path, *detectors: dict[str, Any]) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN | {"detectors": list(detectors)}))
    return path


def test_a_bundle_of_another_density_is_refused(tmp_path: Path) -> None:
    save_density(Autoencoder([1, 28, 28], width=4, latent=3), tmp_path / "kept")
    path = written(tmp_path, {"name": "glow", "bundle": "kept"})
    with pytest.raises(ValueError, match="needs the density 'glow', and this is 'autoencoder'"):
        audit_plan(path, out=tmp_path / "out")


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"name": "glow", "bundle": "nowhere"})
    with pytest.raises(ValueError, match="nowhere is no bundle of a density") as error:
        audit_plan(path, out=tmp_path / "out")
    assert str(tmp_path) in str(error.value)


def test_a_bundle_beside_the_plan_is_audited_without_images_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    glow = Glow([1, 28, 28], steps=1, hidden=4, levels=1)
    train_density(glow, load_source("fashion:train", limit=20).x, Recipe(epochs=1, lr=0.001))
    save_density(glow, tmp_path / "kept")
    audit_plan(written(tmp_path, {"name": "glow", "bundle": "kept"}), out=tmp_path / "out")
    rows = Bundle(tmp_path / "out").results()["rows"]
    assert [row["detector"] for row in rows] == ["glow", "glow"]
    assert rows[1]["auroc"] <= rows[0]["auroc"]


def test_what_must_be_fitted_beside_its_bundle_asks_for_images(tmp_path: Path) -> None:
    save_density(Autoencoder([1, 28, 28], width=4, latent=3), tmp_path / "kept")
    path = written(tmp_path, {"name": "autoencoder", "distance": "mahalanobis", "bundle": "kept", "label": "mine"})
    with pytest.raises(ValueError, match=r"data\.fit is missing: mine must be fitted on inliers"):
        audit_plan(path, out=tmp_path / "out")


def test_checkpoints_stand_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model, training = {"width": 4, "latent": 3}, {"epochs": 1}
    path = written(tmp_path, {"name": "autoencoder", "checkpoints": "kept", "model": model, "training": training})
    plan = yaml.safe_load(path.read_text())
    plan["data"]["fit"] = {"source": "fashion:train", "limit": 20}
    path.write_text(yaml.safe_dump(plan))
    audit_plan(path, out=tmp_path / "out")
    assert (tmp_path / "kept" / "checkpoint.json").is_file() and not any((tmp_path / "elsewhere").iterdir())


def test_the_example_has_the_detectors_that_model_the_data_at_the_side_of_the_images() -> None:
    plan = example_plan("generative")
    names = {"glow", "complexity", "pixelcnn", "vae", "maf", "autoencoder", "collision_residual"}
    assert {detector.name for detector in plan.detectors} == names
    assert (plan.model.size, plan.model.resize) == (28, 56)  # no detector of pixels sees images blown up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "small"}, "model must be a mapping of preset, .*, got 'small'"),
        ({"model": {"steps": "many"}}, "steps must be a whole number of at least 1, got 'many'"),
        ({"model": {"foo": 1}}, "model: unknown option 'foo'; known: preset, levels"),
        ({"training": {"foo": 1}}, "training: unknown option 'foo'; known: epochs"),
        ({"training": [1]}, r"training must be a mapping of epochs, .*, got \[1\]"),
        ({"training": {"lr": 1000000, "clip": None, "epochs": 1}}, "the training of glow diverged.*A smaller lr"),
    ],
)
def test_mistakes_in_what_a_detector_is_trained_with_are_one_line(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, {"name": "glow", **options})
    data = PLAN["data"] | {"fit": {"source": "fashion:train", "limit": 64}}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"data": data}))
    with pytest.raises(ValueError, match=message) as error:
        audit_plan(path, out=tmp_path / "out")
    assert "\n" not in str(error.value)


def test_options_that_do_not_exist_are_named_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'training'") as error:
        read_plan(written(tmp_path, {"name": "glow", "trainin": {"epochs": 1}}))
    assert "options," not in str(error.value)
