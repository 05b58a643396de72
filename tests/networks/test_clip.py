"""A CLIP from a folder: against transformers itself, and what a wrong folder gets."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import interpolate

from gatecrash.networks import clip as clip_module
from gatecrash.networks import hash_of
from gatecrash.networks.clip import (
    ClipImages,
    Framing,
    Preprocessing,
    load_clip,
    read_framing,
    read_preprocessing,
    unit,
)
from small_clip import MEAN, SIZE, STD, colours, write_clip

TEXTS = ["a photo of a cat", "dog", "a drawing of a ship, seen from 日本"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip") / "small")


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(copytree(folder, tmp_path / "own"))


def reference(folder: Path, x: Tensor, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """What transformers gives: image embeddings, text embeddings, logits per image."""
    from transformers import CLIPModel, CLIPTokenizer

    with torch.no_grad():
        tokens = CLIPTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
        output = CLIPModel.from_pretrained(folder).eval()(pixel_values=x, **tokens)
    return output.image_embeds, output.text_embeds, output.logits_per_image


def test_embeddings_and_logits_are_those_of_transformers(folder: Path) -> None:
    network, x = load_clip(folder), colours(5, SIZE)
    images, texts, logits = reference(folder, x, TEXTS)
    with torch.no_grad():
        assert torch.allclose(network(x), images, atol=1e-6)
        assert torch.allclose(network.words(TEXTS), texts, atol=1e-6)
        assert torch.allclose(network.scale * network(x) @ network.words(TEXTS).T, logits, atol=1e-4)
    assert not torch.allclose(texts[0], texts[1], atol=1e-2)
    assert torch.allclose(network(x).norm(dim=1), torch.ones(5))


def test_the_network_is_in_eval_mode_and_knows_its_preprocessing(folder: Path) -> None:
    network = load_clip(str(folder))
    assert not any(module.training for module in network.modules())
    assert (network.mean, network.std, network.size) == read_preprocessing(folder) == Preprocessing(MEAN, STD)
    assert network.framing == read_framing(folder) == Framing(SIZE, SIZE, "bicubic")


def test_a_text_is_embedded_once_and_alone_as_among_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, seen = load_clip(folder), []
    embed = network._embedded
    monkeypatch.setattr(network, "_embedded", lambda texts: seen.extend(texts) or embed(texts))
    together = network.words([*TEXTS, TEXTS[0]])
    assert seen == TEXTS
    assert torch.equal(together[0], together[3])
    assert torch.equal(network.words(TEXTS[:2]), together[:2])
    assert seen == TEXTS
    alone = torch.cat([load_clip(folder).words([text]) for text in TEXTS])
    torch.testing.assert_close(alone, together[:3], rtol=1e-5, atol=1e-6)


def test_more_texts_than_fit_in_one_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = load_clip(folder).words(TEXTS)
    monkeypatch.setattr(clip_module, "TEXTS", 2)
    torch.testing.assert_close(load_clip(folder).words(TEXTS), together, rtol=1e-5, atol=1e-6)


def test_what_was_remembered_is_forgotten_when_the_weights_change(folder: Path) -> None:
    network = load_clip(folder)
    before = network.words(TEXTS)
    with torch.no_grad():
        network.clip.text_projection.weight.mul_(torch.linspace(1, 2, 12)[:, None])
    assert not torch.allclose(network.words(TEXTS), before, atol=1e-3)
    assert network.double().words(TEXTS).dtype == torch.float64


def test_texts_embedded_in_inference_mode_can_be_part_of_a_gradient(folder: Path) -> None:
    network = load_clip(folder)
    with torch.inference_mode():
        words = network.words(TEXTS)
    x = colours(2, SIZE).requires_grad_()
    (gradient,) = torch.autograd.grad((network(x) @ words.T).sum(), x)
    assert gradient.abs().amax(dim=(1, 2, 3)).min() > 0


def test_a_copy_works_on_its_own(folder: Path) -> None:
    network = load_clip(folder)
    words = network.words(TEXTS)
    again = deepcopy(network)
    assert torch.equal(again.words(TEXTS), words)
    assert hash_of(again) == hash_of(network)


def test_weights_in_half_precision_are_loaded_as_float32(tmp_path: Path) -> None:
    network = load_clip(write_clip(tmp_path / "half", dtype=torch.float16))
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert network(colours(2, SIZE)).dtype == network.words(TEXTS).dtype == torch.float32


def test_a_network_in_half_precision_gives_float32(folder: Path) -> None:
    exact, half = load_clip(folder), load_clip(folder).bfloat16()
    with torch.no_grad():
        z = half(colours(2, SIZE).bfloat16())
        assert z.dtype == half.words(TEXTS).dtype == torch.float32
        torch.testing.assert_close(z, exact(colours(2, SIZE)), rtol=0, atol=0.05)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(2))


def test_tensors_as_transformers_4_gives_them_are_taken_too() -> None:
    assert torch.equal(unit(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))


def test_the_files_of_a_whole_processor_are_read_too(own: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPProcessor, CLIPTokenizer

    (own / "preprocessor_config.json").unlink()
    size = {"crop_size": {"height": SIZE, "width": SIZE}, "size": {"shortest_edge": SIZE}}
    images = CLIPImageProcessor(image_mean=MEAN, image_std=STD, **size)
    CLIPProcessor(images, CLIPTokenizer.from_pretrained(own)).save_pretrained(own)
    network = load_clip(own)
    assert (network.mean, network.framing) == (MEAN, Framing(SIZE, SIZE, "bicubic"))


@pytest.mark.parametrize("size", [SIZE, {"shortest_edge": SIZE}, {"height": SIZE, "width": SIZE}], ids=str)
def test_a_size_may_be_written_in_three_ways(own: Path, size: object) -> None:
    change(own / "preprocessor_config.json", crop_size=size)
    assert read_framing(own) == Framing(SIZE, SIZE, "bicubic")


@pytest.mark.parametrize(
    ("about", "framing"),
    [
        ({"size": 20}, Framing(20, SIZE, "bicubic")),
        ({"size": {"height": 20, "width": 24}}, Framing((20, 24), SIZE, "bicubic")),
        ({"resample": 2}, Framing(SIZE, SIZE, "bilinear")),
        ({"resample": 3, "do_center_crop": False}, Framing(SIZE, None, "bicubic")),
        ({"do_resize": False}, Framing(None, SIZE, "bicubic")),
    ],
    ids=str,
)
def test_resize_and_crop_are_read(own: Path, about: dict[str, object], framing: Framing) -> None:
    change(own / "preprocessor_config.json", **about)
    assert read_framing(own) == framing


SHAPES = [(40, 40), (16, 16), (10, 10), (40, 81), (97, 33), (16, 23), (9, 31)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "about",
    [
        {},
        {"resample": 2},
        {"size": {"shortest_edge": 21}},
        {"size": {"height": 16, "width": 16}, "do_center_crop": False},
        {"size": {"height": 19, "width": 24}},
    ],
    ids=str,
)
def test_images_are_framed_as_transformers_frames_them(
    own: Path, shape: tuple[int, int], about: dict[str, object]
) -> None:
    from transformers import CLIPImageProcessor

    change(own / "preprocessor_config.json", **about)
    network, x = load_clip(own), pictures(shape)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    found = network.framed((x.float() / 255 - mean) / std)
    wanted = CLIPImageProcessor.from_pretrained(own)(list(x), return_tensors="pt")["pixel_values"]
    assert found.shape == wanted.shape == (2, 3, SIZE, SIZE)
    # transformers rounds to a grey level after each of the two directions.
    assert float(((found - wanted) * std * 255).abs().amax()) < 1.6


def pictures(shape: tuple[int, int]) -> Tensor:
    """One smooth image and one with edges from black to white, which a bicubic resize overshoots, uint8."""
    generator = torch.Generator().manual_seed(0)
    smooth = interpolate(torch.rand(1, 3, 4, 4, generator=generator), size=shape, mode="bilinear")
    edges = interpolate((torch.rand(1, 3, 5, 5, generator=generator) > 0.5).float(), size=shape)
    return (torch.cat([smooth, edges]) * 255).round().byte()


def test_the_gradient_goes_through_resize_and_crop(own: Path) -> None:
    change(own / "preprocessor_config.json", size={"shortest_edge": 17})
    network = load_clip(own).double()
    x = 0.5 * colours(1, 9, dtype=torch.float64)[..., :7]
    assert torch.autograd.gradcheck(network.framed, x.requires_grad_())
    assert torch.autograd.gradcheck(network, x)


def test_images_smaller_than_the_crop_are_refused(own: Path) -> None:
    change(own / "preprocessor_config.json", do_resize=False)
    with pytest.raises(ValueError, match="images of 9×9 have no middle of 16×16"):
        load_clip(own)(colours(1, 9))


def test_images_that_are_not_to_be_normalised_are_left_as_they_are(own: Path) -> None:
    change(own / "preprocessor_config.json", do_normalize=False)
    assert read_preprocessing(own) == Preprocessing((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_a_text_that_is_too_long_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'a photo of a ver+'… has 54 tokens; this CLIP takes 40"):
        load_clip(folder).words(["cat", "a photo of a ve" + "r" * 40 + "y"])


# Folders that are none


def change(path: Path, **content: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path / 'none'}; a CLIP is a folder"):
        load_clip(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("preprocessor_config.json", "is no CLIP of transformers: preprocessor_config.json is missing"),
        ("config.json", "is no CLIP of transformers: config.json is missing"),
        ("vocab.json", "has no tokenizer"),
        ("merges.txt", "has no tokenizer"),
        ("model.safetensors", "has no weights in safetensors, and pickles .* are refused"),
    ],
)
def test_a_file_that_is_missing_is_named(own: Path, name: str, message: str) -> None:
    (own / name).unlink()
    torch.save({}, own / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        load_clip(own)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "must hold a JSON object, got list"),
        ("config.json", '{"model_type": "vit"}', "holds a model of type 'vit', not 'clip'"),
        ("preprocessor_config.json", "{}", "does not say image_mean and image_std of three channels: 'image_mean'"),
        ("model.safetensors", "garbage", "the CLIP in .* cannot be loaded: "),
        ("vocab.json", "garbage", "the CLIP in .* cannot be loaded: "),
    ],
)
def test_a_file_that_is_no_such_thing_is_named(own: Path, name: str, content: str, message: str) -> None:
    (own / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_clip(own)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_mean": [0.5]}, "does not say image_mean and image_std of three channels: got 1 and 3"),
        ({"image_std": None}, "does not say image_mean and image_std of three channels"),
        ({"crop_size": {"height": 16, "width": 8}}, "does not say size and a square crop_size: got size"),
        ({"crop_size": "big"}, "does not say size and a square crop_size: got size big"),
        ({"size": {"longest_edge": 16}}, "does not say size and a square crop_size: got size"),
        ({"size": None}, "does not say size and a square crop_size: got size None"),
        ({"size": 12}, "has a crop_size of 16, which is larger than its size of 12"),
        ({"resample": 1}, r"has resample 1; bilinear \(2\) and bicubic \(3\) can be done"),
        ({"resample": "bicubic"}, "has resample 'bicubic'"),
    ],
    ids=str,
)
def test_preprocessing_that_is_none_is_named(own: Path, wrong: dict[str, object], message: str) -> None:
    change(own / "preprocessor_config.json", **wrong)
    with pytest.raises(ValueError, match=f"preprocessor_config.json {message}"):
        load_clip(own)


def test_a_size_that_the_network_does_not_take_is_named(own: Path) -> None:
    change(own / "preprocessor_config.json", crop_size=24, size=24)
    with pytest.raises(ValueError, match=r"have 24 pixels a side, its network takes 16"):
        load_clip(own)


def test_a_tokenizer_of_another_network_is_named(own: Path) -> None:
    vocabulary = json.loads((own / "vocab.json").read_text())
    (own / "vocab.json").write_text(json.dumps(vocabulary | {"more</w>": 514}))
    with pytest.raises(ValueError, match=r"has 515 tokens, its network 514"):
        load_clip(own)


def test_weights_that_are_not_all_there_are_not_made_up(own: Path) -> None:
    weights = load_file(own / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 of the network's, .*: visual_projection.weight"):
        load_clip(own)


def test_the_positions_that_old_files_hold_do_no_harm(own: Path) -> None:
    weights, before = load_file(own / "model.safetensors"), load_clip(own).words(TEXTS)
    weights["text_model.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_clip(own).words(TEXTS), before)


def test_weights_of_another_shape_are_refused(own: Path) -> None:
    weights = load_file(own / "model.safetensors")
    weights["visual_projection.weight"] = torch.zeros(12, 17)
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"or have another shape: visual_projection.weight"):
        load_clip(own)


def test_without_transformers_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"CLIP needs transformers: pip install 'gatecrash\[clip\]'"):
        load_clip(folder)


def test_importing_gatecrash_does_not_import_transformers() -> None:
    code = "import sys, gatecrash, gatecrash.detectors.words; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_loading_is_silent_and_leaves_the_librarys_own_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert isinstance(load_clip(folder), ClipImages)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bars)


def test_the_folder_is_not_needed_afterwards(own: Path) -> None:
    network = load_clip(own)
    rmtree(own)
    assert network.words(TEXTS).shape == (3, 12)
