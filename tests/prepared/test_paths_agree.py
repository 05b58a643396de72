"""The fast path of a search comes to what the plain one comes to, on real pictures and a trained network.

The copies are those that a GPU gets, folded and in bf16, but uncompiled and on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.data import load_source
from gatecrash.encoder import Encoder
from gatecrash.metrics import auroc
from gatecrash.networks import PRETRAINED
from gatecrash.prepared import facts, preparing

COUNT = 40


def pictures(name: str, count: int = COUNT) -> Tensor:
    """Some of a source's images, as the network of the demo takes them."""
    return load_source(name, limit=count, channels=1, size=56).x


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """The demo's network."""
    return Encoder(PRETRAINED["fashion_small_cnn"].load(), mean=(0.2869,), std=(0.3377,))


def both_ways(run: Callable[[Any], Any], encoder: Encoder) -> tuple[Any, Any]:
    """What a search comes to on the plain path and on the fast one."""
    plain = run("float32")
    with preparing(devices=("cpu",), compile_after=None):
        fast = run("mixed")
        assert {fact.get("precision") for fact in facts(encoder.model)} >= {"torch.bfloat16", "torch.float32"}
    return plain, fast


@pytest.mark.parametrize(("layer", "eps"), [(None, 5.0), ("latent", 5.0), ("latent", 0.7)])
def test_collisions_come_as_close(encoder: Encoder, layer: str | None, eps: float) -> None:
    """Where they meet almost exactly, and where the ball is too small for that."""
    f = encoder.at(layer)
    start, target = pictures("noise"), pictures("fashion:test")

    def run(precision: Any) -> gate.Found:
        return gate.collide(f, start, target, gate.L2(eps), steps=100, precision=precision)

    plain, fast = both_ways(run, f)
    assert fast.mape.median() <= 1.05 * plain.mape.median() + 1e-4
    assert (fast.mape < 1e-2).all() == (plain.mape < 1e-2).all()


@pytest.mark.parametrize("share", [0.4, 0.7])
@pytest.mark.parametrize("first", [True, False])
def test_collisions_come_as_close_where_some_are_within_reach_and_others_are_not(
    encoder: Encoder, share: float, first: bool
) -> None:
    """Those out of reach stand first, or among the others: half precision may not be judged by them alone."""
    order = torch.arange(64)
    far = order < share * 64 if first else (order % 10) < 10 * share
    plain, fast = collided(encoder, far)
    for some in (far, ~far):
        assert fast.mape[some].median() <= 1.05 * plain.mape[some].median() + 1e-4
    assert (fast.mape < 1e-3).float().mean() >= (plain.mape < 1e-3).float().mean() - 0.05
    assert plain.mape[far].median() > 50 * plain.mape[~far].median()


def test_collisions_come_as_close_where_few_are_within_reach_in_even_steps(encoder: Encoder) -> None:
    """Twelve of 64, in steps that an even spread of samples over the batch would fall between."""
    near = torch.zeros(64, dtype=torch.bool)
    near[torch.linspace(1, 62, 12).round().long()] = True
    plain, fast = collided(encoder, ~near)
    assert fast.mape[near].median() <= 1.05 * plain.mape[near].median() + 1e-5
    assert (fast.mape[near] < 1e-4).sum() >= (plain.mape[near] < 1e-4).sum() - 2


def collided(encoder: Encoder, far: Tensor) -> tuple[gate.Found, gate.Found]:
    """Collisions both ways, some of them from noise, out of reach, and the others from near their targets."""
    target = pictures("fashion:test", len(far))
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    start = torch.where(far.view(-1, 1, 1, 1), pictures("noise", len(far)), (target + 0.02 * noise).clamp(0, 1))

    def run(precision: Any) -> gate.Found:
        return gate.collide(encoder, start, target, gate.L2(2.0), steps=100, precision=precision)

    return both_ways(run, encoder)


class Softmax(nn.Module):
    """A network's probabilities, by a function, which no look at its modules tells."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        probabilities: Tensor = self.network(x).softmax(dim=1)
        return probabilities


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [60, 300])
def test_collisions_of_probabilities_come_as_close(steps: int, seed: int) -> None:
    """Near the plateau of a softmax the gradients that are left in half precision are rounding, and lead onto it."""
    network = Encoder(Softmax(PRETRAINED["fashion_small_cnn"].load()), mean=(0.2869,), std=(0.3377,))
    start, target = pictures("noise", 32), pictures("fashion:test", 32)

    def run(precision: Any) -> gate.Found:
        ball = gate.L2(5.0)
        return gate.collide(network, start, target, ball, steps=steps, precision=precision, generator=seed)

    plain = run("float32")
    with preparing(devices=("cpu",), compile_after=None), pytest.warns(RuntimeWarning, match="of probabilities are"):
        fast = run("mixed")
    assert {fact["precision"] for fact in facts(network.model)} == {"torch.float32"}
    assert fast.mape.median() <= 1.05 * plain.mape.median() + 1e-4
    assert (fast.mape < 1e-2).float().mean() >= (plain.mape < 1e-2).float().mean() - 0.1


class Sure(nn.Module):
    """A classifier whose logits are many times as large."""

    def __init__(self, network: nn.Module, times: float) -> None:
        super().__init__()
        self.network, self.times = network, times

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.times * self.network(x)
        return logits


@pytest.mark.parametrize("times", [10.0, 30.0])
def test_a_saturated_softmax_is_left_to_float32(times: float) -> None:
    """In half precision more of its gradients vanish, and whoever has none stands still."""
    sure = Encoder(Sure(PRETRAINED["fashion_small_cnn"].load(), times), mean=(0.2869,), std=(0.3377,))
    images = pictures("fashion:test", 64)
    with torch.no_grad():
        labels = sure(images).argmax(dim=1)

    def run(precision: Any) -> gate.Found:
        return gate.pgd(sure, images, labels, gate.Linf(4 / 255), steps=60, precision=precision)

    plain, fast = both_ways(run, sure)
    assert (fast.value < -1).sum() >= (plain.value < -1).sum() - 1
    assert fast.value.mean() < 0.98 * plain.value.mean() < 0


@pytest.mark.parametrize("ball", [gate.Linf(4 / 255), gate.L2(0.6)], ids=str)
def test_even_steps_come_as_far(encoder: Encoder, ball: gate.Ball) -> None:
    images = pictures("fashion:test")
    with torch.no_grad():
        labels = encoder(images).argmax(dim=1)

    def run(precision: Any) -> gate.Found:
        return gate.pgd(encoder, images, labels, ball, steps=60, step=ball.eps / 4, precision=precision)

    plain, fast = both_ways(run, encoder)
    assert plain.value.mean() < 2 * plain.start_value.mean() < 0
    assert (fast.value.mean() - plain.value.mean()).abs() < 0.01 * plain.value.mean().abs()
    assert (fast.success == plain.success).float().mean() >= 0.95


@pytest.mark.parametrize("ball", [gate.Linf(4 / 255), gate.L2(0.6)], ids=str)
@pytest.mark.parametrize("kind", [gate.detectors.MSP, gate.detectors.Energy])
def test_detectors_break_as_far(encoder: Encoder, kind: Any, ball: gate.Ball) -> None:
    detector, inliers, outliers = kind(encoder), pictures("fashion:test"), pictures("digits")

    def run(precision: Any) -> float:
        out = gate.evict(detector, inliers, ball, steps=50, precision=precision)
        into = gate.admit(detector, outliers, ball, steps=50, precision=precision)
        return auroc(detector.scores(out.x), detector.scores(into.x))

    plain, fast = both_ways(run, encoder)
    clean = auroc(detector.scores(inliers), detector.scores(outliers))
    assert 0 < plain < clean - 0.3
    assert plain - 0.01 <= fast <= plain + 0.002  # as strong; a little luck is either path's
