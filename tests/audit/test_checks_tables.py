"""What the rows of an audit cannot mean, attacks that are scored in whole grey levels, and what an audit refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from small_audit import BOTH, BRIGHT, DARK, Brightness, evidence_for, levels
from torch import Tensor

from gatecrash import audit
from gatecrash.audit.checks import CHECKS, Evidence
from gatecrash.audit.checks.cost import counting, networks_of
from gatecrash.audit.checks.evidence import Shared
from gatecrash.audit.checks.run import price_of
from gatecrash.ball import L2, Ball, Linf
from gatecrash.bundle import Check
from gatecrash.detectors import MSP, Detector, Energy, Mahalanobis
from gatecrash.encoder import Encoder
from gatecrash.protocols import Latent
from small_models import blank, one_thread, squares, trained_net

__all__ = ["one_thread"]

GREY = BOTH | {"ball": {"norm": "linf", "eps": "8/255"}, "steps": 20, "eight_bit": True}
EFFORT = ("steps_suffice", "restarts_suffice", "iterative_beats_single", "black_box_not_stronger")
SOFTMAX = {"name": "softmax", "ball": {"norm": "linf", "eps": 0.2}, "steps": 10}
NARROW = SOFTMAX | {"ball": {"norm": "linf", "eps": 0.1}, "steps": 40}
SCORE = BOTH | {"ball": {"norm": "linf", "eps": 0.2}}


def on_network(detector: Detector, *attacks: dict[str, Any]) -> Evidence:
    """A detector of a network, attacked as told."""
    return evidence_for(detector, *attacks, inliers=squares(32)[0], outliers=blank(32))


def energy(*attacks: dict[str, Any]) -> Evidence:
    """A healthy network's energy, attacked as told."""
    return on_network(Energy(Encoder(trained_net(), layer="hidden")), *attacks)


@pytest.mark.parametrize("ball", [{"norm": "linf", "eps": "8/255"}, {"norm": "l2", "eps": 0.15}])
@pytest.mark.parametrize("name", EFFORT)
def test_an_attack_in_whole_grey_levels_is_compared_with_such_attacks(name: str, ball: dict[str, Any]) -> None:
    check = CHECKS[name](energy(GREY | {"ball": ball}))
    assert check["status"] == "pass", check["sentence"]


@pytest.mark.parametrize("name", ["steps_suffice", "restarts_suffice"])
def test_one_that_is_too_short_is_still_told_so(name: str) -> None:
    assert CHECKS[name](energy(GREY | {"steps": 2}))["status"] == "fail"


def test_where_rounding_takes_everything_back_nothing_fails() -> None:
    """In a ball of half a grey level rounding takes back all that a search finds, and a longer one finds no more."""
    evidence = energy(GREY | {"ball": {"norm": "linf", "eps": 0.4 / 255}})
    standing, clean = evidence.standing("it", evidence.effort("it")), evidence.clean("it")
    assert standing.auroc == pytest.approx(clean.auroc)
    for name in EFFORT:
        assert CHECKS[name](evidence)["status"] == "pass"


@pytest.mark.parametrize("name", EFFORT)
@pytest.mark.parametrize("side", ["both", "out"])
def test_rounding_is_paid_for(name: str, side: str) -> None:
    evidence = energy(GREY | {"side": side})
    with counting(networks_of(evidence.job.detectors.values(), evidence.inliers[:2])) as meter:
        shared = sum(evidence.attack_price(kind) for kind in get_args(Shared) if kind == CHECKS[name].attack)
        price = price_of(evidence, [name])
        CHECKS[name](evidence)
    assert shared <= price
    assert 0.5 * price < meter.passes <= price


def monotone(*attacks: dict[str, Any]) -> Check:
    """What is said about a brightness along eps."""
    return CHECKS["monotone_in_eps"](evidence_for(Brightness(), *attacks))


SMALL = BOTH | {"ball": {"norm": "linf", "eps": 0.05}}
SHORT = BOTH | {"step": 0.001, "steps": 3}


@pytest.mark.parametrize("attacks", [(SMALL, SHORT), (SHORT, SMALL)])
def test_a_larger_ball_must_not_be_weaker_whatever_the_steps(attacks: tuple[dict[str, Any], ...]) -> None:
    check = monotone(*attacks)
    assert check["status"] == "fail"
    assert (
        "at linf 0.05 and 1.000 at 0.1; a larger ball must not be weaker: it needs more than 3 steps in 1 run"
        in check["sentence"]
    )


def test_fewer_steps_in_a_larger_ball_are_no_fault_where_they_get_further() -> None:
    check = monotone(SMALL, BOTH | {"steps": 5})
    assert check["status"] == "pass", check["sentence"]


def test_a_short_attack_beside_a_long_one_in_the_same_ball_is_no_fault() -> None:
    ladder = BOTH | {"ball": {"norm": "linf", "eps": [0.05, 0.1]}}
    check = monotone(ladder, SHORT)
    assert check["status"] == "pass", check["sentence"]


def test_a_weaker_attack_of_another_kind_is_not_compared() -> None:
    suite = {"name": "worst_case", "budget": "quick", "ball": {"norm": "linf", "eps": 0.05}}
    assert monotone(suite, SHORT)["status"] == "pass"


def distances() -> Detector:
    """A detector that reads features, and of the logits nothing."""
    return Mahalanobis(Encoder(trained_net(), layer="maps")).fit(squares(60, seed=7))


@pytest.mark.parametrize(
    ("make", "attacks", "status", "words"),
    [
        (distances, [SOFTMAX, SCORE | {"side": "out"}], "fail", "which softmax falls short of"),
        (distances, [SOFTMAX, SCORE | {"side": "out"}, SCORE | {"name": "evict", "side": "in"}], "warn", "which softmax falls short of"),
        (distances, [SOFTMAX], "warn", "which reads logits, and the detector features"),
        (distances, [SOFTMAX, SCORE], "pass", "in, out and both are reported"),
        (lambda: MSP(Encoder(trained_net())), [SOFTMAX], "pass", "attacked by softmax alone"),
        (lambda: MSP(Encoder(trained_net())), [SOFTMAX, SCORE | {"side": "out"}], "fail", "which softmax falls short of"),
        (lambda: MSP(Encoder(trained_net())), [NARROW, SCORE | {"side": "out", "ball": NARROW["ball"]}], "pass", "by admit on side out"),
    ],
)  # fmt: skip
def test_both_sides_are_attacked_by_what_reaches_the_detector(
    make: Any, attacks: list[dict[str, Any]], status: str, words: str
) -> None:
    check = CHECKS["both_sides"](on_network(make(), *attacks))
    assert check["status"] == status, check["sentence"]
    assert words in check["sentence"]


@pytest.mark.parametrize(
    ("eps", "status", "words"),
    [
        (0.2, "pass", "the targets are 9.28 eps away, the median MAPE"),
        (0.3, "warn", "the ball holds 6.2% of the targets, and the clean AUROC was at least 1.000"),
        (1.5, "fail", "1.24 eps away in the median, but the ball holds 38% of them"),
        (3.0, "fail", "0.619 eps away, so the ball holds them"),
    ],
)
def test_a_ball_that_holds_some_of_the_targets_is_told(eps: float, status: str, words: str) -> None:
    collision = {"name": "collide", "of": "features", "ball": {"norm": "l2", "eps": eps}, "steps": 10}
    evidence = evidence_for(Brightness(), BOTH, collision, inliers=DARK, outliers=BRIGHT.flip(0))
    check = CHECKS["collision_is_real"](evidence)
    assert check["status"] == status, check["sentence"]
    assert words in check["sentence"]


class Drawn(Brightness):
    """A score with noise anew, of so many standard deviations of the clean ones, and a number of draws that averages
    nothing."""

    draws = 16

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise * float(torch.cat([DARK, BRIGHT]).flatten(1).mean(dim=1).std())

    def judge(self, z: Latent) -> Tensor:
        """The mean pixel and noise, (B,)."""
        score = super().judge(z)
        return score + self.noise * torch.randn_like(score)


@pytest.mark.parametrize(("noise", "status"), [(0.01, "pass"), (0.2, "warn"), (1.0, "fail")])
def test_an_average_over_draws_is_scored_twice_to_see_whether_it_is_one(noise: float, status: str) -> None:
    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Drawn(noise)
    torch.manual_seed(0)
    check = CHECKS["deterministic"](evidence)
    assert check["status"] == status, check["sentence"]
    share = float(check["sentence"].partition("vary by ")[2].split()[0])
    assert share == pytest.approx(noise, rel=0.35)


class Wider(Linf):
    """A ball that projects into one of twice its radius."""

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        return x.clamp(centre - 2 * self.eps, centre + 2 * self.eps)


@pytest.mark.parametrize(
    ("ball", "message"),
    [
        (Linf(0.1, box=(0.2, 0.8)), r"the box \(0, 1\), so it cannot express Linf\(0.1, box=\(0.2, 0.8\)\)$"),
        (L2(0.1, box=None), r"the box \(0, 1\), so it cannot express L2\(0.1, box=None\)$"),
        (Wider([0.1, 0.2]), r"for linf a plan takes Linf, so it cannot express Wider\(\[0.1, 0.2\]\)$"),
    ],
)
def test_a_ball_that_a_plan_would_make_another_of_is_refused(ball: Ball, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^balls: .*{message}"):
        audit(Brightness(), DARK, {"bright": BRIGHT}, out=tmp_path / "run", balls=[L2(0.1), ball])
    assert not (tmp_path / "run").exists()


class Holed(Brightness):
    """A score that is a number above a brightness of 0.6 and below one of 0.55."""

    def judge(self, z: Latent) -> Tensor:
        score = super().judge(z)
        return torch.where((score - 0.575).abs() < 0.025, torch.nan, score)


def test_a_score_that_only_an_attack_makes_nan_is_told_with_that_attack() -> None:
    collision = {"name": "collide", "of": "features", "ball": {"norm": "l2", "eps": 0.5}, "steps": 10}
    with pytest.raises(ValueError, match=r"^the score of it becomes NaN under collide features on bright, and before"):
        evidence_for(Holed(), collision, outliers=levels(0.61, 0.65))
