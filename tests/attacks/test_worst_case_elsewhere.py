"""The suite against a plain PGD once more: on other images, in larger and smaller balls."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gatecrash import L2, Ball, Encoder, Linf
from gatecrash.detectors import GMM, MSP, Detector
from shared_data import cifar10_test, gtsrb_test
from small_models import blank, one_thread, squares
from small_rivals import share_weaker, weaker_than_plain_pgd

assert one_thread

HARD = ["maxlogit", "odin", "msp", "glow", "rmd"]
"""Scores with kinks, or with many valleys: the suite was once too weak for them."""


OTHERS = ["temperature", "confident", "zheng_hong", "mahalanobis", "gram"]


@pytest.mark.parametrize(
    ("name", "ball"),
    [
        *((name, Linf(0.25)) for name in [*HARD, *OTHERS]),
        *((name, ball) for name in HARD for ball in (Linf(0.02), L2(1.0))),
        *((name, ball) for name in HARD[:2] for ball in (Linf(0.08), Linf(0.16))),
    ],
    ids=str,
)
def test_so_it_is_on_other_images_and_in_larger_and_smaller_balls(name: str, ball: Ball) -> None:
    assert weaker_than_plain_pgd(name, ball, blank(30, seed=9), squares(30, seed=8)[0]) <= 0.02


@pytest.mark.parametrize("kind", [MSP, GMM])
def test_so_it_is_on_photographs_and_a_network_with_kinks(kind: type[Detector]) -> None:
    """Kinks are where descents come to rest that have not reached the bottom."""
    x, y = cifar10_test(4000)
    inside = y < 5
    x, y = functional.interpolate(x[inside], size=(12, 12), mode="area"), y[inside]
    options = {"components": 4} if kind is GMM else {}
    detector = kind(Encoder(kinked_net(x[100:], y[100:]), layer=None if kind is MSP else "b"), **options)
    detector.fit((x[100:], y[100:]))
    outliers = functional.interpolate(gtsrb_test(100)[0], size=(12, 12), mode="area")
    assert share_weaker(detector, L2(0.5), outliers, x[:100]) <= 0.02


def kinked_net(x: Tensor, y: Tensor) -> nn.Module:
    """A network of ReLUs, trained a little, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        maps = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2, padding=1), nn.ReLU()]
        maps += [nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        body = nn.Sequential(*maps, nn.Linear(96, 24), nn.ReLU())
        net = nn.Sequential(OrderedDict(b=body, head=nn.Linear(24, 5)))
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(15):
            for rows in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
    return net.eval().requires_grad_(False)
