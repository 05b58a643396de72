"""A plan that runs in seconds: the demo's shape at a reduced size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def small_plan(**changes: Any) -> dict[str, Any]:
    """The demo's plan with few images and steps; top-level keys can be replaced."""
    plan: dict[str, Any] = {
        "model": {
            "name": "builtin:small_cnn",
            "weights": "default",
            "layer": "latent",
            "mean": [0.2869],
            "std": [0.3377],
            "channels": 1,
            "size": 56,
        },
        "data": {
            "fit": {"source": "fashion:train", "limit": 300},
            "inliers": {"source": "fashion:test", "limit": 20},
            "outliers": {"digits": {"source": "digits", "limit": 20}, "noise": {"source": "noise", "limit": 15}},
        },
        "detectors": ["msp", "mahalanobis"],
        "attacks": [
            {"name": "collide", "of": "features", "ball": {"norm": "l2", "eps": 5}, "steps": 40},
            {"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": ["4/255", "8/255"]}, "steps": 5},
        ],
        "pictures": [
            {
                "title": "a retinal photograph",
                "start": {"source": "fundus"},
                "targets": {"source": "fashion:test", "classes": ["Ankle boot", "Bag"]},
                "ball": {"norm": "l2", "eps": 5},
                "steps": 20,
            }
        ],
        "seed": 3,
        "batch_size": 8,
    }
    return plan | changes


def write_small_plan(path: Path, **changes: Any) -> Path:
    """The plan as a file."""
    path.write_text(yaml.safe_dump(small_plan(**changes)), encoding="utf-8")
    return path
