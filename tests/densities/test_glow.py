"""Glow against its Jacobian written out, its inverse, and images whose likelihood is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatecrash.densities import Glow, load_density, save_density, train_density
from gatecrash.densities.glow import ActNorm, Conditioner, Mixing
from gatecrash.fitting import Recipe
from small_models import one_thread

assert one_thread

COUPLINGS = ["affine", "additive"]
EVERY_GREY = torch.arange(256).view(1, 1, 16, 16) / 255


def random_images(count: int, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every grey level as likely as any other, in every pixel for itself."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *shape), generator=generator).to(dtype) / 255


def shaken(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: object) -> Glow:
    """A Glow in eval mode of which no layer is the identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        glow = Glow(shape, **{"steps": 2, "hidden": 8, **options}).to(dtype)  # type: ignore[arg-type]
        for name, parameter in glow.named_parameters():
            amount = 0.02 if name.endswith(("lower", "upper")) else 0.1  # what leaves a matrix well conditioned
            parameter.data += amount * torch.randn_like(parameter)
    glow.begin(random_images(64, shape, dtype=dtype))
    return glow.eval().requires_grad_(False)


def by_the_jacobian(glow: Glow, x: Tensor) -> Tensor:
    """The log-likelihood of one image (C, H, W) from all derivatives of the latents by the pixels."""

    def flat(pixels: Tensor) -> Tensor:
        return torch.cat([z.flatten() for z in glow.latents(pixels.view(1, *x.shape))])

    jacobian = torch.autograd.functional.jacobian(flat, x.flatten())
    log_det = torch.linalg.slogdet(jacobian).logabsdet - glow.dimensions * math.log(255 / 256)
    coarsest = glow.flow.q0[0]
    mean = coarsest.loc * torch.exp(3 * coarsest.loc_logs)
    log_deviation = coarsest.log_scale * torch.exp(3 * coarsest.log_scale_logs)
    first, *others = glow.latents(x[None])
    whitened = torch.cat([((first - mean) / log_deviation.exp()).flatten(), *(z.flatten() for z in others)])
    log_prior = -(whitened.square().sum() + glow.dimensions * math.log(2 * math.pi)) / 2
    log_prior = log_prior - log_deviation.sum() * first[0, 0].numel()
    return log_det + log_prior - glow.dimensions * math.log(2 ** int(glow.options["bits"]))


# The likelihood


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(("shape", "levels"), [((1, 2, 2), 1), ((1, 4, 4), 2), ((3, 4, 8), 2)], ids=str)
def test_the_likelihood_is_that_of_the_whole_jacobian(coupling: str, shape: tuple[int, ...], levels: int) -> None:
    glow = shaken(shape, torch.float64, levels=levels, coupling=coupling)
    x = random_images(3, shape, 1, torch.float64)
    expected = torch.stack([by_the_jacobian(glow, image) for image in x])
    torch.testing.assert_close(glow(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_pixels_that_are_all_alike_cost_what_a_gaussian_wastes_on_a_uniform_distribution(bits: int) -> None:
    # Before it learns, an additive Glow turns and scales: independent uniform pixels become Gaussians of variance 1/12.
    glow = Glow((3, 8, 8), coupling="additive", bits=bits)
    x = random_images(512, (3, 8, 8))
    glow.begin(x)
    glow.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        measured = glow.bits_per_dimension(x).mean().item()
    assert measured == pytest.approx(bits + math.log2(math.pi * math.e / 6) / 2, abs=0.01)


def test_every_bit_that_is_kept_costs_a_bit_per_dimension() -> None:
    five, eight = shaken((3, 8, 8), bits=5), shaken((3, 8, 8), bits=8)
    eight.load_state_dict(five.state_dict())
    x = random_images(4, (3, 8, 8), 1)
    torch.testing.assert_close(eight.bits_per_dimension(x), five.bits_per_dimension(x) + 3)


def test_training_finds_what_pixels_have_in_common(tmp_path: Path) -> None:
    x = random_images(96, (1, 1, 1)).expand(-1, -1, 4, 4).contiguous()
    glow = Glow((1, 4, 4), steps=2, hidden=8)
    recipe = Recipe(epochs=12, batch_size=24, optimiser="adamw", lr=1e-2, weight_decay=0.0, clip=1.0)
    history = train_density(glow, x, recipe, folder=tmp_path)
    assert history[-1]["loss"] < 3 < 5 < glow.bits_per_dimension(random_images(20, (1, 4, 4))).min()


def test_a_network_that_overflows_still_gives_a_finite_likelihood() -> None:
    glow = shaken((3, 8, 8), steps=1)
    for part in glow.modules():
        if isinstance(part, Conditioner):
            for parameter in part.parameters():
                parameter *= 1e3
    x = random_images(4, (3, 8, 8)).requires_grad_()
    likelihood = glow(x)
    (gradient,) = torch.autograd.grad(likelihood.sum(), x)
    assert likelihood.isfinite().all()
    assert gradient.isfinite().all()


# The inverse


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)], ids=str)
def test_the_images_of_the_latents_are_the_images(coupling: str, shape: tuple[int, ...]) -> None:
    glow = shaken(shape, coupling=coupling)
    x = random_images(3, shape, 1)
    latents = glow.latents(x)
    assert sum(z[0].numel() for z in latents) == math.prod(shape)
    assert (glow.images(latents) - x).abs().max() < 1e-4


def test_on_the_way_there_and_back_a_gpu_does_not_round_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    glow, seen = shaken((3, 8, 8)), list[bool]()
    conditioner = next(part for part in glow.modules() if isinstance(part, Conditioner))
    conditioner.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    glow.images(glow.latents(random_images(2, (3, 8, 8))))
    assert seen == [False, False]
    assert torch.backends.cudnn.allow_tf32


def test_half_precision_inside_the_couplings_leaves_the_likelihood_in_full() -> None:
    glow = shaken((3, 16, 16))
    x = random_images(3, (3, 16, 16), 1)
    exact = glow.bits_per_dimension(x)
    with torch.autocast("cpu", torch.bfloat16):
        likelihood = glow.bits_per_dimension(x)
    assert likelihood.dtype == torch.float32
    assert 0 < (likelihood - exact).abs().max() < 0.02


def test_the_mixing_matrix_begins_as_a_rotation() -> None:
    mixing = Mixing(12)
    x = torch.randn(2, 12, 3, 3)
    mixed, log_det = mixing.inverse(x)
    torch.testing.assert_close(mixed.norm(dim=1), x.norm(dim=1))
    assert log_det.item() == pytest.approx(0, abs=1e-4)
    torch.testing.assert_close(mixing(mixed)[0], x, rtol=0, atol=1e-5)


# Bins


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_noise_leaves_every_grey_level_in_its_bin(bits: int) -> None:
    glow = Glow((1, 16, 16), bits=bits)
    bins = torch.arange(256).view(1, 1, 16, 16) // 2 ** (8 - bits)
    assert torch.equal(glow.bins(EVERY_GREY).long(), bins)
    for _ in range(20):
        assert torch.equal(((glow.noisy(EVERY_GREY).double() + 0.5) * 2**bits).floor().long(), bins)
    assert torch.equal(((glow.still(EVERY_GREY).double() + 0.5) * 2**bits).floor().long(), bins)


def test_the_grey_levels_of_a_file_of_eight_bits_are_scored_at_the_midpoints() -> None:
    midpoints = (torch.arange(256).view(1, 1, 16, 16) + 0.5) / 256 - 0.5
    torch.testing.assert_close(Glow((1, 16, 16), bits=8).still(EVERY_GREY), midpoints, rtol=0, atol=1e-7)


def test_a_pixel_is_in_the_same_bin_in_every_precision() -> None:
    halves = ((torch.arange(255) + 0.5) / 255).expand(1, 1, 2, -1)[..., :254]
    glow = Glow((1, 2, 254), levels=1, steps=1, hidden=2, bits=8)
    assert torch.equal(glow.bins(halves).double(), glow.bins(halves.double()))


def test_midpoints_score_images_of_one_bin_alike_and_lend_the_gradient() -> None:
    glow = shaken((1, 16, 16), bits=4, midpoints=True)
    plain = Glow((1, 16, 16), **{**glow.options, "bits": 8, "midpoints": False}).eval()
    plain.load_state_dict(glow.state_dict())
    files = torch.randint(0, 16, (2, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    low, high = 16 * files / 255, (16 * files + 15) / 255
    assert torch.equal(glow(low), glow(high))
    middle = (16 * files + 7.5) / 255
    torch.testing.assert_close(glow(low), plain(middle) + 256 * math.log(16), rtol=1e-5, atol=1e-3)
    low.requires_grad_()
    middle.requires_grad_()
    (lent,), (exact,) = (torch.autograd.grad(g(x).sum(), x) for g, x in ((glow, low), (plain, middle)))
    torch.testing.assert_close(lent, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_training_is_noisy_and_scoring_is_not() -> None:
    glow = shaken((3, 8, 8))
    x = random_images(4, (3, 8, 8), 1)
    assert torch.equal(glow(x), glow(x))
    glow.train()
    assert not torch.equal(glow(x), glow(x))


# The first batch


def test_the_first_batch_leaves_every_normalisation_with_mean_zero_and_variance_one() -> None:
    glow, seen = Glow((3, 8, 8), steps=2, hidden=8), []
    x = 0.2 + 0.1 * random_images(128, (3, 8, 8))
    glow.begin(x)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    y = glow.noisy(x)
    torch.random.set_rng_state(state)
    for norm in (part for part in glow.modules() if isinstance(part, ActNorm)):
        norm.inverse = lambda z, norm=norm: seen.append(ActNorm.inverse(norm, z)) or seen[-1]  # type: ignore[misc]
    glow.flow.inverse_and_log_det(y)
    assert len(seen) == 6
    for z, _ in seen:
        deviation, mean = torch.std_mean(z, dim=(0, 2, 3), correction=0)
        torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-4)
        torch.testing.assert_close(deviation, torch.ones_like(mean), rtol=0, atol=1e-4)


def test_only_the_first_batch_sets_anything_and_it_needs_no_luck() -> None:
    glow = Glow((3, 8, 8))
    before = {name: tensor.clone() for name, tensor in glow.state_dict().items()}
    for mode in (True, False):
        glow.train(mode)
        glow(random_images(8, (3, 8, 8)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in glow.state_dict().items())
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random = torch.random.get_rng_state()
        glow.begin(random_images(8, (3, 8, 8)))
        assert torch.equal(torch.random.get_rng_state(), random)
        states.append({name: tensor.clone() for name, tensor in glow.state_dict().items()})
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in states[0].items())


def test_a_first_batch_of_one_grey_or_one_image_leaves_nothing_infinite() -> None:
    for x in (torch.full((1, 1, 2, 2), 0.5), torch.zeros(8, 1, 2, 2), random_images(1, (1, 2, 2))):
        glow = Glow((1, 2, 2))
        glow.begin(x)
        assert glow.eval()(x).isfinite().all()


# Samples


def test_samples_have_the_colours_of_the_first_batch_before_anything_is_learnt() -> None:
    torch.manual_seed(0)
    means, spread = torch.tensor([0.3, 0.5, 0.7]), torch.tensor([0.02, 0.05, 0.08])
    x = (means.view(1, 3, 1, 1) + spread.view(1, 3, 1, 1) * torch.randn(256, 3, 8, 8)).clamp(0, 1)
    glow = Glow((3, 8, 8), coupling="additive", bits=8)
    glow.begin(x)
    samples = glow.sample(256)
    assert samples.shape == (256, 3, 8, 8)
    torch.testing.assert_close(samples.mean(dim=(0, 2, 3)), means, rtol=0, atol=0.01)
    torch.testing.assert_close(samples.std(dim=(0, 2, 3)), spread, rtol=0.05, atol=0)
    cold = glow.sample(256, temperature=0.5)
    torch.testing.assert_close(cold.std(dim=(0, 2, 3)), spread / 2, rtol=0.05, atol=0)


# Mistakes and files


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 8, 8), {"levels": 4}, "a Glow with levels=4 needs sides divisible by 16, got 8×8"),
        ((3, 7, 8), {}, "a Glow with levels=1 needs sides divisible by 2, got 7×8"),
        ((3, 1, 1), {}, "needs sides divisible by 2, got 1×1"),
        ((12,), {}, r"Glow is of images of shape \(C, H, W\), got \(12,\)"),
        ((3, 8, 8), {"levels": 0}, "levels must be a whole number of at least 1, got 0"),
        ((3, 8, 8), {"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ((3, 8, 8), {"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ((3, 8, 8), {"bits": 9}, "bits must be 1 to 8, got 9"),
        ((3, 8, 8), {"bits": 5.5}, "bits must be a whole number of at least 1, got 5.5"),
        ((3, 8, 8), {"hidden": 2.5}, "hidden must be a whole number of at least 1, got 2.5"),
        ((3, 8, 8), {"steps": "many"}, "steps must be a whole number of at least 1, got 'many'"),
        ((3, 8, 8), {"levels": True}, "levels must be a whole number of at least 1, got True"),
        ((3, 8, 8), {"midpoints": "yes"}, "midpoints must be true or false, got 'yes'"),
        ((3, 8, 8), {"coupling": "spline"}, "coupling must be 'affine' or 'additive', got 'spline'"),
        ((3, 8, 8), {"preset": "huge"}, "preset must be 'small' or 'paper', got 'huge'"),
    ],
)
def test_what_cannot_be_built_is_refused(shape: tuple[int, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Glow(shape, **options)  # type: ignore[arg-type]


def test_images_of_another_shape_and_samples_of_no_size_are_refused() -> None:
    glow = Glow((3, 8, 8)).eval()
    with pytest.raises(ValueError, match=r"this Glow is of samples of shape \(3, 8, 8\), got \(1, 8, 8\)"):
        glow(torch.zeros(2, 1, 8, 8))
    for count, temperature in ((0, 1.0), (2, 0.0)):
        with pytest.raises(ValueError, match="count and temperature must be positive"):
            glow.sample(count, temperature)


def test_the_papers_sizes_are_a_preset() -> None:
    assert Glow((3, 8, 8), preset="small").options["levels"] == 3
    paper = Glow((1, 2, 2), preset="paper")
    assert (paper.options["steps"], paper.options["hidden"]) == (32, 512)
    assert Glow((1, 2, 2), preset="paper", steps=1).options["steps"] == 1


def test_a_bundle_gives_back_the_same_likelihood(tmp_path: Path) -> None:
    glow = shaken((3, 8, 8), coupling="additive", bits=6)
    save_density(glow, tmp_path / "glow")
    again = load_density(tmp_path / "glow")
    x = random_images(4, (3, 8, 8), 1)
    assert isinstance(again, Glow)
    assert again.options == glow.options
    assert torch.equal(again(x), glow(x))
