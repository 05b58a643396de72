"""Images by name: the table of sources, and the one way from a name to a set of images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gatecrash.data.image_set import ImageSet
from gatecrash.files import at_home
from gatecrash.images import check_images, resized, to_channels
from gatecrash.registry import Registry, unknown


@dataclass(frozen=True)
class Request:
    """What is asked of a source."""

    name: str
    argument: str | None
    """What stands after the colon."""
    limit: int | None
    shuffle: bool
    channels: int | None
    size: int | None
    root: Path | None
    seed: int

    @property
    def spec(self) -> str:
        """The source as it was asked for."""
        return self.name if self.argument is None else f"{self.name}:{self.argument}"

    def generator(self) -> torch.Generator:
        """Random numbers that depend on the seed and on the source's name, so that no two sources share theirs."""
        digest = hashlib.sha256(f"{self.name} {self.seed}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def rows(self, total: int) -> list[int]:
        """Which of `total` images are meant: the first `limit`, or as many in random order with `shuffle`."""
        count = total if self.limit is None else min(self.limit, total)
        if not self.shuffle:
            return list(range(count))
        return torch.randperm(total, generator=self.generator())[:count].tolist()

    def split(self, known: Iterable[str]) -> str:
        """The split asked for, or the first one known.

        Raises:
            ValueError: there is no such split.
        """
        names = list(known)
        if self.argument is not None and self.argument not in names:
            raise ValueError(unknown(f"split of {self.name}", self.argument, names))
        return self.argument or names[0]

    def path(self) -> Path:
        """The file or folder asked for, relative to `root` where there is one."""
        return at_home(self.root or Path(), self.argument or "")


class Part(NamedTuple):
    """Some images of a source as they are, of one shape, with what to call them in a message."""

    x: Tensor
    y: Tensor | None
    what: str


@dataclass(frozen=True)
class Opened:
    """A source that is ready to be read."""

    parts: Iterable[Part]
    """The images asked for, piece by piece; read only when they are gone through."""
    count: int
    """How many images the parts hold in all."""
    classes: list[str] | None = None


Reader: TypeAlias = Callable[[Request], Opened]


@dataclass(frozen=True)
class Source:
    """Where images come from, with what a listing says about it."""

    name: str
    takes: str | None
    """What may stand after the colon."""
    what: str
    needs: str
    licence: str
    read: Reader

    @property
    def form(self) -> str:
        """How the source is written in a plan."""
        return self.name if self.takes is None else f"{self.name}:{self.takes}"


SOURCES: Registry[Source] = Registry("source")


def source(
    name: str, *, takes: str | None = None, what: str, needs: str = "nothing", licence: str
) -> Callable[[Reader], Reader]:
    """A decorator that enters a reader in the table of sources."""

    def enter(read: Reader) -> Reader:
        SOURCES.register(name)(Source(name, takes, what, needs, licence, read))
        return read

    return enter


def load_source(
    spec: str,
    *,
    limit: int | None = None,
    shuffle: bool = False,
    channels: int | None = None,
    size: int | None = None,
    root: str | Path | None = None,
    seed: int = 0,
) -> ImageSet:
    """The images of a source, in float32 and [0, 1].

    Args:
        spec: a name, and after a colon what the source takes: `noise`, `fashion:train`, `npz:FILE`.
        limit: at most so many images; no more are decoded. Drawn sources give exactly so many, 1,000 when not told.
        shuffle: take them in a random order that `seed` determines; without it the first ones, in the source's order,
            which in a folder of classes are all of one class.
        channels: 1 or 3; grey is made colour or colour grey, and a note says so. As they are when not given; drawn
            sources then have 3.
        size: height and width; the short side is resized and the centre cut out, and a note says so. As they are when
            not given; drawn sources then have 32.
        root: the folder where data sets lie; paths of `npz` and `folder` are relative to it.
        seed: determines what is drawn and what is shuffled, apart from any global random state.

    Raises:
        ValueError: in one line: an unknown source, a file or data set that is missing or cannot be read, images that
            differ in shape where no shape was asked for, values outside [0, 1].
    """
    _check_counts(limit=limit, size=size)
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    name, _, argument = spec.partition(":")
    entry = SOURCES[name]
    if argument and entry.takes is None:
        raise ValueError(f"{name} takes nothing after a colon, got {argument!r}")
    root = None if root is None else at_home("", root)
    asked = Request(name, argument or None, limit, shuffle, channels, size, root, seed)
    return _gathered(entry.read(asked), asked)


def describe_sources() -> list[dict[str, str]]:
    """Every source in a few words: its name, the form a plan takes, what it is, what it needs, its licence."""
    entries = [SOURCES[name] for name in SOURCES]
    return [
        {"name": entry.name, "form": entry.form, "what": entry.what, "needs": entry.needs, "licence": entry.licence}
        for entry in entries
    ]


def fitted(x: Tensor, size: int) -> Tensor:
    """The images at size×size: the short side is resized to it, then the centre is cut out."""
    height, width = x.shape[-2:]
    short = min(height, width)
    height, width = size * height // short, size * width // short
    top, left = round((height - size) / 2), round((width - size) / 2)
    return resized(x, (height, width))[..., top : top + size, left : left + size]


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _gathered(opened: Opened, asked: Request) -> ImageSet:
    x: Tensor | None = None
    labels: list[Tensor] = []
    shapes: set[tuple[int, ...]] = set()
    done = 0
    for part in opened.parts:
        shapes.add(tuple(check_images(part.x, part.what).shape[1:]))
        images = _converted(part.x, asked)
        if x is None:
            x = torch.empty(opened.count, *images.shape[1:])
        elif images.shape[1:] != x.shape[1:]:
            raise ValueError(_differing(part.what, images, x))
        x[done : done + len(images)] = images
        done += len(images)
        if part.y is not None:
            labels.append(part.y)
    if x is None:
        raise ValueError(f"{asked.spec}: there is no image")
    y = torch.cat(labels).long() if sum(map(len, labels)) == len(x) else None
    notes = _notes(shapes, len(x), asked)
    return ImageSet(check_images(x.clamp_(0, 1), asked.spec), y, asked.spec, opened.classes, notes)


def _converted(x: Tensor, asked: Request) -> Tensor:
    if asked.channels is not None:
        x = to_channels(x, asked.channels)
    return x if asked.size is None else fitted(x, asked.size)


def _differing(what: str, images: Tensor, others: Tensor) -> str:
    if images.shape[1] != others.shape[1]:
        came, before = ("grey" if x.shape[1] == 1 else "colour" for x in (images, others))
        return f"{what} is {came} and those before it are {before}: give channels, 1 or 3, to make them alike"
    came, before = (f"{x.shape[2]}×{x.shape[3]}" for x in (images, others))
    return f"{what} is {came} and those before it are {before}: give a size to bring them to"


def _notes(shapes: set[tuple[int, ...]], count: int, asked: Request) -> list[str]:
    notes = []
    if asked.channels is not None and any(channels != asked.channels for channels, _, _ in shapes):
        notes.append("grey → RGB" if asked.channels == 3 else "RGB → grey")
    sizes = {(height, width) for _, height, width in shapes}
    if asked.size is not None and sizes != {(asked.size, asked.size)}:
        cut = any(height != width for height, width in sizes)
        how = ", the short side first, then the centre cut out" if cut else ""
        notes.append(f"resized {_in_words(sizes)} → {asked.size}{how}")
    if asked.limit is not None and count < asked.limit:
        notes.append(f"{asked.limit} images were asked for, {count} are there")
    return notes


def _in_words(sizes: set[tuple[int, int]]) -> str:
    if len(sizes) > 1:
        return f"from {len(sizes)} sizes"
    ((height, width),) = sizes
    return str(height) if height == width else f"{height}×{width}"
