"""Writes the images that the package carries: a balanced sample of Fashion-MNIST and one fundus photograph.

Fashion-MNIST comes from Debian's package `dataset-fashion-mnist`, the photograph from scikit-image's wheel. Run again,
it writes the same pixels:

    python tools/embed_data.py [--fashion DIR] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FASHION = Path("/usr/share/datasets/fashion-mnist")
EMBEDDED = Path(__file__).resolve().parent.parent / "src" / "gatecrash" / "data" / "embedded"
RETINA = "skimage/data/retina.jpg"
RETINA_SHA256 = "38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6"
"""The file that scikit-image says was released under CC0; another one would need its licence read again."""

PER_CLASS = {"train": 600, "val": 100, "test": 100}
CLASSES = 10
COLUMNS = 100
FUNDUS_SIZE = 224
LIMIT = 5_000_000


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped idx file of bytes."""
    raw = gzip.decompress(path.read_bytes())
    rank = raw[3]
    shape = np.frombuffer(raw, dtype=">u4", count=rank, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape.astype(int))


def balanced_rows(labels: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.int64]:
    """The rows of images `start` to `stop` of every class, dealt in rounds: each ten in a row hold every class once."""
    by_class = np.stack([np.flatnonzero(labels == label)[start:stop] for label in range(CLASSES)])
    rounds: NDArray[np.int64] = np.sort(by_class.T, axis=1)
    return rounds.reshape(-1)


def mosaic(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The images (N, H, W) side by side, `COLUMNS` in a row."""
    count, height, width = images.shape
    rows = images.reshape(count // COLUMNS, COLUMNS, height, width).transpose(0, 2, 1, 3)
    return rows.reshape(count // COLUMNS * height, COLUMNS * width)


def embed_fashion(source: Path, target: Path) -> None:
    """Write the three splits as mosaics, with their labels and their rows in the original files."""
    images = {name: read_idx(source / f"{name}-images-idx3-ubyte.gz") for name in ("train", "t10k")}
    labels = {name: read_idx(source / f"{name}-labels-idx1-ubyte.gz") for name in ("train", "t10k")}
    first, then = PER_CLASS["train"], PER_CLASS["train"] + PER_CLASS["val"]
    rows = {
        "train": ("train", balanced_rows(labels["train"], 0, first)),
        "val": ("train", balanced_rows(labels["train"], first, then)),
        "test": ("t10k", balanced_rows(labels["t10k"], 0, PER_CLASS["test"])),
    }
    for split, (file, chosen) in rows.items():
        Image.fromarray(mosaic(images[file][chosen])).save(target / f"fashion_{split}.png", optimize=True)
    tables = {f"{split}_rows": chosen.astype(np.uint16) for split, (_, chosen) in rows.items()}
    tables |= {f"{split}_labels": labels[file][chosen] for split, (file, chosen) in rows.items()}
    np.savez_compressed(target / "fashion_labels.npz", allow_pickle=False, **tables)


def retina_jpeg(wheel: Path | None) -> bytes:
    """The photograph's file: from the wheel given, else from an installed scikit-image, else from a fetched wheel."""
    if wheel is not None:
        return zipfile.Path(wheel, RETINA).read_bytes()
    installed = find_spec("skimage")
    if installed is not None and installed.origin is not None:
        return (Path(installed.origin).parent.parent / RETINA).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, "scikit-image"]
        subprocess.run([sys.executable, "-m", *command], check=True)
        return zipfile.Path(next(Path(folder).glob("*.whl")), RETINA).read_bytes()


def embed_fundus(jpeg: bytes, target: Path) -> None:
    """Write the photograph at `FUNDUS_SIZE` pixels."""
    digest = hashlib.sha256(jpeg).hexdigest()
    if digest != RETINA_SHA256:
        raise SystemExit(f"{RETINA} is not the file whose licence was read: sha256 {digest}")
    photo = Image.open(io.BytesIO(jpeg)).convert("RGB")
    photo = photo.resize((FUNDUS_SIZE, FUNDUS_SIZE), Image.Resampling.LANCZOS)
    photo.save(target / "fundus.png", optimize=True)


def main() -> None:
    """Write all files and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=Path, default=FASHION, help="folder of the four idx .gz files (%(default)s)")
    parser.add_argument("--wheel", type=Path, help="scikit-image wheel; found or downloaded when not given")
    options = parser.parse_args()
    if not options.fashion.is_dir():
        raise SystemExit(f"{options.fashion} is not there; install Debian's dataset-fashion-mnist or give --fashion")
    EMBEDDED.mkdir(parents=True, exist_ok=True)
    embed_fashion(options.fashion, EMBEDDED)
    embed_fundus(retina_jpeg(options.wheel), EMBEDDED)
    sizes = {path.name: path.stat().st_size for path in sorted(EMBEDDED.iterdir())}
    for name, size in sizes.items():
        print(f"{size:>9,}  {name}")
    total = sum(sizes.values())
    print(f"{total:>9,}  in all, {LIMIT:,} allowed")
    if total > LIMIT:
        raise SystemExit("too large")


if __name__ == "__main__":
    main()
