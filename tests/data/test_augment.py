from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from gatecrash.data.augment import (
    Augmentation,
    crop,
    flip,
    projections,
    rotations,
    transformed,
    translations,
    warped,
)

EVERYTHING = Augmentation(crop=2, flip=True, rotation=20, translation=3, projection=2)
CHANGES: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "crop": lambda x, generator: crop(x, 3, generator),
    "reflected": lambda x, generator: crop(x, 3, generator, mode="reflect"),
    "flip": flip,
    "rotation": lambda x, generator: transformed(x, 30, 0, 0, generator),
    "translation": lambda x, generator: transformed(x, 0, 4, 0, generator),
    "projection": lambda x, generator: transformed(x, 0, 0, 2.5, generator),
    "everything": EVERYTHING,
}


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 6, height: int = 12, width: int = 16, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, height, width, generator=seeded(seed))


def moved_by_hand(image: Tensor, homography: Tensor) -> Tensor:
    """One image (C, H, W) moved by a homography, pixel after pixel, in float64."""
    _, height, width = image.shape
    back = homography.double().inverse()
    moved = torch.empty_like(image, dtype=torch.float64)
    for row in range(height):
        for column in range(width):
            point = torch.tensor([column - (width - 1) / 2, row - (height - 1) / 2, 1], dtype=torch.float64)
            across, along, depth = (back @ point).tolist()
            x = min(max(across / depth + (width - 1) / 2, 0), width - 1)
            y = min(max(along / depth + (height - 1) / 2, 0), height - 1)
            left, top = min(int(x), width - 2), min(int(y), height - 2)
            a, b = x - left, y - top
            four = image[:, top : top + 2, left : left + 2].double()
            moved[:, row, column] = (1 - b) * ((1 - a) * four[:, 0, 0] + a * four[:, 0, 1]) + b * (
                (1 - a) * four[:, 1, 0] + a * four[:, 1, 1]
            )
    return moved


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_a_crop_is_a_slice_of_the_padded_image(mode: str) -> None:
    x, padding = pictures(50), 3
    padded = pad(x, [padding] * 4, mode=mode)
    offsets = torch.randint(2 * padding + 1, (2, 50), generator=seeded())
    slices = [image[:, top : top + 12, left : left + 16] for image, top, left in zip(padded, *offsets, strict=True)]
    assert torch.equal(crop(x, padding, seeded(), mode=mode), torch.stack(slices))  # type: ignore[arg-type]


def test_crops_are_taken_at_every_place_equally_often() -> None:
    numbers = torch.arange(1, 26).view(1, 1, 5, 5).expand(9000, -1, -1, -1) / 25
    corners = crop(numbers, 1, seeded())[:, 0, 2, 2].mul(25).round().int()
    found = torch.bincount(corners)
    assert found.nonzero().flatten().tolist() == [7, 8, 9, 12, 13, 14, 17, 18, 19]
    assert (found[found > 0] - 1000).abs().max() < 150


def test_a_flip_mirrors_half_of_the_images_and_leaves_the_others() -> None:
    x = pictures(2000, 4, 6)
    flipped = flip(x, seeded())
    same = (flipped == x).flatten(1).all(dim=1)
    mirrored = (flipped == x.flip(3)).flatten(1).all(dim=1)
    assert (same ^ mirrored).all()
    assert 900 < int(mirrored.sum()) < 1100


@pytest.mark.parametrize("quarters", [-1, 1, 2])
def test_quarter_turns_move_every_pixel_to_another(quarters: int) -> None:
    x = pictures(3, 16, 16)
    turned = warped(x, rotations(torch.full((3,), quarters * math.pi / 2, dtype=torch.float64)))
    torch.testing.assert_close(turned, x.rot90(-quarters, (2, 3)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("right", "down"), [(3, 0), (0, -2), (-5, 4)])
def test_whole_shifts_repeat_the_edge(right: int, down: int) -> None:
    x = pictures(2)
    shifts = torch.tensor([[right, down]], dtype=torch.float64).expand(2, -1)
    edges = pad(x, [8, 8, 8, 8], mode="replicate")
    expected = edges[:, :, 8 - down : 20 - down, 8 - right : 24 - right]
    torch.testing.assert_close(warped(x, translations(shifts)), expected, rtol=0, atol=1e-5)


def test_a_homography_moves_pixels_as_the_equation_says() -> None:
    x = pictures(3)
    homographies = torch.eye(3).repeat(3, 1, 1) + 0.2 * torch.randn(3, 3, 3, generator=seeded(1))
    homographies[:, 2] = torch.tensor([[0.01, -0.02, 1.0], [0.0, 0.03, 1.1], [-0.02, 0.0, 0.9]])
    expected = torch.stack([moved_by_hand(*pair) for pair in zip(x, homographies, strict=True)]).float()
    torch.testing.assert_close(warped(x, homographies), expected, rtol=0, atol=1e-5)
    assert (expected - x).abs().mean() > 0.1


def test_a_projection_takes_the_corners_where_they_are_told() -> None:
    moves = 4 * torch.rand(5, 4, 2, dtype=torch.float64, generator=seeded()) - 2
    corners = torch.tensor([[-8, -6, 1], [8, -6, 1], [-8, 6, 1], [8, 6, 1]], dtype=torch.float64)
    places = corners @ projections(moves, 12, 16).transpose(1, 2)
    torch.testing.assert_close(places[..., :2] / places[..., 2:], corners[:, :2] + moves)


def test_corners_that_move_alike_are_a_translation() -> None:
    moves = torch.tensor([3.0, -2.0], dtype=torch.float64).expand(1, 4, 2)
    torch.testing.assert_close(projections(moves, 12, 16), translations(moves[:, 0]))


def test_an_image_is_projected_then_turned_then_shifted() -> None:
    x, generator = pictures(4), seeded(3)
    angles, shifts, moves = (
        2 * torch.rand(4, *shape, generator=generator, dtype=torch.float64) - 1 for shape in ((), (2,), (4, 2))
    )
    steps = translations(4 * shifts), rotations(math.radians(40) * angles), projections(2 * moves, 12, 16)
    expected = torch.stack([moved_by_hand(image, a @ b @ c) for image, a, b, c in zip(x, *steps, strict=True)])
    torch.testing.assert_close(transformed(x, 40, 4, 2, seeded(3)), expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("option", "scale"), [("rotation", 25.0), ("translation", 3.0), ("projection", 2.5)])
def test_amounts_are_uniform_up_to_the_given_one(option: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def note(x: Tensor, homographies: Tensor) -> Tensor:
        seen.append(homographies)
        return x

    monkeypatch.setattr("gatecrash.data.augment.warped", note)
    Augmentation(**{option: scale})(torch.zeros(4000, 1, 16, 16), seeded())  # type: ignore[arg-type]
    (homographies,) = seen
    if option == "rotation":
        amounts = torch.atan2(homographies[:, 1, 0], homographies[:, 0, 0]).rad2deg()
    else:
        corner = homographies @ torch.tensor([-8.0, -8.0, 1.0], dtype=torch.float64)
        amounts = (corner[:, :2] / corner[:, 2:] + 8).flatten()
    assert scale * 0.99 < float(amounts.max()) <= scale * (1 + 1e-9)
    assert scale * 0.99 < -float(amounts.min()) <= scale * (1 + 1e-9)
    counts = torch.histc(amounts, 10, -scale, scale) / len(amounts)
    assert (counts - 0.1).abs().max() < 0.02


def test_nothing_set_gives_the_very_same_images() -> None:
    x, generator = pictures(), seeded()
    assert Augmentation()(x, generator) is x
    assert crop(x, 0, generator) is x
    assert transformed(x, 0, 0, 0, generator) is x
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize("name", CHANGES)
def test_the_generator_alone_determines_the_change(name: str) -> None:
    x, change, before = pictures(), CHANGES[name], torch.get_rng_state()
    kept = x.clone()
    first = change(x, seeded(1))
    assert torch.equal(change(x, seeded(1)), first)
    assert not torch.equal(change(x, seeded(2)), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, kept)
    assert len({tuple(image.flatten().tolist()) for image in change(x[:1].expand(6, -1, -1, -1), seeded(1))}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHANGES)
def test_values_shape_and_dtype_stay_what_they_were(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([pictures(60, 33, 33).round(), torch.ones(300, 3, 33, 33)]).to(dtype)
    changed = CHANGES[name](x, seeded())
    assert changed.shape == x.shape
    assert changed.dtype == dtype
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_an_image_beyond_its_horizon_shows_its_edge() -> None:
    x = pictures(1, 8, 8)
    steep = torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 0.3, 1]]], dtype=torch.float64)
    moved = warped(x, steep)
    assert moved.isfinite().all()
    assert torch.equal(moved[:, :, -1, :4], x[:, :, -1:, :1].expand(-1, -1, -1, 4).squeeze(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", CHANGES)
def test_a_gpu_gives_the_same_images(name: str) -> None:
    x = pictures()
    changed = CHANGES[name](x.cuda(), seeded())
    assert changed.is_cuda
    torch.testing.assert_close(changed.cpu(), CHANGES[name](x, seeded()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: Augmentation(crop=-1), "crop must be finite and not negative, got -1"),
        (lambda: Augmentation(rotation=math.nan), "rotation must be finite and not negative, got nan"),
        (lambda: crop(pictures(), 12, seeded(), mode="reflect"), "padding must be less than the side .*, got 12"),
        (lambda: transformed(pictures(), 0, -2, 0, seeded()), "translation must be finite and not negative, got -2"),
        (
            lambda: transformed(pictures(), 0, 0, 3, seeded()),
            "projection must be less than a quarter of 12 pixels, got 3",
        ),
    ],
)
def test_amounts_that_make_no_sense_are_refused(change: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        change()
