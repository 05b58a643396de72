"""The detectors of features with a VAE and a MAF: standardised on all inliers, and better the closer they look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gatecrash as gate
from gatecrash.detectors import FeatureMAF, FeatureVAE
from gatecrash.detectors.feature_density import FeatureDensity
from gatecrash.detectors.learned import Learned
from gatecrash.encoder import Encoder
from gatecrash.metrics import auroc
from small_models import Affine, as_images, blank, one_thread, squares, trained_net  # noqa: F401

QUICK = {"epochs": 3, "batch_size": 100}
KINDS = {
    FeatureVAE: {"hidden": 16, "latent": 2, "draws": 4},
    FeatureMAF: {"transforms": 2, "hidden": [16]},
}
both = pytest.mark.parametrize("kind", KINDS)


def made(kind: type[FeatureDensity], encoder: torch.nn.Module | None = None, **options: object) -> FeatureDensity:
    return kind(encoder or Encoder(trained_net(), "hidden"), **{"model": KINDS[kind], "training": QUICK, **options})


def features(count: int, seed: int = 0) -> torch.Tensor:
    """Half of the samples have the first feature at exactly 0.2; all lie in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    z = 0.2 + 0.3 * torch.rand(count, 4, generator=generator)
    z[::2, 0] = 0.2
    return z


@both
def test_mean_and_deviation_are_those_of_all_inliers(kind: type[FeatureDensity]) -> None:
    z = features(1000)
    detector = made(kind, Affine(dtype=torch.float32)).fit(as_images(z))
    torch.testing.assert_close(detector.trained.mean, z.mean(dim=0))
    torch.testing.assert_close(detector.trained.deviation, z.std(dim=0, correction=0))


@both
def test_the_score_is_the_densitys_bits_per_dimension_of_the_features(kind: type[FeatureDensity]) -> None:
    network = trained_net()
    detector = made(kind, Encoder(network, "hidden")).fit(squares(60))
    x = blank(5)
    with torch.no_grad():
        z = network.hidden(network.maps(x))
    torch.testing.assert_close(detector.scores(x), detector.trained.bits_per_dimension(z))


@both
def test_several_layers_are_one_vector(kind: type[FeatureDensity]) -> None:
    detector = made(kind, Encoder(trained_net()), layers=["maps", "hidden"]).fit(squares(60))
    assert detector.trained.shape == (4 + 5,)


@both
def test_a_scale_of_the_features_shifts_every_score_alike(kind: type[FeatureDensity]) -> None:
    z = features(200)
    one, large = (
        made(kind, Affine(scale, torch.float64)).fit(as_images(z.double())).scores(as_images(z[:20].double()))
        for scale in (1.0, 64.0)
    )
    torch.testing.assert_close(large - one, torch.full((20,), 6.0, dtype=torch.float64), rtol=0, atol=1e-6)


@both
def test_features_far_away_are_found(kind: type[FeatureDensity]) -> None:
    detector = made(kind, Affine(dtype=torch.float32), training={"epochs": 20, "lr": 0.01, "batch_size": 100})
    detector.fit(as_images(features(500)))
    far = features(50, 2)
    far[:, 3] = 0.9
    assert auroc(detector.scores(as_images(features(50, 1))), detector.scores(as_images(far))) > 0.99


@both
def test_an_encoder_is_needed(kind: type[FeatureDensity]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} reads features and needs an encoder"):
        kind(None)


@both
def test_a_bundle_of_another_density_is_refused(kind: type[FeatureDensity], tmp_path: Path) -> None:
    other: type[Learned] = FeatureMAF if kind is FeatureVAE else FeatureVAE
    made(kind).fit(squares(30)).save_bundle(tmp_path / "bundle")
    message = f"{other.__name__} needs the density {other.density_name!r}, and this is {kind.name!r}"
    with pytest.raises(ValueError, match=message):
        other(trained_net(), bundle=str(tmp_path / "bundle"))
    again = kind(Encoder(trained_net(), "hidden"), bundle=str(tmp_path / "bundle"))
    assert again.scores(blank(3)).isfinite().all()


@both
def test_a_network_with_other_features_than_the_bundles_is_an_error(kind: type[FeatureDensity], tmp_path: Path) -> None:
    made(kind).fit(squares(30)).save_bundle(tmp_path / "bundle")
    with pytest.raises(ValueError, match=r"of samples of shape \(5,\), got \(3,\)"):
        kind(Encoder(trained_net()), bundle=str(tmp_path / "bundle")).scores(blank(3))


@both
@pytest.mark.parametrize("option", ["depth", "model"])
def test_options_that_do_not_exist_are_refused(kind: type[FeatureDensity], option: str) -> None:
    with pytest.raises(ValueError, match=f"model: .*{option}"):
        made(kind, model={option: 3}).fit(squares(12))


@both
def test_one_inlier_is_enough_to_fit_and_an_attack_moves_the_score(kind: type[FeatureDensity]) -> None:
    detector = made(kind).fit(squares(1))
    x = blank(3)
    found = gate.admit(detector, x, gate.Linf(0.1), steps=10)
    assert (found.score < detector.scores(x)).all()


def test_importance_weights_change_the_score_and_not_the_training() -> None:
    plain = made(FeatureVAE).fit(squares(60))
    weighted = made(FeatureVAE, model={**KINDS[FeatureVAE], "importance": True}).fit(squares(60))
    assert torch.equal(plain.losses, weighted.losses)
    assert (weighted.scores(blank(5)) != plain.scores(blank(5))).all()
