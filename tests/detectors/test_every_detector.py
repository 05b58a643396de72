"""What the contract promises of every detector, whatever its mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gatecrash.attacks import admit, evict, score_to
from gatecrash.ball import Linf
from gatecrash.detectors import (
    CCU,
    DETECTORS,
    GMM,
    JEM,
    MCM,
    MSP,
    ODIN,
    Card,
    CLIPZeroShot,
    CollisionResidual,
    Confident,
    DeepEnsemble,
    Detector,
    Energy,
    Expected,
    FeatureMAF,
    FeatureVAE,
    GlowLikelihood,
    Gram,
    InputComplexity,
    Mahalanobis,
    MaxLogit,
    OutlierExposureScore,
    PixelCNNLikelihood,
    Reconstruction,
    RelativeMahalanobis,
    ScoreEnsemble,
    Temperature,
    ZhengHong,
    build,
)
from gatecrash.encoder import Encoder
from gatecrash.images import Images
from small_clip import WordedNet
from small_models import SmallNet, blank, fragile_net, one_thread, squares, trained_net  # noqa: F401

Networks = tuple[nn.Module, nn.Module]
BOTH = ["maps", "hidden"]
NARROW = {"width": 4, "latent": 3}
SHORT = {"epochs": 15, "lr": 0.01, "batch_size": 20}
SHALLOW: dict[str, object] = {"steps": 2, "hidden": 16}
STEEP = {"epochs": 25, "lr": 0.02, "batch_size": 60, "seed": 2}
STEEPER = {"epochs": 60, "lr": 0.03, "batch_size": 60}
NARROW_VAE: dict[str, object] = {"hidden": 16, "latent": 2, "draws": 4}
NARROW_MAF: dict[str, object] = {"transforms": 2, "hidden": [8]}


@dataclass(frozen=True)
class Case:
    """How a detector is made of two networks, and which encoders `load` wants for it."""

    make: Callable[[nn.Module, nn.Module], Detector]
    encoders: Callable[[nn.Module, nn.Module], nn.Module | Sequence[nn.Module]] = lambda one, other: one

    def unfitted(self, networks: Networks | None = None, dtype: torch.dtype = torch.float32) -> Detector:
        return self.make(*(networks or two_networks(dtype)))

    def fitted(self, networks: Networks | None = None, dtype: torch.dtype = torch.float32) -> Detector:
        return learnt(self.unfitted(networks, dtype), dtype)


CASES = {
    "msp": Case(lambda one, other: MSP(one)),
    "maxlogit": Case(lambda one, other: MaxLogit(one)),
    "energy": Case(lambda one, other: Energy(one)),
    "energy, warm": Case(lambda one, other: Energy(one, temperature=2.5)),
    "oe": Case(lambda one, other: OutlierExposureScore(one)),
    "odin": Case(lambda one, other: ODIN(one)),
    "odin, large step": Case(lambda one, other: ODIN(one, temperature=2.0, magnitude=0.02)),
    "odin, no step": Case(lambda one, other: ODIN(one, temperature=10.0, magnitude=0.0)),
    "mahalanobis": Case(lambda one, other: Mahalanobis(one, layers="hidden")),
    "mahalanobis of logits": Case(lambda one, other: Mahalanobis(one, weighting="classes")),
    "mahalanobis, layers": Case(lambda one, other: Mahalanobis(one, layers=BOTH)),
    "mahalanobis, step": Case(lambda one, other: Mahalanobis(one, layers="hidden", magnitude=0.01)),
    "mahalanobis, layers, step": Case(lambda one, other: Mahalanobis(one, layers=BOTH, magnitude=0.01)),
    "mahalanobis, logistic": Case(lambda one, other: Mahalanobis(one, layers=BOTH, combine="logistic")),
    "mahalanobis, magnitudes": Case(lambda one, other: Mahalanobis(one, layers=BOTH, magnitude=[0.02, 0.0])),
    "mahalanobis, logistic, magnitudes": Case(
        lambda one, other: Mahalanobis(one, layers=BOTH, magnitude=[0.01, 0.02], combine="logistic")
    ),
    "gram": Case(lambda one, other: Gram(one, layers="maps")),
    "gram, entries": Case(lambda one, other: Gram(one, layers="maps", entries=True)),
    "gram, layers": Case(lambda one, other: Gram(one, layers=BOTH)),
    "temperature": Case(lambda one, other: Temperature(one)),
    "gmm": Case(lambda one, other: GMM(one, layers="hidden", components=3, floor=1e-4)),
    "gmm, full": Case(lambda one, other: GMM(one, layers="hidden", components=3, covariance="full", floor=1e-3)),
    "gmm, tied, layers": Case(lambda one, other: GMM(one, layers=BOTH, components=3, covariance="tied", floor=1e-4)),
    "gmm, spherical, restarts": Case(lambda one, other: GMM(one, components=3, covariance="spherical", restarts=3)),
    "zheng_hong": Case(lambda one, other: ZhengHong(one, layers="hidden", components=2, floor=1e-4)),
    "zheng_hong of logits": Case(lambda one, other: ZhengHong(one, components=1, covariance="spherical")),
    "zheng_hong, tied, layers": Case(
        lambda one, other: ZhengHong(one, layers=BOTH, components=1, covariance="tied", floor=1e-3)
    ),
    "zheng_hong, full": Case(
        lambda one, other: ZhengHong(one, layers="hidden", components=2, covariance="full", floor=1e-3)
    ),
    "clip": Case(
        lambda one, other: CLIPZeroShot(WordedNet(one), inside=WordedNet.corners, outside=["nothing"], prompt="{}"),
        lambda one, other: WordedNet(one),
    ),
    "mcm": Case(
        lambda one, other: MCM(WordedNet(one), inside=WordedNet.corners, prompt="{}"),
        lambda one, other: WordedNet(one),
    ),
    "rmd": Case(lambda one, other: RelativeMahalanobis(one, layers="hidden")),
    "rmd, classes, layers": Case(lambda one, other: RelativeMahalanobis(one, layers=BOTH, weighting="classes")),
    "ensemble": Case(lambda one, other: ScoreEnsemble([MSP(one), MSP(other)]), lambda one, other: [one, other]),
    "ensemble, mixed": Case(
        lambda one, other: ScoreEnsemble(
            [ODIN(one, magnitude=0.01), Mahalanobis(other, layers="hidden", magnitude=0.01), Energy(one)]
        ),
        lambda one, other: [one, other, one],
    ),
    "ensemble of ensembles": Case(
        lambda one, other: ScoreEnsemble(
            [RelativeMahalanobis(one), ScoreEnsemble([Mahalanobis(one, layers=BOTH, combine="logistic"), MSP(one)])]
        )
    ),
    "autoencoder": Case(lambda one, other: Reconstruction(one, model=NARROW, training=SHORT)),
    "autoencoder, l1": Case(lambda one, other: Reconstruction(one, distance="l1", model=NARROW, training=SHORT)),
    "autoencoder, mahalanobis": Case(
        lambda one, other: Reconstruction(one, distance="mahalanobis", rank=5, model=NARROW, training=SHORT)
    ),
    "collision_residual": Case(
        lambda one, other: CollisionResidual(one, layers="hidden", model={"width": 4}, training=SHORT)
    ),
    "collision_residual, energy, max": Case(
        lambda one, other: CollisionResidual(
            one, layers=BOTH, latent="energy", combine="max", model={"width": 4}, training=SHORT
        )
    ),
    "glow": Case(lambda one, other: GlowLikelihood(one, model=SHALLOW, training=STEEP)),
    "glow, additive": Case(
        lambda one, other: GlowLikelihood(
            one, model={**SHALLOW, "coupling": "additive", "bits": 8}, training={**STEEP, "epochs": 40}
        )
    ),
    "complexity": Case(lambda one, other: InputComplexity(one, model=SHALLOW, training=STEEP)),
    "pixelcnn": Case(
        lambda one, other: PixelCNNLikelihood(
            one,
            model={"filters": 8, "mixtures": 4, "levels": 0},
            training={"epochs": 70, "lr": 0.05, "batch_size": 60, "clip": None, "seed": 1},
        )
    ),
    "vae": Case(lambda one, other: FeatureVAE(one, layers="hidden", model=NARROW_VAE, training=STEEPER)),
    "vae, importance, layers": Case(
        lambda one, other: FeatureVAE(one, layers=BOTH, model={**NARROW_VAE, "importance": True}, training=STEEPER)
    ),
    "maf": Case(lambda one, other: FeatureMAF(one, layers="hidden", model=NARROW_MAF, training=STEEPER)),
    "maf, layers": Case(lambda one, other: FeatureMAF(one, layers=BOTH, model=NARROW_MAF, training=STEEPER)),
    "jem": Case(lambda one, other: JEM(one)),
    "jem, softmax": Case(lambda one, other: JEM(one, score="softmax")),
    "jem, gradient": Case(
        lambda one, other: JEM(nn.Sequential(one, nn.Tanh()), score="gradient"),
        lambda one, other: nn.Sequential(one, nn.Tanh()),
    ),
    "confident": Case(lambda one, other: Confident(one)),
    "ccu": Case(lambda one, other: CCU(one, components=3)),
    "ccu, confidence": Case(lambda one, other: CCU(one, components=3, score="confidence", ridge=1.0, floor=0.05)),
    "deep_ensemble": Case(lambda one, other: DeepEnsemble([one, other]), lambda one, other: [one, other]),
    "expected": Case(lambda one, other: Expected(MSP(one), draws=3)),
    "expected, fitted": Case(
        lambda one, other: Expected(Mahalanobis(one, layers="hidden", magnitude=0.01), draws=2, seed=5)
    ),
}


def two_networks(dtype: torch.dtype = torch.float32) -> Networks:
    return trained_net(0, dtype), trained_net(7, dtype)


LEARNING = {name: case for name, case in CASES.items() if case.unfitted().to_fit()}
OF_NETWORKS = {name: case for name, case in CASES.items() if case.unfitted().card.reads != "pixels"}
LEARNING_OF_NETWORKS = {name: case for name, case in LEARNING.items() if name in OF_NETWORKS}

every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
LABELLED = {
    name: case
    for name, case in LEARNING.items()
    if any(part.card.fit == "labelled inliers" for part in case.unfitted().to_fit())
}
every_labelled = pytest.mark.parametrize("case", LABELLED.values(), ids=LABELLED.keys())
every_learning = pytest.mark.parametrize("case", LEARNING.values(), ids=LEARNING.keys())
every_of_networks = pytest.mark.parametrize("case", OF_NETWORKS.values(), ids=OF_NETWORKS.keys())
every_learning_of_networks = pytest.mark.parametrize(
    "case", LEARNING_OF_NETWORKS.values(), ids=LEARNING_OF_NETWORKS.keys()
)


def learnt(detector: Detector, dtype: torch.dtype = torch.float32, inliers: Images | None = None) -> Detector:
    """The detector, fitted; held-out inliers and outliers are there for those that ask."""
    return detector.fit(
        squares(60, 0, dtype) if inliers is None else inliers,
        held_out=squares(30, 1, dtype)[0],
        outliers=blank(30, 2, dtype),
    )


def state(detector: Detector) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in detector.state_dict().items() if ".model." not in key}


def assert_same_state(first: Detector, second: Detector) -> None:
    assert state(first).keys() == state(second).keys()
    for key, tensor in state(first).items():
        assert torch.equal(tensor, state(second)[key]), key


# The registry


def test_every_registered_detector_is_among_the_cases() -> None:
    assert {case.unfitted().name for case in CASES.values()} == set(DETECTORS)


def test_the_registry_holds_what_the_papers_attack() -> None:
    assert set(DETECTORS) >= {
        "msp", "maxlogit", "energy", "oe", "odin", "mahalanobis", "rmd", "ensemble", "deep_ensemble"
    }  # fmt: skip


@every
def test_a_name_leads_to_its_class_and_a_spec_to_the_detector(case: Case) -> None:
    networks = two_networks()
    detector = case.unfitted(networks)
    again = build(detector.spec, case.encoders(*networks))
    assert type(again) is DETECTORS[detector.name] is type(detector)
    assert again.spec == detector.spec


def test_an_unknown_name_is_an_error_that_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown detector 'mahalonobis'; did you mean 'mahalanobis'"):
        build({"name": "mahalonobis", "options": {}}, trained_net())


@pytest.mark.parametrize("name", list(DETECTORS))
def test_the_card_is_filled(name: str) -> None:
    card, allowed = DETECTORS[name].card, get_type_hints(Card)
    assert str(card.year) in card.paper
    assert len(card.paper) > len(str(card.year))
    assert card.reads in get_args(allowed["reads"])
    assert card.fit in get_args(allowed["fit"])
    assert card.gradient in get_args(allowed["gradient"])


@pytest.mark.parametrize("name", ["msp", "maxlogit", "oe"])
def test_an_option_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match="temperature"):
        DETECTORS[name](trained_net(), temperature=2.0)


# The score


@every
def test_the_gradient_is_that_of_finite_differences(case: Case) -> None:
    detector = case.fitted(dtype=torch.float64)
    x = torch.cat([squares(5, 3, torch.float64)[0], blank(4, 4, torch.float64)]).requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    generator = torch.Generator().manual_seed(5)
    step = 1e-6
    for _ in range(3):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            measured = (detector(x + step * direction) - detector(x - step * direction)) / (2 * step)
        expected = (gradient * direction).flatten(1).sum(dim=1)
        assert expected[5:].abs().min() > 0
        torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@every
def test_an_image_without_any_class_scores_higher_than_every_inlier(case: Case) -> None:
    detector = case.fitted()
    assert detector.scores(blank(20, 6)).min() > detector.scores(squares(40, 7)[0]).max()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_is_one_score_per_image_in_its_dtype_whatever_the_networks(case: Case, dtype: torch.dtype) -> None:
    detector = case.fitted()
    x = squares(5, 3, dtype)[0]
    with torch.no_grad():
        for scores in (detector(x), detector.scores(x)):
            assert scores.shape == (5,)
            assert scores.dtype == dtype


@every
def test_the_score_is_what_judge_makes_of_what_encode_gives(case: Case) -> None:
    detector = case.fitted()
    x = squares(5, 3)[0]
    with torch.no_grad():
        assert torch.equal(detector(x), detector.judge(detector.encode(x)))


@every
def test_a_detector_knows_whether_it_changes_images_first(case: Case) -> None:
    detector, seen = case.fitted(), []
    for module in detector.modules():
        if isinstance(module, SmallNet):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = squares(4, 3)[0]
    detector.scores(x)
    assert detector.preprocesses == any(not torch.equal(images, x) for images in seen)


@every
def test_an_image_has_one_score_whatever_is_beside_it(case: Case) -> None:
    detector = case.fitted(dtype=torch.float64)
    x = torch.cat([squares(6, 3, torch.float64)[0], blank(5, 4, torch.float64)])
    scores = detector.scores(x)
    alone = torch.cat([detector.scores(image[None]) for image in x])
    torch.testing.assert_close(alone, scores, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(detector.scores(x, batch_size=4), scores, rtol=1e-9, atol=1e-12)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(detector.scores(x[order]), scores[order], rtol=1e-9, atol=1e-12)


@every
def test_no_score_has_a_gradient_at_another_image(case: Case) -> None:
    detector = case.fitted()
    x = blank(4, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x)[1], x)
    assert gradient[1].abs().max() > 0
    assert not gradient[[0, 2, 3]].any()


@every
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scoring_without_gradients_gives_the_same_scores(
    case: Case, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    detector = case.fitted()
    x = squares(5, 3)[0]
    wanted = detector(x.clone().requires_grad_())
    assert wanted.requires_grad
    with mode():
        scores = detector(x.clone())
    assert not scores.requires_grad
    assert torch.equal(scores, wanted)


@every_learning
def test_a_detector_fitted_in_inference_mode_can_still_be_attacked(case: Case) -> None:
    detector = case.unfitted()
    with torch.inference_mode():
        learnt(detector)
    x = blank(4, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    assert gradient.flatten(1).any(dim=1).all()


# Leaving the network alone


@every
def test_networks_in_train_mode_stay_there_and_keep_all_they_had(case: Case) -> None:
    networks = two_networks()
    for network in networks:
        network.hidden.append(nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5)))
        network.train()
        network.hidden[-1][1].eval()
    before = deepcopy([network.state_dict() for network in networks])
    modes = [[module.training for module in network.modules()] for network in networks]
    detector = case.fitted(networks)
    x = squares(6, 3)[0].requires_grad_()
    torch.autograd.grad(detector(x).sum(), x)
    first = detector.eval().scores(x)
    assert torch.equal(first, detector.train().scores(x))
    assert [[module.training for module in network.modules()] for network in networks] == modes
    assert all(parameter.grad is None for network in networks for parameter in network.parameters())
    for network, old in zip(networks, before, strict=True):
        for key, tensor in network.state_dict().items():
            assert torch.equal(tensor, old[key]), key


# Fitting


@every
def test_only_detectors_that_learn_need_to_be_fitted(case: Case) -> None:
    assert case.unfitted().fitted == (case not in LEARNING.values())


@every_learning
def test_scoring_before_fitting_is_an_error_that_says_so(case: Case) -> None:
    detector = case.unfitted()
    x = squares(3, 3)[0]
    for score in (detector, detector.scores, detector.calibrate):
        with pytest.raises(ValueError, match=r"is not fitted; call fit\(.*\) before scoring"):
            score(x)


@every_labelled
def test_the_error_before_fitting_names_what_is_needed(case: Case) -> None:
    with pytest.raises(ValueError, match="labelled inliers"):
        case.unfitted()(squares(3, 3)[0])


@every_learning
def test_attacking_before_fitting_is_an_error_that_says_so(case: Case) -> None:
    detector, x = case.unfitted(), squares(3, 3)[0]
    for attack in (
        lambda: admit(detector, x, Linf(0.01), steps=1),
        lambda: evict(detector, x, Linf(0.01), steps=1),
        lambda: score_to(detector, x, 0.0, Linf(0.01), steps=1),
    ):
        with pytest.raises(ValueError, match="is not fitted"):
            attack()


@every
def test_an_attack_is_led_by_the_gradient(case: Case) -> None:
    detector, x = case.fitted(), blank(3, 4)
    found = admit(detector, x, Linf(0.05), steps=5)
    assert (found.score < detector.scores(x)).all()


@every_labelled
@pytest.mark.parametrize("labelled", [(False, False), (True, False)], ids=["no labels", "labels in one batch only"])
def test_missing_labels_are_an_error_that_says_so(case: Case, labelled: tuple[bool, bool]) -> None:
    x, y = squares(12)
    parts = [(x[:6], y[:6]) if labelled[0] else x[:6], (x[6:], y[6:]) if labelled[1] else x[6:]]
    with pytest.raises(ValueError, match=r"fit needs labels: give \(images, labels\)"):
        learnt(case.unfitted(), inliers=parts)


@every_learning
def test_fit_gives_one_state_from_tensors_a_loader_and_batches(case: Case) -> None:
    x, y = squares(60)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    batches = list(zip(x.split(16), y.split(16), strict=True))
    from_loader, from_batches, from_tensors = (
        learnt(case.unfitted(), inliers=data) for data in (loader, batches, (x, y))
    )
    assert_same_state(from_loader, from_batches)
    torch.testing.assert_close(from_loader.scores(x), from_tensors.scores(x), rtol=1e-3, atol=1e-3)


@every_learning
def test_fit_needs_something_to_learn_from(case: Case) -> None:
    with pytest.raises(ValueError, match="no images to learn from"):
        case.unfitted().fit([], held_out=[], outliers=[])


@every_learning
def test_fitting_again_forgets_the_first_time(case: Case) -> None:
    detector = case.unfitted().fit(squares(45, 8), held_out=squares(20, 9)[0], outliers=blank(20, 10))
    assert_same_state(learnt(detector), case.fitted())


@every_learning
def test_a_threshold_does_not_outlive_the_fit_it_was_made_for(case: Case) -> None:
    detector = case.fitted().calibrate(squares(20, 11)[0])
    assert learnt(detector).threshold is None


@every
def test_fit_returns_the_detector_itself(case: Case) -> None:
    detector = case.unfitted()
    assert learnt(detector) is detector
    assert detector.fitted


# Images that are none


@every
def test_images_that_are_none_are_refused_before_any_network_runs(case: Case) -> None:
    detector = case.fitted()
    x = squares(4, 3)[0]
    holed = x.clone()
    holed[2, 0, 1, 1] = torch.nan
    for bad, message in (
        ((x * 255).byte(), "uint8; divide by 255"),
        (x.half(), "float32 or float64, got float16"),
        (x * 255, r"must lie in \[0, 1\].*divide by 255"),
        (x - 0.5, r"must lie in \[0, 1\].*undo the normalisation"),
        (holed, "NaN; found in 1 of 4 images, first at index 2"),
        (x[0], r"shape \(N, C, H, W\), got \(1, 6, 6\)"),
        (x[:0], "at least one image"),
        (x.numpy(), "torch.Tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            detector(bad)
    with pytest.raises(ValueError, match=r"batch 1.*NaN; found in 1 of 2 images, first at index 0"):
        detector.scores(holed, batch_size=2)
    with pytest.raises(ValueError, match="no images to score"):
        detector.scores([])


@every_learning
def test_fit_refuses_images_that_are_none(case: Case) -> None:
    x, y = squares(12)
    with pytest.raises(ValueError, match=r"batch 1.*uint8"):
        case.unfitted().fit([(x, y), ((x * 255).byte(), y)], held_out=x, outliers=x)


# Networks that give NaN


def with_a_white_pixel(count: int, seed: int, place: int) -> Tensor:
    x = squares(count, seed)[0]
    x[place, 0, 5, 5] = 1.0
    return x


@every_of_networks
def test_a_nan_in_the_second_batch_of_scoring_names_it(case: Case) -> None:
    networks = fragile_net(0), fragile_net(7)
    detector = case.fitted(networks)
    x = with_a_white_pixel(12, 3, place=5)
    with pytest.raises(ValueError, match="is NaN, first in batch 1; are the network's weights finite"):
        detector.scores(x, batch_size=4)
    with pytest.raises(ValueError, match="is NaN; are the network's weights finite"):
        detector(x)


@every_learning_of_networks
def test_a_nan_in_the_second_batch_of_fitting_names_it(case: Case) -> None:
    networks = fragile_net(0), fragile_net(7)
    x, y = with_a_white_pixel(12, 3, place=5), squares(12)[1]
    parts = list(zip(x.split(4), y.split(4), strict=True))
    with pytest.raises(ValueError, match="NaN or infinity, first in batch 1"):
        learnt(case.unfitted(networks), inliers=parts)


@every_of_networks
def test_nan_weights_are_an_error_in_the_first_batch(case: Case) -> None:
    networks = two_networks()
    detector = case.fitted(networks)
    for network in networks:
        assert isinstance(network, SmallNet)
        nn.init.constant_(network.maps[0].weight, torch.nan)
    with pytest.raises(ValueError, match="is NaN, first in batch 0"):
        detector.scores(squares(6, 3)[0])
    if case in LEARNING.values():
        with pytest.raises(ValueError, match="NaN or infinity, first in batch 0"):
            learnt(case.unfitted(networks))


# The threshold


@every
@pytest.mark.parametrize("tpr", [0.95, 0.5, 1.0])
def test_calibration_accepts_the_wanted_share_of_inliers_and_no_more_than_it_must(case: Case, tpr: float) -> None:
    detector = case.fitted()
    inliers = squares(41, 11)[0]
    rejected = detector.calibrate(inliers, tpr).predict(inliers)
    assert rejected.dtype == torch.bool
    accepted = int((~rejected).sum())
    assert accepted / 41 >= tpr > (accepted - 1) / 41
    assert detector.predict(blank(9, 12)).all()


@every
def test_tied_inliers_are_accepted_together(case: Case) -> None:
    detector = case.fitted()
    x = squares(5, 3)[0]
    highest = int(detector.scores(x).argmax())
    inliers = torch.cat([x, x[[highest] * 5]]).split(1)  # one by one: the place in a batch may change the last digit
    detector.calibrate(list(inliers), 0.6)
    assert not any(bool(detector.predict(image)) for image in inliers)


@every
def test_predicting_before_calibrating_is_an_error_that_says_so(case: Case) -> None:
    with pytest.raises(ValueError, match=r"has no threshold yet; call calibrate\(inliers, tpr=0.95\) first"):
        case.fitted().predict(squares(3, 3)[0])


@every
@pytest.mark.parametrize("tpr", [0.0, 1.5, -0.1])
def test_a_share_of_inliers_that_is_none_is_refused(case: Case, tpr: float) -> None:
    with pytest.raises(ValueError, match=r"tpr must lie in \(0, 1\]"):
        case.fitted().calibrate(squares(9, 3)[0], tpr)


# Files


@every
def test_a_loaded_detector_scores_and_predicts_bit_for_bit_alike(case: Case, tmp_path: Path) -> None:
    networks = two_networks()
    detector = case.fitted(networks).calibrate(squares(20, 11)[0], 0.9)
    x = torch.cat([squares(8, 3)[0], blank(4, 4)])
    detector.save(tmp_path / "detector.safetensors")
    again = type(detector).load(tmp_path / "detector.safetensors", case.encoders(*networks))
    assert torch.equal(again.scores(x), detector.scores(x))
    assert torch.equal(again.threshold, detector.threshold)
    assert again.threshold.dtype == detector.threshold.dtype
    assert torch.equal(again.predict(x), detector.predict(x))
    assert again.spec == detector.spec
    assert_same_state(again, detector)


@every_of_networks
def test_the_file_holds_no_weights_of_the_network(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    case.fitted().save(path)
    others = trained_net(3), trained_net(9)
    x = squares(8, 3)[0]
    loaded = Detector.load(path, case.encoders(*others))
    detector = case.fitted()
    assert loaded.spec == detector.spec
    assert not torch.allclose(loaded.scores(x), detector.scores(x))


@every
def test_an_uncalibrated_detector_is_loaded_uncalibrated(case: Case, tmp_path: Path) -> None:
    networks = two_networks()
    case.fitted(networks).save(tmp_path / "detector.safetensors")
    loaded = Detector.load(tmp_path / "detector.safetensors", case.encoders(*networks))
    assert loaded.fitted
    assert loaded.threshold is None


def test_an_unfitted_detector_is_loaded_unfitted(tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    Mahalanobis(trained_net(), layers="hidden", magnitude=[0.01, 0.02]).save(path)
    loaded = Mahalanobis.load(path, trained_net())
    assert not loaded.fitted
    assert loaded.magnitudes == [0.01, 0.02]


def test_loading_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(ValueError, match=f"there is no saved detector at {path}"):
            Detector.load(path, trained_net())


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_loading_a_damaged_file_is_an_error_that_names_it(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    Mahalanobis(trained_net()).fit(squares(60)).save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{path} is not a safetensors file, or is damaged"):
        Mahalanobis.load(path, trained_net())


def test_loading_another_detector_is_an_error_that_names_both(tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    Energy(trained_net(), temperature=3.0).save(path)
    with pytest.raises(ValueError, match=f"{path} holds a Energy, not a ODIN"):
        ODIN.load(path, trained_net())
    assert isinstance(Detector.load(path, trained_net()), Energy)


def test_tensors_that_no_detector_saved_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=f"{path} holds tensors, but no saved detector"):
        Detector.load(path, trained_net())
    save_file({"weight": torch.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="no saved detector"):
        Detector.load(path, trained_net())


def test_a_tensor_that_the_detector_does_not_know_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    save_file({"weight": torch.zeros(3)}, path, metadata={"gatecrash": '{"name": "msp", "options": {}}'})
    with pytest.raises(ValueError, match="the saved state has 'weight', which MSP does not know"):
        Detector.load(path, trained_net())


@pytest.mark.parametrize("spec", ["{}", "[]", '{"name": "energy", "options": {"warmth": 2}}', '{"name": "msp"}'])
def test_a_spec_that_does_not_fit_is_an_error_that_names_the_file(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    save_file({"empty": torch.zeros(1)}, path, metadata={"gatecrash": spec})
    with pytest.raises(ValueError, match=str(path)):
        Detector.load(path, trained_net())


@pytest.mark.parametrize("kind", [Mahalanobis, RelativeMahalanobis])
@pytest.mark.parametrize("layer", [None, "maps", ["hidden"], ["maps", "hidden", "head"]], ids=str)
def test_the_tapped_layers_are_in_the_file(kind: type[Detector], layer: str | list[str] | None, tmp_path: Path) -> None:
    path, network = tmp_path / "detector.safetensors", trained_net()
    detector = kind(Encoder(network, BOTH)).fit(squares(60))
    detector.save(path)
    x = squares(5, 3)[0]
    assert torch.equal(kind.load(path, Encoder(network, layer)).scores(x), detector.scores(x))


def test_a_save_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    MSP(trained_net()).save(path)
    before = path.read_bytes()
    broken = MSP(trained_net())
    broken.options["odd"] = object()
    with pytest.raises(TypeError, match="not JSON serializable"):
        broken.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@every_learning
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_leaves_what_was_fitted_alone(case: Case, half: torch.dtype) -> None:
    detector = case.fitted()
    before = {key: tensor.clone() for key, tensor in state(detector).items()}
    detector.to(half)
    for key, tensor in state(detector).items():
        assert torch.equal(tensor, before[key]), key
        assert tensor.dtype == before[key].dtype


def test_a_detector_made_in_inference_mode_has_a_gradient_later() -> None:
    net = trained_net(0)
    with torch.inference_mode():
        detector = MSP(Encoder(net, mean=(0.5,), std=(0.2,)))
    x = blank(2, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    assert gradient.abs().sum() > 0
