"""The bundle of a density: a directory with its weights, its description and the numbers of every epoch."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch

from gatecrash.densities.base import DENSITIES, Density
from gatecrash.files import write_text
from gatecrash.fitting import History
from gatecrash.networks import check_hash, hash_of, load_weights, save_weights

SCHEMA = 1


def save_density(density: Density, folder: str | Path, history: History | None = None) -> None:
    """Write `model.safetensors`, `manifest.json` and, last, `model.json`: with it the bundle is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(density, folder / "model.safetensors")
    manifest = {"weights_sha256": hash_of(as_read(density)), "epochs": history or []}
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    about = {"schema": SCHEMA, "density": density.name, "shape": list(density.shape), "options": density.options}
    write_text(folder / "model.json", json.dumps(about, indent=1) + "\n")


def load_density(folder: str | Path) -> Density:
    """The density of a bundle, in eval mode, its parameters frozen.

    Raises:
        ValueError: there is no such bundle, it is damaged, or its weights are not those of its manifest.
    """
    about = Path(folder) / "model.json"
    if not about.is_file():
        raise ValueError(f"{folder} is no bundle of a density: model.json is missing")
    try:
        content = json.loads(about.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "density" not in content:
            raise ValueError("it is of another kind of model")
        if content.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"it has schema {content['schema']!r}, this version reads {SCHEMA}")
        density = DENSITIES[content["density"]](content["shape"], **content["options"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{about} does not describe a density: {' '.join(str(error).split())}") from error
    load_weights(density, Path(folder) / "model.safetensors")
    check_weights(density, Path(folder))
    return density.eval().requires_grad_(False)


def as_read(density: Density) -> Density:
    """The density as `load_density` will give it: in single precision."""
    if all(not p.is_floating_point() or p.dtype == torch.float32 for p in density.state_dict().values()):
        return density
    return copy.deepcopy(density).float()


def check_weights(density: Density, folder: Path) -> None:
    """Raises a ValueError where a bundle's weights are not those that its manifest has the hash of."""
    if not (folder / "manifest.json").is_file():
        raise ValueError(f"{folder} is no bundle of a density: manifest.json is missing")
    check_hash(density, folder, required=True)
