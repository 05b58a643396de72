"""Steps and schedules against their definitions."""

import math

import pytest
import torch
from torch import Tensor

from gatecrash import L2, Adamax, Apgd, Langevin, Linf, Normalised, Sign, search
from gatecrash.protocols import Walk
from gatecrash.stepper import SCHEDULES, STEPPERS, checkpoints, choose, scheduled


def walk_at(step: int, steps: int) -> Walk:
    x = torch.zeros(1, 1, 1, 1)
    return Walk(x, torch.zeros(1), None, x, Linf(1.0), step, steps, lambda: x, lambda: x, lambda y: torch.zeros(1))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]),
        ("halving", [1, 1, 1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 8]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    assert [scheduled(2.0, schedule, walk_at(t, 8)) for t in range(8)] == pytest.approx([2 * e for e in expected])


def test_every_schedule_is_tested_and_every_stepper_has_a_name() -> None:
    assert set(SCHEDULES) == {"constant", "linear", "cosine", "halving"}
    assert set(STEPPERS) == {"sign", "normalised", "adamax", "apgd", "langevin", "square"}


def quadratic(x: Tensor, rows: Tensor) -> Tensor:
    weights = torch.arange(1, 5, dtype=x.dtype).view(1, 2, 2)
    return (weights * (x - 0.6).square()).flatten(1).sum(dim=1)


def test_adamax_is_torchs_adamax_on_the_normalised_gradient() -> None:
    start = torch.full((1, 1, 2, 2), 0.5)
    found = search(
        quadratic, start, L2(100.0, box=None), stepper=Adamax(0.01, "constant", straight=0), steps=17, keep="last"
    )
    x = start.clone().requires_grad_()
    optimiser = torch.optim.Adamax([x], lr=0.01)
    for _ in range(17):
        (gradient,) = torch.autograd.grad(quadratic(x, torch.zeros(1)).sum(), x)
        x.grad = gradient / gradient.norm()
        optimiser.step()
    torch.testing.assert_close(found.x, x.detach(), rtol=1e-5, atol=1e-6)


def test_adamax_ends_with_straight_steps_of_the_same_length() -> None:
    """After the first half the move is parallel to the mean direction, here the gradient of a linear objective."""
    weights = torch.tensor([[[1.0, 2.0], [3.0, 10.0]]])
    start = torch.full((1, 1, 2, 2), 0.5)

    def slope(x: Tensor, rows: Tensor) -> Tensor:
        return (weights * x).flatten(1).sum(dim=1)

    ball = L2(100.0, box=None)
    ends = [search(slope, start, ball, stepper=Adamax(0.01, "constant"), steps=4, keep="last", stop=None).x]
    ends.append(search(slope, start, ball, stepper=Adamax(0.01, "constant", straight=0), steps=2, keep="last").x)
    move = ends[0] - ends[1]
    torch.testing.assert_close(ends[1] - start, torch.full_like(start, -0.02), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(move, -0.04 * weights.unsqueeze(0) / weights.norm(), rtol=1e-4, atol=1e-6)


def test_adamax_takes_a_hundredth_of_eps_by_default() -> None:
    start = torch.full((1, 1, 2, 2), 0.5)
    found = search(quadratic, start, Linf(0.1), stepper=Adamax(), steps=1, keep="last")
    torch.testing.assert_close(found.x, start + 0.001, rtol=1e-5, atol=1e-6)


def test_sign_and_normalised_steps_have_their_length() -> None:
    start = torch.full((1, 1, 2, 2), 0.5)
    sign = search(quadratic, start, Linf(0.5), stepper=Sign(0.02), steps=3, keep="last")
    torch.testing.assert_close(sign.x, start + 0.06)
    length = search(quadratic, start, L2(0.5), stepper=Normalised(0.02), steps=1, keep="last")
    torch.testing.assert_close(length.distance("l2"), torch.tensor([0.02]))
    direction = torch.arange(1.0, 5.0).view(1, 1, 2, 2)
    torch.testing.assert_close(length.x - start, 0.02 * direction / direction.norm(), rtol=1e-4, atol=1e-6)


def test_langevin_samples_the_gaussian_of_a_quadratic() -> None:
    """x ← x − α·x + √(2α)·n is stationary at variance 1 / (1 − α/2) for the energy x²/2."""
    start = torch.zeros(400, 1, 4, 4)
    step = 0.1
    found = search(
        lambda x, rows: x.square().flatten(1).sum(dim=1) / 2,
        start,
        L2(1e6, box=None),
        stepper=Langevin(step, math.sqrt(2 * step)),
        steps=120,
        keep="last",
    )
    assert found.x.mean().abs() < 0.05
    assert float(found.x.var()) == pytest.approx(1 / (1 - step / 2), rel=0.05)


def test_apgd_looks_back_at_the_published_checkpoints() -> None:
    """For 100 steps Croce & Hein's positions are 22, 41, 57, 70, 80, 87, 93, 99, with the gaps between them."""
    assert checkpoints(100) == {22: 22, 41: 19, 57: 16, 70: 13, 80: 10, 87: 7, 93: 6, 99: 6}
    assert checkpoints(1) == {1: 1} or checkpoints(1) == {}


def test_apgd_halves_its_step_where_it_overshoots() -> None:
    """From 2ε a fixed step only jumps across the minimum; halving finds it."""
    start = torch.full((1, 1, 2, 2), 0.5)
    found = search(quadratic, start, Linf(0.4), stepper=Apgd(), steps=100)
    fixed = search(quadratic, start, Linf(0.4), stepper=Sign(0.8), steps=100)
    assert found.value < 1e-4
    assert fixed.value > 100 * found.value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sign(0.0),
        lambda: Normalised(-1.0),
        lambda: Adamax(0.0),
        lambda: Apgd(step=-1.0),
        lambda: Langevin(0.0),
    ],
)
def test_a_step_must_be_positive(make: object) -> None:
    with pytest.raises(ValueError, match="step must be positive"):
        make()


@pytest.mark.parametrize("step", ["a", True, [0.1], torch.nan, torch.inf])
def test_a_step_or_share_is_a_number(step: object) -> None:
    for make in (Sign, Normalised, Adamax, Langevin, lambda size: Apgd(step=size)):
        with pytest.raises(
            ValueError, match=r"step must be (a positive number, got ('a'|True|\[)|positive, got (nan|inf))"
        ):
            make(step)
    for kind in (Sign, Normalised):
        with pytest.raises(ValueError, match=r"share must be (a positive number|positive), got"):
            kind(share=step)
    with pytest.raises(ValueError, match="share must be a positive number, got None"):
        Sign(share=None)


def test_unknown_schedules_and_negative_noise_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'cosin'; did you mean 'cosine'"):
        Adamax(schedule="cosin")
    with pytest.raises(ValueError, match=r"unknown schedule \['cosine'\]; did you mean 'cosine'"):
        Adamax(schedule=["cosine"])
    with pytest.raises(ValueError, match="noise must not be negative"):
        Langevin(noise=-1.0)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 8])
def test_samples_are_chosen_whole_and_as_they_are(count: int) -> None:
    first, second = torch.rand(2, 8, 1, 2, 2).unbind()
    first[::2, 0, 0, 0], second[::3, 0, 1, 1] = torch.nan, torch.inf
    mask = torch.randperm(8, generator=torch.Generator().manual_seed(0)) < count
    before = first.clone(), second.clone()
    chosen = choose(mask, first, second)
    for row, taken in enumerate(mask.tolist()):
        torch.testing.assert_close(chosen[row], (first if taken else second)[row], rtol=0, atol=0, equal_nan=True)
    for tensor, copy in zip((first, second), before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_a_step_may_be_a_tensor_of_one_number() -> None:
    assert Sign(torch.tensor(0.01)).step == torch.tensor(0.01)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be a positive number"):
        Sign(torch.tensor([0.01]))  # type: ignore[arg-type]
