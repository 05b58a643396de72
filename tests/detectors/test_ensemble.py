from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gatecrash.detectors import (
    MSP,
    ODIN,
    DeepEnsemble,
    Detector,
    Energy,
    InputComplexity,
    Mahalanobis,
    PixelCNNLikelihood,
    RelativeMahalanobis,
    ScoreEnsemble,
)
from gatecrash.encoder import Encoder
from small_models import Affine, as_images, blank, one_thread, squares, trained_net  # noqa: F401


def networks(*seeds: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [trained_net(seed, dtype) for seed in seeds]


def some_images() -> Tensor:
    return torch.cat([squares(5, 3)[0], blank(5, 4)])


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


# The mean of scores


def test_an_ensemble_is_the_mean_of_its_members() -> None:
    one, other = networks(0, 7)
    members = [ODIN(one), Mahalanobis(other, layers="hidden", magnitude=0.01), Energy(one), RelativeMahalanobis(one)]
    ensemble = ScoreEnsemble(members).fit(squares(60))
    x = some_images()
    scores = [member.scores(x).tolist() for member in members]
    expected = [sum(column) / 4 for column in zip(*scores, strict=True)]
    torch.testing.assert_close(ensemble.scores(x), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_card_says_the_least_that_is_known_of_the_members_gradients(tmp_path: Path) -> None:
    exact, omits = Energy(trained_net()), InputComplexity()
    assert ScoreEnsemble([exact, exact]).card.gradient == "exact"
    assert ScoreEnsemble([exact, PixelCNNLikelihood()]).card.gradient == "exact between jumps"
    assert ScoreEnsemble([omits, exact]).card.gradient == "omitted"


def test_members_without_an_encoder_are_loaded_without_one(tmp_path: Path) -> None:
    ScoreEnsemble([InputComplexity(), PixelCNNLikelihood()]).save(tmp_path / "saved.safetensors")
    again = ScoreEnsemble.load(tmp_path / "saved.safetensors")
    assert [member.encoder for member in again.detectors] == [None, None]
    ScoreEnsemble([Energy(trained_net())]).save(tmp_path / "saved.safetensors")
    with pytest.raises(ValueError, match="Energy needs the encoder"):
        ScoreEnsemble.load(tmp_path / "saved.safetensors")


def test_fitting_an_ensemble_fits_each_member_as_it_would_be_alone() -> None:
    one, other = networks(0, 7)
    inliers, data = squares(60), {"held_out": squares(30, 1)[0], "outliers": blank(30, 2)}
    options = {"layers": ["maps", "hidden"], "combine": "logistic"}
    ensemble = ScoreEnsemble([Mahalanobis(one, **options), Mahalanobis(other, **options)]).fit(inliers, **data)
    for member, network in zip(ensemble.detectors, (one, other), strict=True):
        alone = Mahalanobis(network, **options).fit(inliers, **data)
        assert torch.equal(member.scores(some_images()), alone.scores(some_images()))


def test_members_may_be_fitted_before_they_meet() -> None:
    one, other = networks(0, 7)
    members = [Mahalanobis(one, layers="hidden").fit(squares(60)), MSP(other)]
    assert ScoreEnsemble(members).fitted
    assert not ScoreEnsemble([*members, Mahalanobis(other, layers="hidden")]).fitted


def test_data_that_can_be_read_only_once_is_enough_for_two_members() -> None:
    one, other = networks(0, 7)
    once, again = (ScoreEnsemble([Mahalanobis(one), Mahalanobis(other)]) for _ in range(2))
    once.fit(iter([squares(30)]))
    again.fit(squares(30))
    assert torch.equal(once.scores(some_images()), again.scores(some_images()))


def test_members_of_two_precisions_are_averaged_in_the_images_dtype() -> None:
    single, double = trained_net(0), trained_net(7, torch.float64)
    x = some_images()
    scores = ScoreEnsemble([MSP(single), MSP(double)]).scores(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, (MSP(single).scores(x) + MSP(double).scores(x)) / 2)


# The entropy of averaged softmaxes


@pytest.mark.parametrize("scales", [(1.0,), (3.0, 20.0), (0.5, 4.0, 1e-3)])
def test_a_deep_ensemble_is_the_entropy_of_the_mean_softmax(scales: tuple[float, ...]) -> None:
    z = torch.rand(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for row in z.tolist():
        softmaxes = [softmax([scale * value for value in row]) for scale in scales]
        mean = [sum(column) / len(scales) for column in zip(*softmaxes, strict=True)]
        expected.append(-sum(p * math.log(p) for p in mean))
    scores = DeepEnsemble([Affine(scale) for scale in scales]).scores(as_images(z))
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_two_networks_that_are_sure_of_different_classes_have_the_entropy_of_a_coin() -> None:
    images = torch.tensor([[1.0, 0.0, 0.5]])
    reverse = nn.Sequential(Affine(200.0, torch.float32), nn.Linear(3, 3, bias=False))
    reverse[1].weight.data = torch.eye(3).flip(0)
    scores = DeepEnsemble([Affine(400.0, torch.float32), reverse]).scores(as_images(images))
    assert float(scores) == pytest.approx(math.log(2), rel=1e-6)


def test_a_deep_ensemble_that_is_certain_has_no_entropy_and_a_finite_gradient() -> None:
    x = as_images(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.2]])).requires_grad_()
    scores = DeepEnsemble([Affine(1e4, torch.float32), Affine(2e4, torch.float32)])(x)
    assert torch.equal(scores, torch.zeros(2))
    assert torch.autograd.grad(scores.sum(), x)[0].isfinite().all()


def test_a_deep_ensemble_reads_logits_whatever_layers_are_tapped() -> None:
    one, other = networks(0, 7)
    tapped = DeepEnsemble([Encoder(one, "hidden"), Encoder(other, ["maps", "hidden"])])
    assert torch.equal(tapped.scores(some_images()), DeepEnsemble([one, other]).scores(some_images()))


@pytest.mark.parametrize("kind", [ScoreEnsemble, DeepEnsemble])
def test_an_ensemble_of_nothing_is_refused(kind: type[Detector]) -> None:
    with pytest.raises(ValueError, match="an ensemble needs at least one"):
        kind([])


# Files


def saved(detector: Detector, folder: Path) -> Path:
    path = folder / "ensemble.safetensors"
    detector.save(path)
    return path


def three_members(encoders: Sequence[nn.Module]) -> ScoreEnsemble:
    one, other, third = encoders
    return ScoreEnsemble([MSP(one), Mahalanobis(other, layers="hidden"), RelativeMahalanobis(third)])


def test_an_ensemble_of_one_network_is_loaded_beside_it(tmp_path: Path) -> None:
    network = trained_net()
    ensemble = three_members([network] * 3).fit(squares(60)).calibrate(squares(20, 5)[0])
    loaded = ScoreEnsemble.load(saved(ensemble, tmp_path), network)
    assert [type(member) for member in loaded.detectors] == [MSP, Mahalanobis, RelativeMahalanobis]
    assert torch.equal(loaded.scores(some_images()), ensemble.scores(some_images()))
    assert torch.equal(loaded.predict(some_images()), ensemble.predict(some_images()))


def test_an_ensemble_of_several_networks_is_loaded_beside_them_in_order(tmp_path: Path) -> None:
    encoders = networks(0, 7, 9)
    ensemble = three_members(encoders).fit(squares(60))
    path = saved(ensemble, tmp_path)
    x = some_images()
    assert torch.equal(ScoreEnsemble.load(path, encoders).scores(x), ensemble.scores(x))
    assert not torch.allclose(ScoreEnsemble.load(path, encoders[::-1]).scores(x), ensemble.scores(x))


def test_members_keep_thresholds_of_their_own(tmp_path: Path) -> None:
    one, other = networks(0, 7)
    member = MSP(one).calibrate(squares(20, 5)[0])
    loaded = ScoreEnsemble.load(saved(ScoreEnsemble([member, MSP(other)]), tmp_path), [one, other])
    assert torch.equal(loaded.detectors[0].threshold, member.threshold)
    assert loaded.detectors[1].threshold is None
    assert loaded.threshold is None


@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_wrong_number_of_encoders_is_an_error_that_names_both(count: int, tmp_path: Path) -> None:
    path = saved(three_members(networks(0, 7, 9)).fit(squares(60)), tmp_path)
    with pytest.raises(ValueError, match=f"has 3 members, but {count} encoders were given"):
        ScoreEnsemble.load(path, networks(*range(count)))


def test_a_deep_ensemble_is_loaded_beside_its_networks(tmp_path: Path) -> None:
    encoders = networks(0, 7, 9)
    ensemble = DeepEnsemble(encoders).calibrate(squares(20, 5)[0])
    loaded = DeepEnsemble.load(saved(ensemble, tmp_path), encoders)
    assert torch.equal(loaded.scores(some_images()), ensemble.scores(some_images()))
    assert torch.equal(loaded.threshold, ensemble.threshold)


@pytest.mark.parametrize("given", [networks(0), networks(0, 7), trained_net()], ids=["one of a list", "two", "one"])
def test_a_deep_ensemble_beside_too_few_networks_is_refused(
    given: nn.Module | Sequence[nn.Module], tmp_path: Path
) -> None:
    path = saved(DeepEnsemble(networks(0, 7, 9)).calibrate(squares(20, 5)[0]), tmp_path)
    with pytest.raises(ValueError, match="3"):
        DeepEnsemble.load(path, given)


def test_a_list_of_encoders_for_a_detector_of_one_is_refused(tmp_path: Path) -> None:
    path = saved(MSP(trained_net()), tmp_path)
    with pytest.raises(ValueError, match="MSP takes one encoder, got a list"):
        MSP.load(path, networks(0, 7))
