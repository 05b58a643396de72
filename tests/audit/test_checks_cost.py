"""What the checks cost: at most a quarter of the audit, whatever the detectors are made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_audit import BOTH, Counted, finished
from torch import Tensor, nn

from gatecrash.audit.checks import run_checks
from gatecrash.audit.checks.cost import counting, networks_of, passes_of
from gatecrash.bundle import Check
from gatecrash.detectors import (
    MSP,
    ODIN,
    Card,
    Detector,
    GlowLikelihood,
    Mahalanobis,
    Reconstruction,
    ScoreEnsemble,
)
from gatecrash.encoder import Encoder
from gatecrash.protocols import Latent, leaves
from small_models import blank, one_thread, squares, trained_net

__all__ = ["one_thread"]

COLLISION = {"name": "collide", "of": "logits", "ball": {"norm": "l2", "eps": [0.25, 0.5]}, "steps": 10}


class Bare(Detector):
    """The mean pixel, without any module that could be watched."""

    card = Card(paper="none", year=2000, reads="pixels")
    seen = 0

    def __init__(self) -> None:
        super().__init__(None)

    def encode(self, x: Tensor) -> Latent:
        """The images."""
        Bare.seen += len(x)
        return x

    def judge(self, z: Latent) -> Tensor:
        """Their means, (B,)."""
        return leaves(z)[0].flatten(1).mean(dim=1)


class Scale(nn.Module):
    """A number to multiply by, asked for without an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        return 2 * self.factor


class Named(nn.Module):
    """The mean pixel, of images that are given by name; of several batches, that of the first."""

    def forward(self, *, pixels: Tensor | tuple[Tensor, ...]) -> Tensor:
        return leaves(pixels)[0].flatten(1).mean(dim=1)


class ByName(Bare):
    """Modules that are called with names only, or with nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.means, self.scale = Named(), Scale()

    def encode(self, x: Tensor) -> Latent:
        z: Tensor = self.means(pixels=x)
        return z

    def judge(self, z: Latent) -> Tensor:
        score: Tensor = leaves(z)[0] * self.scale()
        return score


def glow() -> GlowLikelihood:
    """A Glow of squares, small."""
    return GlowLikelihood(model={"steps": 1, "hidden": 8}, training={"epochs": 3, "lr": 0.02}).fit(squares(60))


def autoencoder() -> Reconstruction:
    """An autoencoder of squares, small."""
    training = {"epochs": 5, "lr": 0.01, "batch_size": 20}
    return Reconstruction(model={"width": 4, "latent": 3}, training=training).fit(squares(60))


def audited(count: int, steps: int) -> tuple[int, int, list[Check]]:
    """Images that the network saw in an audit and in its checks, counted by the network, and the verdicts."""
    encoder = Encoder(Counted(trained_net()), layer="network.hidden")
    detectors = {"msp": MSP(encoder), "odin": ODIN(encoder), "distance": Mahalanobis(encoder).fit(squares(60, seed=7))}
    attacks = [
        BOTH | {"ball": {"norm": "linf", "eps": [0.03, 0.06]}, "steps": steps},
        COLLISION | {"steps": 2 * steps},
    ]
    Counted.seen = 0
    job, measured, rows = finished(detectors, attacks, squares(count)[0], blank(count))
    spent, Counted.seen = Counted.seen, 0
    checks = run_checks(job, measured, rows)
    return spent, Counted.seen, checks


@pytest.mark.parametrize(("count", "steps"), [(3, 2), (20, 5), (64, 10)])
def test_the_checks_take_at_most_a_quarter_of_what_the_audit_took(count: int, steps: int) -> None:
    audit, checks, verdicts = audited(count, steps)
    left_out = [check for check in verdicts if check["sentence"].startswith("Not run")]
    assert 0 < checks <= audit / 4
    assert bool(left_out) == (count < 64)
    assert all(check["status"] == "warn" and "too costly" in check["sentence"] for check in left_out)


def first(detector: Detector, kind: str) -> nn.Module:
    """The first part of a detector that is of a class by its name."""
    return next(part for part in detector.modules() if type(part).__name__ == kind)


@pytest.mark.parametrize(("make", "kind"), [(glow, "Glow"), (autoencoder, "Downwards")], ids=["glow", "autoencoder"])
@pytest.mark.parametrize(("count", "steps"), [(32, 8), (64, 20)])
def test_so_they_do_without_an_encoder(make: Callable[[], Detector], kind: str, count: int, steps: int) -> None:
    detector, seen = make(), [0]

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[0] += len(args[0])

    first(detector, kind).register_forward_pre_hook(watch)
    attack = BOTH | {"ball": {"norm": "linf", "eps": 0.05}, "steps": steps}
    job, measured, rows = finished({"it": detector}, [attack], squares(count)[0], blank(count))
    audit, seen[0] = seen[0], 0
    left_out = [check for check in run_checks(job, measured, rows) if check["sentence"].startswith("Not run")]
    assert 0 < seen[0] <= audit / 4
    assert bool(left_out) == (count < 64)


def test_so_they_do_where_nothing_can_be_watched() -> None:
    Bare.seen = 0
    attack = BOTH | {"ball": {"norm": "linf", "eps": 0.05}}
    job, measured, rows = finished({"it": Bare()}, [attack], squares(64)[0], blank(64))
    audit, Bare.seen = Bare.seen, 0
    run_checks(job, measured, rows)
    assert 0 < Bare.seen <= audit / 4


def test_a_score_takes_as_many_passes_as_networks_it_runs() -> None:
    image, encoder = blank(1), Encoder(trained_net())
    ensemble = ScoreEnsemble([MSP(encoder), ODIN(encoder, magnitude=0.01)])
    cases = {1: MSP(encoder), 2: ODIN(encoder, magnitude=0.01), 3: ensemble, 0: Bare()}
    assert {count: passes_of(detector, image) for count, detector in cases.items()} == {n: n for n in cases}
    assert networks_of([ensemble, MSP(encoder)], image) == [encoder.model]


def test_modules_may_be_called_with_names_or_with_nothing() -> None:
    detector = ByName()
    networks = networks_of([detector], blank(2))
    assert networks == [detector.means, detector.scale]
    with counting(networks) as meter:
        detector(blank(3))
        assert meter.passes == 3
        detector.means(pixels=(blank(5), blank(5)))
    assert meter.passes == 8
    job, measured, rows = finished({"it": detector}, [BOTH])
    assert not [check for check in run_checks(job, measured, rows) if "tuple index" in check["sentence"]]


def test_where_an_encoder_only_says_on_which_device_the_density_is_watched() -> None:
    detector = glow()
    detector.encoder = Encoder(trained_net())
    assert networks_of([detector], blank(1)) == [first(detector, "Glow")]
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in detector.modules())
    assert networks_of([autoencoder()], blank(1))[0].__class__.__name__ == "Downwards"
