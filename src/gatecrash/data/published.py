"""The published data sets that torchvision reads: never downloaded here, found under a `root`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gatecrash.data.pictures import UNREADABLE, as_image
from gatecrash.data.sources import Opened, Part, Request, source
from gatecrash.progress import tracked


@dataclass(frozen=True)
class Split:
    """A part of a published set: how torchvision is asked for it, and the paths under the root that it needs."""

    options: dict[str, Any]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """A data set of torchvision's."""

    kind: str
    """The class in torchvision.datasets."""
    splits: dict[str, Split]
    """By name; the first is taken when none is asked for."""
    what: str
    licence: str
    get: str
    """What to type or do to have it."""
    build: Callable[[str, Path, dict[str, Any]], Any] | None = None
    """How it is built, where it takes more than a call."""
    files: str | None = None
    """The attribute that lists its files, or pairs of file and label, for messages that name one."""
    module: str | None = None
    """What torchvision needs besides itself."""


def _build(kind: str, root: Path, options: dict[str, Any]) -> Any:
    from torchvision import datasets

    return getattr(datasets, kind)(str(root), **options)


def _build_places(kind: str, root: Path, options: dict[str, Any]) -> Any:
    """The small images where they are there, else the large ones."""
    small = _build(kind, root, {**options, "small": True})
    if Path(small.images_dir).is_dir():
        return small
    large = _build(kind, root, {**options, "small": False})
    if Path(large.images_dir).is_dir():
        return large
    raise ValueError(f"neither {small.images_dir} nor {large.images_dir} is there")


def _build_lsun(kind: str, root: Path, options: dict[str, Any]) -> Any:
    # torchvision keeps a pickle of the keys in the working directory and trusts the one it finds there, even when it
    # belongs to another root whose path has the same letters; in an empty directory it finds none and leaves none.
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        return _build(kind, root, options)


def _train_or_test(path: str) -> dict[str, Split]:
    return {"test": Split({"train": False}, (path,)), "train": Split({"train": True}, (path,))}


def _download(kind: str, options: str = "") -> str:
    return f"torchvision.datasets.{kind}(root, {options}download=True)"


_LSUN_CATEGORIES = (
    "bedroom",
    "bridge",
    "church_outdoor",
    "classroom",
    "conference_room",
    "dining_room",
    "kitchen",
    "living_room",
    "restaurant",
    "tower",
)
_GTSRB = "gtsrb/GTSRB"
_PLACES = {
    "test": "places365_test.txt",
    "val": "places365_val.txt",
    "train-standard": "places365_train_standard.txt",
    "train-challenge": "places365_train_challenge.txt",
}

PUBLISHED = {
    "cifar10": Published(
        "CIFAR10",
        _train_or_test("cifar-10-batches-py"),
        what="CIFAR-10, 50,000 + 10,000 images, 32×32",
        licence="no formal licence; cite Krizhevsky 2009",
        get=_download("CIFAR10"),
    ),
    "cifar100": Published(
        "CIFAR100",
        _train_or_test("cifar-100-python"),
        what="CIFAR-100, 50,000 + 10,000 images, 32×32",
        licence="no formal licence; cite Krizhevsky 2009",
        get=_download("CIFAR100"),
    ),
    "svhn": Published(
        "SVHN",
        {name: Split({"split": name}, (f"{name}_32x32.mat",)) for name in ("test", "train", "extra")},
        what="street view house numbers, 73,257 + 26,032 (+ 531,131 extra) images, 32×32",
        licence="non-commercial use; cite Netzer et al. 2011",
        get=_download("SVHN", "split=..., "),
    ),
    "gtsrb": Published(
        "GTSRB",
        {
            "test": Split({"split": "test"}, (f"{_GTSRB}/Final_Test/Images", "gtsrb/GT-final_test.csv")),
            "train": Split({"split": "train"}, (f"{_GTSRB}/Training",)),
        },
        what="German traffic signs, 26,640 + 12,630 images of different sizes",
        licence="research; cite Stallkamp et al. 2012",
        get=_download("GTSRB", "split=..., "),
        files="_samples",
    ),
    "dtd": Published(
        "DTD",
        {name: Split({"split": name}, ("dtd/dtd",)) for name in ("test", "train", "val")},
        what="describable textures, 1,880 images a split, of different sizes",
        licence="research; cite Cimpoi et al. 2014",
        get=_download("DTD"),
        files="_image_files",
    ),
    "places365": Published(
        "Places365",
        {name: Split({"split": name}, ("categories_places365.txt", path)) for name, path in _PLACES.items()},
        what="scenes of 365 kinds, 256×256 or larger; `test` has no labels",
        licence="research and education; cite Zhou et al. 2017",
        get=_download("Places365", "split=..., small=True, "),
        build=_build_places,
        files="imgs",
    ),
    "lsun": Published(
        "LSUN",
        {
            "test": Split({"classes": "test"}, ("test_lmdb",)),
            "val": Split({"classes": "val"}, tuple(f"{name}_val_lmdb" for name in _LSUN_CATEGORIES)),
            "train": Split({"classes": "train"}, tuple(f"{name}_train_lmdb" for name in _LSUN_CATEGORIES)),
            **{
                f"{name}_{part}": Split({"classes": [f"{name}_{part}"]}, (f"{name}_{part}_lmdb",))
                for name in _LSUN_CATEGORIES
                for part in ("val", "train")
            },
        },
        what="scenes of ten kinds, of different sizes; one kind as in lsun:bedroom_val",
        licence="no formal licence; cite Yu et al. 2015",
        get="the download script of fyu/lsun, and unzip what it fetches in root",
        build=_build_lsun,
        module="lmdb",
    ),
    "celeba": Published(
        "CelebA",
        {
            name: Split({"split": name, "target_type": "identity"}, ("celeba/img_align_celeba",))
            for name in ("test", "train", "valid", "all")
        },
        what="celebrity faces, 202,599 images, 178×218; the labels are the persons' numbers",
        licence="non-commercial research; cite Liu et al. 2015",
        get=_download("CelebA") + ", for which it needs gdown",
        files="filename",
    ),
    "mnist": Published(
        "MNIST",
        _train_or_test("MNIST"),
        what="MNIST, 60,000 + 10,000 digits, 28×28 grey",
        licence="CC BY-SA 3.0",
        get=_download("MNIST"),
    ),
    "fashion_mnist": Published(
        "FashionMNIST",
        _train_or_test("FashionMNIST"),
        what="all of Fashion-MNIST, 60,000 + 10,000 images, 28×28 grey",
        licence="MIT, © Zalando SE",
        get=_download("FashionMNIST"),
    ),
    "imagenet": Published(
        "ImageNet",
        {name: Split({"split": name}, (name, "meta.bin")) for name in ("val", "train")},
        what="ImageNet 2012, 1,281,167 + 50,000 images of different sizes",
        licence="ImageNet's terms of access: non-commercial research",
        get="torchvision.datasets.ImageNet(root, split=...) once, with the ILSVRC2012 archives and the devkit in root; "
        "class folders without meta.bin are read by folder:DIR",
        files="imgs",
    ),
}


def _read(published: Published, asked: Request) -> Opened:
    split = published.splits[asked.split(published.splits)]
    if asked.root is None:
        raise ValueError(
            f"{asked.spec} needs a root, the folder that holds {split.paths[0]}; get it with {published.get}"
        )
    for path in split.paths:
        if not (asked.root / path).exists():
            raise ValueError(
                f"{asked.spec} is expected at {asked.root / path}, which is not there; get it with {published.get}"
            )
    if published.module is not None and find_spec(published.module) is None:
        raise ValueError(
            f"{asked.spec} is read with {published.module}, which is missing: pip install {published.module}"
        )
    build = published.build or _build
    try:
        dataset = build(published.kind, asked.root.resolve(), split.options)
    # Files that are missing, cut off or not what they should be raise whatever torchvision's parser stumbled on.
    except Exception as error:
        reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise ValueError(
            f"{asked.spec} at {asked.root} cannot be read: {reason.rstrip('.')}; get it again with {published.get}"
        ) from error
    rows = asked.rows(len(dataset))
    return Opened(_decoded(published, dataset, rows, asked.spec), len(rows), _classes(dataset))


def _decoded(published: Published, dataset: Any, rows: list[int], spec: str) -> Iterator[Part]:
    for row in tracked(rows, f"reading {spec}"):
        what = f"{spec}, {_file_name(published, dataset, row)}"
        try:
            picture, label = dataset[row]
            x = as_image(picture)
        except UNREADABLE as error:
            raise ValueError(f"{what}, cannot be read: {error}") from error
        yield Part(x, None if label is None else torch.tensor([int(label)]), what)


def _file_name(published: Published, dataset: Any, row: int) -> str:
    if published.files is None:
        return f"image {row}"
    entry = getattr(dataset, published.files)[row]
    return f"file {entry[0] if isinstance(entry, tuple) else entry}"


def _classes(dataset: Any) -> list[str] | None:
    names = getattr(dataset, "classes", None)
    # ImageNet's classes are tuples of synonyms.
    return None if names is None else [name if isinstance(name, str) else ", ".join(name) for name in names]


for _name, _published in PUBLISHED.items():
    source(
        _name,
        takes="|".join(list(_published.splits)[:4]),
        what=_published.what,
        needs=f"root with {next(iter(_published.splits.values())).paths[0]}"
        + (f", and {_published.module}" if _published.module else ""),
        licence=_published.licence,
    )(partial(_read, _published))
