from __future__ import annotations

import gzip
import io
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from gatecrash.data.embedded import FASHION_CLASSES, FASHION_SPLITS, fashion, fashion_rows, fundus

COUNTS = {"train": 6000, "val": 1000, "test": 1000}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def from_debian(name: str, header: int) -> NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress((DEBIAN / f"{name}-ubyte.gz").read_bytes()), np.uint8, offset=header)


@pytest.mark.parametrize("split", FASHION_SPLITS)
def test_a_split_is_balanced_over_the_classes_and_so_is_every_ten_of_it(split: str) -> None:
    x, y = fashion(split)
    assert x.shape == (COUNTS[split], 1, 28, 28)
    assert x.dtype == torch.float32
    assert x.min() == 0
    assert x.max() == 1
    assert y.dtype == torch.int64
    assert torch.equal(y.view(-1, 10).sort(dim=1).values, torch.arange(10).expand(len(y) // 10, 10))
    assert len(FASHION_CLASSES) == 10


def test_no_image_is_in_two_splits_or_twice_in_one() -> None:
    images = [image.numpy().tobytes() for split in COUNTS for image in fashion(split)[0]]
    assert len(set(images)) == sum(COUNTS.values())


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("split", "original"), [("train", "train"), ("val", "train"), ("test", "t10k")])
def test_every_pixel_and_label_is_the_original_one(split: str, original: str) -> None:
    pixels = from_debian(f"{original}-images-idx3", 16).reshape(-1, 1, 28, 28)
    labels = from_debian(f"{original}-labels-idx1", 8)
    x, y = fashion(split)
    rows = fashion_rows(split).numpy()
    np.testing.assert_array_equal((x * 255).round().numpy(), pixels[rows])
    np.testing.assert_array_equal(y.numpy(), labels[rows])


def test_the_labels_name_what_is_seen() -> None:
    x, y = fashion("val")
    inked = {name: float((x[y == label] > 0.1).float().mean()) for label, name in enumerate(FASHION_CLASSES)}
    order = sorted(inked, key=inked.__getitem__)
    assert order[:3] == ["Sandal", "Sneaker", "Trouser"]
    assert set(order[-3:]) == {"Coat", "Pullover", "Shirt"}


def test_writing_to_the_images_changes_nothing_for_the_next_caller() -> None:
    fashion("test")[0].zero_()
    fundus().zero_()
    assert fashion("test")[0].amax() == 1
    assert fundus().amax() > 0.9


def test_an_unknown_split_is_told_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown split of fashion 'tran'; did you mean 'train'"):
        fashion("tran")


def test_the_fundus_is_a_red_disc_on_black() -> None:
    (image,) = fundus()
    assert image.shape == (3, 224, 224)
    assert image[:, :8, :8].amax() < 0.05
    red, green, blue = image[:, 92:132, 92:132].mean(dim=(1, 2))
    assert red > 1.5 * green > 1.5 * blue


def test_the_fundus_is_scikit_images_photograph() -> None:
    package = find_spec("skimage")
    if package is None or package.origin is None:
        pytest.skip("scikit-image is not installed")
    photo = Image.open(Path(package.origin).parent / "data" / "retina.jpg").convert("RGB")
    expected = np.asarray(photo.resize((224, 224), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    np.testing.assert_array_equal((fundus()[0] * 255).round().numpy(), expected)


def test_what_is_carried_is_small_lossless_and_under_a_stated_licence() -> None:
    carried = {entry.name: entry.read_bytes() for entry in files("gatecrash.data").joinpath("embedded").iterdir()}
    assert sum(map(len, carried.values())) <= 5_000_000
    notice = carried.pop("NOTICE").decode()
    for name, content in carried.items():
        assert name in notice
        assert name.endswith(".npz") or Image.open(io.BytesIO(content)).format == "PNG"
    assert "MIT License" in notice
    assert "Zalando SE" in notice
    assert "CC0" in notice
