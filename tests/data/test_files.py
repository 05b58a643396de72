from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from gatecrash.data import load_source

RANDOM = np.random.default_rng(0)


def saved(path: Path, **arrays: NDArray[Any]) -> str:
    np.savez_compressed(path, allow_pickle=True, **arrays)
    return f"npz:{path}"


def pixels(*shape: int) -> NDArray[Any]:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def draw(path: Path, values: NDArray[Any]) -> NDArray[Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return values


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.float32, np.float64])
def test_an_npz_is_read_whichever_layout_and_type_it_has(
    tmp_path: Path, layout: str, channels: int, kind: type[np.generic]
) -> None:
    stored = pixels(5, 6, 7, channels)
    expected = torch.from_numpy(stored).permute(0, 3, 1, 2).float() / 255
    x = stored if kind is np.uint8 else (stored / 255).astype(kind)
    x = x if layout == "NHWC" else x.transpose(0, 3, 1, 2)
    images = load_source(saved(tmp_path / "a.npz", x=x, y=np.arange(5, dtype=np.uint8)))
    torch.testing.assert_close(images.x, expected, rtol=0, atol=1e-3 if kind is np.float16 else 1e-7)
    assert images.y is not None
    assert (images.y.dtype, images.y.tolist()) == (torch.int64, [0, 1, 2, 3, 4])


def test_an_npz_of_grey_images_needs_no_channels_and_no_labels(tmp_path: Path) -> None:
    stored = pixels(5, 6, 7)
    images = load_source(saved(tmp_path / "a.npz", x=stored), limit=3)
    assert torch.equal(images.x, torch.from_numpy(stored[:3, None]).float() / 255)
    assert images.y is None


def test_paths_are_relative_to_the_root(tmp_path: Path) -> None:
    draw(tmp_path / "sets" / "pictures" / "a.png", pixels(4, 4, 3))
    saved(tmp_path / "sets" / "a.npz", x=pixels(2, 4, 4))
    assert len(load_source("npz:sets/a.npz", root=tmp_path)) == 2
    assert len(load_source("folder:pictures", root=tmp_path / "sets")) == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": pixels(2, 4, 4)}, "there is no array x in it, only images"),
        ({"x": pixels(4, 4)}, "x must be N×H×W, N×H×W×C or N×C×H×W with C 1 or 3; (4, 4) is none of them"),
        ({"x": pixels(2, 8, 8, 4)}, "(2, 8, 8, 4) is none of them"),
        ({"x": pixels(2, 3, 8, 3)}, "(2, 3, 8, 3) could be either of the last two"),
        ({"x": np.zeros((2, 4, 4), dtype=np.int64)}, "x must be uint8 or float, got int64"),
        ({"x": np.full((2, 4, 4), 7.0)}, "must lie in [0, 1], got values from 7 to 7; divide by 255"),
        ({"x": np.full((2, 4, 4), np.nan)}, "must not hold NaN"),
        ({"x": pixels(0, 4, 4)}, "there is no image"),
        ({"x": pixels(2, 4, 4), "y": np.zeros(3, dtype=np.int64)}, "y must be whole numbers of shape (2,), got (3,)"),
        ({"x": pixels(2, 4, 4), "y": np.zeros(2)}, "y must be whole numbers of shape (2,), got (2,) float64"),
        ({"x": np.array([{}, {}], dtype=object)}, "cannot be read: Object arrays cannot be loaded"),
    ],
)
def test_an_npz_that_holds_no_images_says_why(tmp_path: Path, arrays: dict[str, NDArray[Any]], message: str) -> None:
    spec = saved(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError) as caught:
        load_source(spec)
    assert message in str(caught.value)
    assert str(caught.value).startswith(spec)
    assert "\n" not in str(caught.value)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "bomb.npz").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    spec = saved(tmp_path / "inner.npz", x=np.array([Bomb(tmp_path / "ran")], dtype=object))
    with pytest.raises(ValueError, match=r"not an \.npz file, or cut off"):
        load_source(f"npz:{tmp_path}/bomb.npz")
    with pytest.raises(ValueError, match="cannot be read"):
        load_source(spec)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_npz_is_named(tmp_path: Path) -> None:
    spec = saved(tmp_path / "a.npz", x=pixels(50, 8, 8))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.npz: not an \.npz file, or cut off"):
        load_source(spec)
    (tmp_path / "a.npz").write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    with pytest.raises(ValueError, match=r"a\.npz: cannot be read"):
        load_source(spec)


@pytest.mark.parametrize("spec", ["npz:nothing.npz", "folder:nothing"])
def test_what_is_not_there_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ValueError, match=f"{spec}: {tmp_path}/nothing.* is not there"):
        load_source(spec, root=tmp_path)


@pytest.mark.parametrize(("spec", "message"), [("npz", "npz:FILE"), ("folder:", "folder:DIR")])
def test_a_path_that_is_forgotten_is_asked_for(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"needs a path: {message}"):
        load_source(spec)


def test_class_folders_become_labels(tmp_path: Path) -> None:
    cat, dog_b, dog_a = pixels(6, 6, 3), pixels(6, 6, 3), pixels(6, 6, 3)
    draw(tmp_path / "dog" / "b.png", dog_b)
    draw(tmp_path / "dog" / "more" / "c.tif", dog_a)
    draw(tmp_path / "cat" / "x.BMP", cat)
    draw(tmp_path / "cat" / "._x.png", cat)
    draw(tmp_path / ".cache" / "y.png", cat)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dog" / "notes.txt").write_text("not a picture")
    images = load_source(f"folder:{tmp_path}")
    expected = np.stack([cat, dog_b, dog_a]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal((images.x * 255).round().numpy(), expected)
    assert images.classes == ["cat", "dog", "empty"]
    assert images.y is not None
    assert images.y.tolist() == [0, 1, 1]


def test_a_flat_folder_has_no_labels_and_is_read_in_order(tmp_path: Path) -> None:
    drawn = [draw(tmp_path / f"{index}.webp", np.full((5, 5, 3), 50 * index, np.uint8)) for index in range(4)]
    images = load_source(f"folder:{tmp_path}", limit=3)
    assert (images.y, images.classes) == (None, None)
    expected = np.stack(drawn[:3]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose((images.x * 255).numpy(), expected, atol=3)


def test_only_the_images_asked_for_are_decoded(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", pixels(5, 5, 3))
    (tmp_path / "b.png").write_bytes(b"never opened")
    assert len(load_source(f"folder:{tmp_path}", limit=1)) == 1


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "tif", "webp"])
def test_a_truncated_picture_is_named(tmp_path: Path, kind: str) -> None:
    draw(tmp_path / "0.png", pixels(40, 40, 3))
    draw(tmp_path / f"1.{kind}", pixels(40, 40, 3))
    whole = (tmp_path / f"1.{kind}").read_bytes()
    (tmp_path / f"1.{kind}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError) as caught:
        load_source(f"folder:{tmp_path}")
    assert f"1.{kind} cannot be read" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pictures_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", np.full((20, 30, 3), 100, np.uint8))
    draw(tmp_path / "b.png", np.full((24, 24, 3), 200, np.uint8))
    with pytest.raises(ValueError, match=r"b\.png is 24×24 and those before it are 20×30: give a size"):
        load_source(f"folder:{tmp_path}")
    images = load_source(f"folder:{tmp_path}", size=16)
    expected = (torch.tensor([100, 200]) / 255).view(2, 1, 1, 1).expand(2, 3, 16, 16)
    torch.testing.assert_close(images.x, expected)
    assert images.notes == ["resized from 2 sizes → 16, the short side first, then the centre cut out"]


def test_the_centre_of_a_wide_picture_is_kept(tmp_path: Path) -> None:
    values = np.zeros((10, 30), np.uint8)
    values[:, 10:20] = 255
    draw(tmp_path / "a.png", values)
    images = load_source(f"folder:{tmp_path}", size=10)
    assert torch.equal(images.x, torch.ones(1, 1, 10, 10))
    assert images.notes == ["resized 10×30 → 10, the short side first, then the centre cut out"]


def test_grey_and_coloured_pictures_together_need_a_number_of_channels(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", np.full((8, 8, 3), 51, np.uint8))
    draw(tmp_path / "b.png", np.full((8, 8), 102, np.uint8))
    with pytest.raises(ValueError, match=r"b\.png is grey and those before it are colour: give channels, 1 or 3"):
        load_source(f"folder:{tmp_path}")
    for channels, note in ((3, "grey → RGB"), (1, "RGB → grey")):
        images = load_source(f"folder:{tmp_path}", channels=channels)
        torch.testing.assert_close(images.x.mean(dim=(1, 2, 3)), torch.tensor([0.2, 0.4]))
        assert images.x.shape == (2, channels, 8, 8)
        assert images.notes == [note]


def test_pictures_keep_their_depth_and_lose_their_transparency(tmp_path: Path) -> None:
    draw(tmp_path / "deep" / "a.png", np.full((4, 4), 13107, np.uint16))
    draw(tmp_path / "clear" / "a.png", np.full((4, 4, 4), (51, 102, 153, 0), np.uint8))
    draw(tmp_path / "float" / "a.tif", np.full((4, 4), 0.25, np.float32))
    Image.new("1", (4, 4), 1).save(tmp_path / "bits.png")
    torch.testing.assert_close(load_source(f"folder:{tmp_path}/deep").x, torch.full((1, 1, 4, 4), 0.2))
    torch.testing.assert_close(load_source(f"folder:{tmp_path}/clear").x[0, :, 0, 0], torch.tensor([0.2, 0.4, 0.6]))
    torch.testing.assert_close(load_source(f"folder:{tmp_path}/float").x, torch.full((1, 1, 4, 4), 0.25))
    for name in ("deep", "clear", "float"):
        next((tmp_path / name).iterdir()).unlink()
    assert torch.equal(load_source(f"folder:{tmp_path}").x, torch.ones(1, 1, 4, 4))


def test_a_folder_without_pictures_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds no picture \(\.png, \.jpg"):
        load_source(f"folder:{tmp_path}")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", pixels(4, 4))
    with pytest.raises(ValueError, match="is a file, not a folder"):
        load_source(f"folder:{tmp_path}/a.png")


def test_pictures_beside_class_folders_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", pixels(4, 4))
    draw(tmp_path / "class" / "b.png", pixels(4, 4))
    with pytest.raises(ValueError, match=r"a\.png lies beside folders of pictures"):
        load_source(f"folder:{tmp_path}")
