"""The smallest perturbation across a threshold, on scores whose distance to it is known."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gatecrash import L2, Ball, Linf, admit
from gatecrash.attacks.leaps import Flips, Leaps, windows
from gatecrash.attacks.minimal import Minimal, minimal
from gatecrash.attacks.radii import Radii
from gatecrash.attacks.score import scores
from gatecrash.ball import BALLS
from gatecrash.detectors import Detector, Energy, Gram, Mahalanobis, RelativeMahalanobis
from gatecrash.objective import RaiseScore
from gatecrash.search import search
from gatecrash.speed import is_exact
from gatecrash.stepper import Apgd
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

SHAPE = (3, 8, 8)
CENTRE = torch.full((4, *SHAPE), 0.5)


class LinearScore:
    """τ = w·x, summed so that an image's score does not depend on how many others there are."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def judge(self, z: Tensor) -> Tensor:
        return (z * self.weights.flatten()).sum(dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.judge(self.encode(x))


def linear(dtype: torch.dtype = torch.float32) -> LinearScore:
    return LinearScore(torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype))


def images(count: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return low + (high - low) * torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(7)).to(dtype)


def dual_norm(weights: Tensor, norm: str) -> Tensor:
    return weights.abs().sum() if norm == "linf" else weights.norm()


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize(("side", "sign"), [("out", 1), ("in", -1)])
@pytest.mark.parametrize("gap", [1e-3, 0.1, 3.0])
def test_a_linear_score_is_crossed_at_its_exact_distance(norm: str, side: str, sign: int, gap: float) -> None:
    score, x = linear(torch.float64), images(6, 0.4, 0.6, torch.float64)
    gaps = gap * torch.linspace(1, 2, 6)
    clean = score(x)
    for i in range(6):  # every sample has a gap of its own to one threshold: shift the images along w
        x[i] += (sign * gaps[i] - clean[i]) * score.weights / score.weights.square().sum()
    found = minimal(score, x, norm, 0.0, side=side)
    exact = score(x).abs() / dual_norm(score.weights, norm)
    assert found.success.all()
    assert (found.distance <= 1.01 * exact).all() and (found.distance >= 0.999 * exact).all()
    assert (sign * score(found.x) <= 0).all()
    torch.testing.assert_close(BALLS[norm](1.0).distance(found.x, x), found.distance)


@pytest.mark.parametrize(("norm", "gap"), [("linf", 20.0), ("l2", 20.0), ("linf", 40.0), ("l2", 40.0)])
def test_beside_the_walls_of_the_box_the_distance_is_still_found(norm: str, gap: float) -> None:
    """With half of the pixels at 0 the least perturbation is −min(t·|w|, room) for L2, −min(t, room) for L∞."""
    score, x = linear(), CENTRE.clone()
    x[:, :, :4] = 0.0
    weights = score.weights.double()
    room = torch.where(weights > 0, x[0].double(), 1 - x[0].double())
    low, high = 0.0, 10.0
    for _ in range(100):
        t = (low + high) / 2
        step = torch.minimum(t * weights.abs() if norm == "l2" else torch.full_like(weights, t), room)
        low, high = (t, high) if (step * weights.abs()).sum() < gap else (low, t)
    exact = step.norm() if norm == "l2" else step.amax()
    found = minimal(score, x, norm, float(score(x)[0]) - gap)
    torch.testing.assert_close(found.distance.double(), exact.expand(4), rtol=0.01, atol=0)
    assert (found.x >= 0).all() and (found.x <= 1).all()


def test_where_no_image_of_the_box_crosses_the_distance_is_infinite() -> None:
    score, x = linear(), images(5, 0.0, 1.0)
    lowest = float(score.weights.clamp_max(0).sum())
    never = minimal(score, x, "l2", lowest - 0.1)
    assert not never.success.any() and never.distance.isinf().all() and math.isinf(never.median)
    torch.testing.assert_close(score(never.x), torch.full((5,), lowest), rtol=0, atol=0.1)
    just = minimal(score, x, "linf", lowest + 1e-3)
    assert just.success.all()
    corner = (score.weights < 0).float()
    torch.testing.assert_close(just.distance, (x - corner).abs().flatten(1).amax(dim=1), rtol=0.01, atol=0)


def test_images_across_the_threshold_stay_where_they_are() -> None:
    score, x = linear(), images(6, 0.2, 0.8)
    middle = score(x).sort().values[2]
    out, inside = (minimal(score, x, "l2", middle, side=side) for side in ("out", "in"))
    clean = score(x)
    assert torch.equal(out.distance == 0, clean <= middle)  # predict accepts a score at the threshold
    assert torch.equal(inside.distance == 0, clean > middle)
    assert torch.equal(out.x[clean <= middle], x[clean <= middle])
    assert (
        out.evaluations[clean <= middle] == 4
    ).all()  # two to see whether scores are drawn, one how they are rounded
    assert inside.success.all() and (score(inside.x) > middle).all()


class Coarse(LinearScore):
    """The same, rounded where convolutions on a GPU round to TF32: everywhere but where a score is reported."""

    def judge(self, z: Tensor) -> Tensor:
        score = super().judge(z)
        return score if is_exact() else score + (0.02 * (score / 0.02).round() - score).detach()


@pytest.mark.parametrize("side", ["out", "in"])
def test_what_crosses_is_what_the_detector_itself_says(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    score, x = Coarse(linear().weights), images(40, 0.3, 0.7)
    clean = scores(score, x, None)
    threshold = clean.sort().values[20]
    found = minimal(score, x, "l2", threshold, side=side)  # type: ignore[arg-type]
    after, across = scores(score, found.x, None), clean <= threshold if side == "out" else clean > threshold
    assert torch.equal(found.distance == 0, across)
    assert found.success.all() and bool((after <= threshold if side == "out" else after > threshold).all())
    exact = (clean - threshold).abs() / score.weights.norm()
    rounding = 0.04 / score.weights.norm()
    assert bool((found.distance[~across] <= 1.01 * exact[~across] + rounding).all())


class Floored(LinearScore):
    """The mean pixel above a level, and no less: a score that reaches a threshold and never goes below it."""

    def judge(self, z: Tensor) -> Tensor:
        return (z.mean(dim=1) - 0.3).clamp_min(0)


class Stepped(LinearScore):
    """The mean pixel in eighths, with the gradient of the mean."""

    def judge(self, z: Tensor) -> Tensor:
        mean = z.mean(dim=1)
        return mean + ((8 * mean).round() / 8 - mean).detach()


@pytest.mark.parametrize(
    ("kind", "threshold", "mean_there"), [(Floored, 0.0, 0.3), (Stepped, 0.5, 0.5625)], ids=["floor", "steps"]
)
def test_a_threshold_that_is_a_level_of_the_score_is_reached(
    kind: type[LinearScore], threshold: float, mean_there: float
) -> None:
    score, x = kind(torch.zeros(SHAPE)), images(6, 0.6, 0.8)
    found = minimal(score, x, "linf", threshold)
    exact = x.flatten(1).mean(dim=1) - mean_there  # all pixels darker alike
    assert found.success.all() and (score(found.x) <= threshold).all()
    torch.testing.assert_close(found.distance, exact, rtol=0.02, atol=0)


class Exploding(LinearScore):
    """The mean pixel, and 1e18 where the first pixel is white."""

    def judge(self, z: Tensor) -> Tensor:
        return z.mean(dim=1) + 1e18 * (z[:, 0] == 1)


def test_one_huge_score_says_nothing_of_the_others() -> None:
    score, x = Exploding(torch.zeros(SHAPE)), images(6, 0.6, 0.8)
    alone = minimal(score, x[1:], "linf", 0.5)
    x[0, 0, 0, 0] = 1
    found = minimal(score, x, "linf", 0.5)
    assert found.success.all()
    torch.testing.assert_close(found.distance[1:], alone.distance, rtol=0.01, atol=0)
    torch.testing.assert_close(found.distance[1:], x[1:].flatten(1).mean(dim=1) - 0.5, rtol=0.02, atol=0)


class Trembling(LinearScore):
    """The same, and another number at every look."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights)
        self.source = torch.Generator().manual_seed(0)

    def judge(self, z: Tensor) -> Tensor:
        score = super().judge(z)
        return score + 0.1 * torch.randn(score.shape, generator=self.source).to(score)


@pytest.mark.parametrize("side", ["out", "in"])
def test_a_trembling_score_is_across_when_its_mean_is(side: str) -> None:
    """By luck a draw crosses long before that, so a search that is content with one ends at half the distance."""
    plain, trembling, x = linear(), Trembling(linear().weights), images(8, 0.3, 0.7)
    clean = plain(x)
    threshold = float(clean.min() - 0.5) if side == "out" else float(clean.max() + 0.5)
    found = minimal(trembling, x, "l2", threshold, side=side)  # type: ignore[arg-type]
    exact = minimal(plain, x, "l2", threshold, side=side).distance  # type: ignore[arg-type]
    across = plain(found.x) <= threshold if side == "out" else plain(found.x) > threshold
    assert across.all()
    assert (found.distance >= 0.999 * exact).all() and (found.distance <= 1.5 * exact).all()


class Ring:
    """τ = |‖x − ½‖ − r|: rises to r at the centre, falls to 0 on a sphere, and rises again; curved everywhere."""

    def __init__(self, radius: float) -> None:
        self.radius = radius

    def encode(self, x: Tensor) -> Tensor:
        return (x - 0.5).flatten(1)

    def judge(self, z: Tensor) -> Tensor:
        return (z.square().sum(dim=1).add(1e-12).sqrt() - self.radius).abs()

    def __call__(self, x: Tensor) -> Tensor:
        return self.judge(self.encode(x))


def test_the_distance_to_a_sphere_from_both_sides() -> None:
    offset = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([0.2, 0.6, 1.4, 2.0])
    x = 0.5 + offset * (lengths / offset.flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
    found = minimal(Ring(1.0), x, "l2", 0.1)
    torch.testing.assert_close(found.distance, (lengths - 1).abs() - 0.1, rtol=0.01, atol=0)


def test_no_stronger_search_crosses_well_inside_the_distance() -> None:
    detector = Mahalanobis(trained_net(), layers="hidden").fit(squares(60)).calibrate(squares(30, 5)[0])
    outliers = blank(6)
    assert detector.threshold is not None
    found = minimal(detector, outliers, "linf", detector.threshold)
    assert found.success.all() and not detector.predict(found.x).any()
    for i in range(6):
        smaller = Linf(0.97 * float(found.distance[i]))
        best = admit(detector, outliers[i : i + 1], smaller, steps=100, restarts=2, stop=detector.threshold)
        assert not best.success


FEATURES: dict[str, Callable[[], Detector]] = {
    "rmd": lambda: RelativeMahalanobis(trained_net(), layers="hidden"),
    "gram": lambda: Gram(trained_net(), layers=["maps", "hidden"]),
}


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("side", ["out", "in"])
@pytest.mark.parametrize("name", FEATURES)
def test_plain_steps_do_not_cross_well_inside_the_distance(name: str, side: str, norm: str) -> None:
    """Scores with kinks and valleys, where a single descent often fails: 60 small steps from three starts."""
    detector = FEATURES[name]().fit(squares(60)).calibrate(squares(100, seed=8)[0])
    x = blank(15, seed=9) if side == "out" else squares(15, seed=7)[0]
    assert detector.threshold is not None
    sign, limit = (1, detector.threshold) if side == "out" else (-1, -detector.threshold)
    found = minimal(detector, x, norm, detector.threshold, side=side)
    assert found.success.all()
    assert torch.equal(detector.predict(found.x), torch.full((15,), side == "in"))
    x = x[found.distance > 0]
    balls = Radii(BALLS[norm], 0.95 * found.distance[found.distance > 0])
    generator = torch.Generator().manual_seed(11)
    for restart in range(3):
        at = balls.random_start(x, torch.rand(x.shape, generator=generator)) if restart else x
        for _ in range(60):
            at = at.detach().requires_grad_()
            value = sign * detector(at)
            assert (value > limit).all()
            (gradient,) = torch.autograd.grad(value.sum(), at)
            at = balls.project(at - 2.5 / 60 * balls.direction(gradient), x)


class Bowl:
    """τ = Σ (x − 0.4)²: raised, every pixel has a valley between the two ends it can go to, and 1 is the higher one."""

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def judge(self, z: Tensor) -> Tensor:
        return (z - 0.4).square().sum(dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.judge(self.encode(x))


class Steps(Bowl):
    """The same in steps of 1/50 per pixel: its gradient is 0 everywhere."""

    def judge(self, z: Tensor) -> Tensor:
        return (50 * (z - 0.4).square()).detach().floor().sum(dim=1) / 50 + 0 * z.sum(dim=1)


HIGHEST = 48 * 0.6**2
"""The largest value of a bowl with 48 pixels."""


def pixels(count: int = 40) -> Tensor:
    return torch.rand(count, 1, 1, 48, generator=torch.Generator().manual_seed(0))


def exact_linf(score: Bowl, x: Tensor, threshold: float) -> Tensor:
    """The radius at which every pixel's better end lifts the score above the threshold, by bisection."""
    x = x.double()
    low, high = torch.zeros(len(x), dtype=x.dtype), torch.ones(len(x), dtype=x.dtype)
    for _ in range(50):
        radius = (low + high) / 2
        down, up = ((x + sign * radius.view(-1, 1, 1, 1)).clamp(0, 1) for sign in (-1, 1))
        crossed = score(torch.where((up - 0.4).abs() > (down - 0.4).abs(), up, down)) > threshold
        low, high = torch.where(crossed, low, radius), torch.where(crossed, radius, high)
    return high


def least_l2(x: Tensor, threshold: float) -> Tensor:
    """A lower bound of the L2 distance by duality: max over λ of min over δ of ‖δ‖² − λ·(τ(x + δ) − threshold).

    The inner minimum is one per pixel: for λ < 1 the parabola's, from there on the better one of the two ends.
    """
    z, bound = x.flatten(1).double(), torch.zeros(len(x), dtype=torch.float64)
    for price in torch.linspace(0.01, 4, 1000).double():
        ends = torch.stack([-z, 1 - z])
        if price < 1:
            ends = (price * (z - 0.4) / (1 - price)).clamp(-z, 1 - z).unsqueeze(0)
        terms = (ends.square() - price * (z + ends - 0.4).square()).amin(dim=0)
        bound = torch.maximum(bound, terms.sum(dim=1) + price * threshold)
    return bound.sqrt()


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("share", [0.8, 0.95])
def test_a_score_with_a_valley_at_every_pixel_is_crossed_near_its_exact_distance(share: float, norm: str) -> None:
    """A descent leaves every pixel on its own side of 0.4; the least distance takes many across, 0.95 nearly all."""
    score, x, threshold = Bowl(), pixels(), share * HIGHEST
    found = minimal(score, x, norm, threshold, side="in")
    exact = exact_linf(score, x, threshold) if norm == "linf" else least_l2(x, threshold)
    ratio = found.distance / exact
    assert found.success.all() and (score(found.x) > threshold).all()
    assert (found.x >= 0).all() and (found.x <= 1).all()
    torch.testing.assert_close(BALLS[norm](1.0).distance(found.x, x), found.distance)
    assert (ratio >= 1 - 1e-5).all()
    assert ratio.median() <= 1.05 and ratio.quantile(0.95) <= 1.15


def test_a_bowl_is_lowered_along_the_straight_line_to_its_bottom() -> None:
    x = pixels()
    found = minimal(Bowl(), x, "l2", 1.0)
    torch.testing.assert_close(found.distance, (x - 0.4).flatten(1).norm(dim=1) - 1, rtol=0.01, atol=0)


def test_a_score_without_a_gradient_is_crossed_too() -> None:
    score, x, threshold = Steps(), pixels(20), 0.8 * HIGHEST
    found = minimal(score, x, "linf", threshold, side="in")
    ratio = found.distance / exact_linf(score, x, threshold)
    assert found.success.all() and (score(found.x) > threshold).all()
    assert ratio.median() <= 1.2 and ratio.max() <= 1.5


def test_where_none_is_found_the_point_is_the_best_of_all() -> None:
    x = pixels(10)
    never = minimal(Bowl(), x, "linf", HIGHEST + 0.1, side="in")
    assert not never.success.any()
    torch.testing.assert_close(never.x, torch.ones_like(x))


def test_an_answer_does_not_change_from_call_to_call() -> None:
    first, second = (minimal(Bowl(), pixels(8), "linf", 0.8 * HIGHEST, side="in") for _ in range(2))
    assert torch.equal(first.x, second.x) and torch.equal(first.evaluations, second.evaluations)


def test_leaps_find_the_best_corner_of_a_ball() -> None:
    """From where a descent ends: where every pixel has a term of its own, gradients on the way to the far end tell."""
    x = pixels()
    down, up = (x - 0.6).clamp(0, 1), (x + 0.6).clamp(0, 1)
    corner = torch.where((up - 0.4).abs() > (down - 0.4).abs(), up, down)
    descent = search(RaiseScore(Bowl()), x, Linf(0.6), stepper=Apgd(), steps=30)
    assert (-descent.value < 0.99 * Bowl()(corner)).all()
    found = search(RaiseScore(Bowl()), x, Linf(0.6), stepper=Leaps(), steps=5, first=descent.x)
    torch.testing.assert_close(found.x, corner)


def test_flips_climb_without_a_gradient() -> None:
    x = pixels()
    found = search(RaiseScore(Steps()), x, Linf(1.0), stepper=Flips(), steps=400)
    assert (found.value <= -0.95 * HIGHEST).all()


@pytest.mark.parametrize(
    ("shape", "share", "count"), [((3, 8, 8), 0.25, 16), ((1, 1, 48), 0.25, 12), ((1, 5, 5), 0.01, 1)]
)
def test_a_window_has_its_share_of_the_pixels(shape: tuple[int, int, int], share: float, count: int) -> None:
    mask = windows(torch.rand(200, *shape, generator=torch.Generator().manual_seed(2)), share)
    assert mask.shape == (200, 1, *shape[1:]) and (mask.flatten(1).sum(dim=1) == count).all()
    assert mask.any(dim=0).all()


def test_a_batch_gives_the_same_as_its_parts() -> None:
    detector, x = Energy(trained_net()), blank(7)
    threshold = float(detector.scores(squares(30)[0]).max())
    whole = minimal(detector, x, "l2", threshold)
    parts = minimal(detector, x, "l2", threshold, batch_size=3)
    torch.testing.assert_close(whole.distance, parts.distance, rtol=1e-3, atol=1e-6)
    assert len({round(float(distance), 4) for distance in whole.distance}) == 7


def test_quantiles_count_the_samples_that_never_cross() -> None:
    distance = torch.tensor([0.3, torch.inf, 0.1, 0.2, torch.inf])
    found = Minimal(CENTRE, CENTRE, distance, torch.ones(5))
    assert found.median == pytest.approx(0.3)
    assert found.quantiles((0.2, 0.4, 0.6, 0.8)) == pytest.approx({0.2: 0.1, 0.4: 0.2, 0.6: 0.3, 0.8: math.inf})
    assert found.success.tolist() == [True, False, True, True, False]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([L2, Linf]), st.sampled_from([None, (0.0, 1.0)]), st.integers(0, 1000))
def test_balls_with_a_radius_each_are_the_single_balls_side_by_side(
    kind: type[Ball], box: tuple[float, float] | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    centre, uniform = (torch.rand(5, 1, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    x = centre + torch.randn(5, 1, 3, 3, generator=generator, dtype=torch.float64)
    radius = 0.01 + torch.rand(5, generator=generator, dtype=torch.float64)
    balls = Radii(kind, radius, box)
    for i in range(5):
        single, one = kind(float(radius[i]), box), slice(i, i + 1)
        torch.testing.assert_close(balls.project(x, centre)[one], single.project(x[one], centre[one]))
        torch.testing.assert_close(
            balls.random_start(centre, uniform)[one], single.random_start(centre[one], uniform[one])
        )
        torch.testing.assert_close(balls.distance(x, centre)[one] * radius[one], single.distance(x[one], centre[one]))
        torch.testing.assert_close(balls.direction(x)[one] / radius[i], single.direction(x[one]))
    assert balls.contains(balls.project(x, centre), centre).all()


def test_bad_input_is_refused() -> None:
    score = linear()
    with pytest.raises(ValueError, match="side must be 'out' or 'in', got 'both'"):
        minimal(score, CENTRE, "l2", 0.0, side="both")
    with pytest.raises(ValueError, match="unknown norm 'l1'"):
        minimal(score, CENTRE, "l1", 0.0)
    for norm in (None, 2, ["l2"]):
        with pytest.raises(ValueError, match=r"unknown norm .* known: linf, l2"):
            minimal(score, CENTRE, norm, 0.0)
    for options, message in (
        ({"tolerance": "a"}, r"tolerance must lie in \(0, 1\), got 'a'"),
        ({"threshold": float("nan")}, "threshold must be one number, got NaN, which no score reaches"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": -2}, "batch_size must be a whole number of at least 1, got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            minimal(score, CENTRE, "l2", **({"threshold": 0.0} | options))
    for threshold in (None, torch.zeros(4)):
        with pytest.raises(ValueError, match="threshold must be one number, got"):
            minimal(score, CENTRE, "l2", threshold)
    with pytest.raises(ValueError, match="rounds must be a whole number of at least 1, got 0"):
        minimal(score, CENTRE, "l2", 0.0, rounds=0)
    with pytest.raises(ValueError, match=r"tolerance must lie in \(0, 1\), got 1"):
        minimal(score, CENTRE, "l2", 0.0, tolerance=1.0)
    with pytest.raises(ValueError, match="Mahalanobis is not fitted"):
        minimal(Mahalanobis(nn.Flatten()), CENTRE, "l2", 0.0)
