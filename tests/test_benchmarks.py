"""What the benchmarks of generative models do with their time and with what an earlier call left."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_models import one_thread

assert one_thread

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def test_a_time_is_as_many_whole_epochs_as_fit_and_else_a_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = benchmark("pace", monkeypatch)
    assert pace.within(80, images=160, batch=10) == (5, 160)
    assert pace.within(16, images=155, batch=10) == (1, 155)
    assert pace.within(15.9, images=160, batch=10) == (1, 150)
    assert pace.within(0.0, images=160, batch=10) == (1, 10)


def test_the_trial_counts_and_a_margin_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, clock = benchmark("pace", monkeypatch), [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock[0])

    def fit(epochs: int) -> None:
        clock[0] += 3 + 2 * epochs  # three seconds to begin with, then two batches of a second each

    spent = 5 + 5 + 11
    assert pace.epochs_within(spent + 88.5, fit, trial=2, images=160, batch=10) == (5, 160)
    assert clock[0] == spent


def reconstruction(out: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> tuple[ModuleType, dict[str, object]]:
    """A tiny run on the embedded images, with an attack that only makes things worse beside the collision."""
    module = benchmark("reconstruction", monkeypatch)
    options = {"fit": "48", "held-out": "8", "epochs": "1", "batch-size": "16", "width": "2", "latent": "4"}
    options |= {"count": "6", "steps": "3", "worst": "0", "parts": "autoencoder", "detectors": "autoencoder, l2"}
    arguments = [part for key, value in (options | changes).items() for part in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["reconstruction.py", "embedded", str(out), *arguments])
    monkeypatch.setattr(module, "attacked", lambda setting, detector, name: {"score": worse(setting, name)})
    module.main()
    return module, json.loads((out / "reconstruction.json").read_text())


def worse(setting: object, name: str) -> Tensor:
    return torch.ones_like(setting.outliers[name][0])  # type: ignore[attr-defined]


def test_what_an_earlier_call_trained_is_taken_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def width() -> int:
        about = json.loads((tmp_path / "autoencoder" / "model.json").read_text())
        return int(about["options"]["width"])

    _, first = reconstruction(tmp_path, monkeypatch)
    assert width() == 2
    reconstruction(tmp_path, monkeypatch, width="3")
    assert width() == 3
    _, taken = reconstruction(tmp_path, monkeypatch, width="4", bundle=str(tmp_path))
    assert width() == 3 and taken["training"] == [{"taken": str(tmp_path / "autoencoder")}]
    rows = first["rows"]
    assert isinstance(rows, list) and len(rows) == 2
    digits = rows[1]
    assert digits["collision"] < digits["score"] and digits["informed"] == digits["collision"]


def test_a_network_that_is_compiled_for_the_trial_is_the_one_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, compiled = benchmark("pixelcnn", monkeypatch), []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    trained, train = [], module.train_density
    monkeypatch.setattr(module, "train_density", lambda density, *rest, **more: trained.append(density) or train(density, *rest, **more))  # fmt: skip
    x = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar10_train.npz", x=x, y=np.zeros(8, dtype=np.int64))
    options = argparse.Namespace(
        data=tmp_path, out=tmp_path, fit=8, batch=4, seed=0, preset="small", blocks=0, filters=2, mixtures=1,
        dropout=None, levels=0, compile=True, seconds=3.0, epochs=1, checkpoints=None, lr=1e-3, ema=None,
        precision="float32",
    )  # fmt: skip
    folder, facts = module.trained(options, "cpu")
    assert len(compiled) == 1 and all(density.network is compiled[0] for density in trained) and len(trained) == 4
    assert (folder / "model.json").is_file() and facts["epochs"] >= 1
