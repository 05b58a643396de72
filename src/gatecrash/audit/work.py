"""The pieces of a run, each saved when it is done, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatecrash.files import replacing
from gatecrash.progress import Bar

Payload = dict[str, Tensor]


class Work:
    """Pieces of work by key, in a folder of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.bar: Bar | None = None
        self.attacked = 0
        """Pieces of attacks that are done."""

    def done(self, key: str, compute: Callable[[int], Payload]) -> Payload:
        """What `compute` gives for a seed that the key determines: read where it was saved, else computed and saved."""
        path = self.path(key)
        payload = self._saved(path)
        if payload is None:
            computed = compute(self.seed_of(key))
            payload = {name: own_copy(tensor) for name, tensor in computed.items()}
            with replacing(path) as draft:
                save_file(payload, draft, metadata={"key": key})
        self.attacked += not key.startswith("clean |")
        if self.bar is not None:
            self.bar.advance(note=key)
        return payload

    def path(self, key: str) -> Path:
        """Where a piece is kept."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"

    def seed_of(self, key: str) -> int:
        """A seed for one piece, whatever was done before it."""
        return int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:7], "big")

    def clear(self) -> None:
        """Remove the pieces, once all of them are in the bundle."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _saved(path: Path) -> Payload | None:
        try:
            return load_file(path) if path.is_file() else None
        except SafetensorError:  # a damaged piece is done again
            return None


def own_copy(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in memory of its own, which the file format asks for."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
