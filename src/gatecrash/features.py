"""The latents of any amount of data: one pass of a network for several taps, and files that remember them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gatecrash.encoder import Encoder, flat
from gatecrash.files import replacing
from gatecrash.images import Images, batches
from gatecrash.networks import hash_of
from gatecrash.progress import tracked
from gatecrash.protocols import Latent, leaves

Reader: TypeAlias = Callable[[Tensor], Latent]
"""What turns images into latents: an encoder, or a detector's own way."""

ROWS = 1 << 16
"""Rows that are kept together while their number is not known; freed one by one when they are put together."""


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


class Keeper:
    """The latents of consecutive batches, put together at the end without ever being there twice."""

    def __init__(self) -> None:
        self.blocks: list[list[list[Tensor]]] = []  # by leaf, then by block, then by batch
        self.form: Latent | None = None

    def take(self, z: Latent) -> None:
        """One more batch, copied: it may be a view of something much larger, or be overwritten by the next one."""
        parts = leaves(z)
        if self.form is None:
            self.form, self.blocks = z, [[[]] for _ in parts]
        for blocks, part in zip(self.blocks, parts, strict=True):
            blocks[-1].append(part.clone())
            if sum(map(len, blocks[-1])) >= ROWS:
                blocks[-1] = [torch.cat(blocks[-1])]
                blocks.append([])

    def whole(self) -> Latent:
        """All latents; the keeper is empty afterwards."""
        if self.form is None:
            raise ValueError("there are no images to learn from")
        form, self.form = self.form, None
        return like(form, iter([drained(blocks) for blocks in self.blocks]))


def drained(blocks: list[list[Tensor]]) -> Tensor:
    """The tensors of a list of lists as one, each freed as soon as it is copied."""
    parts = [part for block in blocks for part in block]
    blocks.clear()
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
    return hash_and_labels(data)[0]


def hash_and_labels(data: Images) -> tuple[str, Tensor | None]:
    """The hash of all images, and from the same pass their labels: a loader that shuffles has others in the next."""
    seen = Fingerprint()
    labels = all_or_none([None if y is None else y.clone() for _, y in seen.watch(data)])
    return str(seen), labels


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
        self.folder = Path(folder)
        self.data = None if isinstance(data, Iterator) else data
        self._networks: dict[int, str] = {}

    @cached_property
    def known(self) -> tuple[str, Tensor | None]:
        """The hash of the data, and the labels in that order."""
        return ("", None) if self.data is None else hash_and_labels(self.data)

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
        key = json.dumps([2, self._networks[id(model)], self.known[0], taps, device])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def read(self, encoder: Reader, device: torch.device) -> Latent | None:
        """What was kept; None where there is nothing, or a damaged file."""
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
        parts = [part.to(device) for part in parts]
        several = isinstance(encoder, Encoder) and isinstance(encoder.layer, tuple)
        return tuple(parts) if several else parts[0]

    def write(self, encoder: Reader, z: Latent, seen: Fingerprint) -> None:
        """Keep latents, unless the images that they are of are not those that the path is for."""
        path = self.path(encoder)
        if path is not None and str(seen) == self.known[0]:
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
    for index, (x, y) in enumerate(tracked(batches(data, batch_size), "encoding")):
        with torch.no_grad():
            latents = encode(x.to(device))
        if not all(bool(leaf.isfinite().all()) for z in latents for leaf in leaves(z)):
            raise ValueError(f"the network's output has NaN or infinity, first in batch {index}")
        yield latents, None if y is None else y.to(device)
