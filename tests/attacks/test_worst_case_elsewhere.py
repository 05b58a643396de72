"""The suite against a plain PGD once more: on other images, in larger and smaller balls."""

import pytest

from gatecrash import L2, Ball, Linf
from small_models import blank, one_thread, squares
from small_rivals import weaker_than_plain_pgd

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
