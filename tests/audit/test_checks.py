"""Every check twice: it passes where all is well, and fails, it and what has the same cause, where one thing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_audit import BOTH, BRIGHT, DARK, EPS, Brightness, Noisy, evidence_for, finished, levels
from torch import Tensor

from gatecrash.attacks.worst_case import BUDGETS
from gatecrash.audit.checks import CHECKS, ORDER, Evidence, run_checks, verdicts
from gatecrash.audit.checks.gradients import STEPS, contradicted
from gatecrash.audit.checks.leakage import shared
from gatecrash.ball import Ball, Linf
from gatecrash.bundle import Check
from gatecrash.detectors import CCU, MSP, Certified, Detector, Energy, Expected, Mahalanobis
from gatecrash.detectors.certified import Scale
from gatecrash.encoder import Encoder
from gatecrash.protocols import Latent, leaves
from small_models import blank, one_thread, squares, trained_net

__all__ = ["one_thread"]

NAMES = {
    "gradient_flows", "score_is_attacked", "steps_suffice", "restarts_suffice", "monotone_in_eps", "unbounded_breaks",
    "iterative_beats_single", "black_box_not_stronger", "collision_is_real", "deterministic", "planted", "pixel_budget",
    "both_sides", "precision_drift", "leakage",
}  # fmt: skip

COLLISION = {"name": "collide", "of": "features", "ball": {"norm": "l2", "eps": [0.25, 0.5]}, "steps": 10}
LADDER = BOTH | {"ball": {"norm": "linf", "eps": [0.05, EPS]}}


class HalfDetached(Brightness):
    """Half of the score has no gradient."""

    def judge(self, z: Latent) -> Tensor:
        pixels = leaves(z)[0]
        return pixels[:, :18].mean(dim=1) + pixels[:, 18:].detach().mean(dim=1)


class Detached(Brightness):
    """None of the score has a gradient."""

    def judge(self, z: Latent) -> Tensor:
        return super().judge(z).detach()


class NaiveSoftmax(Energy):
    """−max softmax as a textbook writes it: it rounds to −1 from a gap of 17 on, and half of its gradient to 0."""

    def judge(self, z: Latent) -> Tensor:
        return -(3 * leaves(z)[0]).softmax(dim=1).amax(dim=1)


class DeployedOtherwise(Brightness):
    """What is deployed looks at the negative; what is attacked does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(1 - x)


class Constant(Brightness):
    """Every image scores the same, though there is a gradient."""

    def judge(self, z: Latent) -> Tensor:
        score = super().judge(z)
        return score - score.detach()


class Quantised(Brightness):
    """Brightness in steps of 0.1, whose gradient is exactly that of one pixel's small share."""

    def judge(self, z: Latent) -> Tensor:
        pixels = leaves(z)[0]
        return (10 * pixels.mean(dim=1)).floor() / 10 + 1e-3 * pixels[:, 0]


class Proven(Quantised, Certified):
    """The same with a proof that no outlier of brightness 0.6 and more comes under some level."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level

    def score_bound(self, x: Tensor, radius: float, norm: str = "l2") -> Tensor:
        """The level, (B,)."""
        return torch.full((len(x),), self.level)


class Braggart(Brightness, Certified):
    """Brightness, with a proof that no outlier ever comes down."""

    def score_bound(self, x: Tensor, radius: float, norm: str = "l2") -> Tensor:
        """Some level, (B,)."""
        return torch.full((len(x),), 7.0)


class Jumping(Brightness):
    """Brightness and, as in ODIN where a sign flips, jumps: so dense that a step of 1e-5 always crosses some."""

    def judge(self, z: Latent) -> Tensor:
        return super().judge(z) + 1e-3 * ((1e5 * leaves(z)[0]).floor() % 2).mean(dim=1)


class HalfDetachedJumping(HalfDetached, Jumping):
    """Jumps do not excuse a part without a gradient."""

    def judge(self, z: Latent) -> Tensor:
        return HalfDetached.judge(self, z) + Jumping.judge(self, z) - Brightness.judge(self, z)


class Shattered(Brightness):
    """Waves so fine that the gradient says nothing about brightness; in black and white they are all in phase."""

    def judge(self, z: Latent) -> Tensor:
        pixels = leaves(z)[0]
        return pixels.mean(dim=1) + 0.05 * (200 * torch.pi * pixels).sin().mean(dim=1)


class Hilly(Brightness):
    """The first pixel is a row of hills, six of them in a ball's radius, that small steps do not cross."""

    def judge(self, z: Latent) -> Tensor:
        return super().judge(z) + 0.05 * torch.sin(12 * torch.pi * leaves(z)[0][:, 0] / EPS)


class Chaotic(Brightness):
    """The score reads one harmless number of the latent; the others change with every grey level."""

    def encode(self, x: Tensor) -> Latent:
        pixels = x.flatten(1)
        return pixels.mean(dim=1, keepdim=True), (300 * pixels).sin()


def on_network(
    kind: Callable[[Encoder], Detector], *attacks: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Evidence:
    """A detector of a small classifier's logits."""
    detector = kind(Encoder(trained_net().to(dtype), layer="hidden"))
    return evidence_for(detector, *attacks, inliers=squares(32)[0], outliers=blank(32))


def energy(**changes: Any) -> Evidence:
    """A healthy network's energy, which the attack breaks in part."""
    return on_network(Energy, BOTH | {"ball": {"norm": "linf", "eps": 0.04}, "steps": 20} | changes, COLLISION)


def with_rows(evidence: Evidence, **changes: float) -> Evidence:
    """The same audit, with something else in the rows of its larger eps."""
    rows = [row | changes if row["eps"] == EPS else row for row in evidence.rows]
    return replace(evidence, rows=rows)


def in_normalised_units(evidence: Evidence, std: float) -> Evidence:
    """The same audit, its images as far from their starts as if eps had been taken after dividing by std."""
    attacked = {key: replace(outcome, linf=outcome.linf / std) for key, outcome in evidence.measured.attacked.items()}
    return replace(evidence, measured=replace(evidence.measured, attacked=attacked))


def quantised(detector: Detector | None = None) -> Evidence:
    """Levels that no ball of 0.01 moves across a step of 0.1."""
    attack = BOTH | {"ball": {"norm": "linf", "eps": 0.01}}
    sets = {"inliers": levels(0.22, 0.28), "outliers": levels(0.62, 0.68, seed=1)}
    return evidence_for(detector or Quantised(), attack, **sets)


SICK: list[tuple[str, set[str], Callable[[], Evidence], str]] = [
    ("gradient_flows", set(), lambda: evidence_for(HalfDetached()), "that finite differences in float64 contradict"),
    ("gradient_flows", set(), lambda: evidence_for(HalfDetachedJumping()), "88% of 16 have one that finite differences in float64 contradict"),
    ("gradient_flows", set(), lambda: on_network(NaiveSoftmax), "one that rounding spoils (a saturated score)"),
    ("score_is_attacked", set(), lambda: evidence_for(DeployedOtherwise()), "deployed score is -1.000"),
    ("steps_suffice", set(), lambda: energy(steps=2, restarts=8), "4 steps instead of 2"),
    ("steps_suffice", {"iterative_beats_single", "planted"}, lambda: evidence_for(Brightness(), BOTH | {"step": EPS / 10, "steps": 3}), "6 steps instead of 3"),
    ("restarts_suffice", set(), lambda: evidence_for(Hilly()), "2 runs instead of 1"),
    ("monotone_in_eps", set(), lambda: with_rows(evidence_for(Brightness(), LADDER), auroc=0.995), "a larger ball must not be weaker"),
    ("unbounded_breaks", set(), quantised, "from 1.000 to 1.000"),
    ("unbounded_breaks", set(), lambda: evidence_for(Braggart()), "its certificate proves 1.000, so it is wrong"),
    ("unbounded_breaks", {"black_box_not_stronger"}, lambda: evidence_for(Proven(7.0), inliers=levels(0.42, 0.5), outliers=levels(0.5, 0.58, seed=1)), "its certificate proves 1.000, so it is wrong"),
    ("iterative_beats_single", set(), lambda: evidence_for(Hilly(), BOTH | {"step": EPS / 10}, inliers=levels(0.42, 0.5), outliers=levels(0.5, 0.58, seed=1)), "(gradient masking, or steps that are too small)"),
    ("black_box_not_stronger", {"restarts_suffice"}, lambda: evidence_for(Shattered(), BOTH | {"steps": 40}), "in 41 evaluations"),
    ("black_box_not_stronger", set(), lambda: evidence_for(Shattered(), BOTH | {"steps": 100}, inliers=levels(0.2, 0.485), outliers=levels(0.515, 0.8, seed=1)), "in 101 evaluations"),
    ("collision_is_real", {"gradient_flows", "unbounded_breaks", "iterative_beats_single"}, lambda: evidence_for(Constant(), BOTH, COLLISION), "the score is constant"),
    ("collision_is_real", set(), lambda: evidence_for(Brightness(), BOTH, COLLISION | {"ball": {"norm": "l2", "eps": [1, 3]}}), "0.62 eps away, so the ball holds them"),
    ("collision_is_real", set(), lambda: evidence_for(Brightness(), BOTH, COLLISION, outliers=levels(0.3, 0.6, seed=1)), "under 0.8 for it 0.7"),
    ("deterministic", set(), lambda: evidence_for(Noisy(1e-4)), "averaged over draws"),
    ("planted", set(), lambda: evidence_for(Chaotic()), "for 0% of 32 images"),
    ("pixel_budget", set(), lambda: in_normalised_units(evidence_for(Brightness()), std=0.5), "is 0.2 from its start in linf, and eps is 0.1"),
    ("both_sides", set(), lambda: evidence_for(Brightness(), BOTH | {"side": "out"}), "no attack on side in or both"),
    ("precision_drift", set(), lambda: on_network(Energy, BOTH | {"ball": {"norm": "linf", "eps": 0.04}}, dtype=torch.bfloat16), "scored again in float64"),
    ("leakage", set(), lambda: evidence_for(Brightness(), outliers=torch.cat([BRIGHT, DARK[-2:]])), "2 of 18 outliers bright are among the inliers"),
    ("leakage", set(), lambda: evidence_for(Brightness(), fit_outliers=BRIGHT[:3]), "3 of 16 outliers bright are among the fit outliers"),
    ("leakage", set(), lambda: evidence_for(Brightness(), fit=(DARK + 0.01).clamp(0, 1)), "0 of 16 inliers are among the fit set, and 16 nearly"),
]  # fmt: skip


@pytest.fixture(scope="module")
def healthy() -> list[dict[str, Check]]:
    """The verdicts where all is well: on a linear score, and on a network's energy."""
    wholes = (evidence_for(Brightness(), LADDER, COLLISION, fit=levels(0.2, 0.5, seed=2)), energy())
    return [{check["name"]: check for check in verdicts(evidence)} for evidence in wholes]


def test_the_table_holds_every_check_of_the_evaluation_page() -> None:
    assert set(CHECKS) == set(ORDER) == NAMES
    assert len(ORDER) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_check_passes_where_all_is_well(healthy: list[dict[str, Check]], name: str) -> None:
    for checks in healthy:
        assert checks[name]["status"] == "pass", checks[name]["sentence"]


def test_every_check_has_a_case_in_which_it_alone_fails() -> None:
    assert {name for name, also, *_ in SICK if not also} == NAMES


@pytest.mark.parametrize(("name", "also", "make", "words"), SICK, ids=[f"{case[0]}: {case[3]}" for case in SICK])
def test_a_check_fails_where_just_that_is_wrong(
    name: str, also: set[str], make: Callable[[], Evidence], words: str
) -> None:
    failed = {check["name"]: check["sentence"] for check in verdicts(make()) if check["status"] == "fail"}
    assert set(failed) == {name} | also, failed
    assert words in failed[name]


def test_jumps_beside_which_a_gradient_is_right_do_not_contradict_it(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = evidence_for(Jumping())
    check = CHECKS["gradient_flows"](evidence)
    assert check["status"] == "pass", check["sentence"]
    monkeypatch.setitem(STEPS, "float64", (1e-5,))
    assert "100% of 16 have one that finite differences" in CHECKS["gradient_flows"](evidence)["sentence"]


def test_a_short_step_allows_for_no_rounding() -> None:
    """A slope so small beside the score that rounding would excuse any other: at the second step it must not."""
    x = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction, rounding = torch.ones_like(x), torch.full((4,), 10.0, dtype=torch.float64)
    slope = torch.tensor([3.0, 3.1, 3.5, -3.0], dtype=torch.float64)

    def wrong(rounding: Tensor, *steps: float) -> list[bool]:
        return contradicted(lambda at: at.sum(dim=1), x, direction, slope, rounding, steps)[0].tolist()

    assert wrong(rounding, 1e-5) == [False] * 4
    assert wrong(0 * rounding, 1e-5, 1e-8) == [False, False, True, True]


def test_jumps_in_a_saturated_score_tell_nothing_of_its_slope() -> None:
    """As of ODIN's at temperature 1: a long step crosses a jump, and a short one moves the score less than rounding."""
    x = torch.zeros(3, 1, dtype=torch.float64)
    rise, jump = torch.tensor([1e-4, 1e-10, 1e-10]).double(), torch.tensor([0.0, 1e-9, 1e-9]).double()

    def score(at: Tensor) -> Tensor:
        return -1 + rise[: len(at)] * at[:, 0] + jump[: len(at)] * (at[:, 0] > 4e-7)

    def judged(slope: Tensor) -> tuple[list[bool], list[bool]]:
        found = [
            contradicted(
                lambda at, row=row: score(at.expand(3, 1))[row : row + 1],
                x[row : row + 1],
                torch.ones(1, 1).double(),
                slope[row : row + 1],
                torch.tensor([2.2e-16]).double(),
                STEPS["float64"],
            )
            for row in range(3)
        ]
        return [bool(wrong) for wrong, _ in found], [bool(unsure) for _, unsure in found]

    assert judged(rise) == ([False] * 3, [False, True, True])
    assert judged(torch.tensor([2e-4, -1e-10, 1e-3]).double()) == ([True, False, False], [False, True, True])


class Pooled(Brightness):
    """A small network with max-pooling."""

    def encode(self, x: Tensor) -> Latent:
        return super().encode(x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).amax(dim=4).contiguous())


class InSingle(Brightness):
    """A score in float32, whatever the images are in."""

    def judge(self, z: Latent) -> Tensor:
        return super().judge(z).float()


class SinglyEncoded(Brightness):
    """A network that computes in float32, whatever the images are in."""

    def encode(self, x: Tensor) -> Latent:
        return super().encode(x.float()).to(x.dtype)  # type: ignore[union-attr]


class SurelyOtherwise(Energy):
    """Minus the probability of the larger of two sure classes, with its gradient's sign the wrong way."""

    def judge(self, z: Latent) -> Tensor:
        logits = 8 * leaves(z)[0]
        score = -1 / (logits - logits.amax(dim=1, keepdim=True)).exp().sum(dim=1)
        return 2 * score.detach() - score


def test_ties_in_flat_regions_are_no_fault_of_a_gradient() -> None:
    """Where all of a window is one grey, max-pooling has a gradient to one side only."""
    flat = torch.full((32, 1, 6, 6), 0.3)
    check = CHECKS["gradient_flows"](evidence_for(Pooled(), inliers=flat, outliers=flat + 0.4))
    assert check["status"] == "pass", check["sentence"]


@pytest.mark.parametrize("kind", [InSingle, SinglyEncoded])
def test_single_precision_is_no_fault_of_a_gradient(kind: type[Brightness]) -> None:
    check = CHECKS["gradient_flows"](evidence_for(kind()))
    assert check["status"] != "fail", check["sentence"]


def test_what_a_saturated_score_hides_is_not_called_right() -> None:
    detector = SurelyOtherwise(Encoder(trained_net(), layer="hidden"))
    sure = squares(32)[0], squares(32, seed=5)[0]
    check = CHECKS["gradient_flows"](evidence_for(detector, inliers=sure[0], outliers=sure[1]))
    assert check["status"] != "pass"
    assert "they cannot tell, since the score jumps or is rounded" in check["sentence"]


def test_a_score_without_any_gradient_is_told_so() -> None:
    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Detached()
    assert CHECKS["gradient_flows"](evidence)["sentence"].startswith(
        "it: no gradient reaches the pixels; look for detach()"
    )


def test_an_image_outside_ball_or_box_is_seen_whatever_the_ball_says(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = evidence_for(Brightness(), outliers=levels(0.7, 0.94, seed=1))
    monkeypatch.setattr(Ball, "contains", lambda self, x, centre, slack=0: torch.ones(len(x), dtype=torch.bool))
    project_by(monkeypatch, lambda x, centre: x.clamp(centre - 1.5 * EPS, centre + 1.5 * EPS).clamp(0, 1))
    check = CHECKS["pixel_budget"](replace(evidence, _found={}))
    assert check["status"] == "fail"
    assert "at most 0.15 from their start in linf, eps being 0.1" in check["sentence"]
    assert check["sentence"].endswith("outside the ball.")
    project_by(monkeypatch, lambda x, centre: x.clamp(centre - EPS, centre + EPS))
    evidence.job.detectors["it"] = upwards()
    assert "they leave the box [0, 1] by 0.0" in CHECKS["pixel_budget"](replace(evidence, _found={}))["sentence"]


def test_an_attack_with_eps_in_normalised_units_is_seen_even_where_there_is_nothing_to_pay_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as wrong:
        wrong.setattr(Ball, "contains", lambda self, x, centre, slack=0: torch.ones(len(x), dtype=torch.bool))
        project_by(wrong, lambda x, centre: x.clamp(centre - EPS / 0.5, centre + EPS / 0.5).clamp(0, 1))
        evidence = evidence_for(Brightness())
    for allowance in (float("inf"), 0.0):
        checks = verdicts(replace(evidence, allowance=allowance))
        failed = {check["name"]: check["sentence"] for check in checks if check["status"] == "fail"}
        assert set(failed) == {"pixel_budget"}
        assert failed["pixel_budget"].endswith(
            "is 0.2 from its start in linf, and eps is 0.1; is eps in normalised units?"
        )
    healthy = {check["name"]: check for check in verdicts(replace(evidence_for(Brightness()), allowance=0.0))}
    assert healthy["pixel_budget"]["sentence"].startswith("Not run, too costly")


def project_by(monkeypatch: pytest.MonkeyPatch, project: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Put another projection in the place of an L∞ ball's."""
    monkeypatch.setattr(Linf, "project", lambda self, x, centre: project(x, centre))
    monkeypatch.setattr(Linf, "projection", lambda self, centre: lambda x: project(x, centre))


def upwards() -> Brightness:
    """Darker is more out-of-distribution: the attack makes bright outliers brighter."""

    class Darkness(Brightness):
        def judge(self, z: Latent) -> Tensor:
            return -super().judge(z)

    return Darkness()


def test_rounding_to_8_bits_is_measured_and_not_held_against_the_attack(healthy: list[dict[str, Check]]) -> None:
    found = evidence_for(Brightness(), BOTH | {"ball": {"norm": "linf", "eps": 0.3 / 255}})
    check = CHECKS["pixel_budget"](found)
    rounded = float(check["sentence"].split("8 bits ")[1].rstrip("."))
    assert check["status"] == "pass"
    assert 0.5 / 255 < rounded < 0.8 / 255 + 1e-6


def test_a_certificate_explains_what_no_attack_breaks_as_far_as_it_goes() -> None:
    explained, unexplained = (CHECKS["unbounded_breaks"](quantised(Proven(level))) for level in (0.5, 0.1))
    assert explained["status"] == "pass"
    assert explained["sentence"].endswith("as its certificate explains: no attack on these outliers comes under 1.000.")
    assert unexplained["status"] == "fail"
    assert "and its certificate, which proves 0.000, does not explain it" in unexplained["sentence"]


@pytest.mark.parametrize(("score", "status"), [("excess", "pass"), ("confidence", "fail")])
def test_a_real_certificate_proves_nothing_where_an_outlier_may_become_an_inlier(score: Scale, status: str) -> None:
    """CCU's confidence rounds to its limit, where no gradient leads an attack back: that is not what it certifies."""
    detector = CCU(trained_net(), components=3, score=score).fit(squares(60), outliers=blank(30, seed=2))
    inliers, outliers = squares(16)[0], blank(16)
    assert bool((detector.score_bound(outliers, 1.0, "linf") <= detector.scores(inliers).min()).all())
    attack = BOTH | {"ball": {"norm": "linf", "eps": 0.01}}
    check = CHECKS["unbounded_breaks"](evidence_for(detector, attack, inliers=inliers, outliers=outliers))
    assert check["status"] == status
    assert ("its certificate, which proves 0.000, does not explain it" in check["sentence"]) == (status == "fail")


def test_averaging_over_draws_is_reported_with_their_number() -> None:
    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Expected(Noisy(1e-4), draws=7)
    check = CHECKS["deterministic"](evidence)
    assert check["status"] == "pass"
    assert check["sentence"].startswith("it: scores and gradients are averaged over 7 draws, and scored again")


class Speckled(Brightness):
    """Noise on every pixel, so that every draw has a gradient of its own."""

    def judge(self, z: Latent) -> Tensor:
        return super().judge(tuple(leaf * (1 + torch.randn_like(leaf)) for leaf in leaves(z)))


class SpeckledHalfDetached(HalfDetached, Speckled):
    """The same, and half of it has no gradient."""

    def judge(self, z: Latent) -> Tensor:
        return Speckled.judge(self, z) + HalfDetached.judge(self, z) - Brightness.judge(self, z)


@pytest.mark.parametrize(
    ("kind", "status"), [(Speckled, "pass"), (HalfDetached, "fail"), (SpeckledHalfDetached, "fail")]
)
def test_the_gradient_of_an_average_is_compared_with_differences_of_the_same_draws(
    kind: type[Brightness], status: str
) -> None:
    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Expected(kind(), draws=3)
    check = CHECKS["gradient_flows"](evidence)
    assert check["status"] == status, check["sentence"]
    assert "that finite differences in float64 contradict" in check["sentence"]
    assert "rounding" not in check["sentence"]


class Rounded(Brightness):
    """A gradient that is spoilt where a GPU would round to TF32."""

    def judge(self, z: Latent) -> Tensor:
        pixels = leaves(z)[0]
        score = super().judge(z)
        if pixels.dtype == torch.float64 or not torch.backends.cudnn.allow_tf32:
            return score
        noise = pixels * torch.linspace(-1, 1, pixels.shape[1]).to(pixels)
        return score + (noise - noise.detach()).sum(dim=1)


def test_a_gradient_that_only_tf32_spoils_is_a_warning_that_names_it() -> None:
    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Rounded()
    check = CHECKS["gradient_flows"](evidence)
    assert check["status"] == "warn"
    assert "100% one that rounding spoils, as TF32 does; without it, allow_tf32 = False, 0%" in check["sentence"]
    assert torch.backends.cudnn.allow_tf32


def test_a_single_draw_is_no_average() -> None:
    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Expected(Noisy(1e-4), draws=1)
    assert CHECKS["deterministic"](evidence)["status"] == "fail"


def test_a_few_near_duplicates_are_a_warning_only() -> None:
    many, others = levels(0.2, 0.8, 200), levels(0.2, 0.8, 200, seed=5)
    others[7] = many[7] + 2 / 255
    assert shared("a", many, "b", others)[:2] == ("warn", "0 of 200 a are among the b, and 1 nearly")


def test_an_attack_on_something_else_than_the_score_is_told_so() -> None:
    attack = {"name": "softmax", "ball": {"norm": "linf", "eps": 0.04}, "steps": 5}
    evidence = on_network(MSP, attack)
    check = CHECKS["score_is_attacked"](evidence)
    assert check["status"] == "warn"
    assert "no attack of the plan is on the score itself" in check["sentence"]
    evidence.job.detectors["it"] = Mahalanobis(Encoder(trained_net(), layer="maps")).fit(squares(60, seed=7))
    assert CHECKS["score_is_attacked"](evidence)["status"] == "fail"


def test_a_suite_counts_as_an_attack_on_the_score() -> None:
    suite = {"name": "worst_case", "budget": "quick", "ball": {"norm": "linf", "eps": 0.05}}
    evidence = evidence_for(Brightness(), BOTH | {"steps": 200}, suite)
    effort = evidence.effort("it")
    assert (effort.steps, effort.restarts) == (BUDGETS["quick"].steps, BUDGETS["quick"].restarts)
    assert effort.ball == Linf(0.05)


def test_the_largest_ball_that_leaves_something_unbroken_is_looked_at() -> None:
    evidence = evidence_for(Brightness(), BOTH | {"ball": {"norm": "linf", "eps": [0.05, 0.2, 0.1, 0.4]}})
    assert evidence.reported("it", evidence.job.attacks[0], 0.4) == 0
    assert evidence.effort("it").ball == Linf(0.2)


def test_an_error_inside_a_check_is_a_failure_of_that_check_and_detector() -> None:
    class Broken(Brightness):
        def judge(self, z: Latent) -> Tensor:
            raise RuntimeError("the disk\nis full")

    evidence = evidence_for(Brightness())
    evidence.job.detectors["it"] = Broken()
    for check in verdicts(replace(evidence, _found={})):
        scored = CHECKS[check["name"]].attack != "none" or check["name"] in ("gradient_flows", "deterministic")
        if scored and check["name"] != "planted":  # which reads latents only
            assert check["status"] == "fail"
            assert check["sentence"] == "it: the disk is full."


def test_without_an_attack_what_needs_none_is_checked() -> None:
    job, measured, rows = finished({"it": Brightness()}, [])
    checks = {check["name"]: check for check in run_checks(job, measured, rows, share=100)}
    assert list(checks) == list(ORDER)
    assert {name for name, check in checks.items() if check["status"] == "pass"} == {
        "gradient_flows", "deterministic", "collision_is_real", "leakage",
    }  # fmt: skip
    assert checks["planted"]["sentence"] == "Not run, the plan has no attack."


def test_the_checks_leave_no_trace() -> None:
    evidence = energy()
    network = evidence.job.output.model
    before = torch.random.get_rng_state()
    verdicts(evidence)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not network._forward_pre_hooks
    assert all(parameter.grad is None for parameter in network.parameters())
