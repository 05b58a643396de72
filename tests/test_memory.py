"""Memory that a process keeps, by the pages that it has to fetch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
import torch
from gatecrash.memory import keep_freed_memory

said = keep_freed_memory() if sys.argv[1] == "keep" else None
torch.set_num_threads(1)

network = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1))
x = torch.rand(64, 3, 32, 32, requires_grad=True)

def a_pass():
    torch.autograd.grad(network(x).square().sum(), x)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    a_pass()
before = faults()
for _ in range(5):
    a_pass()
print(json.dumps([said, faults() - before]))
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is meant")


def run(argument: str, **changes: str) -> tuple[bool | None, int]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment | changes)
    said, faults = json.loads(done.stdout)
    return said, faults


@glibc
def test_a_pass_finds_the_memory_of_the_pass_before() -> None:
    (said, few), (_, many) = run("keep"), run("leave")
    assert said is True
    assert few < many / 5 and many > 5000


@glibc
def test_who_said_otherwise_is_left_alone() -> None:
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] is False
    assert run("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0] is False


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gatecrash.memory import keep_freed_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert keep_freed_memory() is False
