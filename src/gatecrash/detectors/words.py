"""Detectors that are told in words what is inside: CLIP zero-shot and MCM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gatecrash.detectors.base import Card, register
from gatecrash.detectors.logits import LogitDetector, max_softmax, positive
from gatecrash.encoder import Encoder, as_encoder, evaluating
from gatecrash.networks.clip import ClipImages, load_clip
from gatecrash.objective import single
from gatecrash.protocols import Latent

PROMPT = "a photo of a {}"


class Words(nn.Module):
    """Words as unit vectors, beside which images are held. Nothing of it is learnt, so that no `fit` empties it."""

    vectors: Tensor  # (N, D)

    def __init__(self, network: ClipImages, words: Sequence[str], prompt: str) -> None:
        super().__init__()
        with evaluating(network):
            self.register_buffer("vectors", network.words([prompt.replace("{}", word) for word in words]))

    def forward(self, z: Tensor) -> Tensor:
        """The cosines of image embeddings (B, D) with every word, (B, N)."""
        return z @ self.vectors.to(z).T


class WordDetector(LogitDetector):
    """A detector that reads how well an image fits words: the logits of a zero-shot classifier."""

    def __init__(self, encoder: nn.Module) -> None:
        encoder = prepared(encoder)
        if not isinstance(encoder.model, ClipImages):
            raise ValueError(
                f"{type(self).__name__} compares images with words, which needs a CLIP: "
                f"clip_encoder(folder), or model.name clip:DIR; got {type(encoder.model).__name__}"
            )
        super().__init__(encoder)

    @property
    def network(self) -> ClipImages:
        """The CLIP that the encoder wraps."""
        model = None if self.encoder is None else self.encoder.model
        if not isinstance(model, ClipImages):
            raise ValueError(f"{type(self).__name__} needs a CLIP, got {type(model).__name__}")
        return model


@register("clip")
class CLIPZeroShot(WordDetector):
    """How much better an image fits a word for what is outside than one for what is inside.

    τ = max_j CLIP(x, outword_j) − max_i CLIP(x, inword_i), equations (6) and (7) of Fort (2022) with the sign turned
    round; CLIP(x, word) is the cosine of the two embeddings times CLIP's own scale.

    Args:
        encoder: of a CLIP, see `clip_encoder`.
        inside: words for the inliers, one at least.
        outside: words for the outliers, one at least.
        prompt: a sentence with {} where the word goes.
    """

    card = Card(paper="Fort, Ren & Lakshminarayanan, NeurIPS 2021", year=2021, reads="logits")

    def __init__(
        self, encoder: nn.Module, *, inside: Sequence[str] = (), outside: Sequence[str] = (), prompt: str = PROMPT
    ) -> None:
        super().__init__(encoder)
        self.options = {
            "inside": word_list(inside, "inside"),
            "outside": word_list(outside, "outside"),
            "prompt": template(prompt),
        }
        self.inside, self.outside = Words(self.network, inside, prompt), Words(self.network, outside, prompt)

    def encode(self, x: Tensor) -> Latent:
        """CLIP's logits of the in-words, then of the out-words, (B, N + M)."""
        z = single(super().encode(x))
        return self.network.scale.to(z) * torch.cat([self.inside(z), self.outside(z)], dim=1)

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, N + M)."""
        inside, outside = single(z).tensor_split([len(self.inside.vectors)], dim=1)
        return outside.amax(dim=1) - inside.amax(dim=1)


@register("mcm")
class MCM(WordDetector):
    """Maximum concept matching: τ = −max_i softmax(cos(x, inword) / T)_i.

    Args:
        encoder: of a CLIP, see `clip_encoder`.
        inside: words for the inliers, two at least.
        prompt: a sentence with {} where the word goes.
        temperature: T; 1 in the paper.
    """

    card = Card(paper="Ming et al., NeurIPS 2022", year=2022, reads="logits")

    def __init__(
        self, encoder: nn.Module, *, inside: Sequence[str] = (), prompt: str = PROMPT, temperature: float = 1.0
    ) -> None:
        super().__init__(encoder)
        self.options = {
            "inside": word_list(inside, "inside", least=2),
            "prompt": template(prompt),
            "temperature": positive(temperature, "temperature"),
        }
        self.temperature = temperature
        self.inside = Words(self.network, inside, prompt)

    def encode(self, x: Tensor) -> Latent:
        """The cosines with every word over the temperature, (B, N)."""
        cosines: Tensor = self.inside(single(super().encode(x)))
        return cosines / self.temperature

    def judge(self, z: Latent) -> Tensor:
        """The score of logits (B, N)."""
        return -max_softmax(single(z))


def clip_encoder(folder: str | Path) -> Encoder:
    """The CLIP in a folder for images in [0, 1] of any size: resize, crop and normalisation are as the folder says.

    Raises:
        ValueError: in one line: transformers is not installed, or the folder is missing or lacks something.
    """
    return prepared(load_clip(folder))


def prepared(network: nn.Module) -> Encoder:
    """The encoder itself, or a bare network as one; a CLIP with the normalisation that it wants."""
    if isinstance(network, ClipImages):
        return Encoder(network, None, network.mean, network.std, network.size)
    return as_encoder(network)


def word_list(words: Sequence[str], name: str, least: int = 1) -> list[str]:
    """The words as a list, when they are words and enough of them."""
    several = isinstance(words, Sequence) and not isinstance(words, str)
    if not several or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{name} must be a list of words, got {words!r}")
    if len(words) < least:
        raise ValueError(f"{name} must hold at least {least} word{'s' * (least > 1)}, got {len(words)}")
    return list(words)


def template(prompt: str) -> str:
    """The prompt, when it has a place for the word."""
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ValueError(f"prompt must have {{}} where the word goes, got {prompt!r}")
    return prompt
