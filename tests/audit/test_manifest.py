"""What a manifest says of the way numbers were computed."""

from __future__ import annotations

import pytest
import torch

from gatecrash.audit.manifest import manifest_of, precision_path


@pytest.mark.parametrize(
    ("device", "precision", "path"),
    [
        ("cpu", "auto", "float32"),
        ("mps", "auto", "float32"),
        ("cuda", "float32", "float32"),
        ("cuda", "auto", "bf16 for the far part of long searches, float32 for the rest and for every reported number"),
        (
            "cuda:1",
            "auto",
            "bf16 for the far part of long searches, float32 for the rest and for every reported number",
        ),
    ],
)
def test_half_precision_is_named_where_it_is_used(device: str, precision: str, path: str) -> None:
    assert precision_path(torch.device(device), precision) == path


def test_the_manifest_carries_it() -> None:
    about = {"seed": 0, "networks": {}, "sets": {}, "attacks": (), "precision": "float32"}
    assert manifest_of(device=torch.device("cpu"), **about)["precision"] == "float32"
