"""Every check of a triage on one that is healthy and on one that was made to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_triage import mislabelled
from torch import Tensor

import gatecrash as gate
from gatecrash.detectors import MSP
from gatecrash.encoder import Encoder
from gatecrash.triage import checks as triage_checks
from gatecrash.triage import run as triage_run
from small_models import blank, one_thread, squares, trained_net  # noqa: F401


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatecrash.report.write_triage_report", lambda bundle: bundle.report)


def verdicts(folder: Path, inliers: Any = None, **options: Any) -> dict[str, tuple[str, str]]:
    """The status and sentence of every check of a triage with a detector that needs no fitting."""
    inliers = mislabelled(100) if inliers is None else inliers
    results = gate.triage(MSP(Encoder(trained_net())), inliers, out=folder / "run", **options)
    return {check["name"]: (check["status"], check["sentence"]) for check in results["checks"]}


def test_all_pass_on_a_healthy_triage(tmp_path: Path) -> None:
    attack = {"name": "fgsm", "eps": 0.25}
    found = verdicts(tmp_path, adversarial=[attack], held_out=mislabelled(40, seed=3), outliers={"blank": blank(10)})
    assert list(found) == ["mistakes_suffice", "adversaries_fool", "threshold_is_held_out", "leakage"]
    assert {status for status, _ in found.values()} == {"pass"}
    assert found["mistakes_suffice"][1] == "25 of 100 test images are classified wrongly."
    assert found["adversaries_fool"][1] == "fgsm 0.25 takes the accuracy from 0.750 to 0.000."
    assert found["threshold_is_held_out"][1] == "Chosen on 40 validation images, 10 of them mistakes."
    assert all("\n" not in words and words.endswith(".") for _, words in found.values())


@pytest.mark.parametrize(
    ("inliers", "status", "words"),
    [
        (squares(60, seed=1), "fail", "0 of 60 test images are classified wrongly, so there is nothing to tell apart."),
        (mislabelled(60, every=1), "fail", "60 of 60 test images are classified wrongly, so there is nothing"),
        (mislabelled(60), "warn", "15 of 60 test images are classified wrongly; with fewer than 20 of either kind"),
        (mislabelled(80), "pass", "20 of 80 test images are classified wrongly."),
    ],
)
def test_mistakes_must_suffice(tmp_path: Path, inliers: Any, status: str, words: str) -> None:
    found = verdicts(tmp_path, inliers)["mistakes_suffice"]
    assert found[0] == status and found[1].startswith(words)


def test_too_few_correct_images_are_as_bad_as_too_few_mistakes(tmp_path: Path) -> None:
    images, labels = mislabelled(60, every=1)
    labels[:3] = squares(3)[1]
    status, words = verdicts(tmp_path, (images, labels))["mistakes_suffice"]
    assert (status, words[:8]) == ("warn", "57 of 60")


def test_attacks_must_fool(tmp_path: Path) -> None:
    harmless = {"name": "fgsm", "eps": [0.0001, 0.25]}
    status, words = verdicts(tmp_path, adversarial=[harmless])["adversaries_fool"]
    assert (status, words) == ("warn", "fgsm 0.0001 takes the accuracy from 0.750 to 0.750.")


def test_an_attack_on_images_that_are_all_wrong_fools_nobody(tmp_path: Path) -> None:
    attack = {"name": "fgsm", "eps": 0.1}
    status, words = verdicts(tmp_path, mislabelled(60, every=1), adversarial=[attack])["adversaries_fool"]
    assert (status, words) == ("warn", "fgsm 0.1 takes the accuracy from 0.000 to 0.000.")


def test_an_attack_that_raises_the_accuracy_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Helps:
        """What an attack with the wrong sign would find."""

        def __init__(self, network: Any, x: Tensor, y: Tensor, *rest: Any, **options: Any) -> None:
            pictures, classes = squares(3)
            self.x = pictures[[int(classes.tolist().index(label)) for label in y.tolist()]]

    monkeypatch.setattr(triage_run, "fgsm", Helps)
    status, words = verdicts(tmp_path, adversarial=[{"name": "fgsm", "eps": 0.1}])["adversaries_fool"]
    assert (status, words) == ("fail", "fgsm 0.1 takes the accuracy from 0.750 to 1.000.")


def test_without_attacks_there_is_nothing_to_fool(tmp_path: Path) -> None:
    assert verdicts(tmp_path)["adversaries_fool"] == ("pass", "The plan has no adversarial images.")


@pytest.mark.parametrize(
    ("held_out", "words"),
    [
        (None, "There are no held-out images, so the threshold was chosen on the test images."),
        (squares(40, seed=3), "No threshold was chosen: 0 of 40 validation images are mistakes."),
        (mislabelled(40, seed=3, every=40), "No threshold was chosen: 1 of 40 validation images are mistakes."),
        (mislabelled(40, seed=3, every=1), "No threshold was chosen: 40 of 40 validation images are mistakes."),
    ],
)
def test_the_threshold_must_be_held_out(tmp_path: Path, held_out: Any, words: str) -> None:
    assert verdicts(tmp_path, held_out=held_out)["threshold_is_held_out"] == ("warn", words)


@pytest.mark.parametrize("role", ["outliers", "held_out", "fit", "fit_outliers"])
def test_no_image_may_be_on_both_sides(tmp_path: Path, role: str) -> None:
    inliers = mislabelled(100)
    copied = torch.cat([blank(5), inliers[0][:2]])
    value: Any = {"outliers": {"copies": copied}, "fit_outliers": copied}.get(role, (copied, torch.arange(7) % 3))
    status, words = verdicts(tmp_path, inliers, **{role: value})["leakage"]
    assert status == "fail" and words.startswith("2 of ")


def test_an_error_inside_a_check_costs_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Any) -> Any:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(triage_checks, "leakage", broken)
    assert verdicts(tmp_path)["leakage"] == ("fail", "The check could not be done: out of memory.")
