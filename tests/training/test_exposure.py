from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Material, Recipe, fit
from gatecrash.training.exposure import Exposure, Inner
from gatecrash.training.losses import divergence_from_uniform, to_uniform
from small_models import as_images, one_thread

__all__ = ["one_thread"]

METHODS: dict[str, dict[str, Any]] = {
    "ce": {},
    "oe": {"outliers": "plain"},
    "adv": {"inliers": "attacked"},
    "aoe": {"inliers": "attacked", "outliers": "plain"},
    "aloe": {"inliers": "attacked", "outliers": "attacked"},
}
STRONG = Inner(0.1, step=0.02, steps=15)
"""Steps enough to cross the ball, so that on a linear network the attack is the exact maximum."""


class TwoClasses(nn.Module):
    """Two pixels → logits (−s/2, s/2) with s = scale·w·(x − ½) + b: everything about it is known in closed form."""

    def __init__(self, w: tuple[float, float] = (1.5, -0.5), b: float = 0.2, scale: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(b, dtype=torch.float64))
        self.scale = scale

    def margin(self, x: Tensor) -> Tensor:
        return self.scale * (x.flatten(1) - 0.5) @ self.w + self.b

    def forward(self, x: Tensor) -> Tensor:
        s = self.margin(x)
        return torch.stack([-s / 2, s / 2], dim=1)


def written_out(model: TwoClasses, batch: Batch, method: str, eps: float, weight: float) -> Tensor:
    """The objectives of Chen et al. with the inner maximum put in: the attacker takes ε·‖w‖₁ from every margin."""
    reach = eps * model.scale * model.w.abs().sum()
    signs = 2.0 * batch.y - 1
    loss = softplus(-(signs * model.margin(batch.x) - (reach if method in ("adv", "aoe", "aloe") else 0))).mean()
    if method in ("oe", "aoe", "aloe"):
        assert batch.outliers is not None
        s = model.margin(batch.outliers).abs() + (reach if method == "aloe" else 0)
        loss = loss + weight * (softplus(s) - s / 2).mean()
    return loss


def batch_of(x: Tensor, y: Tensor, outliers: Tensor | None = None, balance: float = 1.0) -> Batch:
    return Batch(x, y, torch.arange(len(x)), outliers, 0, 1, torch.Generator().manual_seed(0), balance)


def points(count: int, seed: int) -> Tensor:
    """Images of two pixels, far enough from black and white for the box not to matter."""
    random = torch.Generator().manual_seed(seed)
    return as_images(0.3 + 0.4 * torch.rand(count, 2, generator=random, dtype=torch.float64))


BATCH = batch_of(points(6, 0), torch.tensor([0, 1, 1, 0, 1, 0]), points(10, 1))


def test_the_losses_of_a_two_class_toy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    # The softmax is (1/4, 3/4): −½·log(1/4) − ½·log(3/4) = log 4 − ½·log 3; uniform gives log 2.
    expected = torch.tensor([math.log(4) - math.log(3) / 2, math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(to_uniform(logits), expected)
    torch.testing.assert_close(divergence_from_uniform(logits), expected - math.log(2))


def test_the_divergence_is_torchs_own_to_the_uniform_distribution() -> None:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    own = nn.functional.kl_div(logits.log_softmax(1), torch.full((7, 5), 0.2), reduction="none").sum(1)
    torch.testing.assert_close(divergence_from_uniform(logits), own)


def test_plain_and_exposed_losses_by_hand() -> None:
    """s = 0 at the middle and log 3 at the other image, so the softmax is (½, ½) and (¼, ¾)."""
    model = TwoClasses((math.log(3) / 0.2, 0.0), b=0.0)
    x = as_images(torch.tensor([[0.5, 0.5], [0.7, 0.5]], dtype=torch.float64))
    batch = batch_of(x, torch.tensor([0, 1]), x[1:])
    ce, exposed = (math.log(2) + math.log(4 / 3)) / 2, math.log(4) - math.log(3) / 2
    plain = Exposure(Encoder(model))(model, batch)
    assert float(plain.loss.detach()) == pytest.approx(ce, rel=1e-12)
    oe = Exposure(Encoder(model), outliers="plain", weight=0.3)(model, batch)
    assert float(oe.loss.detach()) == pytest.approx(ce + 0.3 * exposed, rel=1e-12)
    assert {name: float(value) for name, value in oe.facts.items()} == pytest.approx(
        {"accuracy": 1.0, "loss in": ce, "loss out": exposed}
    )


@pytest.mark.parametrize("method", list(METHODS))
def test_one_step_is_autograd_on_the_written_out_objective(method: str) -> None:
    model = TwoClasses(b=0.7)  # all outliers on one side and out of the attacker's reach of the other
    step = Exposure(Encoder(model), inner=STRONG, weight=0.4, **METHODS[method])
    outcome = step(model, BATCH)
    expected = written_out(model, BATCH, method, 0.1, 0.4)
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-9, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(outcome.loss, [model.w, model.b]),
        torch.autograd.grad(expected, [model.w, model.b]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def test_the_balance_weighs_the_outliers_alone() -> None:
    model = TwoClasses()
    step = Exposure(Encoder(model), outliers="plain", weight=0.4)
    lighter = batch_of(BATCH.x, BATCH.y, BATCH.outliers, balance=0.5)
    torch.testing.assert_close(step(model, lighter).loss, written_out(model, BATCH, "oe", 0, 0.2), rtol=1e-12, atol=0)


def test_the_papers_number_of_steps() -> None:
    assert [Inner(k / 255).count for k in (1, 2, 3, 4, 8)] == [2, 3, 4, 5, 9]
    assert Inner(0.01).count == 3
    assert Inner(1 / 255, steps=7).count == 7
    assert Inner(1 / 255).step == 1 / 255


def test_the_success_is_the_share_of_right_inliers_that_become_wrong() -> None:
    """Margins 0.35, 0.05, 0.15, −0.05 towards the true class, and an attacker who takes 0.1: one of three falls."""
    model = TwoClasses((1.0, 0.0), b=0.0)
    x = as_images(torch.tensor([[0.85, 0.5], [0.45, 0.5], [0.65, 0.5], [0.45, 0.5]], dtype=torch.float64))
    batch = batch_of(x, torch.tensor([1, 0, 1, 1]), x)
    outcome = Exposure(Encoder(model), inner=STRONG, **METHODS["aloe"])(model, batch)
    assert float(outcome.facts["attack success"]) == pytest.approx(1 / 3)
    assert int(outcome.counts["attack success"]) == 3


def test_the_gain_is_the_mean_rise_of_the_outliers_cross_entropy_to_uniform() -> None:
    model, flat = TwoClasses((1.0, 0.0), b=0.7), TwoClasses((0.0, 0.0), b=0.0)
    attacked = {"inner": STRONG, **METHODS["aloe"]}
    s = model.margin(points(4, 1)).detach()
    rise = (softplus(s + 0.1) - (s + 0.1) / 2) - (softplus(s) - s / 2)
    batch = batch_of(points(4, 0), torch.tensor([0, 1, 0, 1]), points(4, 1))
    facts = Exposure(Encoder(model), **attacked)(model, batch).facts
    assert float(facts["outlier attack gain"]) == pytest.approx(float(rise.mean()))
    nothing = Exposure(Encoder(flat), **attacked)(flat, batch).facts
    assert (float(nothing["attack success"]), float(nothing["outlier attack gain"])) == (0, 0)


def trained_toy(method: str, epochs: int = 120) -> TwoClasses:
    """Pixel 1 tells the classes apart by ±0.2, pixel 2 by ±0.05 only: less than the attacker's 0.1.

    The outlier is in the middle, many times, since its attacker goes to one side or the other by chance.
    """
    away = torch.tensor([[0.2, 0.05]], dtype=torch.float64)
    inliers = as_images(torch.cat([0.5 - away, 0.5 + away]))
    data = Material(inliers, torch.tensor([0, 1]), as_images(torch.full((1, 2), 0.5, dtype=torch.float64)), 32)
    model = TwoClasses((0.4, 0.4), b=0.1, scale=20)
    step = Exposure(Encoder(model), inner=STRONG, weight=0.5, **METHODS[method])
    fit(model, step, data, Recipe(epochs, batch_size=2, lr=0.3, momentum=0.8, weight_decay=0))
    return model


def test_aloe_moves_the_decision_region_to_where_the_min_max_predicts() -> None:
    """At the saddle the weak pixel is not used, and the strong one as far as attacked outliers let it.

    With w₂ = b = 0 the objective is log(1 + e^(−v/10)) + λ·log(2·cosh(v/20)) for v = 20·w₁, whose minimum has
    tanh(v/20) = 1/(1 + λ).
    """
    model = trained_toy("aloe")
    assert float(model.w.detach()[0]) == pytest.approx(math.atanh(1 / 1.5), rel=0.01)
    assert abs(float(model.w.detach()[1])) < 0.02
    assert abs(float(model.b.detach())) < 0.02


def test_without_the_attack_on_outliers_the_region_of_sureness_grows_on_and_without_any_the_weak_pixel_is_used() -> (
    None
):
    bound = math.atanh(1 / 1.5)
    aoe, ce = trained_toy("aoe"), trained_toy("ce")
    assert float(aoe.w.detach()[0]) > 1.3 * bound
    assert abs(float(aoe.w.detach()[1])) < 0.1 * float(aoe.w.detach()[0])
    assert float(ce.w.detach()[1]) > 0.3 * float(ce.w.detach()[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inliers": "attacked"}, "an attack needs its radius: eps"),
        ({"outliers": "attacked"}, "an attack needs its radius: eps"),
        ({"weight": -0.1}, "weight must not be negative, got -0.1"),
        ({"weight": math.nan}, "weight must not be negative, got nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exposure(Encoder(TwoClasses()), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps must be positive, got 0"),
        ({"eps": 0.1, "step": 0.0}, "step must be positive, got 0"),
        ({"eps": 0.1, "steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_an_attacker_that_cannot_move_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Inner(**options)


def test_exposure_without_outliers_is_refused() -> None:
    model = TwoClasses()
    with pytest.raises(ValueError, match="this method needs outliers to be exposed to"):
        Exposure(Encoder(model), outliers="plain")(model, batch_of(BATCH.x, BATCH.y))
