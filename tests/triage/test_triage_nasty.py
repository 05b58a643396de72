"""What a careless or malicious user gives to `gate.triage`: one line, or results that hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_triage import column, detectors_of, mislabelled, row_of, small_triage
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.bundle import Bundle
from gatecrash.data import ImageSet
from gatecrash.detectors import GMM, MCM, MSP, Card, Detector, Energy, Mahalanobis, ScoreEnsemble, Temperature
from gatecrash.encoder import Encoder
from gatecrash.protocols import Latent, leaves
from small_clip import WordedNet
from small_models import Affine, blank, fragile_net, one_thread, squares, trained_net  # noqa: F401


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatecrash.report.write_triage_report", lambda bundle: bundle.report)


class Scored(Detector):
    """The score of an image is a function of its mean pixel; the network is there for the classes."""

    card = Card(paper="none", year=2000, reads="pixels")

    def __init__(self, network: nn.Module, score: Any) -> None:
        super().__init__(Encoder(network))
        self.score = score

    def encode(self, x: Tensor) -> Latent:
        return x.flatten(1)

    def judge(self, z: Latent) -> Tensor:
        found: Tensor = self.score(leaves(z)[0].mean(dim=1))
        return found


def msp(**changes: Any) -> dict[str, Detector]:
    return {"msp": MSP(Encoder(trained_net()))}


def relabelled(label: int, place: int = 3) -> tuple[Tensor, Tensor]:
    images, labels = mislabelled()
    labels[place] = label
    return images, labels


def poisoned() -> nn.Module:
    network = trained_net()
    with torch.no_grad():
        network.head.bias[1] = math.nan
    return network


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inliers": relabelled(3)}, "inliers: labels must be from 0 to 2, the network's classes, got 0 to 3"),
        ({"inliers": relabelled(-1)}, "inliers: labels must be from 0 to 2, the network's classes, got -1 to 2"),
        ({"held_out": relabelled(7)}, "held_out: labels must be from 0 to 2, the network's classes, got 0 to 7"),
        ({"fit": relabelled(9)}, "fit: labels must be from 0 to 2, the network's classes, got 0 to 9"),
        ({"inliers": mislabelled()[0]}, "inliers must have labels, and inliers has none"),
        ({"held_out": mislabelled()[0]}, "held_out must have labels, and held_out has none"),
        ({"fit": squares(9)[0]}, "distance needs labelled inliers to fit on, and fit has no labels"),
        ({"inliers": (mislabelled()[0], mislabelled()[1].float())}, "labels must be whole numbers"),
        ({"inliers": (mislabelled()[0] * 255, mislabelled()[1])}, r"must lie in \[0, 1\]"),
        ({"inliers": (mislabelled()[0][:0], mislabelled()[1][:0])}, "must hold at least one image"),
        ({"inliers": ImageSet(mislabelled()[0].byte(), mislabelled()[1], "x")}, "got uint8; divide by 255"),
        ({"outliers": {"wide": torch.rand(4, 1, 6, 7)}}, r"outliers.wide has images of shape \(1, 6, 7\)"),
        ({"outliers": {"held_out": blank(3)}}, "a set cannot be called 'held_out'"),
        ({"outliers": {"inliers": blank(3)}}, "a set cannot be called 'inliers'"),
        ({"outliers": {"bim L2 0.8": blank(3)}}, "a set cannot be called 'bim L2 0.8'"),
        ({"fit": None}, "repeats fit the detectors again: give fit"),
        ({"fit": None, "repeats": 1}, "GMM is not fitted"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"folds": 1}, "folds must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"repeats": 2.5}, "repeats must be a whole number, got 2.5"),
        ({"repeats": "2"}, "repeats must be a whole number, got '2'"),
        ({"folds": 2.5}, "folds must be a whole number, got 2.5"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**62}, r"seed must be less than 2\^62"),
        ({"batch_size": 1.5}, "batch_size must be a whole number, got 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"fooled_only": "no"}, "fooled_only must be True or False, got 'no'"),
        ({"resume": 1}, "resume must be True or False, got 1"),
        ({"out": None}, "out must be the path of the bundle's folder, got None"),
        ({"out": ""}, "out must be the path of the bundle's folder, got ''"),
        ({"outliers": [blank(3)]}, 'outliers must be sets of images by name, {"noise": images}, got a list'),
        ({"outliers": blank(3)}, "outliers must be sets of images by name, .*, got a Tensor"),
        ({"outliers": {3: blank(3)}}, "outliers must be sets of images by name"),
        ({"classifier": trained_net()}, "classifier must be an Encoder, got a SmallNet; wrap it"),
        ({"classifier": "resnet18"}, "classifier must be an Encoder, got 'resnet18'"),
        ({"detectors": "gmm"}, r"detectors must be detectors such as MSP\(encoder\), got 'gmm'"),
        ({"detectors": ["gmm"]}, r"detectors must be detectors such as MSP\(encoder\), got 'gmm'"),
        ({"detectors": {"a": "gmm"}}, r"detectors must be detectors such as MSP\(encoder\), got 'gmm'"),
        ({"detectors": trained_net()}, r"detectors must be detectors such as MSP\(encoder\), got a SmallNet"),
        ({"detectors": {3: MSP(trained_net())}}, "detectors: the name of one must be a string, got 3"),
        ({"adversarial": "fgsm"}, "adversarial must be a list of attacks such as .*, got 'fgsm'"),
        ({"adversarial": ["fgsm"]}, "adversarial must be a list of attacks such as .*, and one of it is 'fgsm'"),
        ({"adversarial": None}, "adversarial must be a list of attacks such as .*, got None"),
        ({"adversarial": [{"name": "fgsm", "epz": 0.1}]}, "adversarial: unknown key 'epz'; did you mean 'eps'"),
        ({"purify": [0.1]}, "purify must be True or a grid such as .*, got a list"),
        ({"purify": "yes"}, "purify must be True or a grid such as .*, got 'yes'"),
        ({"purify": True, "detectors": msp()}, "purify needs a detector of features: name one, or add a GMM"),
        ({"adversarial": {"name": "fgsm", "eps": 0.1}}, "adversarial must be a list of attacks"),
        ({"adversarial": [{"name": "fgsm"}]}, "adversarial: eps is missing"),
        ({"adversarial": [{"name": "fgsm", "eps": 0.1, "spets": 3}]}, "adversarial: unknown key 'spets'.*'steps'"),
        ({"adversarial": [{"name": "fgsm", "eps": [0.1, 0.1000000001]}]}, "two attacks are called 'fgsm 0.1'"),
        ({"purify": {"stps": 3}}, "purify: unknown key 'stps'; did you mean 'steps'"),
        ({"purify": {"detectors": ["nobody"]}}, "purify.detectors: 'nobody' is none of GMM, distance, msp"),
        ({"purify": {}, "detectors": msp()}, "purify needs a detector of features: name one, or add a GMM"),
        ({"detectors": []}, "there is no detector"),
        ({"detectors": {"one": MSP(Encoder(nn.Sequential(nn.Flatten(), nn.Linear(36, 1))))}}, r"logits of shape \(N, classes\), got \(2, 1\)"),
        ({"detectors": {"nan": MSP(Encoder(poisoned()))}}, "output has NaN or infinity; are its weights finite"),
        ({"detectors": {"it": GMM(Encoder(trained_net(), "hidden"), components=91)}}, "91 components need at least"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    detectors = changes.get("detectors", detectors_of())
    options = {name: value for name, value in changes.items() if name != "detectors"}
    given: dict[str, Any] = {
        "inliers": mislabelled(), "fit": squares(90, seed=2), "held_out": mislabelled(40, seed=3), "repeats": 2,
        "adversarial": [{"name": "fgsm", "eps": 0.1}, {"name": "bim", "norm": "l2", "eps": 0.8}],
    }  # fmt: skip
    with pytest.raises(ValueError, match=message) as caught:
        gate.triage(detectors, **{"out": tmp_path / "run"} | given | options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_clip_is_no_classifier(tmp_path: Path) -> None:
    network = WordedNet(trained_net())
    detector = MCM(Encoder(network), inside=network.corners, prompt="{}")
    with pytest.raises(ValueError, match=r"^a triage needs a classifier, and a CLIP gives embeddings of images, not"):
        gate.triage(detector, mislabelled(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    beside = gate.triage(detector, mislabelled(), classifier=Encoder(network.network), out=tmp_path / "run")
    assert row_of(beside, "mcm", "mistakes")["auroc"] > 0


@pytest.mark.usefixtures("no_report")
def test_purification_is_switched_on_and_off_as_in_a_plan(tmp_path: Path) -> None:
    def purified(name: str, purify: object) -> list[Any]:
        return list(small_triage(tmp_path / name, adversarial=[], repeats=1, purify=purify)[0]["purified"])

    assert purified("on", True) == purified("grid", {}) != []
    assert purified("off", False) == []


def test_logits_that_turn_to_nan_for_some_images_are_noticed_though_no_detector_reads_them(tmp_path: Path) -> None:
    x, y = mislabelled()
    x[50] = 1.0  # a white image, which the rehearsal does not see
    detector = Scored(fragile_net(), lambda mean: mean)
    with pytest.raises(ValueError, match="the network's output has NaN; are its weights finite"):
        gate.triage(detector, (x, y), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_attacked_is_kept_when_a_later_piece_fails(tmp_path: Path) -> None:
    detector = Scored(trained_net(), lambda mean: mean.masked_fill(mean > 0.45, math.nan))
    attacks = [{"name": "fgsm", "eps": [0.01, 0.9]}]
    with pytest.raises(ValueError, match="the score of Scored is NaN, first in batch 0"):
        gate.triage(detector, mislabelled(), adversarial=attacks, out=tmp_path / "run", batch_size=60)
    assert len(list((tmp_path / "run" / "work").glob("[!.]*.safetensors"))) == 2  # clean, and the small radius


@pytest.mark.parametrize("every", [1, 1000])
def test_images_that_are_all_wrong_or_nearly_all_right_give_what_can_be_said(tmp_path: Path, every: int) -> None:
    inliers = mislabelled(30, every=every) if every == 1 else squares(30, seed=1)
    results, bundle = small_triage(tmp_path / "run", inliers=inliers, held_out=None, repeats=1)
    assert results["accuracy"]["inliers"] == (0.0 if every == 1 else 1.0)
    assert {row["task"] for row in results["rows"]} == {"adversarial", "outliers"}
    assert all("threshold" not in row for row in results["rows"])
    assert results["checks"][0]["status"] == "fail" and bundle.report.is_file()


def test_one_image_is_enough_for_a_run(tmp_path: Path) -> None:
    one = tuple(part[1:2] for part in mislabelled())
    results, bundle = small_triage(
        tmp_path / "run", inliers=one, repeats=1, outliers={"one": blank(1)}, purify={"steps": 1}
    )
    assert [row["n_out"] for row in results["rows"]] == [1] * 12 and bundle.report.is_file()


def test_validation_images_without_a_mistake_give_no_threshold(tmp_path: Path) -> None:
    results, bundle = small_triage(tmp_path / "run", held_out=squares(40, seed=3), repeats=1)
    assert all("threshold" not in row and "rejected_out" not in row for row in results["rows"])
    assert row_of(results, "GMM", "mistakes")["p"] < 0.2 and bundle.report.is_file()


def test_scores_that_are_all_equal_say_nothing_and_break_nothing(tmp_path: Path) -> None:
    detector = Scored(trained_net(), lambda mean: torch.full_like(mean, -1e20))
    results = gate.triage({"flat": detector}, mislabelled(), out=tmp_path / "run", held_out=mislabelled(40, seed=3))
    row = row_of(results, "flat", "mistakes")
    assert (row["auroc"], row["p"], row["u"]) == (0.5, 1.0, 45 * 15 / 2)
    assert (row["precision"], row["recall"], row["rejected_in"]) == (0.25, 1.0, 1.0)


def test_infinite_scores_are_ranked_and_written(tmp_path: Path) -> None:
    images, labels = mislabelled()
    images[::4] = images[::4] * 0.5 + 0.5  # the mistakes are brighter
    network = trained_net()
    right = network(images).argmax(dim=1) == labels
    limit = float(images.mean(dim=(1, 2, 3))[right].max())
    detector = Scored(network, lambda mean: torch.where(mean > limit, math.inf, -math.inf))
    results = gate.triage({"it": detector}, (images, labels), out=tmp_path / "run")
    row = row_of(results, "it", "mistakes")
    assert math.isfinite(row["threshold"]) and row["rejected_in"] == 0.0
    assert row["rejected_out"] == row["recall"] > 0
    assert Bundle(tmp_path / "run").triage() == results


def test_labels_of_any_whole_type_and_images_of_both_kinds_will_do(tmp_path: Path, no_report: None) -> None:
    x, y = mislabelled()
    plain, _ = small_triage(tmp_path / "plain", msp(), repeats=1)
    for number, (images, labels) in enumerate([(x, y.int()), (x, y.to(torch.uint8)), (x.double(), y)]):
        results, _ = small_triage(tmp_path / str(number), msp(), repeats=1, inliers=(images, labels))
        assert results["accuracy"]["inliers"] == plain["accuracy"]["inliers"]
        assert row_of(results, "msp", "mistakes")["auroc"] == pytest.approx(row_of(plain, "msp", "mistakes")["auroc"])


def test_detectors_are_told_apart_whatever_they_are_called(tmp_path: Path, no_report: None) -> None:
    encoder = Encoder(trained_net())
    detectors = {
        "0.a": MSP(encoder),
        "a": Energy(encoder),
        "a | 0.1 | 0.0": MSP(encoder),
        "predictions": Energy(encoder),
    }
    _, bundle = small_triage(tmp_path / "run", detectors, repeats=1, outliers={"predictions": blank(5), "a": blank(6)})
    x = mislabelled()[0]
    for title, detector in detectors.items():
        scores = column(bundle, "score", detector=title, set="inliers")
        assert torch.equal(scores.float(), detector.scores(x, 25))
    assert len(column(bundle, "score", detector="a", set="predictions")) == 5
    assert len(column(bundle, "score", detector="a", set="a")) == 6


def test_temperature_learns_from_the_validation_images(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    detector = Temperature(Encoder(network))
    small_triage(tmp_path / "run", {"t": detector}, repeats=1, adversarial=[])
    alone = Temperature(Encoder(network)).fit(squares(90, seed=2), held_out=mislabelled(40, seed=3))
    assert float(detector.temperature) == float(alone.temperature) != 1.0


def test_options_that_need_outliers_get_the_known_ones(tmp_path: Path, no_report: None) -> None:
    features = Encoder(trained_net(), "hidden")
    detector = {"it": Mahalanobis(features, combine="logistic")}
    with pytest.raises(ValueError, match="needs held-out inliers and outliers"):
        small_triage(tmp_path / "none", detector, adversarial=[])
    assert not (tmp_path / "none").exists()
    _, bundle = small_triage(tmp_path / "run", detector, adversarial=[], fit_outliers=blank(20, seed=77))
    alone = Mahalanobis(features, combine="logistic").fit(
        squares(90, seed=2), held_out=mislabelled(40, seed=3), outliers=blank(20, seed=77)
    )  # fmt: skip
    assert torch.equal(column(bundle, "score", set="blank").float(), alone.scores(blank(15), 25))


def test_an_ensemble_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report: None) -> None:
    features = Encoder(trained_net(), "hidden")

    def ensemble() -> dict[str, Detector]:
        return {"both": ScoreEnsemble([GMM(features, components=3, steps=2), Mahalanobis(features)])}

    straight, _ = small_triage(tmp_path / "straight", ensemble(), adversarial=[])
    with monkeypatch.context() as patch:
        from gatecrash.triage import run

        patch.setattr(run, "score_set", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            small_triage(tmp_path / "run", ensemble(), adversarial=[])
    assert len(list((tmp_path / "run" / "work").glob("[!.]*.safetensors"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr(run, "fit_all", lambda *arguments, **options: pytest.fail("fitted again"))
        resumed, _ = small_triage(tmp_path / "run", ensemble(), adversarial=[], resume=True)
    assert resumed["rows"] == straight["rows"]


def test_a_network_without_an_encoder_is_no_classifier(tmp_path: Path) -> None:
    class Bare(Detector):
        card = Card(paper="none", year=2000, reads="pixels")

        def encode(self, x: Tensor) -> Latent:
            return x

        def judge(self, z: Latent) -> Tensor:
            return leaves(z)[0].flatten(1).mean(dim=1)

    with pytest.raises(ValueError, match="no detector has an Encoder, so there is no classifier"):
        gate.triage(Bare(None), mislabelled(), out=tmp_path / "run")
    results = gate.triage(Bare(None), mislabelled(), out=tmp_path / "run", classifier=Encoder(trained_net()))
    assert results["accuracy"] == {"inliers": 0.75}
