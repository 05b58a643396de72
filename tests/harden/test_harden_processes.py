"""Hardening in several processes that torchrun starts: they share the training, the first one writes and prints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from small_harden import small_model, weights_in, written

from gatecrash.harden import harden_plan


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", "gatecrash", "harden", *arguments, "--device", "cpu",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_parameter_without_a_gradient_is_named_before_several_processes_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "spare_harden.py").write_text(
        "from torch import nn\n\ndef make():\n    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))\n"
        "    net[1].spare = nn.Linear(3, 3)\n    return net\n"
    )
    model = {"name": "spare_harden:make", "options": {}, "layer": None}
    plan = written(tmp_path / "plan.yaml", model=model, methods=["oe"])
    done = torchrun(tmp_path, "plan.yaml", "--out", "run", "--trust")
    assert "gatecrash: oe trains no 1.spare.weight and 1 more" in done.stderr
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    harden_plan(plan, out=tmp_path / "alone", trust=True)  # one process waits for nobody
    assert (tmp_path / "alone/oe/model.json").is_file()


def test_two_processes_make_the_models_of_one(tmp_path: Path) -> None:
    """A network without batch statistics: the gradients of the shares add up to those of the whole batch."""
    (tmp_path / "linear_harden.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))\n"
    )
    plan: dict[str, Any] = {
        "model": {"name": "linear_harden:make", "options": {}, "layer": None},
        "methods": ["ce", "oe"],
        "training": {"epochs": 2, "batch_size": 9},
    }
    written(tmp_path / "plan.yaml", **plan)
    done = torchrun(tmp_path, "plan.yaml", "--out", "run", "--json", "--trust")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)  # so one process alone has printed
    assert results == json.loads((tmp_path / "run/results.json").read_text())
    alone = harden_plan(small_model(**plan), out=tmp_path / "alone", folder=tmp_path, trust=True)
    for name in ("ce", "oe"):
        one, two = weights_in(tmp_path / "alone" / name), weights_in(tmp_path / "run" / name)
        torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
        assert not list((tmp_path / "run" / name).glob("*checkpoint*"))
    assert results["bundles"] == alone["bundles"]
