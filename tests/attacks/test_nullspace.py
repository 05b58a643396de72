"""Exact collisions: matrices against the equation of a convolution, ways through linear regions against the network."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from scipy.optimize import linprog
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from gatecrash import L2, Encoder, Linf
from gatecrash.attacks import ATTACKS
from gatecrash.attacks.nullspace import linear_matrix, null_space, nullspace, row_space
from gatecrash.attacks.region import Region, require_affine_until
from gatecrash.detectors import MSP
from gatecrash.networks.resnet_cifar import ResNetCifar


def images(count: int = 2, side: int = 6, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


class Functional(nn.Module):
    """ReLUs and max-pools as functions, in place and not, one layer that runs twice, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.again = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, 4)."""
        x = self.norm(self.conv(x)).relu_()
        x = x + relu(self.again(torch.relu(self.again(x))))
        x = max_pool2d(x, (3, 2), stride=2, padding=1, ceil_mode=True)
        latent: Tensor = self.head(self.drop(x.mean(dim=(2, 3))))
        return latent


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 30), nn.ReLU(), nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 3))


NETWORKS = [perceptron, convolutional, Functional]


def choices(network: nn.Module, x: Tensor) -> list[Tensor]:
    """What every ReLU and max-pool of a network of modules chooses, by hooks on the inputs of its modules."""
    network, seen = deepcopy(network).double().eval(), []

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.ReLU):
            seen.append(args[0] > 0)
        if isinstance(module, nn.MaxPool2d):
            seen.append(max_pool2d(args[0], module.kernel_size, return_indices=True)[1])

    for module in network.modules():
        module.register_forward_pre_hook(hook)
    network(x)
    return seen


def reference_matrix(layer: nn.Conv2d, channels: int, height: int, width: int) -> Tensor:
    """The matrix of a convolution from its equation, entry by entry."""
    kernel, weight = layer.kernel_size, layer.weight.detach()
    pads, steps, gaps = [tuple(map(int, pair)) for pair in (layer.padding, layer.stride, layer.dilation)]
    rows, columns = (
        (size + 2 * pad - gap * (k - 1) - 1) // step + 1
        for size, pad, gap, k, step in zip((height, width), pads, gaps, kernel, steps, strict=True)
    )
    matrix = torch.zeros(layer.out_channels, rows, columns, channels, height, width, dtype=torch.float64)
    per_group, out_per_group = channels // layer.groups, layer.out_channels // layer.groups
    for out in range(layer.out_channels):
        for i in range(rows):
            for j in range(columns):
                for c in range(per_group):
                    for a in range(kernel[0]):
                        for b in range(kernel[1]):
                            y, x = i * steps[0] - pads[0] + a * gaps[0], j * steps[1] - pads[1] + b * gaps[1]
                            if 0 <= y < height and 0 <= x < width:
                                channel = out // out_per_group * per_group + c
                                matrix[out, i, j, channel, y, x] = weight[out, c, a, b]
    return matrix.flatten(3).flatten(0, 2)


pairs = st.tuples(st.integers(1, 2), st.integers(1, 2))


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=pairs,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=pairs,
    bias=st.booleans(),
    size=st.tuples(st.integers(3, 5), st.integers(3, 5)),
)
def test_the_matrix_of_a_convolution_is_its_equation(
    groups: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    bias: bool,
    size: tuple[int, int],
) -> None:
    assume(all(s + 2 * p > d * (k - 1) for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    layer = nn.Conv2d(2 * groups, 2 * groups, kernel, stride, padding, dilation, groups, bias).double()
    x = torch.randn(3, 2 * groups, *size, dtype=torch.float64)
    matrix, offset = linear_matrix(layer, (2 * groups, *size))
    torch.testing.assert_close(matrix, reference_matrix(layer, 2 * groups, *size), rtol=0, atol=1e-15)
    torch.testing.assert_close(x.flatten(1) @ matrix.T + offset, layer(x).flatten(1), rtol=0, atol=1e-12)


def test_the_matrix_of_a_linear_layer_acts_on_whole_samples_or_on_their_last_dimension() -> None:
    layer = nn.Linear(12, 5)
    matrix, offset = linear_matrix(layer, (3, 2, 2))
    assert torch.equal(matrix, layer.weight.detach().double())
    assert torch.equal(offset, layer.bias.detach().double())
    x = torch.randn(4, 3, 12, dtype=torch.float64)
    matrix, offset = linear_matrix(layer, (3, 12))
    torch.testing.assert_close(x.flatten(1) @ matrix.T + offset, deepcopy(layer).double()(x).flatten(1))
    assert layer.weight.dtype == torch.float32 and layer.bias is not None


def test_only_single_layers_of_a_fitting_size_are_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"only nn.Linear and nn.Conv2d are one matrix, got ReLU"):
        linear_matrix(nn.ReLU(), (3, 4, 4))
    with pytest.raises(ValueError, match=r"the matrix of 262144 latents by 12288 pixels would take 24 GiB"):
        linear_matrix(nn.Conv2d(3, 64, 3, padding=1), (3, 64, 64))


@pytest.mark.parametrize(("rows", "columns", "rank"), [(4, 10, 4), (6, 10, 3), (30, 8, 5), (5, 5, 0)])
def test_row_space_and_null_space_are_orthonormal_and_split_the_space(rows: int, columns: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    left, right = (torch.randn(*shape, generator=generator).double() for shape in ((rows, rank), (rank, columns)))
    matrix = left @ right
    free, seen = null_space(matrix), row_space(matrix)
    assert free.shape == (columns, columns - rank)
    both = torch.cat([free.T, seen])
    torch.testing.assert_close(both @ both.T, torch.eye(columns, dtype=torch.float64), rtol=0, atol=1e-13)
    assert (matrix @ free).abs().max() < 1e-13 * max(1.0, float(matrix.abs().max())) * columns
    if rank:
        assert subspace_angles(seen.T.numpy(), right.T.numpy()).max() < 1e-7


@pytest.mark.parametrize(
    "layer", [nn.Linear(108, 12), nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(3, 3, 2, stride=2, groups=3, dilation=2)]
)
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_a_layer_has_collisions_of_any_size(layer: nn.Module, size: float) -> None:
    x = images()
    found = nullspace(layer, x, L2(size, box=None))
    torch.testing.assert_close(found.distance("l2"), torch.full((2,), size, dtype=torch.float64), rtol=1e-9, atol=0)
    assert found.success.all() and (found.steps == 1).all()
    exact = deepcopy(layer).double()
    before, after = (v.flatten(1) if isinstance(layer, nn.Linear) else v for v in (x.double(), found.x))
    difference = (exact(after) - exact(before)).flatten(1).abs().amax(dim=1)
    assert (difference < 1e-9).all()
    torch.testing.assert_close(found.value, difference, rtol=0, atol=1e-12)
    assert (found.cast_value < 1e-6 * max(1.0, size)).all()
    matrix = linear_matrix(layer, (3, 6, 6))[0]
    assert (found.nullity == 108 - torch.linalg.matrix_rank(matrix)).all()


@pytest.mark.parametrize(
    ("layer", "grey", "size"),
    [
        (nn.AvgPool2d(2), 0.0, 3.0),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), 0.0, 3.0),
        (nn.AvgPool2d(2), 0.3, 1e9),
    ],
    ids=["windows", "mean", "far"],
)
def test_so_has_one_that_is_its_own_mirror_image_and_has_no_latent_to_begin_with(
    layer: nn.Module, grey: float, size: float
) -> None:
    start = torch.full((1, 1, 6, 6), grey)
    found = nullspace(layer, start, L2(size, box=None))
    assert float(found.distance("l2")) == pytest.approx(size, rel=1e-4)
    torch.testing.assert_close(layer(found.x.double()), layer(start.double()), rtol=0, atol=1e-7 * size)


def test_a_layer_of_vectors_is_attacked_as_well() -> None:
    x = torch.randn(3, 20)
    found = nullspace(nn.Linear(20, 6), x, L2(50.0, box=None))
    assert found.x.shape == (3, 20)
    torch.testing.assert_close(found.distance("l2"), torch.full((3,), 50.0, dtype=torch.float64))
    assert (found.value < 1e-12).all()


def test_directions_are_random_and_belong_to_the_seed() -> None:
    layer, x = nn.Linear(108, 12), images()
    one, same, other = (nullspace(layer, x, L2(1.0, box=None), generator=seed).x for seed in (1, 1, 2))
    assert torch.equal(one, same)
    cosine = torch.cosine_similarity((one - x).flatten(1), (other - x).flatten(1))
    assert (cosine.abs() < 0.5).all()


def longest_in_the_box(matrix: Tensor, x: Tensor, towards: Tensor) -> float:
    """The length of the perturbation in box and null space that goes furthest along a direction, a vertex."""
    flat = x.flatten().double()
    bounds = list(zip((-flat).tolist(), (1 - flat).tolist(), strict=True))
    answer = linprog(-towards.numpy(), A_eq=matrix.numpy(), b_eq=[0.0] * len(matrix), bounds=bounds)
    assert answer.success
    return float(torch.from_numpy(answer.x).norm())


@pytest.mark.parametrize("black", [0, 60])
def test_in_the_box_a_way_grows_to_a_vertex(black: int) -> None:
    layer, x = seeded(lambda: nn.Linear(108, 12)), images(3)
    x.flatten(1)[:, :black] = 0  # on the wall, where half of all directions begin outside
    found = nullspace(layer, x, L2(100.0))
    assert float(found.x.min()) >= 0 and float(found.x.max()) <= 1
    assert (found.value < 1e-13).all() and not found.success.any()
    assert (found.distance("l2") > 1.5 * found.first_piece).all()
    for i in range(3):
        vertex = longest_in_the_box(linear_matrix(layer, (3, 6, 6))[0], x[i], (found.x - x)[i].flatten())
        assert float(found.distance("l2")[i]) > 0.97 * vertex
    assert (nullspace(layer, x, L2(2.0)).distance("l2") - 2).abs().max() < 1e-9


def test_a_linf_ball_bounds_every_pixel() -> None:
    found = nullspace(seeded(lambda: nn.Linear(108, 12)), images(), Linf(8 / 255))
    assert (found.distance("linf") <= 8 / 255 + 1e-12).all()
    assert found.success.all()
    assert (found.distance("l2") > 0.8 * 8 / 255 * 108**0.5).all()
    assert float(found.x.min()) >= 0 and float(found.x.max()) <= 1


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("ball", [L2(50.0), L2(50.0, box=None), Linf(0.05)], ids=["box", "free", "linf"])
def test_inside_the_linear_region_the_latent_stays_and_the_image_moves(
    make: Callable[[], nn.Module], ball: L2 | Linf
) -> None:
    network, x = seeded(make).eval(), images()
    found = nullspace(network, x, ball)
    exact = deepcopy(network).double()
    assert ((exact(found.x) - exact(x.double())).abs() < 1e-10).all()
    assert (found.value < 1e-12).all() and (found.cast_value < 1e-5).all()
    assert found.pattern_kept.all()
    assert ball.contains(found.x, x).all()
    for before, after in zip(choices(network, x.double()), choices(network, found.x), strict=True):
        assert torch.equal(before, after)
    assert (found.first_piece > 0).all() and (found.steps > 1).all()
    assert (found.distance("l2") > 2 * found.first_piece).all()  # it went on beyond the first boundary


def test_the_first_piece_ends_where_the_pattern_changes() -> None:
    network, x = seeded(perceptron), images(1)
    one = nullspace(network, x, L2(50.0, box=None), steps=1)
    direction = one.x - x
    assert float(one.distance("l2")) == pytest.approx(float(one.first_piece))
    short, far = (choices(network, x + share * direction) for share in (1.0, 1.0 + 1e-5))
    before = choices(network, x.double())
    assert all(torch.equal(a, b) for a, b in zip(before, short, strict=True))
    assert sum(int((a != b).sum()) for a, b in zip(before, far, strict=True)) == 1


def test_a_wanted_length_inside_the_region_is_met_and_more_pieces_go_further() -> None:
    network, x = seeded(convolutional), images()
    lengths = [nullspace(network, x, L2(50.0), steps=steps).distance("l2") for steps in (1, 4, 16)]
    assert (lengths[0] < lengths[1]).all() and (lengths[1] < lengths[2]).all()
    wanted = float(lengths[2].min()) / 2
    found = nullspace(network, x, L2(wanted))
    torch.testing.assert_close(found.distance("l2"), torch.full((2,), wanted, dtype=torch.float64), rtol=1e-9, atol=0)
    assert found.success.all() and found.pattern_kept.all()


@pytest.mark.parametrize("black", [0.0, 1.0])
def test_ties_on_a_background_of_one_colour_do_not_end_the_way(black: float) -> None:
    network, x = seeded(convolutional).eval(), images(side=8)
    x[:, :, :6] = black
    found = nullspace(network, x, L2(50.0), steps=8)
    exact = deepcopy(network).double()
    ties = [
        slack == 0
        for slack, _ in (Region(exact, one).along(one.flatten(), one.flatten()) for one in x.double().split(1))
    ]
    assert all(int(tie.sum()) > 100 for tie in ties)
    assert found.pattern_kept.all() and (found.value < 1e-12).all()
    assert ((exact(found.x) - exact(x.double())).abs() < 1e-12).all()
    assert (found.distance("l2") > 0.1).all()


def test_restarts_keep_the_longest_way() -> None:
    network, x = seeded(convolutional), images(1)
    one_by_one, at_once = (torch.Generator().manual_seed(3) for _ in range(2))
    single = [float(nullspace(network, x, L2(50.0), steps=4, generator=one_by_one).distance("l2")) for _ in range(5)]
    several = nullspace(network, x, L2(50.0), steps=4, restarts=5, generator=at_once)
    assert float(several.distance("l2")) == max(single) > single[0]


def test_the_jacobian_and_the_slacks_are_those_of_the_network() -> None:
    network, x = seeded(Functional).eval().double(), images(1).double()
    region = Region(network.requires_grad_(False), x)
    jacobian = torch.autograd.functional.jacobian(lambda v: network(v)[0], x).flatten(1)
    torch.testing.assert_close(region.jacobian(), jacobian)
    direction = torch.randn(108, dtype=torch.float64)
    slack, slope = region.along(x.flatten(), direction)
    assert (slack >= 0).all() and region.holds(x) and not region.holds(x + 10 * direction.view_as(x))
    some = torch.tensor([0, 5, len(slack) - 1])
    torch.testing.assert_close(region.slack_rows(some) @ direction, slope[some])


def test_an_encoder_is_attacked_at_its_layers_with_its_normalisation() -> None:
    encoder = Encoder(seeded(lambda: ResNetCifar(8)).eval(), "layer1", mean=[0.5] * 3, std=[0.2] * 3)
    x = images(1, side=8)
    found = nullspace(encoder, x, L2(50.0), steps=4)
    exact = deepcopy(encoder).double()
    z, goal = exact(found.x), exact(x.double())
    assert isinstance(z, Tensor) and isinstance(goal, Tensor)
    assert (z - goal).abs().max() < 1e-12 and found.mape is not None and float(found.mape) < 1e-12
    assert int(found.nullity) == 192 - 16
    assert float(found.distance("l2")) > 3 * float(found.first_piece) > 0


@pytest.mark.parametrize("make", NETWORKS)
def test_the_model_is_left_as_it_is(make: Callable[[], nn.Module]) -> None:
    model, x = seeded(make).eval(), images(1)
    next(model.children()).train()
    before, modes = deepcopy(model.state_dict()), [module.training for module in model.modules()]
    copy = x.clone()
    state = torch.get_rng_state()
    nullspace(model, x, L2(0.1), steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, copy)
    assert [module.training for module in model.modules()] == modes
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("network", [nn.Linear(108, 108), nn.Conv2d(3, 8, 3, padding=1), nn.Flatten()])
def test_a_latent_that_keeps_every_dimension_has_no_collisions(network: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=r"image 0 \(\d+ values\) sees all 108 dimensions of the image, so no .* fewer"
    ):
        nullspace(network, images(), L2(1.0))


class Squared(nn.Module):
    """A product between two layers, which no module stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(108, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 6, 6) to (B, 2)."""
        latent: Tensor = self.second(self.first(x.flatten(1)).square())
        return latent


@pytest.mark.parametrize(
    ("network", "named"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(108, 6), nn.Tanh(), nn.Linear(6, 2)), r"layer '2' \(Tanh\)"),
        (nn.Sequential(perceptron(), nn.Sequential(nn.Softmax(dim=1))), r"layer '1.0' \(Softmax\)"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU6(), nn.Flatten()), r"layer '1' \(ReLU6\)"),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveMaxPool2d(1)), r"layer '1' \(AdaptiveMaxPool2d\)"),
        (Squared(), "^Squared is not affine"),
        (nn.Sequential(Squared()), r"layer '0' \(Squared\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_network_with_other_kinks_is_refused_by_the_name_of_the_first(network: nn.Module, named: str) -> None:
    torch.manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
    with pytest.raises(ValueError, match=named + ".*collide"):
        nullspace(network, images(), L2(1.0))


class Clamped(nn.Module):
    """A ReLU by another name, and few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(108, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 6, 6) to (B, 2)."""
        latent: Tensor = self.second(self.first(x.flatten(1)).clamp(min=0))
        return latent


@pytest.mark.parametrize("seed", range(30))
def test_a_kink_in_a_single_place_is_seen_wherever_it_lies(seed: int) -> None:
    torch.manual_seed(seed)
    leaky = nn.Sequential(nn.Flatten(), nn.Linear(108, 1), nn.LeakyReLU(0.2), nn.Linear(1, 2))
    for network in (leaky, Clamped()):
        with pytest.raises(ValueError, match="is not affine between its ReLUs and max-pools"):
            nullspace(network, images(), L2(1.0))


def test_a_latent_that_depends_on_the_rest_of_the_batch_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="the latent of one image depends on the others in its batch"):
        nullspace(network, images(), L2(1.0))


class Bounded(nn.Module):
    """Affine until a value comes to ±30, which those of images do not."""

    def forward(self, z: Tensor) -> Tensor:
        return z.clamp(-30, 30)


def test_a_bend_far_from_the_images_is_not_walked_past() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(108, 40), Bounded(), nn.Linear(40, 10))
    near = nullspace(network, images(), L2(5.0, box=None))
    assert near.success.all() and near.value.max() < 1e-12
    with pytest.raises(ValueError, match=r"layer '2' \(Bounded\) is not affine"):
        nullspace(network, images(), L2(2000.0, box=None))


def test_a_bend_that_no_look_at_a_few_points_told_is_found_at_the_end_of_the_way() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(108, 40), Bounded(), nn.Linear(40, 10)).double()
    region = Region(network.requires_grad_(False), images()[:1].double())
    unseen = null_space(region.jacobian())[:, 0].view_as(region.x)
    require_affine_until(region, region.x + 5 * unseen)
    with pytest.raises(ValueError, match=r"Sequential bends on the way: 2000 from the image"):
        require_affine_until(region, region.x + 2000 * unseen)


def test_bad_input_is_refused() -> None:
    layer, x = nn.Linear(108, 12), images()
    with pytest.raises(ValueError, match="not a detector: give MSP's encoder"):
        nullspace(MSP(layer), x, L2(1.0))
    with pytest.raises(ValueError, match="is TorchScript, whose layers cannot be looked into"):
        nullspace(torch.jit.script(nn.Sequential(nn.Flatten(), layer)), x, L2(1.0))
    with pytest.raises(ValueError, match=r"images must lie in \[0, 1\]"):
        nullspace(layer, x * 255, L2(1.0))
    with pytest.raises(ValueError, match=r"images must be in \[0.2, 0.8\]"):
        nullspace(layer, x, L2(1.0, box=(0.2, 0.8)))
    with pytest.raises(ValueError, match="images must be finite"):
        nullspace(layer, x / 0, L2(1.0, box=None))
    with pytest.raises(ValueError, match="uint8"):
        nullspace(layer, (255 * x).byte(), L2(1.0))
    with pytest.raises(ValueError, match="one L2 or L∞ ball"):
        nullspace(layer, x, L2([1.0, 2.0]))
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        nullspace(layer, x, L2(1.0), steps=0)
    with pytest.raises(ValueError, match=r"steps must be a whole number of at least 1, got 2\.5"):
        nullspace(layer, x, L2(1.0), steps=2.5)
    with pytest.raises(ValueError, match=r"takes images of 3 channels, got shape \(1, 4, 4\)"):
        nullspace(nn.Conv2d(3, 4, 3), torch.rand(2, 1, 4, 4), L2(1.0))
    with pytest.raises(ValueError, match=r"the layer takes 7 numbers, got samples of shape \(3, 6, 6\)"):
        nullspace(nn.Linear(7, 2), x, L2(1.0))
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, a seed or None, got 's'"):
        nullspace(layer, x, L2(1.0), generator="s")
    with pytest.raises(ValueError, match=r"network must be a torch.nn.Module, got function"):
        nullspace(relu, x, L2(1.0))
    with pytest.raises(ValueError, match="NaN or infinity"):
        nullspace(nn.Sequential(nn.Conv2d(3, 1, 3), nn.Flatten()).requires_grad_(False).apply(spoil), x, L2(1.0))


def spoil(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.fill_(torch.nan)


def test_the_attack_is_in_the_table() -> None:
    attack = ATTACKS["nullspace"]
    assert attack.run is nullspace
    assert attack.aim == "latent"
    assert attack.paper == "Liang et al., Section 2.2"
