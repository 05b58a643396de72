"""CLIP from a folder of transformers: images and words as unit vectors of one space."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

Mode = Literal["bilinear", "bicubic"]

TEXTS = 256
"""Texts that are embedded together."""


RESAMPLINGS: dict[int, Mode] = {2: "bilinear", 3: "bicubic"}
"""What PIL's numbers for a way of resizing mean, those that a gradient goes through."""


class Preprocessing(NamedTuple):
    """What an encoder is to do to images in [0, 1] before a CLIP sees them."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: None = None
    """No resize: a CLIP has its own (`Framing`)."""


class Framing(NamedTuple):
    """How images of any size become those that a CLIP takes: a resize, then a square from the middle."""

    size: int | tuple[int, int] | None
    """The shortest edge, or height and width; None leaves the images as large as they are."""
    crop: int | None
    """The side of the square; None leaves all of the image."""
    mode: Mode

    @property
    def side(self) -> int | tuple[int, int] | None:
        """The side of what comes out of a square image, or its height and width."""
        return self.size if self.crop is None else self.crop


class ClipImages(nn.Module):
    """A CLIP as a network of images: pixels in, unit vectors out, and texts as unit vectors beside them.

    Args:
        clip: transformers' `CLIPModel`.
        tokenizer: its `CLIPTokenizer`.
        preprocessing: what is to be done to images before `forward`.
        framing: what `forward` does to them first.
    """

    def __init__(self, clip: nn.Module, tokenizer: Any, preprocessing: Preprocessing, framing: Framing) -> None:
        super().__init__()
        self.clip: Any = clip
        self.tokenizer = tokenizer
        self.mean, self.std, self.size = preprocessing
        self.framing = framing
        self._known: dict[str, Tensor] = {}
        self._stamp: object = None

    @property
    def scale(self) -> Tensor:
        """What a cosine is multiplied by to be CLIP's logit, ()."""
        scale: Tensor = self.clip.logit_scale.exp()
        return scale

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings of normalised pixels (B, 3, H, W), of length 1, (B, D); of half precision in float32."""
        return unit(self.clip.get_image_features(pixel_values=self.framed(x)))

    def framed(self, x: Tensor) -> Tensor:
        """Normalised pixels (B, 3, H, W) of any size as the network takes them, differentiably.

        Width and height are resized one after the other, and what a bicubic resize makes darker than black or brighter
        than white is clamped after each, as in PIL.
        """
        black, white = (
            torch.tensor([(level - mean) / std for mean, std in zip(self.mean, self.std, strict=True)]).view(
                1, -1, 1, 1
            )
            for level in (0.0, 1.0)
        )
        dtype = x.dtype
        x = (
            x.float() if dtype in (torch.float16, torch.bfloat16) else x
        )  # no device resizes in every kind of half precision
        height, width = target_of(x, self.framing.size)
        for size in ((x.shape[2], width), (height, width)):
            if x.shape[2:] != size:
                x = interpolate(x, size=size, mode=self.framing.mode, align_corners=False, antialias=True)
                if self.framing.mode == "bicubic":
                    x = torch.minimum(torch.maximum(x, black.to(x)), white.to(x))
        return (x if self.framing.crop is None else middle(x, self.framing.crop)).to(dtype)

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


def target_of(x: Tensor, size: int | tuple[int, int] | None) -> tuple[int, int]:
    """The height and width that images are resized to; of a shortest edge the other one is rounded down, as in PIL."""
    height, width = int(x.shape[2]), int(x.shape[3])
    if size is None:
        return height, width
    if isinstance(size, tuple):
        return size
    short = min(height, width)
    return int(size * height / short), int(size * width / short)


def middle(x: Tensor, side: int) -> Tensor:
    """The square in the middle of images.

    Raises:
        ValueError: they are smaller.
    """
    top, left = ((edge - side) // 2 for edge in x.shape[2:])
    if top < 0 or left < 0:
        raise ValueError(f"images of {x.shape[2]}×{x.shape[3]} have no middle of {side}×{side}")
    return x[:, :, top : top + side, left : left + side]


def load_clip(folder: str | Path) -> ClipImages:
    """The CLIP in a folder as transformers saves it, in eval mode and float32; nothing is fetched, no pickle is read.

    Raises:
        ValueError: in one line: transformers is not installed, or the folder is missing or lacks something.
    """
    folder = Path(folder)
    preprocessing, framing = read_preprocessing(folder), read_framing(folder)
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
    check(clip.config, len(tokenizer), framing, sorted(wrong), folder)
    return ClipImages(clip.float(), tokenizer, preprocessing, framing).eval()


def check(config: Any, tokens: int, framing: Framing, wrong: list[str], folder: Path) -> None:
    """Raises a ValueError when the files of a folder do not belong together."""
    if wrong:
        raise ValueError(
            f"the weights in {folder} lack {len(wrong)} of the network's, or have another shape: {wrong[0]}"
        )
    if tokens > config.text_config.vocab_size:
        raise ValueError(f"the tokenizer in {folder} has {tokens} tokens, its network {config.text_config.vocab_size}")
    takes = config.vision_config.image_size
    if framing.side not in (None, takes, (takes, takes)):
        raise ValueError(
            f"the images that {folder} prepares have {framing.side} pixels a side, its network takes {takes}"
        )


def read_preprocessing(folder: str | Path) -> Preprocessing:
    """What the folder of a CLIP says an encoder is to do to images; needs no transformers.

    Raises:
        ValueError: in one line: the folder or a file in it is missing, or does not say.
    """
    path, content = described(folder)
    try:
        mean, std = (tuple(float(value) for value in content[key]) for key in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"got {len(mean)} and {len(std)} channels")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not say image_mean and image_std of three channels: {error}") from error
    if not content.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return Preprocessing(mean, std)


def read_framing(folder: str | Path) -> Framing:
    """What the folder of a CLIP says of the size of images.

    What it leaves out is as in transformers: a bicubic resize of the shortest edge, then a square from the middle.

    Raises:
        ValueError: in one line: the folder or a file in it is missing, or says what cannot be done.
    """
    path, content = described(folder)
    resample = content.get("resample", 3)
    if not isinstance(resample, int) or resample not in RESAMPLINGS:
        raise ValueError(f"{path} has resample {resample!r}; bilinear (2) and bicubic (3) can be done")
    try:
        size = edge(content["size"]) if content.get("do_resize", True) else None
        cropped = content.get("do_center_crop", True)
        crop = side(content.get("crop_size") or content["size"]) if cropped else None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not say size and a square crop_size: {error}") from error
    if crop is not None and size is not None and min(size if isinstance(size, tuple) else (size,)) < crop:
        raise ValueError(f"{path} has a crop_size of {crop}, which is larger than its size of {size}")
    return Framing(size, crop, RESAMPLINGS[resample])


def described(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file in the folder of a CLIP that describes what is done to images, and what it says.

    Raises:
        ValueError: in one line: the folder or the file is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; a CLIP is a folder as transformers saves it")
    path = folder / "preprocessor_config.json"
    joint = folder / "processor_config.json"  # how transformers 5 saves a whole processor
    if path.is_file() or not joint.is_file():
        return path, read_json(path)
    content = read_json(joint).get("image_processor")
    return joint, content if isinstance(content, dict) else {}


def side(size: Any) -> int:
    """The side of a square, written as a number, as height and width, or as a shortest edge."""
    sides = set(size.values()) if isinstance(size, dict) else {size}
    if len(sides) != 1 or not all(type(value) is int and value > 0 for value in sides):
        raise ValueError(f"got size {size}")
    return int(sides.pop())


def edge(size: Any) -> int | tuple[int, int]:
    """A shortest edge, also written as a number; or height and width."""
    if isinstance(size, dict) and size.keys() == {"height", "width"}:
        return side(size["height"]), side(size["width"])
    if isinstance(size, dict) and size.keys() != {"shortest_edge"}:
        raise ValueError(f"got size {size}")
    return side(size)


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
