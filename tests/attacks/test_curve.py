"""Perturbation curves: a slow reference with NumPy, linear scores, and images attacked at two resolutions."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gatecrash import L2, Encoder, Linf, Sign, admit, collide, evict
from gatecrash.attacks.curve import Path, curve_of, perturbation_curve
from gatecrash.detectors import Card, Detector, MaxLogit
from gatecrash.images import resized
from gatecrash.metrics import auroc
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

SHAPE = (1, 4, 4)


class LinearScore:
    """τ = w·x."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def judge(self, z: Tensor) -> Tensor:
        return z @ self.weights.flatten()

    def __call__(self, x: Tensor) -> Tensor:
        return self.judge(self.encode(x))


def linear() -> LinearScore:
    return LinearScore(torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)))


def images(count: int, seed: int, low: float = 0.3, high: float = 0.7) -> Tensor:
    return low + (high - low) * torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def test_a_path_is_read_like_numpys_interpolation() -> None:
    generator = torch.Generator().manual_seed(0)
    distance = torch.rand(12, 5, generator=generator).cumsum(dim=0)
    distance[0] = 0
    score = torch.randn(12, 5, generator=generator)
    path = Path(score, distance)
    for norm in (0.0, 0.3, 1.7, 4.0):
        expected = [np.interp(norm, distance[:, i].numpy(), score[:, i].numpy(), right=np.nan) for i in range(5)]
        torch.testing.assert_close(path.at(norm), torch.tensor(expected, dtype=torch.float32), equal_nan=True)


def test_where_the_norm_falls_and_rises_again_its_first_visit_counts() -> None:
    path = Path(torch.tensor([[0.0], [1.0], [5.0], [9.0]]), torch.tensor([[0.0], [2.0], [1.0], [3.0]]))
    assert path.at(1.0).item() == pytest.approx(0.5)
    assert path.at(2.0).item() == pytest.approx(1.0)
    assert path.at(2.5).item() == pytest.approx(5 + 0.75 * 4)
    assert path.at(3.1).isnan().all()
    assert path.reach.item() == 3.0


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("direction", ["in", "out", "both"])
def test_on_a_linear_score_every_point_of_the_curve_is_known(norm: str, direction: str) -> None:
    """A sign step of α moves the score by α·‖w‖₁, the L∞ norm by α and the L2 norm by α·√D, until the box ends it."""
    score, inliers, outliers = linear(), images(40, 0), images(30, 1)
    outliers += 0.02 * score.weights.sign()
    at = [0.0, 0.0005, 1 / 255, 0.0085]
    scale = 4.0 if norm == "l2" else 1.0
    curve = perturbation_curve(
        score,
        inliers,
        outliers,
        direction=direction,
        norm=norm,
        at=[scale * each for each in at],
    )
    inside, outside = score(inliers).double(), score(outliers).double()
    for row, eps in zip(curve.rows, at, strict=True):
        shift = eps * float(score.weights.abs().sum())
        expected = auroc(inside + shift * (direction != "in"), outside - shift * (direction != "out"))
        assert row.before == pytest.approx(auroc(inside, outside))
        assert row.after == pytest.approx(expected, abs=1e-3)
        assert row.difference == pytest.approx(expected - row.before, abs=1e-3)
        assert row.reached == 1.0
    assert curve.rows[0].difference == 0
    assert curve.reach == pytest.approx(scale * 0.009, rel=1e-3)
    assert curve.row(scale / 255).after == curve.rows[2].after


def test_a_norm_that_some_image_never_reached_is_not_reported() -> None:
    """An image with all pixels against the wall of the box stays where it is."""
    score, inliers, outliers = linear(), images(10, 0), images(8, 1)
    outliers[3] = (score.weights < 0).float()
    curve = perturbation_curve(score, inliers, outliers, at=(0.0, 1 / 255))
    start, row = curve.rows
    assert start.after == start.before and start.reached == 1.0
    assert row.after is None and row.difference is None
    assert row.reached == pytest.approx(17 / 18)
    assert curve.reach == 0.0
    assert perturbation_curve(score, inliers, images(8, 1), at=(0.02,)).rows[0].reached == pytest.approx(10 / 18)


def test_a_norm_that_rounding_keeps_just_out_of_reach_counts_as_reached() -> None:
    curve = perturbation_curve(linear(), images(50, 0), images(50, 1), step=1 / 255, steps=1)
    assert curve.rows[0].reached == 1.0


def slow_auroc(detector: Detector, inliers: Tensor, outliers: Tensor, at: float, order: float) -> float:
    """Fort's recipe written out: 30 sign steps, NumPy's interpolation image by image, then the AUROC."""
    x, distances, scores = outliers, [np.zeros(len(outliers))], [detector.scores(outliers).numpy()]
    for _ in range(30):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(detector(x).sum(), x)
        x = (x - 3e-4 * gradient.sign()).clamp(0, 1).detach()
        distances.append(np.linalg.norm((x - outliers).flatten(1).numpy(), ord=order, axis=1))
        scores.append(detector.scores(x).numpy())
    paths = zip(np.stack(distances).T, np.stack(scores).T, strict=True)
    read = [np.interp(at, path, values, right=np.nan) for path, values in paths]
    return auroc(detector.scores(inliers), torch.tensor(read, dtype=torch.float32))


@pytest.mark.parametrize(("norm", "order", "at"), [("linf", np.inf, 1 / 255), ("l2", 2, 0.02)])
def test_the_paper_recipe_step_by_step(norm: str, order: float, at: float) -> None:
    detector = MaxLogit(trained_net())
    inliers = 0.2 * squares(40, 3)[0] + 0.1  # faint squares, which are not told from nothing at all without fault
    outliers = blank(40, 4)
    curve = perturbation_curve(detector, inliers, outliers, norm=norm, at=(at,))
    expected = slow_auroc(detector, inliers, outliers, at, order)
    assert curve.rows[0].after == pytest.approx(expected, abs=1e-3)
    assert curve.rows[0].after != curve.rows[0].before


def test_recorded_attacks_of_ones_own_make_the_same_curve() -> None:
    score, inliers, outliers = linear(), images(20, 0), images(20, 1)
    recipe = {"stepper": Sign(3e-4), "steps": 30, "keep": "last", "record": True}
    pushed = evict(score, inliers, Linf(0.05), **recipe)
    pulled = admit(score, outliers, Linf(0.05), **recipe)
    own = curve_of(pushed, pulled, norm="l2", at=(0.01,))
    assert own.rows == perturbation_curve(score, inliers, outliers, direction="both", norm="l2", at=(0.01,)).rows
    assert (own.inliers.score.diff(dim=0) > 0).all() and (own.outliers.score.diff(dim=0) < 0).all()
    clean = curve_of(score(inliers), pulled, norm="l2", at=(0.01,))
    assert clean.rows == perturbation_curve(score, inliers, outliers, norm="l2", at=(0.01,)).rows


class Linear(nn.Module):
    """One logit, w·x."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights).flatten(1).sum(dim=1, keepdim=True)


class Logit(Detector):
    """τ is the only logit."""

    card = Card(paper="none", year=2000, reads="logits")

    def judge(self, z: Tensor) -> Tensor:
        return z[:, 0]


def test_the_small_image_and_the_large_one_can_both_be_attacked() -> None:
    """Fort, 3.4: with the resize R inside the encoder the gradient is Rᵀw, which has fewer pixels to hide in."""
    weights = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    small = 0.3 + 0.4 * torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    large = resized(small, 24)
    network = Linear(weights)
    inside, outside = Logit(Encoder(network, size=24)), Logit(Encoder(network))
    torch.testing.assert_close(inside(small), outside(large))
    pixels = torch.eye(108, dtype=torch.float64).view(108, 3, 6, 6)
    pulled_back = network(resized(pixels, 24)).detach().flatten()
    eps = 1 / 255
    low, high = (admit(detector, x, Linf(eps), steps=20) for detector, x in ((inside, small), (outside, large)))
    torch.testing.assert_close(low.score, inside(small).detach() - eps * pulled_back.abs().sum())
    torch.testing.assert_close(high.score, outside(large).detach() - eps * weights.abs().sum())
    assert (high.start_score - high.score > 3 * (low.start_score - low.score)).all()
    torch.testing.assert_close(low.distance("l2"), torch.full((4,), eps * 108**0.5, dtype=torch.float64))
    torch.testing.assert_close(high.distance("l2"), torch.full((4,), eps * 1728**0.5, dtype=torch.float64))


class Untouched(LinearScore):
    """No image may be scored."""

    def encode(self, x: Tensor) -> Tensor:
        raise AssertionError("an image was scored")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "a"}, "step must be a positive number, got 'a'"),
        ({"step": True}, "step must be a positive number, got True"),
        ({"step": None}, "step must be a positive number, got None"),
        ({"step": 0.0}, "step must be positive, got 0"),
        ({"step": float("nan")}, "step must be positive, got nan"),
        ({"at": (0.1, -1.0)}, "a norm must not be negative, got -1"),
    ],
)
def test_a_step_or_norm_that_is_none_is_refused_before_an_image_is_scored(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perturbation_curve(Untouched(linear().weights), images(4, 0), images(4, 1), **options)


def test_bad_input_is_refused() -> None:
    score, x = linear(), images(4, 0)
    with pytest.raises(ValueError, match="direction must be 'in', 'out' or 'both', got 'up'"):
        perturbation_curve(score, x, x, direction="up")
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got -3"):
        perturbation_curve(score, x, x, batch_size=-3)
    with pytest.raises(ValueError, match=r"clean scores must be one per image, \(B,\), got shape \(4,"):
        curve_of(x, x, norm="l2")
    with pytest.raises(ValueError, match="norm must be 'l2' or 'linf', got 'l1'"):
        perturbation_curve(score, x, x, norm="l1")
    for at in (0.1, "1", None, [True]):
        with pytest.raises(ValueError, match="at must be a list of norms, such as"):
            perturbation_curve(score, x, x, at=at)
    with pytest.raises(TypeError, match="detector must be a detector, such as MSP"):
        perturbation_curve("msp", x, x)
    with pytest.raises(ValueError, match="record=True"):
        curve_of(score(x), admit(score, x, L2(1.0)), norm="l2")
    with pytest.raises(ValueError, match="record=True"):
        curve_of(score(x), collide(nn.Flatten(), x, x.flip(0), L2(1.0), record=True), norm="l2")
    with pytest.raises(ValueError, match="random_start=False"):
        curve_of(score(x), admit(score, x, L2(1.0), record=True, random_start=True, steps=3, keep="last"), norm="l2")
