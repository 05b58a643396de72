"""Compiled code is there for the next run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import json, torch
from torch import nn
from torch._dynamo.utils import counters
from gatecrash.encoder import Encoder
from gatecrash.prepared import preparing
from gatecrash.speed import at_pace

torch.manual_seed(0)
encoder = Encoder(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
x = torch.rand(64, 3, 8, 8, requires_grad=True)
with preparing(devices=("cpu",), compile_after=0), at_pace("half"):
    torch.autograd.grad(encoder(x).sum(), x)
print(json.dumps(counters["inductor"]))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("COVERAGE_PROCESS_START", None)
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"] == 2  # forward and backward
    assert "fxgraph_cache_miss" not in second
