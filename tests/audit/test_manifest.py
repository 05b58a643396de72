"""What a manifest says of the way numbers were computed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_audit import BOTH, finished
from torch import Tensor, nn

from gatecrash.attacks import collide
from gatecrash.audit.job import as_set
from gatecrash.audit.main import attack_plans
from gatecrash.audit.manifest import manifest_of, precision_path, with_copies
from gatecrash.ball import L2
from gatecrash.detectors import MSP
from gatecrash.encoder import Encoder
from gatecrash.prepared import preparing

SETS = {"inliers": as_set(torch.rand(2, 1, 10, 10), "grey")}
WIDE, NARROW = {"norm": "l2", "eps": 1.0}, {"norm": "linf", "eps": 1 / 255}
SHORT = {"name": "softmax", "ball": WIDE, "steps": 49}
COLLISION = {"name": "collide", "of": "logits", "ball": WIDE, "steps": 50}
SCORE = {"name": "admit", "ball": NARROW, "steps": 50}
SUITE = {"name": "worst_case", "ball": NARROW}

PLAIN = "float32, the networks as they are"
LAID_OUT = f"{PLAIN}; in attacks those with convolutions may get their channels last"
COPIES = "float32, prepared copies of the networks, where there can be one, for the steps of"


@pytest.mark.parametrize(
    ("device", "precision", "attacks", "path"),
    [
        ("cpu", "auto", [COLLISION], LAID_OUT),
        ("cpu", "float32", [COLLISION], PLAIN),
        ("mps", "auto", [COLLISION], PLAIN),
        ("cuda", "float32", [COLLISION], PLAIN),
        ("cuda", "auto", [], PLAIN),
        ("cuda", "auto", [SHORT, SUITE | {"budget": "quick"}], PLAIN),
        ("cuda:1", "auto", [SHORT, SCORE], f"{COPIES} admit"),
        ("cuda", "auto", [SUITE], f"{COPIES} worst case, standard"),
        (
            "cuda",
            "auto",
            [COLLISION, SCORE],
            f"{COPIES} collide logits, admit, at most 97% of them in bf16 in collide logits",
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


def test_a_run_that_is_over_tells_how_its_copies_ran() -> None:
    encoder, manifest = Encoder(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))), {"seed": 0}
    networks = {"Sequential 0": encoder.model}
    assert with_copies(manifest, networks) == manifest
    images = torch.rand(4, 1, 6, 6)
    with preparing(devices=("cpu",), compile_after=None):
        collide(encoder, images, images.flip(0), L2(0.5), steps=20, precision="mixed")
    told = with_copies(manifest, networks)
    assert manifest == {"seed": 0}
    ran = told["prepared_copies"]["Sequential 0"]
    assert {(copy["pace"], copy["precision"]) for copy in ran} == {
        ("half", "torch.bfloat16"),
        ("prepared", "torch.float32"),
    }
    assert json.loads(json.dumps(told)) == told


class Blocks(nn.Module):
    """A network with a chain of blocks, as a transformer has one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(36, 36), nn.Linear(36, 36))

    def forward(self, x: Tensor) -> Tensor:
        """The last block's output."""
        output: Tensor = self.blocks(x.flatten(1))
        return output


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_network_that_is_checkpointed_has_no_copies(checkpointing: bool) -> None:
    encoder = Encoder(Blocks(), checkpointing=checkpointing)
    job, _, _ = finished({"it": MSP(encoder)}, [BOTH | {"steps": 1}])
    job = replace(job, encoder=encoder, features=encoder)
    assert job.prepares is not checkpointing
    path = precision_path(torch.device("cuda"), "auto", attack_plans([COLLISION]), SETS, prepares=job.prepares)
    assert (path == PLAIN) is checkpointing
