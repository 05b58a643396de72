"""A step must not wait for a device: what would read a number from one is counted, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from fit_toys import material, network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gatecrash.encoder import Encoder
from gatecrash.fitting import Recipe, Step, fit, loop
from gatecrash.fitting.watch import Watch
from gatecrash.training.exposure import Exposure
from gatecrash.training.temporal import TemporalEnsembling, few_labels

DATA = material(24, outliers=15)
READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::equal"}


class Reading(TorchDispatchMode):
    """Counts the operations whose answer only the device knows."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in READS:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def exposed(model: nn.Module) -> Step:
    return Exposure(Encoder(model), outliers="plain")


def temporal(model: nn.Module) -> Step:
    return TemporalEnsembling(few_labels(DATA.y, 3, seed=0), 3)


def reads(step_for: Any, recipe: Recipe, every: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the steps of a run read, the looks of the watch left out where `every` is large."""
    counter, learn = Reading(), loop._Trainer._learn

    def counted(*args: Any) -> None:
        with counter:
            learn(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Trainer, "_learn", counted)
        patch.setattr(loop, "Watch", lambda epoch, _, kept: Watch(epoch, every, kept))
        model = network()
        fit(model, step_for(model), DATA, recipe)
    return counter.names


@pytest.mark.parametrize("step_for", [exposed, temporal])
@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_step_reads_nothing_from_the_device(
    step_for: Any, ema: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads(step_for, Recipe(2, 4, lr=0.01, clip=0.5, ema=ema), 100, monkeypatch) == []


def test_the_count_sees_a_step_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(model: nn.Module) -> Step:
        class Curious(Exposure):
            def __call__(self, *args: Any) -> Any:
                outcome = super().__call__(*args)
                assert bool(outcome.loss.isfinite())
                return outcome

        return Curious(Encoder(model))

    assert reads(reading, Recipe(1, 4, lr=0.01), 100, monkeypatch) == ["aten::_local_scalar_dense"] * 6
