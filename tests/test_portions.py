"""Samples evaluated in portions, against the same in one piece."""

import pytest
import torch
from torch import Tensor, nn

from gatecrash import Encoder, Linf
from gatecrash.detectors import Energy
from gatecrash.portions import ON_CPU, Portions, in_portions
from gatecrash.search import search
from gatecrash.stepper import Apgd

CPU = torch.device("cpu")


class Small:
    """A quadratic objective for which memory runs out above a number of samples; it remembers the sizes it saw."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: list[int] = []

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("no room")
        return (x - 0.5).square().flatten(1).sum(dim=1) * (1 + rows)


def evaluated(portions: Portions, objective: Small, count: int) -> Tensor:
    """The values of some samples."""
    x = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    value, gradient = portions.evaluate(lambda x, rows: (objective(x, rows), x), x, torch.arange(count))
    assert gradient is not None
    assert torch.equal(gradient, x)
    return value


def test_portions_are_halved_until_they_fit_and_stay_so() -> None:
    portions, objective = Portions(CPU), Small(30)
    value = evaluated(portions, objective, 100)
    assert objective.seen == [100, 50, 25, 25, 25, 25]
    assert torch.equal(value, evaluated(Portions(CPU), Small(1000), 100))
    objective.seen.clear()
    evaluated(portions, objective, 60)
    assert objective.seen == [25, 25, 10]


def test_without_room_for_one_sample_memory_has_run_out() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(Portions(CPU), Small(0), 4)


def test_a_function_of_images_gets_as_many_as_it_has_room_for() -> None:
    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        seen.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("no room")
        return 2 * x

    x = torch.arange(11.0)
    assert torch.equal(torch.cat(in_portions(function, x)), 2 * x)
    assert seen == [11, 5, 2, 2, 2, 2, 2, 1]
    seen.clear()
    assert torch.equal(torch.cat(in_portions(function, x, 3)), 2 * x)
    assert seen == [3, 3, 3, 2]
    with pytest.raises(torch.OutOfMemoryError):
        in_portions(lambda x: function(x.repeat(4)), x)


def test_scoring_takes_smaller_batches_where_memory_runs_out() -> None:
    class Narrow(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 3:
                raise torch.OutOfMemoryError("no room")
            return super().forward(x)

    x = torch.rand(10, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    small, large = (Energy(Encoder(net)).scores(x) for net in (Narrow(), nn.Flatten()))
    assert torch.equal(small, large)


def test_a_cpu_evaluates_so_many_at_once() -> None:
    objective = Small(10**6)
    evaluated(Portions(CPU), objective, 2 * ON_CPU + 1)
    assert objective.seen == [ON_CPU, ON_CPU, 1]


def test_a_search_finds_the_same_whatever_the_memory() -> None:
    start = torch.rand(20, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    plenty, little = (
        search(Small(most), start, Linf(0.1), stepper=Apgd(), steps=5, restarts=2, generator=1) for most in (100, 6)
    )
    assert torch.equal(plenty.x, little.x)
    assert torch.equal(plenty.evaluations, little.evaluations)


def test_one_value_for_all_samples_is_refused_in_portions_too() -> None:
    start = torch.rand(ON_CPU + 3, 1, 2, 2)
    with pytest.raises(ValueError, match=rf"one value per sample, \({ON_CPU + 3},\)"):
        search(lambda x, rows: x.sum(), start, Linf(0.1), stepper=Apgd(), steps=1)
