"""Collisions in latent space, on linear encoders whose answer is known."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from gatecrash import L2, Adamax, Ball, Encoder, Linf, Sign, collide
from gatecrash.attacks.latent import latents
from gatecrash.protocols import Latent

SHAPE = (3, 4, 4)


class LinearEncoder(nn.Module):
    """z = W x."""

    def __init__(self, latent: int = 6, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(latent, 48, generator=generator) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


def pair(count: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start, target = (torch.rand(count, *SHAPE, generator=generator) for _ in range(2))
    return start, target


def residual(encoder: LinearEncoder, x: Tensor, target: Tensor) -> Tensor:
    return (encoder(x) - encoder(target)).norm(dim=1).detach()


@pytest.mark.parametrize("ball", [L2(2.5), Linf(0.6)])
def test_with_the_solution_inside_the_ball_the_latents_meet(ball: Ball) -> None:
    encoder, (start, target) = LinearEncoder(), pair()
    found = collide(encoder, start, target, ball, steps=300)
    assert (residual(encoder, found.x, target) < 1e-3 * residual(encoder, start, target)).all()
    assert found.mape is not None and (found.mape < 1e-3).all()
    assert (found.x - target).flatten(1).norm(dim=1).min() > 1.0  # the latents meet, the images do not


def constrained_optimum(encoder: LinearEncoder, start: Tensor, target: Tensor, ball: Ball) -> float:
    """The smallest residual in ball and box, by sequential quadratic programming."""
    weight = encoder.weight.detach().double().numpy()
    centre, goal = start.double().numpy().ravel(), target.double().numpy().ravel() @ weight.T
    bounds = [(0.0, 1.0)] * centre.size
    constraints = []
    if isinstance(ball, Linf):
        bounds = [(max(0.0, c - ball.eps), min(1.0, c + ball.eps)) for c in centre]
    else:
        constraints = [
            {
                "type": "ineq",
                "fun": lambda x: ball.eps**2 - np.sum((x - centre) ** 2),
                "jac": lambda x: -2 * (x - centre),
            }
        ]
    answer = minimize(
        lambda x: np.sum((x @ weight.T - goal) ** 2),
        centre,
        jac=lambda x: 2 * (x @ weight.T - goal) @ weight,
        bounds=bounds,
        constraints=constraints,
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-10},
    )
    assert answer.success, answer.message
    return float(np.sqrt(answer.fun))


@pytest.mark.parametrize("ball", [L2(0.2), L2(0.4), Linf(0.03), Linf(0.05)])
def test_with_a_smaller_ball_the_constrained_optimum_is_reached(ball: Ball) -> None:
    encoder, (start, target) = LinearEncoder(), pair()
    start[:, :, :2] = 0.0  # half of the pixels on the wall of the box, where a careless projection loses its radius
    found = collide(encoder, start, target, ball, steps=400, restarts=2)
    for i in range(len(start)):
        best = constrained_optimum(encoder, start[i], target[i], ball)
        assert best > 1e-2
        assert float(residual(encoder, found.x[i : i + 1], target[i : i + 1])) <= 1.01 * best


@pytest.mark.parametrize("eps", [0.2, 0.4])
def test_adamax_alone_comes_to_rest_beside_the_optimum_on_the_surface_of_an_l2_ball(eps: float) -> None:
    """Why the second half of a run goes straight: with the paper's Adamax throughout, 1 to 10 % are left."""
    encoder, (start, target) = LinearEncoder(), pair()
    start[:, :, :2] = 0.0
    found = collide(encoder, start, target, L2(eps), steps=400, stepper=Adamax(straight=0))
    for i in range(len(start)):
        best = constrained_optimum(encoder, start[i], target[i], L2(eps))
        assert 1.01 * best < float(residual(encoder, found.x[i : i + 1], target[i : i + 1])) < 1.1 * best


def test_the_papers_constant_step_stays_further_away_than_the_annealed_one() -> None:
    encoder, (start, target) = LinearEncoder(), pair(16)
    constant = collide(encoder, start, target, L2(2.5), steps=100, schedule="constant", keep="last")
    annealed = collide(encoder, start, target, L2(2.5), steps=100)
    assert constant.mape is not None and annealed.mape is not None
    assert annealed.mape.median() * 10 < constant.mape.median()


def test_one_start_serves_all_targets_and_mape_is_of_the_returned_images() -> None:
    encoder, (start, target) = LinearEncoder(), pair()
    found = collide(encoder, start[:1], target, L2(1.0), steps=20)
    assert torch.equal(found.start, start[:1].expand(4, -1, -1, -1))
    z, goal = encoder(found.x), encoder(target)
    expected = (z - goal).abs().mean(dim=1) / goal.abs().amax(dim=1)
    torch.testing.assert_close(found.mape, expected.detach())


def test_one_start_for_all_targets_is_encoded_once_and_nothing_else_changes() -> None:
    encoder, (start, target), seen = LinearEncoder(), pair(), []
    encoder.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    one = collide(encoder, start[:1], target, L2(1.0), steps=20)
    assert seen[:3] == [4, 2, 4]
    many = collide(encoder, start[:1].repeat(4, 1, 1, 1), target, L2(1.0), steps=20)
    for name in ("x", "value", "start_value", "mape", "evaluations"):
        torch.testing.assert_close(getattr(one, name), getattr(many, name))


@pytest.mark.parametrize("options", [{}, {"random_start": False}, {"keep": "last"}, {"neighbours": True}], ids=str)
def test_one_start_is_what_it_is_when_repeated_whatever_the_options(options: dict[str, Any]) -> None:
    encoder, (start, target) = LinearEncoder(), pair(6)
    one, many = (
        collide(encoder, x, target, L2(1.0), steps=20, **options) for x in (start[:1], start[:1].repeat(6, 1, 1, 1))
    )
    torch.testing.assert_close(one.x, many.x)
    torch.testing.assert_close(one.start_value, many.start_value)


@pytest.mark.parametrize("count", [4, 6])
def test_a_network_that_takes_one_image_for_no_batch_is_attacked_like_any_other(count: int) -> None:
    """With six targets and six features, a latent without its batch could be taken for one."""

    class Squeezed(LinearEncoder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    start, target = pair(count)
    found = collide(Squeezed(), start[:1], target, L2(1.0), steps=20)
    torch.testing.assert_close(found.start_value, residual(LinearEncoder(), found.start, target).square())


def test_memory_that_runs_out_only_makes_batches_smaller() -> None:
    class Small(LinearEncoder):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 3:
                raise torch.OutOfMemoryError("no room")
            return super().forward(x)

    start, target = pair(10)
    small, large = (collide(encoder, start, target, L2(1.0), steps=20) for encoder in (Small(), LinearEncoder()))
    torch.testing.assert_close(small.x, large.x)
    torch.testing.assert_close(small.mape, large.mape)


def test_several_layers_are_matched_together() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 3))
    start, target = pair()
    encoder = Encoder(network, layer=["1", "3"])
    found = collide(encoder, start, target, L2(3.0), steps=300)
    for got, goal in zip(encoder(found.x), encoder(target), strict=True):
        torch.testing.assert_close(got, goal, rtol=0, atol=5e-3)


def test_a_layer_may_give_one_number_per_image() -> None:
    encoder = LinearEncoder()
    start, target = pair()
    found = collide(lambda x: (encoder(x), x.mean(dim=(1, 2, 3))), start, target, L2(2.5), steps=300)
    assert found.mape is not None
    assert float(found.mape.max()) < 1e-3
    torch.testing.assert_close(found.x.mean(dim=(1, 2, 3)), target.mean(dim=(1, 2, 3)), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="NaN or infinity, first in batch 0"):
        latents(lambda x: (x.mean(dim=(1, 2, 3)) / 0,), start, None)


def test_a_ladder_has_a_mape_on_every_rung() -> None:
    encoder, (start, target) = LinearEncoder(), pair()
    found = collide(encoder, start, target, L2([0.2, 1.0, 3.0]), steps=60)
    medians = [float(rung.mape.median()) for rung in found.rungs if rung.mape is not None]
    assert len(medians) == 3
    assert medians[0] > medians[1] > medians[2]


def test_batches_of_targets_are_matched_to_their_own_rows() -> None:
    encoder, (start, target) = LinearEncoder(), pair(5)
    found = collide(encoder, start, target, L2(2.5), steps=200, batch_size=2)
    assert (residual(encoder, found.x, target) < 1e-3 * residual(encoder, start, target)).all()


def test_another_stepper_can_be_given() -> None:
    encoder, (start, target) = LinearEncoder(), pair()
    found = collide(encoder, start, target, Linf(0.1), steps=3, stepper=Sign(0.01), random_start=False)
    assert float(found.distance("linf").max()) == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, got 2.5"),
        ({"batch_size": "8"}, "batch_size must be a whole number of at least 1, got '8'"),
        ({"precision": "half"}, "precision must be 'auto', 'float32' or 'mixed', got 'half'"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"first": [1, 2]}, r"first must have the start's shape \(4, 3, 8, 8\), got a list"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_encoded(options: dict[str, Any], said: str) -> None:
    def encoder(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is to be encoded")

    images = torch.rand(4, 3, 8, 8)
    with pytest.raises(ValueError, match=said):
        collide(encoder, images, images, L2(1.0), **options)


def test_bad_input_is_refused() -> None:
    encoder, (start, target) = LinearEncoder(), pair()
    with pytest.raises(ValueError, match=r"start and target must have the same shape, got \(4, 3, 4, 4\) and \(3, 3"):
        collide(encoder, start, target[:3], L2(1.0))
    with pytest.raises(ValueError, match=r"target must lie in \[0, 1\]"):
        collide(encoder, start, target * 255, L2(1.0))

    def broken(x: Tensor) -> Latent:
        return torch.where(x[:, 0, 0, :1] < 2, torch.nan, 1.0) * x.flatten(1) if float(x.sum()) < 1 else x.flatten(1)

    target[2:] = 0
    with pytest.raises(ValueError, match="output has NaN or infinity, first in batch 1"):
        collide(broken, start, target, L2(1.0), batch_size=2)


class Curved(nn.Module):
    """z = tanh(W x), on which a few steps do not lead far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = LinearEncoder(latent=20)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(3 * self.linear(x))


@pytest.mark.parametrize("ball", [L2(2.5), Linf([0.6, 0.3])])
def test_the_rest_begins_where_the_nearest_of_the_others_ended(ball: Ball) -> None:
    encoder, (start, some) = Curved(), pair(5)
    noise = 1e-3 * torch.randn(some.shape, generator=torch.Generator().manual_seed(2))
    twins = (some.flip(0) + noise).clamp(0, 1)
    target = torch.stack([some, twins], dim=1).flatten(0, 1)  # every other one a twin of another
    begin = start[:1]
    apart, found = (collide(encoder, begin, target, ball, steps=8, neighbours=warm) for warm in (False, True))
    for rung in found.rungs:
        assert rung.mape is not None and torch.equal(rung.start, begin.expand_as(target))
        error = (encoder(rung.x) - encoder(target)).detach()
        torch.testing.assert_close(rung.value, error.square().sum(dim=1))
    assert torch.equal(found.evaluations, apart.evaluations) and torch.equal(found.steps, apart.steps)
    assert (found.value[1::2] < apart.value[1::2]).all()
    assert found.value[1::2].mean() < 0.85 * apart.value[1::2].mean()
    again = collide(encoder, begin, target[::2], ball, steps=8)
    assert torch.equal(found.x[::2], again.x)


def test_neighbours_take_stops_and_trajectories_of_their_own() -> None:
    encoder, (start, target) = Curved(), pair(7)
    free = collide(encoder, start, target, L2(2.5), steps=20, neighbours=True, record=True)
    assert free.trajectory is not None
    torch.testing.assert_close(free.trajectory.value[-1], free.value)
    torch.testing.assert_close(free.trajectory.l2[-1], free.distance("l2"))
    stop = torch.where(torch.arange(7) % 3 == 0, 1.1 * free.value, 0.0)
    found = collide(encoder, start, target, L2(2.5), steps=20, neighbours=True, stop=stop)
    assert found.success[::3].all() and not found.success[1::3].any() and not found.success[2::3].any()
    one = collide(encoder, start[:1], target[:1], L2(2.5), steps=20, neighbours=True)
    assert torch.equal(one.x, collide(encoder, start[:1], target[:1], L2(2.5), steps=20).x)
    with pytest.raises(ValueError, match="leave out `first`"):
        collide(encoder, start, target, L2(2.5), neighbours=True, first=start)


def test_the_batch_that_is_not_finite_is_one_of_those_asked_for_however_they_are_cut() -> None:
    x = torch.rand(300, 1, 2, 2)
    x[200] = 2.0
    for batch_size, batch in ((256, 0), (150, 1), (None, 0)):
        with pytest.raises(ValueError, match=f"first in batch {batch}$"):
            latents(lambda x: torch.where(x > 1, torch.nan, x).flatten(1), x, batch_size)
