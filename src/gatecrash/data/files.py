"""The sources that read a user's own files: `npz:FILE` and `folder:DIR`."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gatecrash.data.pictures import UNREADABLE, as_image
from gatecrash.data.sources import Opened, Part, Request, source
from gatecrash.progress import tracked

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
"""The files that a folder is searched for."""

Labelled: TypeAlias = tuple[Path, int | None]
"""A file and the number of its class, where it has one."""

_DAMAGED = (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@source(
    "npz",
    takes="FILE",
    what="an .npz file: x, uint8 or float in [0, 1], N×H×W, N×H×W×C or N×C×H×W; y, whole numbers, may be missing",
    needs="the file",
    licence="yours",
)
def _npz(asked: Request) -> Opened:
    path = _existing(asked, "FILE")
    arrays = _arrays(asked.spec, path)
    x = _channels_first(asked.spec, arrays["x"])
    y = arrays.get("y")
    if y is not None and (y.shape != (len(x),) or y.dtype.kind not in "iu"):
        raise ValueError(f"{asked.spec}: y must be whole numbers of shape ({len(x)},), got {y.shape} {y.dtype}")
    rows = asked.rows(len(x))
    labels = None if y is None else torch.from_numpy(y[rows].astype(np.int64))
    return Opened([Part(_floats(x[rows]), labels, asked.spec)] if rows else [], len(rows))


@source(
    "folder",
    takes="DIR",
    what="a folder of pictures, or of one folder of pictures per class: png, jpg, webp, bmp, tif",
    needs="the folder",
    licence="yours",
)
def _folder(asked: Request) -> Opened:
    folder = _existing(asked, "DIR")
    if not folder.is_dir():
        raise ValueError(f"{asked.spec}: {folder} is a file, not a folder")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry))
    flat: list[Labelled] = [(path, None) for path in _pictures_in(folder.iterdir())]
    sorted_in: list[Labelled] = [
        (path, label) for label, name in enumerate(classes) for path in _pictures_in((folder / name).rglob("*"))
    ]
    if flat and sorted_in:
        raise ValueError(f"{asked.spec}: {flat[0][0].name} lies beside folders of pictures; keep one kind of the two")
    found = flat or sorted_in
    if not found:
        raise ValueError(f"{asked.spec}: {folder} holds no picture ({', '.join(SUFFIXES)})")
    chosen = [found[row] for row in asked.rows(len(found))]
    return Opened(_decoded(asked.spec, chosen), len(chosen), classes if sorted_in else None)


def _existing(asked: Request, takes: str) -> Path:
    if asked.argument is None:
        raise ValueError(f"{asked.name} needs a path: {asked.name}:{takes}")
    path = asked.path()
    if not path.exists():
        raise ValueError(f"{asked.spec}: {path} is not there")
    return path


def _arrays(spec: str, path: Path) -> dict[str, NDArray[Any]]:
    """The arrays x and y of the file, as they are; a pickle is refused."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{spec}: not an .npz file, or cut off; numpy.savez(file, x=..., y=...) writes one")
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("x", "y") if name in stored}
            names = ", ".join(stored) or "nothing"
    except _DAMAGED as error:
        raise ValueError(f"{spec}: cannot be read: {error}") from error
    if "x" not in arrays:
        raise ValueError(f"{spec}: there is no array x in it, only {names}")
    return arrays


def _channels_first(spec: str, x: NDArray[Any]) -> NDArray[Any]:
    """The array as N×C×H×W, whichever of the three layouts it has."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise ValueError(f"{spec}: x must be uint8 or float, got {x.dtype}")
    if x.ndim == 3:
        return x[:, None]
    first, last = (x.ndim == 4 and x.shape[axis] in (1, 3) for axis in (1, 3))
    if first == last:
        problem = "could be either of the last two" if first else "is none of them"
        raise ValueError(f"{spec}: x must be N×H×W, N×H×W×C or N×C×H×W with C 1 or 3; {x.shape} {problem}")
    return x if first else x.transpose(0, 3, 1, 2)


def _floats(x: NDArray[Any]) -> Tensor:
    values = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    return values / 255 if x.dtype == np.uint8 else values


def _decoded(spec: str, pictures: list[Labelled]) -> Iterator[Part]:
    for path, label in tracked(pictures, f"reading {spec}"):
        try:
            with Image.open(path) as picture:
                x = as_image(picture)
        except UNREADABLE as error:
            raise ValueError(f"{spec}: {path} cannot be read: {error}") from error
        yield Part(x, None if label is None else torch.tensor([label]), str(path))


def _pictures_in(entries: Iterator[Path]) -> list[Path]:
    return sorted(
        entry for entry in entries if entry.suffix.lower() in SUFFIXES and not _is_hidden(entry) and entry.is_file()
    )


def _is_hidden(entry: Path) -> bool:
    return entry.name.startswith(".")
