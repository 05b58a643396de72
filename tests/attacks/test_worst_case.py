"""The suite against a plain PGD written here, and what it reports."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gatecrash import L2, Ball, Encoder, Linf, worst_case
from gatecrash.attacks.worst_case import SURROGATES, Ranked, log_odds, margin
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
)
from gatecrash.speed import at_pace, current_pace
from small_clip import WordedNet
from small_models import blank, one_thread, squares, trained_net

assert one_thread


def logits() -> Encoder:
    return Encoder(trained_net())


def features() -> Encoder:
    return Encoder(trained_net(), layer="hidden")


MAKERS: dict[str, Callable[[], Detector]] = {
    "msp": lambda: MSP(logits()),
    "maxlogit": lambda: MaxLogit(logits()),
    "energy": lambda: Energy(logits()),
    "oe": lambda: OutlierExposureScore(logits()),
    "odin": lambda: ODIN(logits(), temperature=10.0, magnitude=0.01),
    "mahalanobis": lambda: Mahalanobis(features(), layers=["maps", "hidden"], magnitude=0.01),
    "rmd": lambda: RelativeMahalanobis(features()),
    "ensemble": lambda: ScoreEnsemble([MSP(logits()), Energy(Encoder(trained_net(1)))]),
    "deep_ensemble": lambda: DeepEnsemble([trained_net(0), trained_net(1)]),
    "temperature": lambda: Temperature(logits()),
    "gmm": lambda: GMM(features(), components=4),
    "zheng_hong": lambda: ZhengHong(features(), components=2),
    "gram": lambda: Gram(features(), layers=["maps", "hidden"]),
    "autoencoder": lambda: Reconstruction(
        model={"width": 4, "latent": 3}, training={"epochs": 15, "lr": 0.01, "batch_size": 20}
    ),
    "collision_residual": lambda: CollisionResidual(
        features(), model={"width": 4}, training={"epochs": 15, "lr": 0.01, "batch_size": 20}
    ),
    "glow": lambda: GlowLikelihood(model={"steps": 1, "hidden": 8}, training={"epochs": 20, "lr": 0.02}),
    "complexity": lambda: InputComplexity(model={"steps": 1, "hidden": 16}, training={"epochs": 40, "lr": 0.02}),
    "pixelcnn": lambda: PixelCNNLikelihood(
        model={"blocks": 0, "filters": 8, "mixtures": 2, "levels": 0},
        training={"epochs": 40, "lr": 0.05, "batch_size": 60},
    ),
    "vae": lambda: FeatureVAE(
        features(),
        model={"hidden": 16, "latent": 2, "draws": 4},
        training={"epochs": 60, "lr": 0.03, "batch_size": 60},
    ),
    "maf": lambda: FeatureMAF(
        features(), model={"transforms": 2, "hidden": [8]}, training={"epochs": 60, "lr": 0.03, "batch_size": 60}
    ),
    "jem": lambda: JEM(logits()),
    "confident": lambda: Confident(logits()),
    "ccu": lambda: CCU(logits(), components=3),
    "clip": lambda: CLIPZeroShot(WordedNet(trained_net()), inside=WordedNet.corners, outside=["nothing"], prompt="{}"),
    "mcm": lambda: MCM(WordedNet(trained_net()), inside=WordedNet.corners, prompt="{}"),
}


def plain_pgd(detector: Detector, x: Tensor, ball: Ball, sign: float, steps: int = 200, restarts: int = 5) -> Tensor:
    """The best score of signed (L∞) or normalised (L2) gradient steps from random points, and from the image itself."""
    generator = torch.Generator().manual_seed(11)
    best = sign * detector(x).detach()
    size = 2.5 * ball.eps / steps
    for restart in range(restarts):
        noise = torch.rand(x.shape, generator=generator)
        at = x if restart == 0 else ball.random_start(x, noise)
        for _ in range(steps):
            at = at.detach().requires_grad_()
            score = sign * detector.judge(detector.encode(at))
            best = torch.minimum(best, score.detach())
            (gradient,) = torch.autograd.grad(score.sum(), at)
            at = ball.project(at - size * ball.direction(gradient), x)
        with torch.no_grad():
            best = torch.minimum(best, sign * detector.judge(detector.encode(at)))
    return sign * best


def test_every_detector_is_among_the_makers() -> None:
    assert set(MAKERS) == set(DETECTORS)


@pytest.mark.parametrize("ball", [Linf(0.08), L2(0.25)], ids=["linf", "l2"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_suite_is_weaker_than_plain_pgd_on_no_more_than_two_percent_of_the_samples(name: str, ball: Ball) -> None:
    detector = MAKERS[name]()
    detector.fit(squares(60), outliers=blank(30, seed=2))
    weaker, total = 0, 0
    for side, images, others in (("out", blank(30), squares(30, seed=5)[0]), ("in", squares(30, seed=5)[0], blank(30))):
        sign = 1.0 if side == "out" else -1.0
        found = worst_case(detector, images, ball, side, "standard", others=others)
        rival = plain_pgd(detector, images, ball, sign)
        assert found.score is not None
        reach = (rival - detector(images).detach()).abs().median()
        weaker += int((sign * found.score > sign * rival + 1e-3 * reach).sum())
        total += len(images)
        assert ball.contains(found.x, images).all()
        torch.testing.assert_close(found.score, detector(found.x).detach(), rtol=1e-4, atol=1e-5)
    assert weaker <= 0.02 * total


def test_evaluations_are_reported_per_attack_and_add_up() -> None:
    calls = 0

    class Counting(MSP):
        def encode(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += len(x)
            return super().encode(x)

    detector = Counting(logits())
    images = blank(6)
    found = worst_case(detector, images, Linf(0.05), "out", "quick", others=squares(6)[0])
    assert set(found.spent) == {
        "score",
        "small steps",
        *SURROGATES,
        "class 1",
        "collision 1",
        "square",
        "score from the best",
        "annealed from the best",
    }
    assert sum(found.spent.values()) + len(images) == int(found.evaluations.sum())
    assert int(found.evaluations.sum()) <= calls <= int(found.evaluations.sum()) * 1.2
    assert len(found.winner) == 6


def test_samples_that_have_crossed_the_threshold_are_left_alone() -> None:
    detector = MSP(logits())
    images = blank(10)
    free = worst_case(detector, images, Linf(0.05), "out", "quick")
    assert free.score is not None
    easy = float(free.score.max()) + 1e-3
    found = worst_case(detector, images, Linf(0.05), "out", "quick", stop=easy)
    assert found.success.all()
    assert set(found.spent) == {"score"}
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


def test_surrogates_do_not_saturate() -> None:
    z = torch.tensor([[60.0, 0.0, -5.0], [2.0, 1.9, -30.0]], requires_grad=True)
    torch.testing.assert_close(margin(z), torch.tensor([-60.0, -0.1]))
    torch.testing.assert_close(log_odds(z), torch.tensor([-60.0, -0.1]), rtol=0, atol=1e-2)
    for surrogate in SURROGATES.values():
        (gradient,) = torch.autograd.grad(surrogate(z).sum(), z)
        assert gradient.abs().amax(dim=1).min() > 0.3


def test_bad_options_are_refused() -> None:
    detector = MSP(logits())
    with pytest.raises(ValueError, match="side must be 'out' or 'in', got 'both'"):
        worst_case(detector, blank(2), Linf(0.1), "both")
    with pytest.raises(ValueError, match="budget must be one of quick, standard, thorough, got 'huge'"):
        worst_case(detector, blank(2), Linf(0.1), "out", "huge")
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
    assert ranked.verified(None).tolist() == [2.0, 2.0] and not ranked.rough
    with at_pace("half"):
        ranked(start + 0.1, rows)  # worse at the same pace, though its number is smaller
        ranked(start - 0.1, rows)
    with at_pace("prepared"):
        ranked(start[:1] - 0.2, rows[:1])
    assert ranked.verified(None).tolist() == pytest.approx([1.2, 1.6])
    assert torch.equal(ranked.x, torch.cat([start[:1] - 0.2, start[1:] - 0.1]))
