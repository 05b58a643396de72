"""Images that were read from somewhere, with all that is known about them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images with their labels, and what was done to them on the way."""

    x: Tensor
    """(N, C, H, W), float32 in [0, 1]."""
    y: Tensor | None
    """(N,), int64, where there are labels."""
    name: str
    """The source they came from, as it was asked for."""
    classes: list[str] | None = None
    """The names of the labels, where they have names."""
    notes: list[str] = field(default_factory=list)
    """What was converted, a sentence each."""

    def __len__(self) -> int:
        return len(self.x)


def fingerprint(images: ImageSet) -> str:
    """The SHA-256 of shape, pixels and labels, in hexadecimal; names and notes do not enter."""
    digest = hashlib.sha256()
    for values, kind in ((images.x, "<f4"), (images.y, "<i8")):
        digest.update(b"none" if values is None else f"{kind}{tuple(values.shape)}".encode())
        if values is not None:
            digest.update(values.detach().cpu().contiguous().numpy().astype(kind, copy=False).data)
    return digest.hexdigest()
