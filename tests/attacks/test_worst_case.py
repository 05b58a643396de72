"""The suite against a plain PGD written here, and what it reports."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gatecrash import L2, Ball, Encoder, Linf, worst_case
from gatecrash.attacks.averaged import Averaged
from gatecrash.attacks.ranked import Ranked
from gatecrash.attacks.suite import WorstCase
from gatecrash.attacks.surrogates import SURROGATES, log_odds, margin, unprocessed
from gatecrash.detectors import (
    DETECTORS,
    MSP,
    ODIN,
    Card,
    Detector,
    Energy,
    Expected,
    Mahalanobis,
    ScoreEnsemble,
)
from gatecrash.found import Found
from gatecrash.objective import LowerScore
from gatecrash.search import search
from gatecrash.speed import at_pace, current_pace
from gatecrash.stepper import Apgd, Sign
from small_models import blank, one_thread, squares, trained_net
from small_rivals import MAKERS, features, logits, weaker_than_plain_pgd

assert one_thread


def test_every_detector_is_among_the_makers() -> None:
    assert set(MAKERS) == set(DETECTORS)


@pytest.mark.parametrize("ball", [Linf(0.08), L2(0.25)], ids=["linf", "l2"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_suite_is_weaker_than_plain_pgd_on_no_more_than_two_percent_of_the_samples(name: str, ball: Ball) -> None:
    assert weaker_than_plain_pgd(name, ball, blank(30), squares(30, seed=5)[0]) <= 0.02


@pytest.mark.parametrize("eight_bit", [False, True])
def test_evaluations_are_reported_per_attack_and_add_up(eight_bit: bool) -> None:
    calls = 0

    class Counting(MSP):
        def encode(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += len(x)
            return super().encode(x)

    detector = Counting(logits())
    images = blank(6)
    found = worst_case(detector, images, Linf(0.05), "out", "quick", others=squares(6)[0], eight_bit=eight_bit)
    assert set(found.spent) - {"rounding"} == {
        "start",
        "targets",
        "score",
        "mean gradients",
        "small steps",
        *SURROGATES,
        "class 1",
        "collision 1",
        "square",
        "score from the best",
        "mean gradients from the best",
        "falling steps from the best",
    }
    assert found.spent.get("rounding", 0) == (12 if eight_bit else 0)
    assert sum(found.spent.values()) == calls
    assert int(found.evaluations.sum()) == calls - found.spent["targets"]
    assert len(found.winner) == 6


def test_samples_that_have_crossed_the_threshold_are_left_alone() -> None:
    detector = MSP(logits())
    images = blank(10)
    free = worst_case(detector, images, Linf(0.05), "out", "quick")
    assert free.score is not None
    easy = float(free.score.max()) + 1e-3
    found = worst_case(detector, images, Linf(0.05), "out", "quick", stop=easy)
    assert found.success.all()
    assert set(found.spent) == {"start", "score"}
    assert (found.evaluations < free.evaluations / 2).all()


def test_a_ladder_never_gets_weaker_upwards() -> None:
    detector = Energy(logits())
    found = worst_case(detector, squares(8)[0], Linf([0.02, 0.1, 0.05]), "in", "quick")
    small, large, middle = (rung.score for rung in found.rungs)
    assert (small <= middle).all() and (middle <= large).all()
    assert torch.equal(found.x, found.rungs[1].x)


def test_budgets_buy_strength() -> None:
    detector = ODIN(logits(), temperature=10.0, magnitude=0.01)
    images = blank(12)
    values = [worst_case(detector, images, Linf(0.08), "out", budget).value.mean() for budget in ("quick", "thorough")]
    assert values[1] <= values[0] + 1e-6


def test_a_detector_without_gradient_at_the_start_is_still_attacked() -> None:
    """A score that is flat around the images: gradients say nothing, Square and the collision still look around."""

    class Terrace(MSP):
        def judge(self, z: Tensor) -> Tensor:
            score = super().judge(z)
            return (
                score + (torch.round(score * 20) / 20 - score).detach() + 0 * score - 0 * z.sum(dim=1)
                if score.requires_grad
                else torch.round(score * 20) / 20
            )

    class Flat(MSP):
        def judge(self, z: Tensor) -> Tensor:
            return torch.round(super().judge(z) * 20) / 20 + 0 * z.sum(dim=1)

    for detector in (Terrace(logits()), Flat(logits())):
        found = worst_case(detector, blank(10), Linf(0.1), "out", "standard", others=squares(10)[0])
        assert (found.value < found.start_value).float().mean() > 0.8
    assert "score" not in set(found.winner)


class Ridge(Detector):
    """5·|a − b| + a + b of an image's two pixels: the way down is along the kink a = b."""

    card = Card(paper="", year=2020, reads="pixels")

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def judge(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return 5 * (z[:, 0] - z[:, 1]).abs() + z.sum(dim=1)


def test_mean_gradients_go_along_a_kink_where_signs_leap_across_it() -> None:
    """The least value inside L∞ is at a = b = 0.52 − ε, since b comes no lower."""
    start, ball, ridge = torch.tensor([[[[0.5, 0.52]]]]), Linf(0.1), LowerScore(Ridge(None))
    gaps = {
        type(stepper).__name__: float(search(ridge, start, ball, stepper=stepper, steps=50).value - 2 * 0.42)
        for stepper in (Averaged(), Apgd(), Sign(share=0.07))
    }
    assert gaps["Averaged"] < 2e-3
    assert gaps["Apgd"] > 0.1 and gaps["Sign"] > 0.1


class Unsure(MSP):
    """A randomised MSP."""

    def judge(self, z: Tensor) -> Tensor:  # type: ignore[override]
        score = super().judge(z)
        return score + 0.2 * torch.randn_like(score)


def test_what_is_reported_of_a_randomised_detector_is_its_mean_and_not_its_luck() -> None:
    """The luckiest of some 300 draws of σ = 0.05, the mean of 16, would look 0.14 better than it is."""
    true, images = MSP(logits()), blank(10)
    best = worst_case(true, images, Linf(0.02), "out", "quick")
    found = worst_case(Expected(Unsure(logits()), draws=16), images, Linf(0.02), "out", "quick")
    assert found.score is not None and best.score is not None
    assert float((found.score - true(found.x).detach()).mean()) == pytest.approx(0, abs=4 * 0.2 / (10 * 8 * 16) ** 0.5)
    assert float(true(found.x).detach().mean() - best.score.mean()) < 0.01
    assert {"log-odds", "class 1", "fresh draws"} <= set(found.spent)
    assert sum(found.spent.values()) == int(found.evaluations.sum())
    assert "fresh draws" not in best.spent


def test_an_ensemble_with_preprocessing_is_also_attacked_without_it() -> None:
    odins = [ODIN(Encoder(trained_net(seed)), temperature=10.0, magnitude=0.01) for seed in (0, 1)]
    for detector in (ScoreEnsemble([*odins, MSP(logits())]), Expected(odins[0], draws=2)):
        x = blank(4)
        spent = worst_case(detector, x, Linf(0.05), "out", "quick").spent
        assert spent["without preprocessing"] > 0
        plain = unprocessed(detector, x)
        assert isinstance(plain, tuple)
        torch.testing.assert_close(plain[0], odins[0].encoder(x))
    assert "without preprocessing" not in worst_case(MSP(logits()), x, Linf(0.05), "out", "quick").spent


@pytest.mark.parametrize(("side", "images"), [("out", blank(6)), ("in", squares(6)[0])])
def test_8_bit_images_are_returned_inside_the_ball_with_what_rounding_cost(side: str, images: Tensor) -> None:
    images, detector = (images * 255).round() / 255, Energy(logits())
    free, found = (
        worst_case(detector, images, Linf([4 / 255, 2.5 / 255]), side, "quick", eight_bit=eight_bit)
        for eight_bit in (False, True)
    )
    assert free.cost is None
    for plain, rung, eps in zip(free.rungs, found.rungs, (4, 2), strict=True):
        assert isinstance(rung, WorstCase)
        levels = 255 * rung.x
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
        assert float(rung.distance("linf").max()) <= eps / 255 + 1e-6
        torch.testing.assert_close(rung.score, detector(rung.x).detach())
        torch.testing.assert_close(rung.cost, rung.value - plain.value, rtol=1e-3, atol=1e-5)


def test_surrogates_do_not_saturate() -> None:
    z = torch.tensor([[60.0, 0.0, -5.0], [2.0, 1.9, -30.0]], requires_grad=True)
    torch.testing.assert_close(margin(z), torch.tensor([-60.0, -0.1]))
    torch.testing.assert_close(log_odds(z), torch.tensor([-60.0, -0.1]), rtol=0, atol=1e-2)
    for surrogate in SURROGATES.values():
        (gradient,) = torch.autograd.grad(surrogate(z).sum(), z)
        assert gradient.abs().amax(dim=1).min() > 0.3


class Untouched(MSP):
    """No image may be scored."""

    def encode(self, x: Tensor) -> Tensor:
        raise AssertionError("an image was scored")


@pytest.mark.parametrize("kind", [Linf, L2])
def test_a_narrower_box_is_kept_to(kind: type[Ball]) -> None:
    images = squares(4)[0].clamp(0.2, 0.8)
    found = worst_case(MSP(logits()), images, kind(0.3, box=(0.2, 0.8)), "in", "quick")
    assert float(found.x.min()) >= 0.2 - 1e-6 and float(found.x.max()) <= 0.8 + 1e-6
    assert (found.score > found.start_score).all()


def test_bad_options_are_refused() -> None:
    detector = MSP(logits())
    with pytest.raises(ValueError, match="side must be 'out' or 'in', got 'both'"):
        worst_case(detector, blank(2), Linf(0.1), "both")
    with pytest.raises(TypeError, match=r"detector must be a detector, such as .*, got 'msp'"):
        worst_case("msp", blank(2), Linf(0.1), "out")
    with pytest.raises(TypeError, match=r"such as MSP\(network\), got its class"):
        worst_case(MSP, blank(2), Linf(0.1), "out")
    with pytest.raises(TypeError, match=r"such as MSP\(network\), got Linear$"):
        worst_case(torch.nn.Linear(3, 2), blank(2), Linf(0.1), "out")
    with pytest.raises(ValueError, match=r"an ensemble is made of detectors, such as MSP.*, got a Linear"):
        ScoreEnsemble([torch.nn.Linear(3, 2)])
    with pytest.raises(ValueError, match="budget must be one of quick, standard, thorough, got 'huge'"):
        worst_case(detector, blank(2), Linf(0.1), "out", "huge")
    for ball in (None, 0.1):
        with pytest.raises(TypeError, match=rf"ball must say norm and radius, such as .*, got {ball}"):
            worst_case(detector, blank(2), ball, "out")
    for options, message in (
        ({"stop": float("nan")}, r"stop must be one number or of shape \(2,\), got NaN, which no score reaches"),
        ({"stop": torch.zeros(7)}, r"stop must be one number or of shape \(2,\), got shape \(7,\)"),
        ({"batch_size": -1}, "batch_size must be a whole number of at least 1, got -1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"others": blank(3)[:0]}, "others must hold at least one image"),
        ({"others": torch.rand(2, 3, 5, 5)}, r"others must be of the images' shape \(1, 6, 6\), got \(3, 5, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            worst_case(detector, blank(2), Linf(0.1), "out", "quick", **options)
    for ball in (Linf(0.1, box=None), L2(0.1, box=(-1.0, 2.0))):
        with pytest.raises(
            ValueError, match=r"a ball with a box in \[0, 1\], such as the default \(0, 1\), got L.*, box="
        ):
            worst_case(detector, blank(2), ball, "out", "quick")
    with pytest.raises(ValueError, match=r"start must lie in the ball's box \(0.6, 0.9\), got values from"):
        worst_case(Untouched(logits()), torch.full((2, 1, 6, 6), 0.5), Linf(0.1, box=(0.6, 0.9)), "out", "quick")
    with pytest.raises(ValueError, match=r"8-bit images need a ball with the box \(0, 1\), got \(0.1, 0.9\)"):
        worst_case(Untouched(logits()), torch.full((2, 1, 6, 6), 0.5), Linf(0.1, box=(0.1, 0.9)), "out", eight_bit=True)
    with pytest.raises(ValueError, match="Mahalanobis is not fitted"):
        worst_case(Mahalanobis(features()), blank(2), Linf(0.1), "out")


class Drifting(Detector):
    """Scores the sum of the pixels, and more of it the rougher the pace."""

    card = Card(paper="", year=2020, reads="pixels")

    def encode(self, x: Tensor) -> Tensor:
        return x

    def judge(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return z.flatten(1).sum(dim=1) - {"plain": 0.0, "prepared": 1.0, "half": 100.0}[current_pace()]


def test_scores_of_two_paces_are_never_compared_and_what_is_kept_is_the_detectors_own() -> None:
    start, rows = torch.full((2, 1, 2, 2), 0.5), torch.arange(2)
    ranked = Ranked(Drifting(None), 1.0, lambda z, at: z.flatten(1).sum(dim=1), start)
    ranked(start, rows)
    assert ranked.value.tolist() == [2.0, 2.0] and not ranked.rough
    with at_pace("half"):
        ranked(start + 0.1, rows)  # worse at the same pace, though its number is smaller
        ranked(start - 0.1, rows)
    with at_pace("prepared"):
        ranked(start[:1] - 0.2, rows[:1])
    assert ranked.rough and ranked.value.tolist() == pytest.approx([0.2, 1.6 - 100.0])
    assert torch.equal(ranked.x, torch.cat([start[:1] - 0.2, start[1:] - 0.1]))


@pytest.mark.parametrize("side", ["out", "in"])
def test_what_is_reported_is_the_detectors_score_whatever_a_search_claims(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a score jumps, the layout or precision that a search computes in may be on the other side."""

    def claiming(*args: Any, **options: Any) -> Found:
        found = search(*args, **options)
        return replace(found, value=found.value - 1.0)

    detector = MSP(logits())
    monkeypatch.setattr("gatecrash.attacks.suite.search", claiming)
    found = worst_case(detector, blank(6), Linf(0.05), side, "quick", others=squares(6)[0])  # type: ignore[arg-type]
    assert torch.allclose(found.score, detector.scores(found.x), atol=1e-6)
    assert (found.value < found.start_value).all()
