from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gatecrash.attacks import collide, score_to
from gatecrash.ball import L2, Linf
from gatecrash.detectors import JEM, MSP, Confident, Energy
from gatecrash.encoder import Encoder
from small_models import blank, one_thread, squares, trained_net

assert one_thread


class Linear(nn.Module):
    """Logits W·x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5], [0.0, 1.0]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


def pixels(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)[:, None, None, :]


def test_the_three_scores_of_a_linear_network_are_those_written_out() -> None:
    net, x = Linear(), pixels(0.3, 0.8)
    z = net.weight.detach() @ x.flatten()
    p = z.exp() / z.exp().sum()
    expected = {
        "logsumexp": -z.exp().sum().log(),
        "softmax": -p.max(),
        "gradient": (p @ net.weight.detach()).square().sum().sqrt(),  # ∂ logsumexp / ∂x = Σ_k p_k w_k
    }
    for score, value in expected.items():
        torch.testing.assert_close(JEM(net, score=score)(x).detach(), value[None])


def test_the_gradient_is_with_respect_to_the_images_and_not_to_what_the_network_sees() -> None:
    net, x = Linear(), pixels(0.3, 0.8)
    encoder = Encoder(net, mean=[0.5], std=[0.5])
    with torch.no_grad():
        z = net(2 * x - 1)
    expected = 2 * (z.softmax(dim=1) @ net.weight.detach()).norm(dim=1)
    torch.testing.assert_close(JEM(encoder, score="gradient")(x).detach(), expected)


def test_two_of_the_scores_have_other_names_too() -> None:
    net, x = trained_net(), torch.cat([squares(5)[0], blank(5)])
    assert torch.equal(JEM(net).scores(x), Energy(net).scores(x))
    assert torch.equal(JEM(net, score="softmax").scores(x), MSP(net).scores(x))
    assert torch.equal(Confident(net).scores(x), MSP(net).scores(x))
    assert Confident.card.paper == "Lee et al., ICLR 2018" != MSP.card.paper


def test_the_gradient_of_the_gradient_is_the_hessian_times_its_direction() -> None:
    net, x = trained_net(dtype=torch.float64), blank(1, 3, torch.float64)
    point = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(JEM(net, score="gradient")(point).sum(), point)

    def density(flat: Tensor) -> Tensor:
        logits: Tensor = net(flat.view_as(x))
        return logits.logsumexp(dim=1).sum()

    slope = torch.autograd.functional.jacobian(density, x.flatten())
    hessian = torch.autograd.functional.hessian(density, x.flatten())
    torch.testing.assert_close(found.flatten(), hessian @ slope / slope.norm())


def test_the_network_is_left_alone_and_its_logits_are_told() -> None:
    net, x = trained_net(), blank(3)
    detector = JEM(net, score="gradient")
    z = detector.encode(x)
    assert not any(part.requires_grad for part in z)
    (logits,) = detector.logits_in(z)
    with torch.no_grad():
        torch.testing.assert_close(logits, net(x))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert (detector.card.reads, JEM(net).card.reads) == ("pixels", "logits")


def test_attacks_reach_what_they_ask_for() -> None:
    detector, start = JEM(trained_net(), score="gradient"), blank(4)
    wanted = detector.scores(start) - 0.1
    found = score_to(detector, start, wanted, Linf(0.08), steps=100)
    torch.testing.assert_close(detector.scores(found.x), wanted, rtol=0, atol=1e-2)
    met = collide(detector.encode, start, squares(4)[0], L2(3.0), steps=300)
    before = (detector.encode(start)[1] - detector.encode(squares(4)[0])[1]).flatten(1).norm(dim=1)
    after = (detector.encode(met.x)[1] - detector.encode(squares(4)[0])[1]).flatten(1).norm(dim=1)
    assert (after < 0.2 * before).all()


def test_only_the_score_that_is_a_gradient_itself_jumps_where_the_network_has_kinks() -> None:
    cards = {score: JEM(trained_net(), score=score).card.gradient for score in ("logsumexp", "softmax", "gradient")}
    assert cards == {"logsumexp": "exact", "softmax": "exact", "gradient": "exact between jumps"}


def test_a_score_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="score must be one of logsumexp, softmax, gradient, got 'energy'"):
        JEM(trained_net(), score="energy")
