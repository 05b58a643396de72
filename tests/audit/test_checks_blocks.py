"""Every attack of a plan is looked at, with as many images as tell, and small differences are told apart from none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_audit import BOTH, Brightness, evidence_for, finished
from torch import Tensor

from gatecrash import audit
from gatecrash.audit.checks import CHECKS, Evidence, verdicts
from gatecrash.audit.checks.effort import compared
from gatecrash.audit.checks.evidence import Standing
from gatecrash.audit.checks.run import evidence_of
from gatecrash.audit.checks.tables import collided
from gatecrash.ball import Linf
from gatecrash.detectors import Energy, Expected
from gatecrash.encoder import Encoder
from gatecrash.protocols import Latent
from small_models import blank, one_thread, squares, trained_net

__all__ = ["one_thread"]

SHORT = BOTH | {"ball": {"norm": "linf", "eps": 0.04}, "steps": 2}
LONG = BOTH | {"ball": {"norm": "linf", "eps": 0.08}, "steps": 20}


def network(*attacks: dict[str, Any]) -> Evidence:
    """A network's energy, attacked as told: L∞ 0.04 breaks it in part, and 0.08 altogether."""
    return evidence_for(
        Energy(Encoder(trained_net(), layer="hidden")), *attacks, inliers=squares(32)[0], outliers=blank(32)
    )


@pytest.mark.parametrize("attacks", [(SHORT,), (SHORT, LONG), (LONG, SHORT)])
@pytest.mark.parametrize("name", ["steps_suffice", "restarts_suffice"])
def test_a_weak_attack_is_not_hidden_by_a_strong_one_beside_it(attacks: tuple[dict[str, Any], ...], name: str) -> None:
    check = CHECKS[name](network(*attacks))
    assert check["status"] == "fail"
    assert "instead of" in check["sentence"] and check["sentence"].endswith("(16 + 16 images, Linf(0.04)).")


def test_every_attack_is_looked_at_inside_every_ball_that_says_something() -> None:
    ladder = BOTH | {"ball": {"norm": "linf", "eps": [0.08, 0.02, 0.04]}}
    evidence = network(ladder, SHORT | {"ball": {"norm": "linf", "eps": 0.1}})
    assert evidence.reported("it", evidence.job.attacks[0], 0.08) < 0.01
    assert [effort.ball for _, effort in evidence.looks] == [Linf(0.04), Linf(0.02), Linf(0.1)]
    assert [effort.ball for _, effort in evidence.heads] == [Linf(0.04), Linf(0.1)]


@pytest.mark.parametrize("name", ["planted", "precision_drift", "pixel_budget", "iterative_beats_single"])
def test_checks_of_one_ball_look_at_that_of_every_attack(name: str) -> None:
    check = CHECKS[name](network(LONG, LONG | {"ball": {"norm": "linf", "eps": 0.04}}))
    assert check["status"] == "pass"
    assert check["sentence"].startswith("2 attacks on a score pass; nearest to failing is it: ")


def test_what_the_audit_reports_is_not_attacked_again_to_see_whether_more_steps_find_more() -> None:
    evidence = network(SHORT)
    for name in ("steps_suffice", "restarts_suffice", "black_box_not_stronger"):
        CHECKS[name](evidence)
    assert not evidence._found
    assert torch.equal(
        evidence.standing("it", evidence.effort("it")).inside,
        evidence.measured.attacked["it", "admit + evict linf 0.04", "inliers", 0].scores[::2],
    )


def test_a_side_that_the_plan_leaves_alone_is_attacked_by_the_checks() -> None:
    evidence = network(SHORT | {"side": "out"})
    assert evidence.attack_price("scores") == 16 * 3
    assert "instead of" in CHECKS["steps_suffice"](evidence)["sentence"]
    assert [side for _, _, side in evidence._found] == ["in"]
    assert evidence.attack_price("scores") == 0


def apart(count: int) -> Standing:
    """As many inliers as outliers, all of them told apart."""
    return Standing(torch.arange(count).float(), torch.arange(count).float() + count)


@pytest.mark.parametrize(
    ("count", "pairs", "status"),
    [
        (8, 0, "pass"), (8, 1, "warn"), (8, 2, "warn"), (8, 3, "fail"),
        (10, 1, "warn"), (10, 2, "warn"), (10, 3, "fail"),
        (16, 2, "pass"), (16, 3, "fail"),
        (32, 10, "pass"), (32, 11, "fail"),
    ],
)  # fmt: skip
def test_a_change_of_auroc_is_too_much_from_a_hundredth_on_unless_so_few_images_cannot_tell(
    count: int, pairs: int, status: str
) -> None:
    before, effort = apart(count), evidence_for(Brightness()).effort("it")
    outside = before.outside.clone()
    outside[0] = count - pairs - 0.5
    finding = compared("it", "more", before, Standing(before.inside, outside), effort)
    assert finding.closeness == pytest.approx(pairs / count**2)
    assert finding.status == status
    assert ("one pair of so few images is" in finding.words) == (status == "warn")


def test_a_large_audit_affords_every_ball_and_a_small_one_the_most_telling() -> None:
    attack = BOTH | {"ball": {"norm": "linf", "eps": [0.02, 0.04]}, "steps": 10}
    detector = Energy(Encoder(trained_net(), layer="hidden"))
    seen = {}
    for count in (30, 600):
        evidence = evidence_of(*finished({"it": detector}, [attack], squares(count)[0], blank(count)))
        seen[count] = evidence.size, evidence.planted, len(evidence.looks)
    assert seen == {30: (8, 8, 1), 600: (32, 32, 2)}


class Noisy(Energy):
    """A randomised score."""

    def judge(self, z: Latent) -> Tensor:
        score = super().judge(z)
        return score + 1e-3 * torch.randn_like(score)


def test_an_audit_of_a_randomised_detector_averages_over_draws_and_says_how_many(tmp_path: Path) -> None:
    detector = Noisy(Encoder(trained_net()))
    attack = BOTH | {"ball": {"norm": "linf", "eps": 0.02}, "steps": 10}
    averaged = {"plain": detector, "averaged": Expected(detector, draws=4)}
    verdicts = {}
    for title, one in averaged.items():
        results = audit({title: one}, squares(60)[0], {"blank": blank(60)}, out=tmp_path / title, attacks=[attack])
        verdicts[title] = {check["name"]: check for check in results["checks"]}
    assert verdicts["plain"]["deterministic"]["status"] == "fail"
    assert verdicts["averaged"]["deterministic"]["status"] == "pass"
    words = "averaged: scores and gradients are averaged over 4 draws, and scored again"
    assert verdicts["averaged"]["deterministic"]["sentence"].startswith(words)


def test_the_checks_of_an_average_over_draws_do_not_take_its_noise_for_a_fault() -> None:
    attack = LONG | {"ball": {"norm": "linf", "eps": 0.04}}
    detector = Expected(Noisy(Encoder(trained_net())), draws=4)
    evidence = evidence_for(detector, attack, inliers=squares(32)[0], outliers=blank(32))
    checks = {check["name"]: check for check in verdicts(evidence)}
    assert not [check for check in checks.values() if check["status"] == "fail"]
    assert "its deployed score is 1.000" in checks["score_is_attacked"]["sentence"]
    assert checks["precision_drift"]["status"] == "warn"


def test_the_largest_mape_of_all_detectors_is_told() -> None:
    base = {"attack": "collide detector", "outliers": "noise", "eps": 10.0, "target_distance_median": 21.0}
    base |= {"clean_auroc": 0.9}
    rows = [base | {"detector": name, "mape_median": mape} for name, mape in (("near", 0.001), ("far", 0.2))]
    assert "the median MAPE, the largest, of far, is 0.2" in collided(rows).words
    assert "the median MAPE is 0.001" in collided(rows[:1]).words
