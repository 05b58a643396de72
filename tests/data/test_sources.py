from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.transforms.v2.functional import center_crop, resize

import gatecrash.data
from gatecrash.data import SOURCES, ImageSet, describe_sources, fashion, fingerprint, fundus, load_source
from gatecrash.data.sources import fitted
from gatecrash.images import resized

DRAWN = ["noise", "gaussian", "spiral", "checkerboard", "checkerboard:2", "constant", "blobs"]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_fashion_is_the_embedded_split(split: str) -> None:
    images = load_source(f"fashion:{split}", limit=200)
    x, y = fashion(split)
    assert torch.equal(images.x, x[:200])
    assert images.y is not None
    assert torch.equal(images.y, y[:200])
    assert images.y.bincount().tolist() == [20] * 10
    assert images.classes is not None
    assert images.classes[9] == "Ankle boot"
    assert (images.name, images.notes, len(images)) == (f"fashion:{split}", [], 200)


def test_without_a_split_fashion_is_its_test_images() -> None:
    assert fingerprint(load_source("fashion")) == fingerprint(load_source("fashion:test"))


def test_digits_are_scikit_learns_at_the_size_asked() -> None:
    bunch = load_digits()
    images = load_source("digits", size=56, channels=3)
    grey = resized(torch.from_numpy(bunch.images).float().unsqueeze(1) / 16, 56)
    torch.testing.assert_close(images.x, grey.expand(-1, 3, -1, -1).clamp(0, 1))
    assert images.y is not None
    assert images.y.tolist() == bunch.target.tolist()
    assert images.notes == ["grey → RGB", "resized 8 → 56"]
    assert load_source("digits", limit=5).x.shape == (5, 1, 8, 8)


def test_the_fundus_can_be_made_grey_and_small() -> None:
    assert torch.equal(load_source("fundus").x, fundus())
    images = load_source("fundus", channels=1, size=56)
    luma = (fundus() * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(images.x, resized(luma, 56))
    assert images.notes == ["RGB → grey", "resized 224 → 56"]
    assert images.y is None


@pytest.mark.parametrize("spec", DRAWN)
def test_drawn_sources_give_what_was_asked_and_depend_on_the_seed(spec: str) -> None:
    images = load_source(spec, limit=7, channels=1, size=20, seed=3)
    assert images.x.shape == (7, 1, 20, 20)
    assert (images.y, images.notes) == (None, [])
    assert torch.equal(images.x, load_source(spec, limit=7, channels=1, size=20, seed=3).x)
    assert not torch.equal(images.x, load_source(spec, limit=7, channels=1, size=20, seed=4).x)
    assert load_source(spec, limit=2).x.shape == (2, 3, 32, 32)


def test_two_drawn_sources_share_no_random_numbers() -> None:
    uniform, normal = (load_source(name, limit=20).x.flatten() for name in ("noise", "gaussian"))
    assert abs(float(torch.corrcoef(torch.stack([uniform, normal]))[0, 1])) < 0.02


def test_a_checkerboard_can_be_told_its_fields() -> None:
    x = load_source("checkerboard:2", limit=10, size=32).x
    assert torch.equal(x[:, :, :16, :16], x[:, :, 16:, 16:])
    assert torch.equal(x[:, :, :16, 16:], x[:, :, 16:, :16])
    assert torch.equal(x[:, :, :16, :16], x[:, :, :1, :1].expand(-1, -1, 16, 16))
    assert (x[:, :, 0, 0] - x[:, :, 0, 16]).abs().min() > 0.33


def test_shuffled_images_are_a_seeded_subset_with_their_labels() -> None:
    x, y = fashion("test")
    row_of = {image.numpy().tobytes(): row for row, image in enumerate(x)}
    images = load_source("fashion:test", limit=50, shuffle=True, seed=1)
    rows = [row_of[image.numpy().tobytes()] for image in images.x]
    assert len(set(rows)) == 50
    assert max(rows) > 500
    assert images.y is not None
    assert torch.equal(images.y, y[rows])
    assert fingerprint(images) == fingerprint(load_source("fashion:test", limit=50, shuffle=True, seed=1))
    assert fingerprint(images) != fingerprint(load_source("fashion:test", limit=50, shuffle=True, seed=2))


def test_no_global_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    load_source("spiral", limit=3)
    load_source("fashion:val", limit=3, shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_limit_beyond_what_is_there_is_noted() -> None:
    assert load_source("fashion:test", limit=2000).notes == ["2000 images were asked for, 1000 are there"]


@pytest.mark.parametrize("shape", [(40, 60), (61, 40), (33, 33), (5, 90)])
def test_fitting_is_torchvisions_resize_and_centre_crop(shape: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fitted(x, 24), center_crop(resize(x, [24], antialias=True), [24, 24]))


def test_a_fingerprint_sees_every_pixel_label_and_shape_and_nothing_else() -> None:
    images = ImageSet(torch.rand(4, 1, 2, 8), torch.arange(4), "one")
    changed = images.x.clone()
    changed[3, 0, 1, 7] += 1e-6
    others = [
        replace(images, x=changed),
        replace(images, x=images.x.view(4, 1, 4, 4)),
        replace(images, y=torch.tensor([0, 1, 2, 4])),
        replace(images, y=None),
    ]
    assert len({fingerprint(each) for each in [images, *others]}) == 5
    assert fingerprint(replace(images, name="two", notes=["resized"], classes=["a"])) == fingerprint(images)
    assert len(fingerprint(images)) == 64


def test_a_fingerprint_does_not_depend_on_the_memory_layout() -> None:
    x = torch.rand(2, 3, 4, 4)
    transposed = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert fingerprint(ImageSet(x, None, "a")) == fingerprint(ImageSet(transposed, None, "a"))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("spirals", {}, "unknown source 'spirals'; did you mean 'spiral'"),
        ("fashion:trian", {}, "unknown split of fashion 'trian'; did you mean 'train'"),
        ("noise:3", {}, "noise takes nothing after a colon, got '3'"),
        ("checkerboard:two", {}, "checkerboard takes a number of fields a side, got 'two'"),
        ("checkerboard:64", {"size": 32}, "a checkerboard of 32 pixels takes 1 to 32 fields a side, got 64"),
        ("noise", {"limit": 0}, "limit must be at least 1, got 0"),
        ("noise", {"size": -1}, "size must be at least 1, got -1"),
        ("noise", {"channels": 2}, "channels must be 1 or 3, got 2"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line(spec: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_source(spec, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_source_says_what_it_is_what_it_needs_and_its_licence() -> None:
    listing = describe_sources()
    assert [entry["name"] for entry in listing] == list(SOURCES)
    assert all(all(entry.values()) for entry in listing)
    by_name = {entry["name"]: entry for entry in listing}
    assert by_name["fashion"]["form"] == "fashion:train|val|test"
    assert by_name["fashion"]["licence"] == "MIT, © Zalando SE"
    assert by_name["fundus"]["licence"] == "CC0"
    assert by_name["noise"]["needs"] == "nothing"
    assert by_name["cifar10"]["needs"] == "root with cifar-10-batches-py"
    assert by_name["lsun"]["needs"] == "root with test_lmdb, and lmdb"


def test_slow_libraries_are_imported_only_when_a_source_needs_them() -> None:
    for path in Path(gatecrash.data.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"torchvision", "sklearn", "scipy", "lmdb"}
