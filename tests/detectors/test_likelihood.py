"""Glow's likelihood as a detector, with and without the size of the file, and what an attacker makes of either."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from gatecrash import L2, score_to
from gatecrash.data.drawn import checkerboard, noise, spiral
from gatecrash.densities import DENSITIES, Density, save_density
from gatecrash.detectors import Detector, GlowLikelihood, InputComplexity
from gatecrash.detectors.likelihood import png_bits
from gatecrash.metrics import auroc
from small_models import one_thread

assert one_thread

SIDE = 8


def smooth(count: int, seed: int, channels: int = 3) -> Tensor:
    """Inliers: colours that run into each other, with a little noise, as files have them."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 3, 3, generator=generator)
    x = interpolate(coarse, size=SIDE, mode="bilinear", align_corners=True)
    return (255 * (x + 0.03 * torch.randn(x.shape, generator=generator)).clamp(0, 1)).round() / 255


@cache
def trained() -> GlowLikelihood:
    training = {"epochs": 6, "lr": 1e-2, "batch_size": 30}
    return GlowLikelihood(model={"steps": 2, "hidden": 16, "levels": 2}, training=training).fit(smooth(240, 0))


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    trained().save_bundle(tmp_path / "glow")
    return str(tmp_path / "glow")


def both(bundle: str) -> list[Detector]:
    return [GlowLikelihood(bundle=bundle), InputComplexity(bundle=bundle)]


def drawn(count: int, family: str) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return (
        spiral(count, 3, SIDE, generator) if family == "spiral" else checkerboard(count, 3, SIDE, generator, fields=2)
    )


# The scores


def test_the_score_is_the_densitys_bits_per_dimension() -> None:
    detector, x = trained(), smooth(5, 1)
    expected = -detector.trained(x) / (np.log(2) * 3 * SIDE * SIDE)
    torch.testing.assert_close(detector(x), expected)


def test_complexity_is_the_same_less_the_file(bundle: str) -> None:
    glow, complexity = both(bundle)
    x = torch.cat([smooth(4, 1), drawn(2, "spiral"), drawn(2, "checkerboard")])
    torch.testing.assert_close(complexity(x), glow(x) - png_bits(x), rtol=1e-6, atol=1e-5)


def test_the_gradient_leaves_the_file_out(bundle: str) -> None:
    glow, complexity = both(bundle)
    x = smooth(4, 1).requires_grad_()
    (exact,), (without,) = (torch.autograd.grad(detector(x).sum(), x) for detector in (glow, complexity))
    assert torch.equal(exact, without)
    assert (complexity.card.gradient, glow.card.gradient) == ("omitted", "exact")


@pytest.mark.parametrize("channels", [1, 3])
def test_the_bits_are_those_of_a_file_that_holds_the_image(channels: int, tmp_path: Path) -> None:
    x = smooth(3, 2, channels)
    for number, image in enumerate((255 * x).round().byte().permute(0, 2, 3, 1).numpy()):
        path = tmp_path / f"{number}.png"
        Image.fromarray(image.squeeze()).save(path, compress_level=9)
        assert np.array_equal(np.array(Image.open(path)), image.squeeze())
        assert png_bits(x)[number].item() == pytest.approx(8 * path.stat().st_size / (channels * SIDE * SIDE))


def test_a_file_of_noise_takes_eight_bits_and_one_of_a_single_colour_next_to_none() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = png_bits(torch.cat([noise(1, 3, 64, generator), torch.full((1, 3, 64, 64), 0.25)]))
    assert 8 < bits[0] < 8.5
    assert bits[1] < 0.2


def test_a_file_is_written_anew_for_every_image_in_whatever_precision() -> None:
    x = smooth(2, 3)
    torch.testing.assert_close(png_bits(x.double()).float(), png_bits(x))
    assert png_bits(x.double()).dtype == torch.float64
    nudged = x + (0.4 / 255) * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(png_bits(nudged.clamp(0, 1)), png_bits(x))


def test_half_a_grey_level_is_rounded_alike_in_every_precision() -> None:
    ramp = ((torch.arange(252) + 0.5) / 255).view(1, 1, 14, 18)
    torch.testing.assert_close(png_bits(ramp.double()).float(), png_bits(ramp))


# Bundles and mistakes


@pytest.mark.parametrize("kind", [GlowLikelihood, InputComplexity])
def test_a_detector_without_an_encoder_is_loaded_without_one(
    kind: type[GlowLikelihood], bundle: str, tmp_path: Path
) -> None:
    detector, x = kind(bundle=bundle), smooth(4, 1)
    detector.save(tmp_path / "saved.safetensors")
    for again in (
        kind.load(tmp_path / "saved.safetensors"),
        kind.load(tmp_path / "saved.safetensors", None),
        Detector.load(tmp_path / "saved.safetensors", []),
    ):
        assert again.encoder is None
        assert torch.equal(again.scores(x), detector.scores(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "small"}, "model must be a mapping of preset, levels, .*, got 'small'"),
        ({"model": 5}, "model must be a mapping of preset"),
        ({"model": {"foo": 1}}, "model: unknown option 'foo'; known: preset, levels, steps, hidden"),
        ({"training": {"foo": 1}}, "training: unknown option 'foo'; known: epochs, batch_size"),
        ({"training": [1]}, r"training must be a mapping of epochs, .*, got \[1\]"),
        ({"training": {"lr": "fast"}}, "training: lr must be a number, got 'fast'"),
        ({"training": {"seed": 2**70}}, "training: seed must have at most 64 bits"),
        ({"bundle": 5}, "bundle must be the name of a folder, got 5"),
        ({"checkpoints": 3}, "checkpoints must be the name of a folder, got 3"),
        ({"shape": [1, 8, 8], "model": {"preset": ["small"]}}, r"preset must be 'small' or 'paper', got \['small'\]"),
    ],
)
def test_what_is_wrong_in_a_plan_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlowLikelihood(**options)


def test_a_size_that_is_none_is_named_and_a_training_that_diverges_says_so() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 'many'"):
        GlowLikelihood(model={"steps": "many"}).fit(smooth(8, 0))
    training = {"lr": 1_000_000, "clip": None, "epochs": 1}
    with pytest.raises(ValueError, match=r"the training of glow diverged.*(finite|is nan|is inf).*smaller lr"):
        GlowLikelihood(model={"steps": 1, "hidden": 4}, training=training).fit(smooth(64, 0))


def test_a_bundle_needs_no_training_and_no_inliers(bundle: str) -> None:
    x = smooth(5, 1)
    for detector in both(bundle):
        assert detector.fitted
        assert detector.to_fit() == []
    assert torch.equal(both(bundle)[0].scores(x), trained().scores(x))


def test_a_bundle_of_another_density_is_refused(tmp_path: Path) -> None:
    class Flat(Density):
        name = "flat, for this test"

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).sum(dim=1)

    DENSITIES.register(Flat.name)(Flat)
    try:
        save_density(Flat((3, SIDE, SIDE)), tmp_path)
        with pytest.raises(ValueError, match="GlowLikelihood needs the density 'glow', and this is 'flat"):
            GlowLikelihood(bundle=str(tmp_path))
    finally:
        DENSITIES._entries.pop(Flat.name)


def test_images_that_the_flow_or_the_file_cannot_hold_are_refused(bundle: str) -> None:
    quick = {"epochs": 1}
    with pytest.raises(ValueError, match="needs sides divisible by 2, got 7×7"):
        GlowLikelihood(training=quick).fit(torch.rand(4, 3, 7, 7))
    with pytest.raises(ValueError, match="only images with 1 or 3 channels are written as PNG, got 2"):
        InputComplexity(training=quick).fit(torch.rand(4, 2, 8, 8))
    with pytest.raises(ValueError, match=r"model: .*'width'"):
        GlowLikelihood(model={"width": 3}, training=quick).fit(torch.rand(4, 3, 8, 8))
    for detector in both(bundle):
        with pytest.raises(ValueError, match=r"is of samples of shape \(3, 8, 8\), got \(1, 8, 8\)"):
            detector(smooth(2, 0, channels=1))


# The attack


@pytest.mark.parametrize("family", ["spiral", "checkerboard"])
@pytest.mark.parametrize("kind", [0, 1], ids=["glow", "complexity"])
def test_the_score_of_one_drawn_image_is_brought_to_any_value(kind: int, family: str, bundle: str) -> None:
    detector, start = both(bundle)[kind], drawn(1, family)
    inliers = detector.scores(smooth(40, 1))
    goals = torch.linspace(float(inliers.min()), float(detector.scores(start)) + 1, 7)
    found = score_to(detector, start.expand(7, -1, -1, -1).contiguous(), goals, L2(5.0), steps=200)
    torch.testing.assert_close(found.score, goals, rtol=0, atol=0.02)
    torch.testing.assert_close(detector.scores(found.x), found.score)
    assert found.distance("l2").max() <= 5 + 1e-5


@pytest.mark.parametrize("kind", [0, 1], ids=["glow", "complexity"])
def test_spirals_that_match_inliers_one_by_one_cannot_be_told_from_them(kind: int, bundle: str) -> None:
    detector = both(bundle)[kind]
    inliers, spirals = smooth(24, 1), drawn(24, "spiral")
    wanted = detector.scores(inliers)
    assert auroc(wanted, detector.scores(spirals)) > 0.95
    found = score_to(detector, spirals, wanted, L2(5.0), steps=200)
    assert 0.47 < auroc(wanted, detector.scores(found.x)) < 0.53
