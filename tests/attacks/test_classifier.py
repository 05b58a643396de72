"""FGSM, BIM, PGD and the two-sided softmax attack on linear classifiers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gatecrash import L2, Found, Linf, attack_softmax, bim, fgsm, pgd
from gatecrash.attacks import ATTACKS

X = torch.full((6, 1, 4, 4), 0.5)
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def linear(classes: int = 2) -> nn.Sequential:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, classes))
    weight = torch.randn(classes, 16, generator=torch.Generator().manual_seed(0))
    network[1].weight.data.copy_(weight)
    network[1].bias.data.zero_()
    return network


def loss(network: nn.Module, x: Tensor, y: Tensor = Y) -> Tensor:
    return nn.functional.cross_entropy(network(x), y, reduction="none").detach()


def test_on_a_linear_classifier_one_sign_step_is_the_optimum_and_all_attacks_agree() -> None:
    network = linear()
    weight = network[1].weight.detach()
    away = torch.where(Y == 0, -1.0, 1.0).view(-1, 1) * (weight[0] - weight[1])
    expected = (X + 0.1 * away.sign().view_as(X)).clamp(0, 1)
    one = fgsm(network, X, Y, Linf(0.1))
    torch.testing.assert_close(one.x, expected)
    torch.testing.assert_close(-one.value, loss(network, expected))
    for many in (bim(network, X, Y, Linf(0.1)), pgd(network, X, Y, Linf(0.1))):
        torch.testing.assert_close(many.x, expected, rtol=0, atol=1e-6)
    length = pgd(network, X, Y, L2(0.3), steps=100, step=0.03)
    torch.testing.assert_close(
        length.x, X + 0.3 * (away / away.norm(dim=1, keepdim=True)).view_as(X), rtol=0, atol=2e-3
    )


def test_bim_starts_at_the_image_and_takes_equal_steps() -> None:
    found = bim(linear(), X, Y, Linf(0.1), steps=4, record=True)
    assert found.trajectory is not None
    torch.testing.assert_close(found.trajectory.linf[:, 0], torch.tensor([0.0, 0.025, 0.05, 0.075, 0.1]))


def test_fgsm_returns_the_step_even_where_it_overshoots() -> None:
    class Bowl(nn.Module):
        """The loss of class 0 is largest a little to the right of 0.5."""

        def forward(self, x: Tensor) -> Tensor:
            value = -(x.flatten(1) - 0.52).square().sum(dim=1, keepdim=True)
            return torch.cat([torch.zeros_like(value), value], dim=1)

    found = fgsm(Bowl(), X[:1], torch.zeros(1, dtype=torch.long), Linf(0.3))
    torch.testing.assert_close(found.x, X[:1] + 0.3)
    assert found.value > found.start_value


def test_the_softmax_attack_makes_inliers_unsure_and_outliers_sure() -> None:
    network = linear(5)
    x = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
    unsure = attack_softmax(network, x, Linf(8 / 255), side="in", steps=40)
    sure = attack_softmax(network, x, Linf(8 / 255), side="out", steps=40)
    clean, low, high = (network(images).softmax(dim=1).amax(dim=1) for images in (x, unsure.x, sure.x))
    assert (low < clean).all() and (high > clean).all()
    logits = network(unsure.x)
    torch.testing.assert_close(unsure.value, (logits.logsumexp(dim=1) - logits.mean(dim=1)).detach())
    p = network(sure.x).softmax(dim=1)
    torch.testing.assert_close(sure.value, -(p * p.log()).sum(dim=1).detach())


def test_the_softmax_attack_on_two_classes_reaches_the_closed_form() -> None:
    """With two classes both objectives are monotone in |w·x|: the attack ends where that is extreme."""
    network = linear()
    weight = network[1].weight.detach()
    difference = weight[0] - weight[1]
    margin = (X.flatten(1) @ difference).abs()
    reach = 0.02 * difference.abs().sum()
    sure = attack_softmax(network, X, Linf(0.02), side="out", steps=20)
    torch.testing.assert_close((sure.x.flatten(1) @ difference).abs(), margin + reach, rtol=1e-4, atol=1e-4)
    unsure = attack_softmax(network, X, Linf(0.02), side="in", steps=20)
    torch.testing.assert_close(
        (unsure.x.flatten(1) @ difference).abs(), (margin - reach).clamp_min(0), rtol=1e-3, atol=2e-2
    )


@pytest.mark.parametrize("attack", [fgsm, bim, pgd])
def test_every_eps_of_a_list_is_as_strong_as_alone(attack: Callable[..., Found]) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    ladder = attack(network, X, Y, Linf([0.01, 0.1]))
    for eps, rung in zip((0.01, 0.1), ladder.rungs, strict=True):
        assert (rung.value <= attack(network, X, Y, Linf(eps)).value + 1e-6).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="labels must be from 0 to 1, got 0 to 7"):
        pgd(linear(), X, torch.tensor([0, 1, 7, 0, 0, 0]), Linf(0.1))
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        bim(linear(), X, Y, Linf(0.1), steps=0)
    with pytest.raises(ValueError, match="side must be 'in' or 'out', got 'both'"):
        attack_softmax(linear(), X, Linf(0.1), side="both")
    with pytest.raises(ValueError, match=r"labels must be whole numbers of shape \(6,\), got \(5,\)"):
        fgsm(linear(), X, Y[:5], Linf(0.1))
    with pytest.raises(ValueError, match=r"images must lie in \[0, 1\]"):
        pgd(linear(), X * 9, Y, Linf(0.1))
    with pytest.raises(ValueError, match="expected logits of shape"):
        bim(nn.Conv2d(1, 2, 3), X, Y, Linf(0.1))


def test_every_attack_has_a_name_and_says_what_it_does() -> None:
    names = {"collide", "admit", "evict", "softmax", "score_to", "fgsm", "bim", "pgd"}
    assert names <= set(ATTACKS)
    assert all(ATTACKS[name].summary.endswith((".", ":", "x near its start.")) for name in ATTACKS)
