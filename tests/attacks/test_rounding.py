"""8-bit images inside the ball: properties for any image and ball, and examples worked out by hand."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gatecrash import L2, Ball, Encoder, Linf, admit, collide, evict, worst_case
from gatecrash.attacks import attack_mahalanobis, attack_softmax, score_to
from gatecrash.attacks.rounding import Rounded, RoundedFound, to_8bit
from gatecrash.detectors import Energy, Mahalanobis
from gatecrash.objective import LowerScore
from small_models import blank, one_thread, squares, trained_net  # noqa: F401


def linear(x: Tensor, rows: Tensor) -> Tensor:
    """Σ x, which an attack makes small by darkening."""
    return x.flatten(1).sum(dim=1)


class Doubled(nn.Module):
    """A network in float64, which takes images of any kind."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.double()

    def forward(self, x: Tensor) -> Tensor:
        """Logits in float64."""
        logits: Tensor = self.network(x.double())
        return logits


def on_grid(x: Tensor) -> Tensor:
    return ((x.double() * 255).round() / 255).to(x)


def levels(*values: float) -> Tensor:
    """One image whose pixels are these grey levels."""
    return torch.tensor(values).view(1, 1, 1, -1) / 255


@st.composite
def cases(draw: st.DrawFn) -> tuple[Ball, Tensor, Tensor]:
    """A ball, starts on the grid or off it, and points of the ball."""
    kind = draw(st.sampled_from([L2, Linf]))
    ball = kind(draw(st.floats(0.1, 40)) / 255)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (3, draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    start = torch.rand(shape, generator=generator, dtype=dtype)
    if draw(st.booleans()):
        start = torch.where(start < 0.3, torch.zeros_like(start), start)
    if draw(st.booleans()):
        start = on_grid(start)
    x = start + ball.eps * (draw(st.sampled_from([0.3, 1.0, 3.0])) * torch.randn(shape, generator=generator).to(dtype))
    return ball, start, ball.project(x, start)


@settings(deadline=None, max_examples=200)
@given(cases())
def test_the_result_is_8_bit_and_inside_wherever_an_8_bit_image_is(case: tuple[Ball, Tensor, Tensor]) -> None:
    ball, start, x = case
    rounded = to_8bit(x, start, ball, linear)
    torch.testing.assert_close(rounded.x * 255, rounded.pixels.to(x), rtol=0, atol=1e-4)
    assert torch.equal(rounded.x, (rounded.pixels.double() / 255).to(x))
    nearest = on_grid(start)
    assert torch.equal(rounded.inside, ball.contains(rounded.x, start))
    assert torch.equal(rounded.inside, ball.contains(nearest, start, slack=5e-7))
    assert torch.equal(rounded.x[~rounded.inside], nearest[~rounded.inside])
    torch.testing.assert_close(rounded.cost, linear(rounded.x, start) - linear(x, start))


@settings(deadline=None, max_examples=60)
@given(cases())
def test_no_pixel_goes_further_than_plain_rounding_takes_it(case: tuple[Ball, Tensor, Tensor]) -> None:
    """An image that plain rounding leaves inside is plainly rounded; otherwise pixels lie between that and the start's."""
    ball, start, x = case
    rounded, plain, home = to_8bit(x, start, ball, linear).x, on_grid(x), on_grid(start)
    fits = ball.contains(plain, start, slack=4e-7)
    torch.testing.assert_close(rounded[fits], plain[fits], rtol=0, atol=1e-6)
    low, high = torch.minimum(plain, home), torch.maximum(plain, home)
    assert (rounded >= low - 1e-6).all() and (rounded <= high + 1e-6).all()


def test_in_linf_pixels_stop_at_the_last_level_of_the_ball() -> None:
    start = levels(100, 100.4, 100.4, 0, 255)
    x = levels(98.4, 98.8, 102.0, 0.6, 253.4)
    rounded = to_8bit(x, start, Linf(1.6 / 255), linear)
    assert rounded.pixels.flatten().tolist() == [99, 99, 102, 1, 254]
    assert rounded.inside.all()
    assert float(rounded.cost * 255) == pytest.approx(
        99 + 99 + 102 + 1 + 254 - (98.4 + 98.8 + 102.0 + 0.6 + 253.4), abs=1e-3
    )


def test_a_whole_number_of_levels_keeps_its_last_one() -> None:
    start = on_grid(torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1)
    for eps in (1, 2, 8):
        x = start - eps / 255
        assert torch.equal(to_8bit(x, start, Linf(eps / 255), linear).pixels, (start * 255).round().byte() - eps)


def test_in_l2_those_pixels_go_back_first_that_it_takes_least_far() -> None:
    """From 100 everywhere: (3.6, 2.55, 0.4) rounds to (4, 3, 0), of length 5; at 4.5 the second gives way."""
    start, x = levels(100, 100, 100), levels(103.6, 102.55, 100.4)
    assert to_8bit(x, start, L2(5 / 255), linear).pixels.flatten().tolist() == [104, 103, 100]
    assert to_8bit(x, start, L2(4.5 / 255), linear).pixels.flatten().tolist() == [104, 102, 100]
    assert to_8bit(x, start, L2(4.4 / 255), linear).pixels.flatten().tolist() == [103, 102, 100]
    assert to_8bit(x, start, L2(0.9 / 255), linear).pixels.flatten().tolist() == [100, 100, 100]


def test_a_ball_without_an_8_bit_image_says_so() -> None:
    start = torch.cat([levels(10, 10.45), levels(10, 10)])
    for ball in (L2(0.4 / 255), Linf(0.4 / 255)):
        rounded = to_8bit(ball.project(start - 1, start), start, ball, linear)
        assert rounded.inside.tolist() == [False, True]
        assert rounded.pixels.flatten().tolist() == [10, 10, 10, 10]
        assert torch.equal(rounded.x[1], start[1])
    wider = to_8bit(start - 0.5 / 255, start, Linf(0.5 / 255), linear)
    assert wider.inside.all()


def test_a_large_flat_image_stays_inside_although_its_roundings_add_up() -> None:
    worst = max(range(1, 250), key=lambda k: abs(float(torch.tensor(k / 255)) - k / 255))
    start = torch.full((1, 3, 224, 224), (worst - 3) / 255)
    x = torch.full_like(start, worst / 255)
    ball = L2(3 / 255 * (3 * 224 * 224) ** 0.5)
    assert to_8bit(ball.project(x, start), start, ball, linear).inside.all()


@pytest.mark.parametrize("kind", [L2, Linf])
def test_what_a_search_finds_can_only_lose_on_a_linear_score_and_loses_little(kind: type[Ball]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3 * 8 * 8, generator=generator)
    start = on_grid(torch.rand(8, 3, 8, 8, generator=generator))

    class LinearScore:
        def encode(self, x: Tensor) -> Tensor:
            return x.flatten(1)

        def judge(self, z: Tensor) -> Tensor:
            return z @ weights

        def __call__(self, x: Tensor) -> Tensor:
            return self.judge(self.encode(x))

    ball = kind(8.5 / 255) if kind is Linf else kind(0.5)
    found = admit(LinearScore(), start, ball, steps=200)
    rounded = to_8bit(found.x, found.start, ball, LowerScore(LinearScore()))
    gained = found.start_value - found.value
    torch.testing.assert_close(rounded.value_before, found.value)
    assert (rounded.cost >= -1e-3 * gained).all() and (rounded.cost > 0).float().mean() > 0.9
    assert (rounded.cost <= 0.1 * gained).all()


def test_the_l2_rounding_is_near_the_best_of_all_8_bit_images() -> None:
    """Every grid image around the start, tried one by one: none inside the ball is nearer to x by more than a little."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        start = levels(*(100 + torch.rand(4, generator=generator)).tolist())
        ball = L2((1.5 + 2 * float(torch.rand((), generator=generator))) / 255)
        x = ball.project(start + 9 / 255 * torch.randn(start.shape, generator=generator), start)
        rounded = to_8bit(x, start, ball, linear)
        grid = torch.tensor(list(product(range(95, 107), repeat=4))).view(-1, 1, 1, 4) / 255
        inside = grid[ball.contains(grid, start.expand_as(grid), slack=5e-7)]
        best = (inside - x).flatten(1).norm(dim=1).min() * 255
        assert rounded.inside.all()
        assert float((rounded.x - x).norm() * 255) <= float(best) + 0.75


@pytest.mark.parametrize("ball", [Linf([2.5 / 255, 1.5 / 255]), L2(0.1)], ids=str)
def test_attacks_return_8_bit_images_when_asked_to(ball: Ball) -> None:
    detector, start, target = Energy(trained_net()), on_grid(blank(5)), squares(5)[0]
    distance = Mahalanobis(Encoder(trained_net(), layer="hidden")).fit(squares(60, seed=7))
    attacks = {
        admit: (detector, start, ball),
        evict: (detector, on_grid(target), ball),
        collide: (trained_net(), start, target, ball),
        score_to: (detector, start, float(detector.scores(target).mean()), ball),
        partial(attack_softmax, side="in"): (trained_net(), on_grid(target), ball),
        partial(attack_mahalanobis, side="out"): (distance, start, ball),
    }
    for attack, arguments in attacks.items():
        plain, found = (attack(*arguments, steps=10, eight_bit=eight_bit) for eight_bit in (False, True))
        for before, rung, around in zip(plain.rungs, found.rungs, ball.rungs, strict=True):
            assert isinstance(rung, RoundedFound) and rung.rounding is not None
            torch.testing.assert_close(rung.x * 255, rung.rounding.pixels.to(rung.x), rtol=0, atol=1e-4)
            assert around.contains(rung.x, rung.start).all() and rung.rounding.inside.all()
            torch.testing.assert_close(rung.cost, rung.value - before.value)
            assert torch.equal(rung.success, rung.value < rung.start_value)
            if attack in (admit, evict, score_to):
                torch.testing.assert_close(rung.score, detector(rung.x).detach())
        assert torch.equal(found.x, found.rungs[0].x)


def test_a_stop_that_rounding_undoes_is_no_success() -> None:
    detector, start = Energy(trained_net()), on_grid(blank(8))
    stop = float(detector.scores(start).min()) - 0.05
    found = admit(detector, start, Linf(1.4 / 255), steps=20, stop=stop, eight_bit=True)
    assert torch.equal(found.success, found.value <= stop)
    exact = admit(detector, start, Linf(1.4 / 255), steps=20, stop=stop)
    assert exact.success.any() and (found.success < exact.success).any()


def test_an_8_bit_image_outside_the_ball_is_no_success() -> None:
    detector, start = Energy(trained_net()), blank(16)
    for found in (
        admit(detector, start, Linf(0.4 / 255), steps=10, eight_bit=True),
        worst_case(detector, start, Linf(0.4 / 255), "out", budget="quick", eight_bit=True),
    ):
        assert isinstance(found, RoundedFound) and found.rounding is not None
        assert not found.rounding.inside.any() and not found.success.any()
        assert (found.value < found.start_value).any()  # which alone would be one


def test_batches_are_evaluated_in_parts() -> None:
    detector, start = Energy(trained_net()), blank(7)
    found = admit(detector, start, Linf(3 / 255), steps=10)
    whole, parts = (to_8bit(found.x, start, Linf(3 / 255), LowerScore(detector), batch_size=size) for size in (None, 2))
    assert isinstance(whole, Rounded)
    torch.testing.assert_close(whole.value, parts.value)
    torch.testing.assert_close(whole.value, detector(whole.x).detach())


def test_values_have_the_images_dtype_whatever_the_networks() -> None:
    """A network in float64 on images in float32, as an audit's checks put its values beside those of a search."""
    detector, start = Energy(Doubled(trained_net())), on_grid(blank(4))
    rounded = to_8bit(start, start, Linf(3 / 255), LowerScore(detector), batch_size=3)
    assert rounded.value.dtype == rounded.value_before.dtype == rounded.cost.dtype == torch.float32
    found = evict(detector, start, Linf(3 / 255), steps=3, eight_bit=True)
    assert found.value.dtype == torch.float32
    places = torch.zeros(4)
    places[torch.arange(4)] = found.value  # which refuses another dtype
    torch.testing.assert_close(places, -detector(found.x).detach())


def test_bad_input_is_refused() -> None:
    x = torch.rand(2, 1, 3, 3)
    for ball in (None, 0.1, Linf):
        with pytest.raises(TypeError, match="ball must say norm and radius, such as Linf"):
            to_8bit(x, x, ball, linear)
    for objective, name in (
        (None, "NoneType"),
        (LowerScore, "the class LowerScore"),
        (Energy(trained_net()), "Energy"),
    ):
        with pytest.raises(TypeError, match=rf"such as LowerScore\(detector\), got {name}$"):
            to_8bit(x, x, Linf(0.1), objective)
    for size in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"batch_size must be a whole number of at least 1, got {size}"):
            to_8bit(x, x, Linf(0.1), linear, batch_size=size)
    with pytest.raises(ValueError, match="same shape"):
        to_8bit(x[:1], x, L2(1.0), linear)
    with pytest.raises(ValueError, match=r"x must lie in \[0, 1\]"):
        to_8bit(x * 255, x, L2(1.0), linear)
    with pytest.raises(ValueError, match=r"8-bit images need a ball with the box \(0, 1\), got None"):
        to_8bit(x, x, L2(1.0, box=None), linear)
