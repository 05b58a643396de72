"""Arithmetic that is compiled at a fast pace: the same numbers, compiled seldom, and never at the plain pace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gatecrash.ball import L2, Linf
from gatecrash.fused import Fused, fused
from gatecrash.prepared import preparing
from gatecrash.protocols import Walk
from gatecrash.speed import at_pace
from gatecrash.stepper import Adamax


class Backend:
    """Compiles nothing and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        code: Callable[..., Any] = module.forward
        return code


@pytest.fixture
def backend() -> Iterator[Backend]:
    """For a fast pace on the CPU, from the first call on; a warning is an error."""
    torch._dynamo.reset()
    counting = Backend()
    fast = at_pace("half"), preparing(devices=("cpu",), compile_after=0, backend=counting)
    with warnings.catch_warnings(), fast[0], fast[1]:
        warnings.simplefilter("error")
        yield counting


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_the_projection_is_compiled_once_for_every_size_of_batch_and_of_ball(backend: Backend) -> None:
    for count, eps in ((6, 0.5), (6, 0.7), (4, 0.7), (11, 2.0)):
        centre, far = images(count), 3 * images(count, seed=1) - 1
        found = L2(eps).project(far, centre)
        with at_pace("plain"):
            expected = L2(eps).project(far, centre)
        torch.testing.assert_close(found, expected)
        assert L2(eps).contains(found, centre).all()
    assert 1 <= backend.graphs <= 2  # for one size, then for any


@pytest.mark.parametrize("ball", [L2(0.5), Linf(0.1)], ids=str)
def test_adamax_is_compiled_for_its_two_halves_and_no_step_of_its_own(backend: Backend, ball: L2 | Linf) -> None:
    def way(pace: Any) -> list[Tensor]:
        x, stepper, steps = images(), Adamax(), 12
        state, points = {}, []
        for step in range(steps):
            walk = Walk(
                x=x,
                value=x.flatten(1).sum(dim=1),
                gradient=torch.sin(7 * x + step),
                centre=images(),
                ball=ball,
                step=step,
                steps=steps,
                normal=images,
                uniform=images,
                evaluate=lambda points: points,
            )
            with at_pace(pace):
                state = stepper.begin(walk) if step == 0 else state
                x = ball.project(stepper.move(walk, state), images())
            points.append(x)
        return points

    for found, expected in zip(way("prepared"), way("plain"), strict=True):
        torch.testing.assert_close(found, expected)
    assert 1 <= backend.graphs <= 6


def test_at_the_plain_pace_and_before_it_is_called_often_nothing_is_compiled(backend: Backend) -> None:
    with at_pace("plain"):
        L2(0.5).project(images(seed=1), images())
    with preparing(compile_after=10**9):
        L2(0.5).project(images(seed=1), images())
    with preparing(devices=("cuda",)):
        L2(0.5).project(images(seed=1), images())
    with preparing(compile_after=None):
        L2(0.5).project(images(seed=1), images())
    assert backend.graphs == 0


def test_where_compiling_fails_the_function_itself_runs_and_it_is_said_once(backend: Backend) -> None:
    @fused
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def broken(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler\nat all")

    assert isinstance(doubled, Fused)
    with preparing(backend=broken), pytest.warns(RuntimeWarning, match=r"doubled cannot be compiled.*: no compiler$"):
        assert torch.equal(doubled(images()), 2 * images())
    with preparing(backend=broken):
        assert torch.equal(doubled(images()), 2 * images())
