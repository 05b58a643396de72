"""A small CLIP with random weights, saved as transformers saves a real one; and one made of any small classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from gatecrash.networks.clip import ClipImages

SIZE = 16
MEAN, STD = (0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758)


def write_clip(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """The folder, with weights, tokenizer and preprocessing in it; its 514 tokens cover every byte."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    config = CLIPConfig(
        projection_dim=12,
        text_config=small | words | {"max_position_embeddings": 40},
        vision_config=small | {"image_size": SIZE, "patch_size": 8},
        **sizes,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = CLIPModel(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # as they are made, all images look alike
                parameter *= 5
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    about = {
        "image_processor_type": "CLIPImageProcessor",
        "image_mean": MEAN,
        "image_std": STD,
        "do_normalize": True,
        "do_resize": True,
        "size": {"shortest_edge": SIZE},
        "do_center_crop": True,
        "crop_size": {"height": SIZE, "width": SIZE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder


def write_tokenizer(folder: Path) -> None:
    """CLIP's alphabet of bytes, inside and at the end of a word, and no merges."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def colours(count: int = 6, side: int = 10, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random colour images, (N, 3, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, side, side, generator=generator, dtype=torch.float64).to(dtype)


class WordedNet(ClipImages):
    """A classifier of `squares` as a CLIP: its logits and a 4, as unit vectors, and words that point where they do."""

    vectors: ClassVar = {
        "left": [4, -4, -4, 4],
        "right": [-4, 4, -4, 4],
        "below": [-4, -4, 4, 4],
        "nothing": [0, 0, 0, 4],
    }
    corners = ("left", "right", "below")

    def __init__(self, network: nn.Module) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.mean = self.std = self.size = None

    @property
    def scale(self) -> Tensor:
        """A constant."""
        return torch.tensor(10.0)

    def forward(self, x: Tensor) -> Tensor:
        """Unit vectors (B, 4)."""
        z = self.network(x)
        return normalize(torch.cat([z, torch.full_like(z[:, :1], 4.0)], dim=1), dim=1)

    def words(self, texts: list[str]) -> Tensor:
        """Unit vectors (N, 4)."""
        return normalize(torch.tensor([self.vectors[text] for text in texts], dtype=torch.float32), dim=1)
