"""CLIP from a folder of transformers: images and words as unit vectors of one space."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

TEXTS = 256
"""Texts that are embedded together."""


class Preprocessing(NamedTuple):
    """What a CLIP wants done to images in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int


class ClipImages(nn.Module):
    """A CLIP as a network of images: pixels in, unit vectors out, and texts as unit vectors beside them.

    Args:
        clip: transformers' `CLIPModel`.
        tokenizer: its `CLIPTokenizer`.
        preprocessing: what is to be done to images before `forward`.
    """

    def __init__(self, clip: nn.Module, tokenizer: Any, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.clip: Any = clip
        self.tokenizer = tokenizer
        self.mean, self.std, self.size = preprocessing
        self._known: dict[str, Tensor] = {}
        self._stamp: object = None

    @property
    def scale(self) -> Tensor:
        """What a cosine is multiplied by to be CLIP's logit, ()."""
        scale: Tensor = self.clip.logit_scale.exp()
        return scale

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings of normalised pixels (B, 3, size, size), of length 1, (B, D); of half precision in float32."""
        return unit(self.clip.get_image_features(pixel_values=x))

    def words(self, texts: Sequence[str]) -> Tensor:
        """The embeddings of texts, of length 1, (N, D), without gradients; remembered until the weights change.

        Raises:
            ValueError: a text is longer than the network takes.
        """
        stamp = [(p.data_ptr(), p._version, p.dtype, p.device) for p in self.clip.parameters()]
        if stamp != self._stamp:
            self._known, self._stamp = {}, stamp
        unseen = [text for text in dict.fromkeys(texts) if text not in self._known]
        # Vectors made in inference mode could not be part of a gradient later.
        with torch.inference_mode(False), torch.no_grad():
            for start in range(0, len(unseen), TEXTS):
                part = unseen[start : start + TEXTS]
                self._known |= dict(zip(part, self._embedded(part), strict=True))
            return torch.stack([self._known[text] for text in texts])

    def _embedded(self, texts: list[str]) -> Tensor:
        most = self.clip.config.text_config.max_position_embeddings
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        for text, mask in zip(texts, tokens["attention_mask"], strict=True):
            if int(mask.sum()) > most:
                raise ValueError(f"{text[:40]!r}… has {int(mask.sum())} tokens; this CLIP takes {most}")
        device = self.clip.logit_scale.device
        return unit(
            self.clip.get_text_features(
                input_ids=tokens["input_ids"].to(device), attention_mask=tokens["attention_mask"].to(device)
            )
        )


def load_clip(folder: str | Path) -> ClipImages:
    """The CLIP in a folder as transformers saves it, in eval mode and float32; nothing is fetched, no pickle is read.

    Raises:
        ValueError: in one line: transformers is not installed, or the folder is missing or lacks something.
    """
    folder = Path(folder)
    preprocessing = read_preprocessing(folder)
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "clip":
        raise ValueError(f"{folder} holds a model of type {kind!r}, not 'clip'")
    # Without these files the tokenizer would quietly know two tokens.
    if not (folder / "tokenizer.json").is_file() and not all(
        (folder / f).is_file() for f in ("vocab.json", "merges.txt")
    ):
        raise ValueError(f"{folder} has no tokenizer: tokenizer.json, or vocab.json and merges.txt, is missing")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has no weights in safetensors, and pickles such as pytorch_model.bin are refused")
    library = transformers()
    try:
        with quiet(library.utils.logging):
            tokenizer = library.CLIPTokenizer.from_pretrained(folder, local_files_only=True)
            clip, found = library.CLIPModel.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they can be named
            )
    except Exception as error:  # damaged files can fail anywhere; the tokenizer raises a bare Exception
        raise ValueError(f"the CLIP in {folder} cannot be loaded: {' '.join(str(error).split())}") from error
    wrong = [*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])]
    check(clip.config, len(tokenizer), preprocessing, sorted(wrong), folder)
    return ClipImages(clip.float(), tokenizer, preprocessing).eval()


def check(config: Any, tokens: int, preprocessing: Preprocessing, wrong: list[str], folder: Path) -> None:
    """Raises a ValueError when the files of a folder do not belong together."""
    if wrong:
        raise ValueError(
            f"the weights in {folder} lack {len(wrong)} of the network's, or have another shape: {wrong[0]}"
        )
    if tokens > config.text_config.vocab_size:
        raise ValueError(f"the tokenizer in {folder} has {tokens} tokens, its network {config.text_config.vocab_size}")
    if preprocessing.size != config.vision_config.image_size:
        raise ValueError(
            f"the images that {folder} prepares have {preprocessing.size} pixels a side, "
            f"its network takes {config.vision_config.image_size}"
        )


def read_preprocessing(folder: str | Path) -> Preprocessing:
    """What the folder of a CLIP says of its images; needs no transformers.

    Raises:
        ValueError: in one line: the folder or a file in it is missing, or does not say.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; a CLIP is a folder as transformers saves it")
    path = folder / "preprocessor_config.json"
    joint = folder / "processor_config.json"  # how transformers 5 saves a whole processor
    if path.is_file() or not joint.is_file():
        content = read_json(path)
    else:
        path, content = joint, read_json(joint).get("image_processor", {})
    try:
        mean, std = (tuple(float(value) for value in content[key]) for key in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"got {len(mean)} and {len(std)} channels")
        if not content.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return Preprocessing(mean, std, side(content.get("crop_size") or content["size"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not say image_mean, image_std and a square crop_size: {error}") from error


def side(size: Any) -> int:
    """The side of a square, written as a number, as height and width, or as a shortest edge."""
    sides = set(size.values()) if isinstance(size, dict) else {size}
    if len(sides) != 1 or not all(isinstance(value, int) and value > 0 for value in sides):
        raise ValueError(f"got size {size}")
    return int(sides.pop())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.is_file():
        raise ValueError(f"{path.parent} is no CLIP of transformers: {path.name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def unit(output: Any) -> Tensor:
    """The embedding in what transformers gives (4: a tensor, 5: an output object), of length 1, in float32 at least."""
    embedding: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return normalize(embedding.float() if embedding.dtype in (torch.float16, torch.bfloat16) else embedding, dim=-1)


def transformers() -> Any:
    """The library, which is an optional dependency.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ValueError("CLIP needs transformers: pip install 'gatecrash[clip]'") from error


@contextmanager
def quiet(logging: Any) -> Iterator[None]:
    """A library without its progress bars and reports; what is wrong becomes an error of ours."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
