"""A triage end to end in Python: its numbers against scipy and scikit-learn, its images, its repeats, and one pass."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from sklearn.metrics import average_precision_score, roc_auc_score
from small_audit import Counted
from small_triage import BIM, FGSM, column, detectors_of, mislabelled, row_of, small_triage

import gatecrash as gate
from gatecrash.bundle import TRIAGE_SAMPLES, Bundle
from gatecrash.detectors import (
    GMM,
    MSP,
    Card,
    Detector,
    FeatureMAF,
    FeatureVAE,
    Mahalanobis,
    PixelCNNLikelihood,
    ScoreEnsemble,
    Temperature,
    ZhengHong,
    fit_all,
)
from gatecrash.detectors.learned import Learned
from gatecrash.encoder import Encoder
from gatecrash.features import FIRST
from gatecrash.metrics import detection_error, fpr_at_tpr
from gatecrash.triage import run as triage_run
from gatecrash.triage.threshold import choose_threshold
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

TITLES = ("fgsm 0.1", "fgsm 64/255", "bim L2 0.8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Bundle]:
    return small_triage(tmp_path_factory.mktemp("triage") / "run", purify={"steps": 2})


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report takes most of the time of a small triage, and has tests of its own."""
    monkeypatch.setattr("gatecrash.report.write_triage_report", lambda bundle: bundle.report)


def sides(bundle: Bundle, detector: str, against: str, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    """The scores in and out of a row, from the samples alone."""
    about = {"detector": detector, "repeat": repeat}
    inside = column(bundle, "score", **about, set="inliers").numpy()
    if against == "mistakes":
        right = column(bundle, "predicted", **about, set="inliers") == column(bundle, "label", **about, set="inliers")
        return inside[right.numpy()], inside[~right.numpy()]
    return inside, column(bundle, "score", **about, set=against).numpy()


# Numbers


def test_the_bundle_holds_what_an_audits_does(finished: tuple[Any, Bundle]) -> None:
    results, bundle = finished
    names = {path.name for path in bundle.folder.iterdir()}
    assert names == {"plan.yaml", "results.json", "samples.parquet", "report.html", "manifest.json"}
    assert json.loads((bundle.folder / "results.json").read_text()) == results == bundle.triage()
    assert bundle.samples().schema == TRIAGE_SAMPLES
    assert results["manifest"] == bundle.manifest()
    with pytest.raises(ValueError, match="another kind of run: triage instead of audit"):
        bundle.results()


def test_there_is_a_row_for_every_detector_and_task(finished: tuple[Any, Bundle]) -> None:
    keys = [(row["task"], row["against"], row["detector"], row["norm"], row["eps"]) for row in finished[0]["rows"]]
    tasks = [
        ("mistakes", "mistakes", None, None),
        ("adversarial", "fgsm 0.1", "linf", 0.1),
        ("adversarial", "fgsm 64/255", "linf", 64 / 255),
        ("adversarial", "bim L2 0.8", "l2", 0.8),
        ("outliers", "blank", None, None),
    ]
    assert keys == [(t, a, d, norm, eps) for t, a, norm, eps in tasks for d in ("GMM", "distance", "msp")]


def test_the_numbers_are_those_of_scipy_and_scikit_learn(finished: tuple[Any, Bundle]) -> None:
    results, bundle = finished
    for row in results["rows"]:
        assert len(row["per_repeat"]) == row["repeats"] == 2
        for repeat, numbers in enumerate(row["per_repeat"]):
            inside, outside = sides(bundle, row["detector"], row["against"], repeat if row["detector"] == "GMM" else 0)
            assert (row["n_in"], row["n_out"]) == (len(inside), len(outside))
            scores, out = np.concatenate([inside, outside]), np.r_[np.zeros(len(inside)), np.ones(len(outside))]
            assert numbers["auroc"] == pytest.approx(roc_auc_score(out, scores), abs=1e-12)
            assert numbers["aupr_out"] == pytest.approx(average_precision_score(out, scores), abs=1e-9)
            assert numbers["aupr_in"] == pytest.approx(average_precision_score(1 - out, -scores), abs=1e-9)
            pair = torch.tensor(inside), torch.tensor(outside)
            assert numbers["fpr95"] == fpr_at_tpr(*pair) and numbers["detection_error"] == detection_error(*pair)
            if row["task"] == "mistakes":
                test = mannwhitneyu(inside, outside, method="asymptotic")
                assert numbers["u"] == min(test.statistic, len(inside) * len(outside) - test.statistic)
                assert numbers["p"] == pytest.approx(test.pvalue, rel=1e-9)
            else:
                assert "u" not in numbers and "p" not in numbers


class Backwards(MSP):
    """The opposite of what it should say."""

    def judge(self, z: Any) -> torch.Tensor:
        return -super().judge(z)


def test_the_smaller_of_the_two_statistics_is_given(tmp_path: Path, no_report: None) -> None:
    encoder = Encoder(trained_net())
    results = gate.triage({"a": MSP(encoder), "b": Backwards(encoder)}, mislabelled(), out=tmp_path / "run")
    there, back = row_of(results, "a", "mistakes"), row_of(results, "b", "mistakes")
    assert there["auroc"] == pytest.approx(1 - back["auroc"]) != pytest.approx(0.5)
    assert there["u"] == back["u"] < 45 * 15 / 2
    assert there["p"] == pytest.approx(back["p"])


def test_the_threshold_comes_from_the_validation_images_and_is_applied_to_the_rest(finished: Any) -> None:
    results, bundle = finished
    for row in results["rows"]:
        for repeat, numbers in enumerate(row["per_repeat"]):
            about = {"detector": row["detector"], "repeat": repeat if row["detector"] == "GMM" else 0}
            held = {name: column(bundle, name, **about, set="held_out") for name in ("score", "predicted", "label")}
            chosen = choose_threshold(held["score"], held["predicted"] != held["label"], 5, 0)
            inside, outside = sides(bundle, row["detector"], row["against"], about["repeat"])
            assert numbers["threshold"] == chosen.value
            assert numbers["rejected_in"] == pytest.approx((inside > chosen.value).mean())
            assert numbers["rejected_out"] == pytest.approx((outside > chosen.value).mean())
            if row["task"] == "mistakes":
                above = (inside > chosen.value).sum() + (outside > chosen.value).sum()
                assert numbers["precision"] == pytest.approx((outside > chosen.value).sum() / above)
                assert numbers["recall"] == numbers["rejected_out"]
                assert numbers["validated_precision"] == chosen.validated.precision
                assert numbers["validated_recall"] == chosen.validated.recall


def test_means_and_deviations_are_those_of_the_repeats(finished: tuple[Any, Bundle]) -> None:
    for row in finished[0]["rows"]:
        for name in row["per_repeat"][0]:
            first, second = (numbers[name] for numbers in row["per_repeat"])
            assert row[name] == pytest.approx((first + second) / 2, rel=1e-12)
            if name not in ("u", "p"):
                assert row[f"{name}_std"] == pytest.approx(abs(first - second) / 2**0.5, abs=1e-12)
    assert row_of(finished[0], "GMM", "mistakes")["auroc_std"] > 0


def test_of_p_the_median_is_given(tmp_path: Path, no_report: None) -> None:
    results, _ = small_triage(tmp_path / "run", {"GMM": detectors_of()["GMM"]}, repeats=3, adversarial=[])
    row = row_of(results, "GMM", "mistakes")
    values = [numbers["p"] for numbers in row["per_repeat"]]
    assert row["p"] == statistics.median(values)
    assert len(set(values)) == 3
    assert row["auroc_std"] == pytest.approx(np.std([n["auroc"] for n in row["per_repeat"]], ddof=1))


def test_the_accuracies_are_counted(finished: tuple[Any, Bundle]) -> None:
    results, bundle = finished
    assert set(results["accuracy"]) == {"inliers", "held_out", *TITLES}
    assert results["accuracy"]["inliers"] == results["accuracy"]["held_out"] == 0.75  # every fourth label is wrong
    for name, accuracy in results["accuracy"].items():
        about = {"detector": "msp", "set": name}
        same = column(bundle, "predicted", **about) == column(bundle, "label", **about)
        assert accuracy == pytest.approx(float(same.double().mean()), abs=1e-12)
    for title in TITLES:
        assert row_of(results, "msp", title)["accuracy"] == results["accuracy"][title]


def test_labels_of_outliers_are_unknown_and_predictions_are_the_classifiers(finished: tuple[Any, Bundle]) -> None:
    _, bundle = finished
    samples = bundle.samples().to_pylist()
    assert {row["label"] for row in samples if row["set"] == "blank"} == {None}
    roles = {(row["set"], row["role"]) for row in samples}
    assert roles == {("inliers", "in"), ("held_out", "held_out"), ("blank", "out")} | {
        (t, "adversarial") for t in TITLES
    }
    predicted = trained_net()(blank(15)).argmax(dim=1)
    assert torch.equal(column(bundle, "predicted", detector="msp", set="blank"), predicted)


# Adversarial images


class Seen(Detector):
    """Keeps the images that it is asked to score."""

    card = Card(paper="none", year=2000, reads="pixels")

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__(Encoder(network))
        self.images: list[torch.Tensor] = []

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.images.append(x.clone())
        return x.flatten(1)

    def judge(self, z: Any) -> torch.Tensor:
        return z.mean(dim=1)


def test_the_adversarial_images_are_those_of_the_named_attacks(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    detector = Seen(network)
    x, y = mislabelled()
    small_triage(tmp_path / "run", {"seen": detector}, repeats=1, held_out=None, outliers={}, batch_size=60)
    clean, *attacked = detector.images
    assert torch.equal(clean, x)
    expected = [
        gate.fgsm(network, x, y, gate.Linf(0.1)).x,
        gate.fgsm(network, x, y, gate.Linf(64 / 255)).x,
        gate.bim(network, x, y, gate.L2(0.8), steps=3, keep="last").x,
    ]
    for found, wanted in zip(attacked, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        assert not torch.equal(found, x)
    for found, eps in zip(attacked[:2], (0.1, 64 / 255), strict=True):
        assert eps - 1e-6 <= float((found - x).abs().max()) <= eps + 1e-6
    assert float((attacked[2] - x).flatten(1).norm(dim=1).max()) <= 0.8 + 1e-5
    assert all(float(found.min()) >= 0 and float(found.max()) <= 1 for found in attacked)


def test_a_step_that_is_given_is_the_one_taken(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    detector = Seen(network)
    x, y = mislabelled()
    attack = {"name": "bim", "eps": 0.2, "steps": 2, "step": 0.01}
    small_triage(tmp_path / "run", detector, repeats=1, held_out=None, outliers={}, batch_size=99, adversarial=[attack])
    assert float((detector.images[1] - x).abs().max()) == pytest.approx(0.02, abs=1e-6)
    expected = gate.bim(network, x, y, gate.Linf(0.2), steps=2, step=0.01, keep="last").x
    torch.testing.assert_close(detector.images[1], expected, rtol=0, atol=1e-6)


def test_the_last_image_counts_where_a_long_step_overshoots(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    detector = Seen(network)
    x, y = mislabelled()
    attack = {"name": "bim", "eps": 0.9, "steps": 4, "step": 1.5}
    small_triage(tmp_path / "run", detector, repeats=1, held_out=None, outliers={}, batch_size=99, adversarial=[attack])
    last, best = (gate.bim(network, x, y, gate.Linf(0.9), steps=4, step=1.5, keep=keep).x for keep in ("last", "best"))
    assert not torch.allclose(last, best)
    torch.testing.assert_close(detector.images[1], last, rtol=0, atol=1e-6)


def test_how_images_are_batched_changes_nothing(tmp_path: Path, no_report: None, finished: tuple[Any, Bundle]) -> None:
    results, _ = small_triage(tmp_path / "run", batch_size=1000)
    for row, other in zip(results["rows"], finished[0]["rows"], strict=True):
        for name in ("auroc", "aupr_in", "aupr_out", "threshold", "rejected_out"):
            assert row[name] == pytest.approx(other[name], abs=1e-4), name


def test_only_images_that_fool_count_when_asked(tmp_path: Path, no_report: None) -> None:
    results, bundle = small_triage(tmp_path / "run", fooled_only=True, adversarial=[FGSM], repeats=1)
    counted = set()
    for title in TITLES[:2]:
        about = {"detector": "distance", "repeat": 0}
        label = column(bundle, "label", **about, set="inliers")
        right = column(bundle, "predicted", **about, set="inliers") == label
        fooled = right & (column(bundle, "predicted", **about, set=title) != label)
        inside = column(bundle, "score", **about, set="inliers")[fooled]
        outside = column(bundle, "score", **about, set=title)[fooled]
        row = row_of(results, "distance", title)
        assert row["n_in"] == row["n_out"] == int(fooled.sum())
        assert row["auroc"] == pytest.approx(roc_auc_score([0] * len(inside) + [1] * len(outside), [*inside, *outside]))
        counted.add(row["n_out"])
    assert len(counted) == 2 and max(counted) == 45  # all that were right; the smaller radius fools fewer
    assert row_of(results, "distance", "blank")["n_in"] == 60


# Repeats and passes


def test_a_detector_without_a_seed_is_scored_once_and_has_no_deviation(finished: tuple[Any, Bundle]) -> None:
    results, bundle = finished
    repeats = {(row["detector"], row["repeat"]) for row in bundle.samples().to_pylist()}
    assert repeats == {("GMM", 0), ("GMM", 1), ("distance", 0), ("msp", 0)}
    for row in results["rows"]:
        if row["detector"] != "GMM":
            assert all(row[name] == 0.0 for name in row if name.endswith("_std"))
            assert all(row[name] == row["per_repeat"][0][name] for name in row["per_repeat"][0])


def test_a_thousand_repeats_of_detectors_without_a_seed_cost_no_more_than_one(tmp_path: Path, no_report: None) -> None:
    Counted.seen = 0
    detectors = {"msp": MSP(Encoder(Counted(trained_net())))}
    results, bundle = small_triage(tmp_path / "run", detectors, repeats=1000, adversarial=[])
    assert bundle.samples().num_rows == 60 + 40 + 15
    assert Counted.seen == 60 + 40 + 15 + 2  # two for the rehearsal
    row = row_of(results, "msp", "mistakes")
    assert (row["repeats"], len(row["per_repeat"]), row["auroc_std"]) == (1000, 1000, 0.0)


def test_repeats_differ_by_the_seed_alone(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    x, fit = mislabelled()[0], squares(90, seed=2)
    _, bundle = small_triage(tmp_path / "run", {"GMM": detectors_of(network)["GMM"]}, repeats=3, adversarial=[])
    for repeat in range(3):
        alone = GMM(Encoder(network, "hidden"), components=4, steps=3, seed=repeat).fit(fit)
        scores = column(bundle, "score", detector="GMM", repeat=repeat, set="inliers")
        assert torch.equal(scores.float(), alone.scores(x, 25))


def test_detectors_that_train_a_density_are_trained_anew_in_every_repeat(tmp_path: Path, no_report: None) -> None:
    features, x, fit = Encoder(trained_net(), "hidden"), mislabelled()[0], squares(90, seed=2)
    training = {"epochs": 1, "batch_size": 45}
    models: dict[str, tuple[type[Learned], dict[str, Any]]] = {
        "vae": (FeatureVAE, {"hidden": 4, "latent": 2}),
        "maf": (FeatureMAF, {"transforms": 1, "hidden": [4]}),
        "pixelcnn": (PixelCNNLikelihood, {"blocks": 0, "filters": 2, "mixtures": 2, "levels": 0}),
    }
    detectors = {name: kind(features, model=model, training=training) for name, (kind, model) in models.items()}
    detectors["vae"].fit(fit).save_bundle(tmp_path / "bundle")
    trained = {"trained": FeatureVAE(features, bundle=str(tmp_path / "bundle"))}
    results, bundle = small_triage(tmp_path / "run", detectors | trained, repeats=2, adversarial=[])
    for name, (kind, model) in models.items():
        for repeat in range(2):
            alone = kind(features, model=model, training={**training, "seed": repeat}).fit(fit)
            scores = column(bundle, "score", detector=name, repeat=repeat, set="inliers").float()
            torch.testing.assert_close(scores, alone.scores(x, 25), rtol=1e-5, atol=1e-5)
        assert row_of(results, name, "mistakes")["auroc_std"] > 0
    assert row_of(results, "trained", "mistakes")["auroc_std"] == 0
    known = column(bundle, "score", detector="trained", repeat=0, set="inliers")
    assert torch.equal(known, column(bundle, "score", detector="vae", repeat=0, set="inliers"))


def test_the_network_runs_once_per_image_for_all_detectors_and_repeats(tmp_path: Path, no_report: None) -> None:
    network = Counted(trained_net())
    features = Encoder(network, "network.hidden")
    detectors = {
        "GMM": GMM(features, components=3, steps=2),
        "other": GMM(features, components=2, steps=2, seed=9),
        "zheng": ZhengHong(features, components=2, steps=2),
        "temperature": Temperature(features),
        "msp": MSP(features),
    }
    Counted.seen = 0
    small_triage(tmp_path / "run", detectors, repeats=4, adversarial=[], held_out=None)
    checks = 3 * 2 * FIRST  # in later repeats, before the remembered features of either kind of mixture are trusted
    assert Counted.seen == 90 + 60 + 15 + 2 + checks  # fit, test, outliers, two for the rehearsal


def test_the_grid_of_purification_shares_one_pass(tmp_path: Path, no_report: None) -> None:
    network = Counted(trained_net())
    features = Encoder(network, "network.hidden")
    Counted.seen = 0
    purify = {"steps": 1, "step": [0.1, 0.01, 0.001], "pull": [0.0, 0.1]}
    small_triage(
        tmp_path / "run", {"g": GMM(features, components=3, steps=2)}, repeats=3, adversarial=[], purify=purify
    )  # fmt: skip
    assert Counted.seen == 90 + (60 + 40 + 15) + (60 + 40) + 2 * 2 + 2 * FIRST


def test_members_of_ensembles_are_reseeded_fitted_and_scored(tmp_path: Path, no_report: None) -> None:
    features = Encoder(trained_net(), "hidden")
    both = ScoreEnsemble([GMM(features, components=3, steps=2), Mahalanobis(features)])
    nested = ScoreEnsemble([both, MSP(features)])
    x, fit = mislabelled()[0], squares(90, seed=2)
    _, bundle = small_triage(tmp_path / "run", {"nested": nested}, repeats=2, adversarial=[])
    alone = GMM(features, components=3, steps=2, seed=1), Mahalanobis(features)
    fit_all(alone, fit)
    expected = ScoreEnsemble([ScoreEnsemble(alone), MSP(features)]).scores(x, 25)
    assert torch.equal(column(bundle, "score", repeat=1, set="inliers").float(), expected)
    assert not torch.equal(column(bundle, "score", repeat=0, set="inliers").float(), expected)


# The door in Python


def test_fitted_detectors_are_taken_as_they_are(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    detectors = detectors_of(network)
    fit_all(list(detectors.values()), squares(90, seed=2))
    before = {title: detector.scores(blank(15)) for title, detector in detectors.items()}
    _, bundle = small_triage(tmp_path / "run", detectors, fit=None, repeats=1)
    for title, scores in before.items():
        assert torch.equal(column(bundle, "score", detector=title, set="blank").float(), scores)


def test_one_detector_or_a_list_will_do(tmp_path: Path, no_report: None) -> None:
    network = Encoder(trained_net())
    results = gate.triage(MSP(network), mislabelled(), out=tmp_path / "one")
    assert [row["detector"] for row in results["rows"]] == ["msp"]
    results = gate.triage([MSP(network), MSP(network)], mislabelled(), out=tmp_path / "two")
    assert [row["detector"] for row in results["rows"]] == ["msp 1", "msp 2"]


def test_a_run_can_be_repeated_bit_for_bit(tmp_path: Path, no_report: None, finished: tuple[Any, Bundle]) -> None:
    results, _ = small_triage(tmp_path / "run", purify={"steps": 2})
    assert results == finished[0]


def test_the_classifier_can_be_another_network_than_the_detectors(tmp_path: Path, no_report: None) -> None:
    mine, other = trained_net(), trained_net(seed=1)
    detectors = {"a": MSP(Encoder(mine)), "b": MSP(Encoder(other))}
    with pytest.raises(ValueError, match=r"the detectors read 2 networks, .*classifier=Encoder\(network\)"):
        small_triage(tmp_path / "run", detectors)
    same = {"a": MSP(Encoder(mine)), "b": MSP(Encoder(mine, mean=[0.5]))}
    with pytest.raises(ValueError, match="one with different mean, std or size"):
        small_triage(tmp_path / "run", same)
    _, bundle = small_triage(tmp_path / "run", detectors, classifier=Encoder(other), adversarial=[], repeats=1)
    predicted = other(mislabelled()[0]).argmax(dim=1)
    assert torch.equal(column(bundle, "predicted", detector="a", set="inliers"), predicted)


def test_the_manifest_says_what_the_attacker_may_do(finished: tuple[Any, Bundle]) -> None:
    manifest = finished[1].manifest()
    assert manifest["threat_model"]["capability"].endswith("inside Linf(0.1), Linf(0.25098), L2(0.8)")
    assert set(manifest["data"]) == {"inliers", "fit", "held_out", "outliers.blank"}
    assert len(manifest["networks"]) == 1


# Killed and gone on with


class Killed(Exception):
    """Not a ValueError: the machine went down."""


def killed_after(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Let the run die when it has saved so many adversarial pieces."""
    made, original = [], triage_run.score_adversarial

    def dying(*arguments: Any, **options: Any) -> Any:
        if len(made) == pieces:
            raise Killed
        made.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(triage_run, "score_adversarial", dying)


@pytest.mark.parametrize("pieces", [0, 4])
def test_a_killed_run_goes_on_and_ends_with_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report: None, finished: tuple[Any, Bundle], pieces: int
) -> None:
    with monkeypatch.context() as patch:
        killed_after(patch, pieces)
        with pytest.raises(Killed):
            small_triage(tmp_path / "run", purify={"steps": 2})
    work = tmp_path / "run" / "work"
    assert not (tmp_path / "run" / "results.json").exists()
    saved = sorted(work.glob("[!.]*.safetensors"))
    assert len(saved) == 3 + 3 + pieces  # GMM twice and the distance, three clean sets
    with pytest.raises(ValueError, match="holds another run; choose another --out, or go on with it: --resume"):
        small_triage(tmp_path / "run", purify={"steps": 2})
    done = []
    with monkeypatch.context() as patch:
        original = triage_run.score_adversarial
        patch.setattr(triage_run, "score_adversarial", lambda *a, **k: done.append(1) or original(*a, **k))
        patch.setattr(triage_run, "fit_all", lambda *a, **k: pytest.fail("fitted again"))
        patch.setattr(triage_run, "score_set", lambda *a, **k: pytest.fail("scored again"))
        results, bundle = small_triage(tmp_path / "run", purify={"steps": 2}, resume=True)
    assert len(done) == 9 - pieces
    assert results == finished[0]
    assert bundle.samples().equals(finished[1].samples())
    assert not work.exists()
    assert small_triage(tmp_path / "run", purify={"steps": 2}, resume=True)[0] == results


def test_damaged_pieces_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report: None, finished: tuple[Any, Bundle]
) -> None:
    with monkeypatch.context() as patch:
        killed_after(patch, 2)
        with pytest.raises(Killed):
            small_triage(tmp_path / "run", purify={"steps": 2})
    for path in (tmp_path / "run" / "work").glob("[!.]*.safetensors"):
        path.write_bytes(path.read_bytes()[:40])  # a full disk cut all of them off, the fitted detectors too
    results, _ = small_triage(tmp_path / "run", purify={"steps": 2}, resume=True)
    assert results == finished[0]


def test_a_run_does_not_go_on_with_detectors_that_were_fitted_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report: None
) -> None:
    detectors = detectors_of()
    fit_all(list(detectors.values()), squares(90, seed=2))
    with monkeypatch.context() as patch:
        killed_after(patch, 1)
        with pytest.raises(Killed):
            small_triage(tmp_path / "run", detectors, fit=None, repeats=1)
    fit_all(list(detectors.values()), squares(90, seed=8))
    with pytest.raises(ValueError, match="was begun with another plan"):
        small_triage(tmp_path / "run", detectors, fit=None, repeats=1, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folds": 3}, "begun with another plan"),
        ({"adversarial": [BIM]}, "begun with another plan"),
        ({"outliers": {"blank": blank(15, seed=5)}}, "begun with other images"),
        ({"inliers": mislabelled(every=5)}, "begun with other images"),
        ({"detectors": detectors_of(trained_net(seed=1))}, "begun with other weights"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    finished: tuple[Any, Bundle], changes: dict[str, Any], message: str
) -> None:
    before = {path.name: path.read_bytes() for path in finished[1].folder.iterdir()}
    with pytest.raises(ValueError, match=message):
        small_triage(finished[1].folder, **{"purify": {"steps": 2}} | changes, resume=True)
    assert {path.name: path.read_bytes() for path in finished[1].folder.iterdir()} == before
