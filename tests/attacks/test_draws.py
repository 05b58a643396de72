"""Whether a detector draws random numbers is seen wherever they are drawn, and infinities are none."""

import math

import pytest
import torch
from torch import Tensor, nn

from gatecrash.attacks.draws import FEW, FRESH, apart, draws_of, looked_at
from gatecrash.detectors import Card, Detector


class Brightness(Detector):
    """The mean pixel, with chance in the brightest images and no end in images of one level."""

    card = Card(paper="none", year=2000, reads="pixels")

    def __init__(self, noisy_from: float = math.inf, endless_from: float = math.inf) -> None:
        super().__init__(nn.Flatten())
        self.noisy_from, self.endless_from = noisy_from, endless_from

    def judge(self, z: Tensor) -> Tensor:
        score = z.mean(dim=1)
        shaken = torch.where(score > self.noisy_from, score + 0.05 * torch.randn_like(score), score)
        return torch.where(score > self.endless_from, torch.inf, shaken)


SORTED = torch.linspace(0, 1, 24).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()


def test_images_in_the_order_of_their_scores_do_not_hide_which_are_random() -> None:
    assert draws_of(Brightness(), SORTED, None) == 1
    assert draws_of(Brightness(noisy_from=0.9), SORTED, None) == FRESH
    assert draws_of(Brightness(noisy_from=0.9), SORTED.flip(0), 5) == FRESH


def test_the_same_infinity_twice_is_no_draw() -> None:
    assert draws_of(Brightness(endless_from=0.4), SORTED, None) == 1
    assert draws_of(Brightness(endless_from=-1.0), SORTED, None) == 1
    assert draws_of(Brightness(noisy_from=0.1, endless_from=0.4), SORTED, None) == FRESH


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, 1000])
def test_the_images_looked_at_are_different_ones_from_the_first_to_the_last(count: int) -> None:
    rows = looked_at(SORTED[:1].expand(count, -1, -1, -1)).tolist()
    assert len(set(rows)) == len(rows) == min(FEW, count)
    assert (rows[0], rows[-1]) == (0, count - 1)


def test_distances_are_shares_of_the_size_of_finite_scores() -> None:
    inf = math.inf
    first, second = torch.tensor([2.0, -4.0, inf, -inf, inf, 0.0]), torch.tensor([2.0, -3.0, inf, -inf, 1.0, 0.5])
    assert apart(first, second).tolist() == [0.0, 0.5, 0.0, 0.0, inf, 0.25]
    assert apart(torch.zeros(2), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert bool(apart(torch.tensor([torch.nan]), torch.tensor([1.0])).isnan())
