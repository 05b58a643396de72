"""Objectives against their formulas."""

import pytest
import torch
from torch import Tensor, nn

from gatecrash.objective import (
    Entropy,
    LowerScore,
    MatchLatent,
    Misclassify,
    RaiseScore,
    ScoreNear,
    ToUniform,
    name_of,
    single,
)

X = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([5, 0, 3, 1])


def logits(x: Tensor) -> Tensor:
    return 3 * x.flatten(1) - 1


class PixelSum:
    """τ = Σ x."""

    def encode(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def judge(self, z: Tensor) -> Tensor:
        return z.sum(dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.judge(self.encode(x))


def test_match_latent_sums_squares_over_all_parts_and_picks_the_rows() -> None:
    target = (torch.arange(24.0).view(6, 4), torch.arange(12.0).view(6, 2))

    def encoder(x: Tensor) -> tuple[Tensor, Tensor]:
        return logits(x), x.flatten(1)[:, :2]

    expected = [
        sum(
            (float(a) - float(b)) ** 2
            for z, goal in zip(encoder(X), target, strict=True)
            for a, b in zip(z[i], goal[row], strict=True)
        )
        for i, row in enumerate(ROWS.tolist())
    ]
    torch.testing.assert_close(MatchLatent(encoder, target)(X, ROWS), torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_a_part_of_the_latent_may_be_one_number_per_sample() -> None:
    target = (torch.arange(6.0), (torch.zeros(6, 1),))
    found = MatchLatent(lambda x: (x.sum(dim=(1, 2, 3)), (x[:, 0, 0, :1],)), target)(X, ROWS)
    torch.testing.assert_close(found, (X.sum(dim=(1, 2, 3)) - ROWS).square() + X[:, 0, 0, 0].square())


def test_scores_are_lowered_raised_and_brought_near() -> None:
    tau = X.flatten(1).sum(dim=1)
    torch.testing.assert_close(LowerScore(PixelSum())(X, ROWS), tau)
    torch.testing.assert_close(RaiseScore(PixelSum())(X, ROWS), -tau)
    torch.testing.assert_close(ScoreNear(PixelSum(), torch.tensor(2.0))(X, ROWS), (tau - 2) ** 2)
    goals = torch.arange(6.0)
    torch.testing.assert_close(ScoreNear(PixelSum(), goals)(X, ROWS), (tau - goals[ROWS]) ** 2)


def test_softmax_objectives() -> None:
    p = logits(X).softmax(dim=1)
    torch.testing.assert_close(ToUniform(logits)(X, ROWS), -(p.log() / 4).sum(dim=1))
    torch.testing.assert_close(Entropy(logits)(X, ROWS), -(p * p.log()).sum(dim=1))
    labels = torch.tensor([0, 3, 0, 1, 0, 2])
    torch.testing.assert_close(Misclassify(logits, labels)(X, ROWS), p[torch.arange(4), labels[ROWS]].log())


def test_entropy_is_finite_where_a_probability_vanishes() -> None:
    z = torch.tensor([[0.0, -500.0, -1000.0]], requires_grad=True)
    entropy = Entropy(lambda x: z)(X, ROWS)
    assert float(entropy.detach()) == pytest.approx(0.0, abs=1e-6)
    (gradient,) = torch.autograd.grad(entropy.sum(), z)
    assert gradient.isfinite().all()


def test_logits_must_be_one_matrix() -> None:
    with pytest.raises(ValueError, match="got a tuple of 2; tap one layer only"):
        single((X, X))
    with pytest.raises(ValueError, match=r"expected logits of shape \(B, K\), got \(4, 1, 2, 2\)"):
        single(X)


def test_names_for_messages() -> None:
    assert name_of(LowerScore(PixelSum())) == "PixelSum"
    assert name_of(MatchLatent(nn.Flatten(), X)) == "Flatten"
    assert name_of(logits) == "logits"
