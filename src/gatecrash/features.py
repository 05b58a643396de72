"""The latents of any amount of data: one pass of a network for several taps, and files that remember them."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gatecrash.encoder import Encoder, flat
from gatecrash.files import replacing
from gatecrash.images import Images, batches, batches_on
from gatecrash.layout import alike
from gatecrash.networks import hash_of
from gatecrash.portions import Portions
from gatecrash.progress import tracked
from gatecrash.protocols import Latent, joined, leaves

Reader: TypeAlias = Callable[[Tensor], Latent]
"""What turns images into latents: an encoder, or a detector's own way."""

ROWS = 1 << 16
"""Rows that are kept together while their number is not known; freed one by one when they are put together."""

FIRST = 8
"""Images that are encoded anew before the file of a cache is trusted."""


def shared_pass(readers: Sequence[Reader]) -> Callable[[Tensor], list[Latent]]:
    """A function x → what every reader makes of x, in which a network runs once however many encoders tap it."""
    groups: dict[Any, list[int]] = {}
    for index, reader in enumerate(readers):
        groups.setdefault(network_key(reader) if type(reader) is Encoder else index, []).append(index)
    passes = [(together([readers[i] for i in members]), members) for members in groups.values()]

    def run(x: Tensor) -> list[Latent]:
        found: dict[int, Latent] = {}
        for latents, members in passes:
            found |= dict(zip(members, latents(x), strict=True))
        return [found[index] for index in range(len(readers))]

    return run


def network_key(encoder: Encoder) -> tuple[Any, ...]:
    """What encoders must have in common to be served by one pass."""
    return id(encoder.model), str(flat(encoder.mean)), str(flat(encoder.std)), str(encoder.size)


def reader_key(reader: Reader) -> tuple[Any, ...]:
    """What readers have in common that give the same latents."""
    if type(reader) is Encoder:
        return *network_key(reader), reader.layer, reader.pool
    return (id(getattr(reader, "__self__", reader)),)


def leaf_keys(reader: Reader, z: Latent) -> list[tuple[Any, ...]]:
    """For every tensor of a reader's latent, what it has in common with the same tensor of other readers."""
    if type(reader) is Encoder:
        names = reader.layers or (None,)
        return [(*network_key(reader), name, None if name is None else reader.pool) for name in names]
    return [(*reader_key(reader), index) for index, _ in enumerate(leaves(z))]


def together(readers: Sequence[Reader]) -> Callable[[Tensor], list[Latent]]:
    """The latents of encoders of one network, mean, std and size, from one pass; or of one reader of any kind."""
    if len(readers) == 1:
        return lambda x: [readers[0](x)]
    encoders = [reader for reader in readers if isinstance(reader, Encoder)]
    names = list(dict.fromkeys(name for encoder in encoders for name in encoder.layers or (None,)))
    tap = encoders[0].at(names, pool=None)

    def run(x: Tensor) -> list[Latent]:
        outputs = dict(zip(names, leaves(tap(x)), strict=True))
        return [encoder.pick(outputs.__getitem__) for encoder in encoders]

    return run


class Column:
    """The rows of one tensor of consecutive batches, put together at the end without ever being there twice."""

    def __init__(self) -> None:
        self.blocks: list[list[Tensor]] = [[]]  # each with the batches of at least `ROWS` rows

    def take(self, rows: Tensor) -> None:
        """One more batch, copied: it may be a view of something much larger, or be overwritten by the next one."""
        self.blocks[-1].append(rows.clone())
        if sum(map(len, self.blocks[-1])) >= ROWS:
            self.blocks[-1] = [torch.cat(self.blocks[-1])]
            self.blocks.append([])

    def whole(self) -> Tensor:
        """All rows as one tensor, the same one whenever it is asked for."""
        self.blocks = [[drained(self.blocks)]]
        return self.blocks[0][0]


class Keeper:
    """The latents of consecutive batches, each tensor in a column."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.form: Latent | None = None

    def take(self, z: Latent) -> None:
        """One more batch."""
        parts = leaves(z)
        if self.form is None:
            self.form, self.columns = z, [Column() for _ in parts]
        for column, part in zip(self.columns, parts, strict=True):
            column.take(part)

    def whole(self) -> Latent:
        """All latents; the keeper is empty afterwards."""
        if self.form is None:
            raise ValueError("there are no images to learn from")
        form, self.form = self.form, None
        columns, self.columns = self.columns, []
        return like(form, iter([column.whole() for column in columns]))


def drained(blocks: list[list[Tensor]]) -> Tensor:
    """The tensors of a list of lists as one, each freed as soon as it is copied."""
    parts = [part for block in blocks for part in block]
    blocks.clear()
    if len(parts) == 1:
        return parts[0]
    count, first = sum(map(len, parts)), parts[0]
    other = next((part for part in parts if part.shape[1:] != first.shape[1:]), None)
    if other is not None:
        raise ValueError(
            f"all images must give latents of one shape, got {tuple(first.shape[1:])} and {tuple(other.shape[1:])}; "
            "are the images of several sizes?"
        )
    whole = first.new_empty(count, *first.shape[1:])
    while parts:
        part = parts.pop()
        count -= len(part)
        whole[count : count + len(part)] = part
    return whole


def like(form: Latent, parts: Iterator[Tensor]) -> Latent:
    """Tensors, in order, in the form of a latent."""
    return next(parts) if isinstance(form, Tensor) else tuple(like(part, parts) for part in form)


class Fingerprint:
    """The SHA-256 of images in their order, however they are batched."""

    def __init__(self) -> None:
        self._digest, self._form, self._count = hashlib.sha256(), "", 0

    def watch(self, data: Images, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The batches of the data, each hashed as it goes by."""
        for x, y in batches(data, batch_size):
            form = f"{x.dtype} {tuple(x.shape[1:])}"
            if form != self._form:
                self._form = form
                self._digest.update(f"{self._count} {form}".encode())
            self._digest.update(bytes_of(x))
            self._count += len(x)
            yield x, y

    def __str__(self) -> str:
        return f"{self._count} {self._digest.hexdigest()}"


def data_hash(data: Images) -> str:
    """The hash of all images in their order, however they are batched."""
    return known_of(data).hash


class Known(NamedTuple):
    """What one pass over images tells of them; a loader that shuffles tells something else in the next."""

    hash: str
    labels: Tensor | None
    first: list[Tensor]
    """The first `FIRST` images, as they were batched."""


def known_of(data: Images) -> Known:
    """The hash of all images, and from the same pass their labels and the first of them."""
    seen, labels, first = Fingerprint(), [], list[Tensor]()
    for x, y in seen.watch(data):
        labels.append(None if y is None else y.clone())
        missing = FIRST - sum(map(len, first))
        if missing > 0:
            first.append(x[:missing].clone())
    return Known(str(seen), all_or_none(labels), first)


def network_hash(model: nn.Module) -> str:
    """The hash of a network: its weights, its buffers that are not saved, and its layers with their options."""
    digest = hashlib.sha256(f"{type(model).__qualname__} {hash_of(model)} {model!r}".encode())
    for name, buffer in model.named_buffers():
        digest.update(name.encode() + bytes_of(buffer))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """What a tensor holds, for a hash."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


class Cache:
    """Latents in a folder, by the hash of the weights, the data and the taps. Maps are not kept: they are too large.

    Args:
        folder: where the files go; made when needed.
        data: the images, which are read once more for their hash. Something that can be read only once has no cache.
    """

    def __init__(self, folder: str | Path, data: Images) -> None:
        if not isinstance(folder, str | Path):
            raise ValueError(f"cache must be the path of a folder, got {folder!r}")
        self.folder = Path(folder)
        self.data = None if isinstance(data, Iterator) else data
        self._networks: dict[int, str] = {}

    @cached_property
    def known(self) -> Known:
        """The hash of the data, and the labels and the first images in that order."""
        return Known("", None, []) if self.data is None else known_of(self.data)

    def make(self) -> None:
        """Make the folder.

        Raises:
            ValueError: it is a file, or cannot be made or written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cache must be a folder, and {self.folder} cannot be one: {error.strerror}") from error
        if not os.access(self.folder, os.W_OK):
            raise ValueError(f"cache must be a folder that can be written to, and {self.folder} cannot")

    def path(self, encoder: Reader) -> Path | None:
        """Where the latents of the data under an encoder are; None where they are not kept."""
        if self.data is None or not isinstance(encoder, Encoder) or type(encoder) is not Encoder:
            return None
        if encoder.pool is None and encoder.layers:
            return None
        model = encoder.model
        if id(model) not in self._networks:
            self._networks[id(model)] = network_hash(model)
        taps = [encoder.layer, encoder.pool, flat(encoder.mean), flat(encoder.std), encoder.size]
        device = None if encoder.device is None else encoder.device.type
        key = json.dumps([2, self._networks[id(model)], self.known.hash, taps, device])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def read(self, encoder: Reader, device: torch.device) -> Latent | None:
        """What was kept; None where there is nothing, a damaged file, or what another network made.

        Two networks may have the same weights and layers and still differ, in a number or a function that is no part
        of either. So the first images are encoded anew.
        """
        path = self.path(encoder)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                parts = [file.get_tensor(str(i)) for i in range(len(file.keys()))]
                whole = (file.metadata() or {}).get("sha256") == hash_of_all(parts)
        except (SafetensorError, OSError):
            return None
        if not whole:
            return None
        if not self._agrees(encoder, parts, device):
            warnings.warn(f"{path} holds what another network made of the images; it is made anew", stacklevel=2)
            return None
        parts = [part.to(device) for part in parts]
        several = isinstance(encoder, Encoder) and isinstance(encoder.layer, tuple)
        return tuple(parts) if several else parts[0]

    def _agrees(self, encoder: Reader, parts: list[Tensor], device: torch.device) -> bool:
        """Whether the encoder makes of the first images what the first rows of the parts hold."""
        row = 0
        for x in self.known.first:
            with torch.no_grad():
                fresh = leaves(encoder(x.to(device)))
            kept = [part[row : row + len(x)].to(device) for part in parts]
            if len(fresh) != len(kept) or not all(map(alike, fresh, kept)):
                return False
            row += len(x)
        return True

    def write(self, encoder: Reader, z: Latent, seen: Fingerprint) -> None:
        """Keep latents, unless the images that they are of are not those that the path is for."""
        path = self.path(encoder)
        if path is not None and str(seen) == self.known.hash:
            parts = [leaf.detach().cpu().contiguous() for leaf in leaves(z)]
            with replacing(path) as draft:
                tensors = {str(i): part for i, part in enumerate(parts)}
                save_file(tensors, draft, metadata={"sha256": hash_of_all(parts)})


def hash_of_all(tensors: Sequence[Tensor]) -> str:
    """The SHA-256 of what several tensors hold."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def all_or_none(labels: Sequence[Tensor | None]) -> Tensor | None:
    """The labels of consecutive batches as one; None unless every batch has them."""
    known = [y for y in labels if y is not None]
    return torch.cat(known) if known and len(known) == len(labels) else None


def encoded(
    encode: Callable[[Tensor], list[Latent]], data: Images, device: torch.device, batch_size: int = 256
) -> Iterator[tuple[list[Latent], Tensor | None]]:
    """Latents and labels batch by batch, without their history.

    Raises:
        ValueError: the network's output is NaN or infinite; it names the first such batch.
    """
    portions = Portions(device, batch_size, gradient=False)
    for index, (x, y) in enumerate(tracked(batches_on(device, data, batch_size), "encoding")):
        with torch.no_grad():
            latents = [joined(list(parts)) for parts in zip(*portions.run(encode, x), strict=True)]
        if not all(bool(leaf.isfinite().all()) for z in latents for leaf in leaves(z)):
            raise ValueError(f"the network's output has NaN or infinity, first in batch {index}")
        yield latents, y
