"""What a manifest says of the way numbers were computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gatecrash.audit.job import as_set
from gatecrash.audit.main import attack_plans
from gatecrash.audit.manifest import manifest_of, precision_path

SETS = {"inliers": as_set(torch.rand(2, 1, 10, 10), "grey")}
WIDE, NARROW = {"norm": "l2", "eps": 1.0}, {"norm": "linf", "eps": 1 / 255}
SHORT = {"name": "softmax", "ball": WIDE, "steps": 49}
COLLISION = {"name": "collide", "of": "logits", "ball": WIDE, "steps": 50}
SCORE = {"name": "admit", "ball": NARROW, "steps": 50}
SUITE = {"name": "worst_case", "ball": NARROW}

PLAIN = "float32, the networks as they are"


@pytest.mark.parametrize(
    ("device", "precision", "attacks", "path"),
    [
        ("cpu", "auto", [COLLISION], PLAIN),
        ("mps", "auto", [COLLISION], PLAIN),
        ("cuda", "float32", [COLLISION], PLAIN),
        ("cuda", "auto", [], PLAIN),
        ("cuda", "auto", [SHORT, SUITE | {"budget": "quick"}], PLAIN),
        ("cuda:1", "auto", [SHORT, SCORE], "float32, prepared copies of the networks for the steps of admit"),
        ("cuda", "auto", [SUITE], "float32, prepared copies of the networks for the steps of worst case, standard"),
        (
            "cuda",
            "auto",
            [COLLISION, SCORE],
            "float32, prepared copies of the networks for the steps of collide logits, admit, at most 97% of them in "
            "bf16 in collide logits",
        ),
    ],
)
def test_the_path_is_named_with_the_attacks_that_take_it(
    device: str, precision: Any, attacks: list[dict[str, Any]], path: str
) -> None:
    assert precision_path(torch.device(device), precision, attack_plans(attacks), SETS) == path


def test_the_manifest_carries_it() -> None:
    about: dict[str, Any] = {"seed": 0, "networks": {}, "sets": SETS, "attacks": (), "precision": "float32"}
    assert manifest_of(device=torch.device("cpu"), **about)["precision"] == PLAIN
