"""Detectors by words: against transformers' own logits, to the pixels by finite differences, and through files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from gatecrash.attacks import admit, evict
from gatecrash.ball import Linf
from gatecrash.detectors import Detector, Mahalanobis, ScoreEnsemble, build
from gatecrash.detectors.words import MCM, CLIPZeroShot, clip_encoder
from gatecrash.encoder import Encoder
from gatecrash.networks.clip import load_clip
from small_clip import MEAN, SIZE, STD, colours, write_clip
from small_models import trained_net

INSIDE, OUTSIDE = ["cat", "dog", "small horse"], ["ship", "lorry"]
PROMPT = "a drawing of a {}, nothing else"

Maker = Callable[[nn.Module], Detector]
MAKERS: dict[str, Maker] = {
    "clip": lambda encoder: CLIPZeroShot(encoder, inside=INSIDE, outside=OUTSIDE, prompt=PROMPT),
    "mcm": lambda encoder: MCM(encoder, inside=INSIDE, prompt=PROMPT, temperature=0.1),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip") / "small")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return clip_encoder(folder)


def reference_logits(folder: Path, x: Tensor, words: list[str], prompt: str) -> list[list[float]]:
    """CLIP's logit for every image and word, straight from transformers, one pair at a time."""
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    for size in ((x.shape[2], SIZE), (SIZE, SIZE)):
        x = interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
    pixels = (x - mean) / std
    with torch.no_grad():
        return [
            [
                float(
                    model(
                        pixel_values=image[None], **tokenizer([prompt.format(word)], return_tensors="pt")
                    ).logits_per_image
                )
                for word in words
            ]
            for image in pixels
        ]


def exact(detector: Detector) -> Detector:
    return detector.double()


# The score against its equation


@pytest.mark.parametrize("prompt", ["a photo of a {}", PROMPT])
def test_clip_is_the_best_outside_less_the_best_inside(folder: Path, encoder: Encoder, prompt: str) -> None:
    x = colours(8)
    detector = CLIPZeroShot(encoder, inside=INSIDE, outside=OUTSIDE, prompt=prompt)
    inside, outside = (reference_logits(folder, x, words, prompt) for words in (INSIDE, OUTSIDE))
    expected = [max(out) - max(inn) for inn, out in zip(inside, outside, strict=True)]
    assert max(expected) - min(expected) > 0.1
    torch.testing.assert_close(detector.scores(x), torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_mcm_is_minus_the_largest_probability_over_the_words(
    folder: Path, encoder: Encoder, temperature: float
) -> None:
    x, scale = colours(8), float(load_clip(folder).scale.detach())
    detector = MCM(encoder, inside=INSIDE, temperature=temperature)
    expected = []
    for row in reference_logits(folder, x, INSIDE, "a photo of a {}"):
        weights = [math.exp(logit / scale / temperature) for logit in row]
        expected.append(-max(weights) / sum(weights))
    torch.testing.assert_close(detector.scores(x), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_an_image_that_fits_a_word_inside_scores_low_and_one_that_fits_a_word_outside_high(encoder: Encoder) -> None:
    detector = CLIPZeroShot(encoder, inside=INSIDE, outside=OUTSIDE)
    swapped = CLIPZeroShot(encoder, inside=OUTSIDE, outside=INSIDE)
    x = colours(4)
    torch.testing.assert_close(swapped.scores(x), -detector.scores(x))
    words = torch.cat([detector.inside.vectors, detector.outside.vectors])
    logits = detector.network.scale.detach() * torch.cat([detector.inside(words), detector.outside(words)], dim=1)
    assert (detector.judge(logits)[: len(INSIDE)] < 0).all()
    assert (detector.judge(logits)[len(INSIDE) :] > 0).all()


@each
def test_a_bare_clip_gets_the_preprocessing_it_wants(make: Maker, folder: Path, encoder: Encoder) -> None:
    assert torch.equal(make(load_clip(folder)).scores(colours(3)), make(encoder).scores(colours(3)))


@each
def test_the_latent_is_a_row_of_logits_for_the_words(make: Maker, encoder: Encoder) -> None:
    detector, x = make(encoder), colours(3)
    assert detector.encode(x).shape == (3, 5 if detector.name == "clip" else 3)
    assert torch.equal(detector(x), detector.judge(detector.encode(x)))


# The gradient


@each
@pytest.mark.parametrize("side", [SIZE, 10, 23])
def test_the_gradient_is_that_of_finite_differences_through_resize_and_normalisation(
    make: Maker, folder: Path, side: int
) -> None:
    detector = exact(make(clip_encoder(folder)))
    x = colours(4, side, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(detector(x).sum(), x)
    generator, step = torch.Generator().manual_seed(5), 1e-6
    for _ in range(3):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            low, high = (detector.judge(detector.encode(x + sign * step * direction)) for sign in (-1, 1))
        expected = (gradient * direction).flatten(1).sum(dim=1)
        assert expected.abs().min() > 0
        torch.testing.assert_close(
            (high - low) / (2 * step), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
        )


@each
def test_no_score_has_a_gradient_at_another_image(make: Maker, encoder: Encoder) -> None:
    x = colours(3).requires_grad_()
    (gradient,) = torch.autograd.grad(make(encoder)(x)[1], x)
    assert gradient[1].abs().max() > 0
    assert not gradient[[0, 2]].any()


@each
def test_an_attack_is_led_by_the_gradient(make: Maker, encoder: Encoder) -> None:
    detector, x = make(encoder), colours(3)
    clean = detector.scores(x)
    assert (admit(detector, x, Linf(0.002), steps=10).score < clean).all()
    assert (evict(detector, x, Linf(0.002), steps=10).score > clean).all()


# What the contract says besides


@each
def test_nothing_is_fitted_and_fit_leaves_the_words_alone(make: Maker, encoder: Encoder) -> None:
    detector, x = make(encoder), colours(6)
    before = detector.scores(x)
    assert detector.fitted
    assert torch.equal(detector.fit(x).scores(x), before)


@each
def test_fitting_an_ensemble_leaves_the_words_alone(make: Maker, encoder: Encoder) -> None:
    x, y = colours(24), torch.arange(24) % 3
    detector = make(encoder)
    ensemble = ScoreEnsemble([detector, Mahalanobis(encoder)]).fit((x, y))
    distances = ensemble.detectors[1].scores(x)
    torch.testing.assert_close(ensemble.scores(x), (make(encoder).scores(x) + distances) / 2, rtol=1e-5, atol=1e-5)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_is_one_score_per_image_in_its_dtype(make: Maker, encoder: Encoder, dtype: torch.dtype) -> None:
    scores = make(encoder).scores(colours(5, dtype=dtype))
    assert (scores.shape, scores.dtype) == ((5,), dtype)


@each
def test_a_network_in_train_mode_stays_there_and_drops_nothing(make: Maker, folder: Path, encoder: Encoder) -> None:
    own = clip_encoder(folder)
    for module in own.model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.5
    own.model.train()
    x = colours(3)
    assert torch.equal(make(own).scores(x), make(encoder).scores(x))
    assert all(module.training for module in own.model.modules())


@each
def test_a_network_in_half_precision_scores_in_float32(make: Maker, folder: Path, encoder: Encoder) -> None:
    half = make(Encoder(load_clip(folder).bfloat16(), None, MEAN, STD))
    x = colours(3)
    assert half.encode(x).dtype == torch.float32
    plain = make(encoder).scores(x)
    torch.testing.assert_close(half.scores(x), plain, rtol=0.1, atol=0.3)


@each
def test_an_image_has_one_score_whatever_is_beside_it(make: Maker, folder: Path) -> None:
    detector, x = exact(make(clip_encoder(folder))), colours(5, dtype=torch.float64)
    alone = torch.cat([detector.scores(image[None]) for image in x])
    torch.testing.assert_close(alone, detector.scores(x), rtol=1e-9, atol=1e-12)


# Files


@each
def test_a_loaded_detector_scores_and_predicts_bit_for_bit_alike(
    make: Maker, encoder: Encoder, folder: Path, tmp_path: Path
) -> None:
    detector, x = make(encoder).calibrate(colours(20, seed=1), 0.9), colours(5)
    detector.save(tmp_path / "detector.safetensors")
    for again in (
        Detector.load(tmp_path / "detector.safetensors", encoder),
        type(detector).load(tmp_path / "detector.safetensors", clip_encoder(copytree(folder, tmp_path / "copy"))),
    ):
        assert again.spec == detector.spec
        assert torch.equal(again.scores(x), detector.scores(x))
        assert torch.equal(again.predict(x), detector.predict(x))
    assert (tmp_path / "detector.safetensors").stat().st_size < 4000


@each
def test_the_saved_vectors_win_over_those_computed_again(make: Maker, encoder: Encoder, tmp_path: Path) -> None:
    detector, x = make(encoder), colours(5)
    before = detector.scores(x)
    detector.inside.vectors = detector.inside.vectors.flip(1)
    detector.save(tmp_path / "detector.safetensors")
    again = Detector.load(tmp_path / "detector.safetensors", encoder)
    assert torch.equal(again.scores(x), detector.scores(x))
    assert not torch.allclose(again.scores(x), before)


@each
def test_a_spec_leads_to_the_detector(make: Maker, encoder: Encoder) -> None:
    detector = make(encoder)
    again = build(detector.spec, encoder)
    assert type(again) is type(detector)
    assert torch.equal(again.scores(colours(3)), detector.scores(colours(3)))


# Mistakes


@each
def test_a_network_that_knows_no_words_is_refused(make: Maker) -> None:
    with pytest.raises(ValueError, match=r"which needs a CLIP: clip_encoder\(folder\), or .*; got SmallNet"):
        make(trained_net())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inside": []}, "inside must hold at least 1 word, got 0"),
        ({"outside": []}, "outside must hold at least 1 word, got 0"),
        ({"inside": "cat"}, "inside must be a list of words, got 'cat'"),
        ({"outside": ["cat", " "]}, "outside must be a list of words"),
        ({"inside": [3]}, "inside must be a list of words"),
        ({"inside": None}, "inside must be a list of words, got None"),
        ({"outside": iter(["cat"])}, "outside must be a list of words"),
        ({"prompt": "a photo"}, "prompt must have {} where the word goes, got 'a photo'"),
    ],
)
def test_words_that_are_none_are_refused(encoder: Encoder, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CLIPZeroShot(encoder, **({"inside": INSIDE, "outside": OUTSIDE} | options))


def test_words_that_are_left_out_are_asked_for(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match=r"^inside must hold at least 1 word, got 0$"):
        CLIPZeroShot(encoder)
    with pytest.raises(ValueError, match=r"^outside must hold at least 1 word, got 0$"):
        CLIPZeroShot(encoder, inside=INSIDE)
    with pytest.raises(ValueError, match=r"^inside must hold at least 2 words, got 0$"):
        MCM(encoder)


def test_one_word_tells_mcm_nothing(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="inside must hold at least 2 words, got 1"):
        MCM(encoder, inside=["cat"])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf])
def test_a_temperature_must_be_positive(encoder: Encoder, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        MCM(encoder, inside=INSIDE, temperature=temperature)
