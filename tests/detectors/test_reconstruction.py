"""Reconstruction error and collision residual: distances by hand, what a collision cannot hide, bundles and kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatecrash import L2, Encoder, admit, collide
from gatecrash.densities import Autoencoder, load_density
from gatecrash.detectors import CollisionResidual, Energy, Mahalanobis, Reconstruction
from gatecrash.detectors.residual import Norm, Whitened, principal
from small_models import blank, one_thread, squares, trained_net

assert one_thread

MODEL = {"width": 4, "latent": 3}
TRAINING = {"epochs": 15, "lr": 0.01, "batch_size": 20}


def autoencoder(**options: Any) -> Reconstruction:
    return Reconstruction(**{"model": MODEL, "training": TRAINING, **options})


def residual(network: nn.Module | None = None, **options: Any) -> CollisionResidual:
    options = {"layers": "hidden", "model": {"width": 4}, "training": TRAINING, **options}
    return CollisionResidual(network or trained_net(), **options)


class LeftHalf(nn.Module):
    """Features that know the left half of a 6×6 image only: whoever shares it collides."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Identity()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The features (B, 18)."""
        seen: Tensor = self.seen(self.weight * x[:, :, :, :3].flatten(1))
        return seen


# Distances


def test_norms_are_those_of_the_definition() -> None:
    r = torch.tensor([[[3.0, -4.0]], [[0.0, 2.0]]])
    assert Norm(1.0)(r).tolist() == [7, 2]
    assert Norm(2.0)(r).tolist() == [5, 2]
    torch.testing.assert_close(Norm(3.0)(r), torch.tensor([91.0 ** (1 / 3), 2.0]))


def test_a_perfect_reconstruction_has_a_gradient_and_not_nan() -> None:
    r = torch.zeros(2, 3, requires_grad=True)
    for p in (1.0, 2.0, 3.0):
        (gradient,) = torch.autograd.grad(Norm(p)(r).sum(), r)
        assert gradient.isfinite().all()


def uneven(count: int, dimensions: int) -> Tensor:
    """Residuals with the standard deviations 1, ½, ¼, … along turned axes, about a mean that is not zero."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64)).Q
    spread = 0.5 ** torch.arange(dimensions, dtype=torch.float64)
    return 0.3 + torch.randn(count, dimensions, generator=generator, dtype=torch.float64) * spread @ turn


def test_the_covariance_has_the_largest_directions_and_one_variance_for_the_rest() -> None:
    r = uneven(400, 40)  # many more than rank and spare directions together
    measure = Whitened(rank=3)
    measure.learn(r)
    values, vectors = torch.linalg.eigh(torch.cov(r.T, correction=0))
    rest = values[:-3].mean()
    sigma = vectors[:, -3:] @ (values[-3:] * vectors[:, -3:]).T + rest * vectors[:, :-3] @ vectors[:, :-3].T
    centred = r - r.mean(dim=0)
    expected = (centred @ torch.linalg.inv(sigma) * centred).sum(dim=1)
    torch.testing.assert_close(measure(r), expected, rtol=1e-5, atol=0)


def test_with_all_directions_it_is_the_plain_mahalanobis_distance() -> None:
    r = uneven(300, 5)
    measure = Whitened(rank=99)
    measure.learn(r)
    assert measure.directions.shape == (5, 5)
    centred = r - r.mean(dim=0)
    expected = (centred @ torch.linalg.inv(torch.cov(r.T, correction=0)) * centred).sum(dim=1)
    torch.testing.assert_close(measure(r), expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(measure(r).mean(), torch.tensor(5.0, dtype=torch.float64))


def test_there_are_no_more_directions_than_half_the_inliers() -> None:
    r = uneven(9, 30)
    measure = Whitened(rank=20)
    measure.learn(r)
    assert measure.directions.shape == (30, 4)
    assert measure(r).isfinite().all()
    with pytest.raises(ValueError, match="needs at least 3 inliers, got 2"):
        measure.learn(r[:2])


def test_many_rows_are_the_same_as_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    r = uneven(50, 30)
    whole = principal(r, 2)
    monkeypatch.setattr("gatecrash.detectors.residual.ROWS", 7)
    for one, other in zip(whole, principal(r, 2), strict=True):
        torch.testing.assert_close(one.abs(), other.abs(), rtol=1e-8, atol=1e-12)


def test_residuals_that_do_not_vary_have_no_distance() -> None:
    with pytest.raises(ValueError, match="the residuals of the inliers do not vary"):
        Whitened(rank=2).learn(torch.zeros(10, 4))
    with pytest.raises(ValueError, match="the residuals of the inliers do not vary"):
        autoencoder(distance="mahalanobis").fit(torch.full((30, 1, 6, 6), 0.3))


# Autoencoder


@pytest.mark.parametrize(("options", "p"), [({"distance": "l1"}, 1), ({}, 2), ({"distance": "lp", "p": 4.0}, 4)])
def test_the_score_is_the_length_of_what_the_autoencoder_cannot_rebuild(options: dict[str, Any], p: float) -> None:
    detector, x = autoencoder(**options).fit(squares(60)), blank(5)
    assert isinstance(detector.density, Autoencoder)
    left = (x - detector.density.reconstruct(x)).flatten(1)
    torch.testing.assert_close(detector(x), left.abs().pow(p).sum(dim=1).pow(1 / p))


def test_mahalanobis_is_that_of_the_inliers_own_residuals() -> None:
    x = squares(60)[0]
    detector = autoencoder(distance="mahalanobis", rank=4).fit(x)
    assert isinstance(detector.density, Autoencoder)
    measure = Whitened(rank=4)
    measure.learn(x - detector.density.reconstruct(x))
    wanted = blank(5)
    torch.testing.assert_close(detector(wanted), measure(wanted - detector.density.reconstruct(wanted)))


def test_an_image_with_the_code_of_an_inlier_is_rebuilt_as_the_inlier() -> None:
    detector = autoencoder().fit(squares(60))
    inlier, outlier = squares(1, 5)[0], blank(1)
    code = detector.code(inlier)
    detector.autoencoder.encode = lambda x: code.expand(len(x), -1)  # type: ignore[method-assign]
    rebuilt = detector.autoencoder.decode(code)
    torch.testing.assert_close(detector(outlier), (outlier - rebuilt).flatten(1).norm(dim=1))
    assert detector(outlier) > 3 * detector(inlier)


def test_what_is_encoded_is_code_and_error() -> None:
    detector, x = autoencoder().fit(squares(60)), squares(4, 3)[0]
    code, error = detector.encode(x)
    assert torch.equal(code, detector.code(x))
    assert error.shape == (4, 1)
    assert torch.equal(error.squeeze(1), detector(x))


def test_one_who_knows_of_the_error_gets_further_than_a_collision() -> None:
    detector, start = autoencoder().fit(squares(60)), blank(10)
    target, ball = squares(10, 5)[0], L2(0.8)
    blind = collide(detector.code, start, target, ball, steps=60)
    joint = collide(detector.encode, start, target, ball, steps=60)
    knowing = admit(detector, start, ball, steps=60)
    assert (detector.code(blind.x) - detector.code(target)).norm() < (
        detector.code(start) - detector.code(target)
    ).norm() / 2
    assert detector(joint.x).mean() <= detector(blind.x).mean() + 1e-3
    assert detector(knowing.x).mean() < detector(blind.x).mean() - 0.1


def test_an_image_of_another_shape_is_an_error_that_names_both() -> None:
    detector = autoencoder().fit(squares(60))
    with pytest.raises(ValueError, match=r"of samples of shape \(1, 6, 6\), got \(1, 6, 8\)"):
        detector(torch.rand(2, 1, 6, 8))


@pytest.mark.parametrize("distance", ["l2", "mahalanobis"])
def test_a_bundle_is_not_trained_again(distance: str, tmp_path: Path) -> None:
    first = autoencoder(distance=distance, rank=4).fit(squares(60))
    first.save_bundle(tmp_path)
    again = Reconstruction(bundle=str(tmp_path), distance=distance, rank=4)
    assert again.fitted == (distance == "l2")
    again.fit(squares(60))
    x = blank(4)
    assert torch.equal(again(x), first(x))
    again.fit(squares(40, 9))
    assert torch.equal(again(x), first(x)) == (distance == "l2")
    assert isinstance(again.density, Autoencoder)
    for key, tensor in load_density(tmp_path).state_dict().items():
        assert torch.equal(tensor, again.density.state_dict()[key])


def test_a_fit_that_was_killed_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, calls, forward = squares(60)[0], 0, Autoencoder.forward

    def failing(self: Autoencoder, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 10:  # in the third epoch of three batches, after each of which comes a look
            raise KeyboardInterrupt
        return forward(self, x)

    options: dict[str, Any] = {"training": {**TRAINING, "epochs": 4}}
    whole = autoencoder(**options).fit(x)
    monkeypatch.setattr(Autoencoder, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        autoencoder(**options, checkpoints=str(tmp_path)).fit(x)
    calls = 100
    resumed = autoencoder(**options, checkpoints=str(tmp_path)).fit(x)
    assert calls == 100 + 6 + 2  # two epochs of three batches were left, and a look at what came of each
    assert torch.equal(resumed(blank(4)), whole(blank(4)))


# Collision residual


@pytest.mark.parametrize("combine", ["sum", "max"])
def test_latent_score_and_residual_are_standardised_and_combined(combine: str) -> None:
    x, y = squares(60)
    detector = residual(combine=combine).fit((x, y))
    latent = Mahalanobis(trained_net(), layers="hidden").fit((x, y))
    features = Encoder(trained_net(), "hidden")

    def both(images: Tensor) -> Tensor:
        assert isinstance(features(images), Tensor)
        left = images - detector.decoder.decode(features(images))
        return torch.stack([latent.scores(images), left.flatten(1).norm(dim=1)], dim=1)

    inside, outside = both(x), both(blank(7))
    expected = (outside - inside.mean(dim=0)) / inside.std(dim=0, correction=0)
    torch.testing.assert_close(detector.parts(blank(7)), expected, rtol=1e-3, atol=1e-3)
    combined = expected.sum(dim=1) if combine == "sum" else expected.max(dim=1).values
    torch.testing.assert_close(detector(blank(7)), combined, rtol=1e-3, atol=1e-3)


def test_held_out_inliers_set_the_scale_where_there_are_some() -> None:
    held_out = squares(25, 9)[0]
    detector = residual().fit(squares(60), held_out=held_out)
    parts = detector.parts(held_out)
    torch.testing.assert_close(parts.mean(dim=0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(parts.std(dim=0, correction=0), torch.ones(2), atol=1e-4, rtol=0)
    assert residual().fit(squares(60)).parts(held_out).mean(dim=0).abs().max() > 0.01


@pytest.mark.parametrize("distance", ["l2", "mahalanobis"])
def test_a_collision_leaves_the_latent_score_alone_and_the_residual_gives_it_away(distance: str) -> None:
    x, y = squares(60)
    detector = residual(LeftHalf(), layers="seen", distance=distance, rank=6).fit((x, y))
    inlier = squares(6, 5)[0]
    collided = inlier.clone()
    collided[:, :, :, 3:] = 0.9
    latent = Mahalanobis(LeftHalf(), layers="seen").fit((x, y))
    assert torch.equal(latent(collided), latent(inlier))
    before, after = detector.parts(inlier), detector.parts(collided)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert (after[:, 1] > before[:, 1] + 5).all()
    assert detector(collided).min() > detector(squares(40, 7)[0]).max()
    if distance == "l2":
        rebuilt = detector.decoder.decode(inlier[:, :, :, :3].flatten(1))
        length = (collided - rebuilt).flatten(1).norm(dim=1)
        torch.testing.assert_close(detector.encode(collided)[1].squeeze(1), length)


def test_one_who_lowers_the_combined_score_gets_further_than_a_collision() -> None:
    network, ball = trained_net(), L2(0.8)
    detector, start, target = residual(network).fit(squares(60)), blank(10), squares(10, 5)[0]
    blind = collide(Encoder(network, "hidden"), start, target, ball, steps=60)
    knowing = admit(detector, start, ball, steps=60)
    assert detector.parts(blind.x)[:, 0].median() < detector.parts(start)[:, 0].median() / 3
    assert detector(knowing.x).mean() < detector(blind.x).mean() - 1


def test_a_latent_detector_without_labels_needs_none() -> None:
    detector = residual(latent="energy", latent_options={"temperature": 2.0})
    assert detector.card.fit == "inliers"
    assert residual().card.fit == "labelled inliers"
    detector.fit(squares(60)[0])
    x = blank(5)
    score = Energy(trained_net(), temperature=2.0)(x)
    torch.testing.assert_close(detector.parts(x)[:, 0], (score - detector.centres[0]) / detector.scales[0])
    (logits,) = detector.logits_in(detector.encode(x))
    torch.testing.assert_close(logits, trained_net()(x))


def test_the_network_runs_once_for_latent_score_and_features() -> None:
    network, runs = trained_net(), 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    for latent in ("energy", "mahalanobis"):
        detector = residual(network, latent=latent).fit(squares(60))
        handle = network.head.register_forward_hook(count)
        runs = 0
        detector(blank(4))
        handle.remove()
        assert runs == 1


def test_several_layers_are_decoded_together() -> None:
    detector = residual(layers=["maps", "hidden"]).fit(squares(60))
    assert detector.decoder.features == 4 + 5
    assert detector.options["shape"] == [4 + 5 + 36]


def test_a_latent_detector_that_settles_is_settled_before_its_scores_are_standardised() -> None:
    detector = residual(latent="temperature").fit(squares(60), held_out=squares(30, 1))
    assert detector.fitted
    parts = detector.parts(squares(30, 1)[0])
    torch.testing.assert_close(parts.mean(dim=0), torch.zeros(2), atol=1e-3, rtol=0)


def test_a_bundle_of_the_decoder_is_not_trained_again(tmp_path: Path) -> None:
    first = residual().fit(squares(60))
    first.save_bundle(tmp_path)
    again = residual(bundle=str(tmp_path), model=None)
    with pytest.raises(ValueError, match="is not fitted"):
        again(blank(2))
    again.fit(squares(60))
    torch.testing.assert_close(again(blank(4)), first(blank(4)))
    assert len(again.losses) == 0
    again.fit(squares(40, 9))
    assert not torch.equal(again(blank(4)), first(blank(4)))
    with pytest.raises(ValueError, match=r"of images of shape \(1, 6, 6\), got \(1, 6, 9\)"):
        again(torch.rand(2, 1, 6, 9))


@pytest.mark.parametrize("kind", [autoencoder, residual])
def test_options_that_are_none_are_refused(kind: Any) -> None:
    for options, message in (
        ({"distance": "cosine"}, "distance must be one of l1, l2, lp, mahalanobis, got 'cosine'"),
        ({"distance": "lp", "p": 0.5}, "p must be at least 1 and finite, got 0.5"),
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"rank": "x"}, "rank must be a whole number of at least 1, got 'x'"),
        ({"distance": "lp", "p": "x"}, "p must be a number, got 'x'"),
        ({"training": {"epoch": 3}}, "training: .*epoch"),
        ({"bundle": "nowhere", "model": None}, "nowhere is no bundle of a density"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**options)
    with pytest.raises(ValueError, match="model: unknown option 'depth'; did you mean 'width'"):
        kind(model={"depth": 3})


def test_latent_detectors_that_do_not_suit_are_refused() -> None:
    for options, message in (
        ({"combine": "product"}, "combine must be 'sum' or 'max', got 'product'"),
        ({"latent": "mahalonobis"}, "unknown detector 'mahalonobis'"),
        ({"latent": "odin"}, "must judge features or logits of the image itself, which odin does not"),
        ({"latent": "gram"}, "must judge features or logits of the image itself, which gram does not"),
        ({"latent_options": {"magnitude": 0.05}}, "which mahalanobis does not"),
        ({"latent": "collision_residual"}, "which collision_residual does not"),
        ({"latent": "autoencoder"}, "which autoencoder does not"),
        ({"latent": "ensemble"}, "latent: 'ensemble' is made of other detectors"),
        ({"latent_options": {"depth": 2}}, "latent: .*depth"),
    ):
        with pytest.raises(ValueError, match=message):
            residual(**options)


def test_a_latent_detector_that_comes_to_change_images_is_refused_too() -> None:
    detector = residual()
    assert isinstance(detector.latent, Mahalanobis)
    detector.latent.magnitudes = [0.05]
    with pytest.raises(ValueError, match="of the image itself, which mahalanobis does not"):
        detector.fit(squares(60))
