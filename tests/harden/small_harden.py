"""A plan of hardening that runs in a fraction of a second: sixteen pixels a side, a few images, one epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.torch import load_file
from torch import Tensor

from gatecrash.harden import HardenPlan

OPTIONS = {"width": 2, "latent": 4, "size": 16}
ALOE = {"name": "aloe", "eps": "8/255", "step": "4/255", "steps": 2}


def small_harden(**changes: Any) -> dict[str, Any]:
    """The plan; the keys of model, data, training and evaluation are changed one by one, others replaced."""
    plan: dict[str, Any] = {
        "model": {
            "name": "builtin:small_cnn",
            "options": OPTIONS,
            "layer": "latent",
            "mean": [0.3],
            "std": [0.35],
            "channels": 1,
            "size": 16,
        },
        "data": {
            "train": {"source": "fashion:train", "limit": 24},
            "outliers": [{"source": "noise", "limit": 10}],
            "test": {"source": "fashion:test", "limit": 12},
            "test_outliers": {"digits": {"source": "digits", "limit": 10}},
        },
        "methods": ["ce", ALOE],
        "training": {"epochs": 1, "batch_size": 12, "lr": 0.05},
        "evaluation": {"eps": "8/255", "steps": 2, "step": "4/255", "pgd_steps": 2},
        "seed": 1,
    }
    for key, value in changes.items():
        plan[key] = plan[key] | value if isinstance(plan.get(key), dict) else value
    return plan


def written(path: Path, **changes: Any) -> Path:
    """The plan as a file."""
    path.write_text(yaml.safe_dump(small_harden(**changes)), encoding="utf-8")
    return path


def small_model(**changes: Any) -> HardenPlan:
    """The plan, read."""
    return HardenPlan.model_validate(small_harden(**changes))


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a finished model."""
    return load_file(folder / "model.safetensors")


def write_images(path: Path, x: Tensor, y: Tensor | None = None) -> str:
    """Images as an .npz file; how a plan names it."""
    labels = {} if y is None else {"y": y.numpy()}
    np.savez(path, x=x.numpy(), **labels)
    return f"npz:{path.name}"
