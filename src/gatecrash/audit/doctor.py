"""What this machine has for Gatecrash to work with: device, versions, data, and what is missing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from gatecrash.audit.manifest import device_name, pick_device
from gatecrash.data import describe_sources, load_source

OPTIONAL = {
    "transformers": "CLIP detectors: pip install 'gatecrash[clip]'",
    "lmdb": "the LSUN source: pip install lmdb",
}
PACKAGES = (
    *(
        "gatecrash",
        "torch",
        "torchvision",
        "timm",
        "lightning",
        "zuko",
        "numpy",
        "scipy",
        "scikit-learn",
        "safetensors",
    ),
    *("pyarrow", "pydantic", "PyYAML", "typer", "rich", "jinja2", "altair", "vl-convert-python"),
)


def examine() -> dict[str, Any]:
    """The findings, as `gatecrash doctor --json` prints them."""
    missing = [f"{name} is not installed" for name in PACKAGES if found_version(name) is None]
    missing += [
        f"{name} is not installed; needed for {what}" for name, what in OPTIONAL.items() if find_spec(name) is None
    ]
    data, damaged = embedded_data()
    return {
        "device": device_name(pick_device("auto")),
        "devices": {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()},
        "python": platform.python_version(),
        "versions": {name: found_version(name) for name in PACKAGES},
        "data": data,
        "needs_files": [entry["form"] for entry in describe_sources() if entry["needs"] != "nothing"],
        "missing": missing + damaged,
    }


def found_version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def embedded_data() -> tuple[dict[str, int], list[str]]:
    """How many images each source that needs no file really gives, and which of them fail."""
    counts, damaged = {}, []
    for spec in ("fashion:train", "fashion:val", "fashion:test", "fundus", "digits"):
        try:
            counts[spec] = len(load_source(spec))
        except (ValueError, OSError) as error:
            damaged.append(f"{spec}: {error}")
    return counts, damaged
