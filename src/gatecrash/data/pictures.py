"""A decoded picture as a batch of one image."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for a file that is truncated, damaged, no picture, or far too large."""

_GREY_16 = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def as_image(picture: Image.Image) -> Tensor:
    """The picture as (1, C, H, W) in float32: one channel when it is grey, else three; transparency is dropped.

    Pictures of 8 and 16 bits become [0, 1]; floating-point ones are taken as they are, unchecked.
    """
    if picture.mode in _GREY_16:
        values = np.array(picture, dtype=np.float32) / 65535
    elif picture.mode == "F":
        values = np.array(picture, dtype=np.float32)
    else:
        grey = picture.mode in ("1", "L", "LA", "La")
        values = np.array(picture.convert("L" if grey else "RGB"), dtype=np.float32) / 255
    pixels = torch.from_numpy(values)
    return (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)).unsqueeze(0)
