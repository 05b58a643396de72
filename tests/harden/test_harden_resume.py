"""A run that ends early goes on where it was, to the same weights, and mixes with no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from small_harden import ALOE, OPTIONS, small_model, weights_in, write_images, written
from torch import nn

from gatecrash.fitting import Batch, Outcome
from gatecrash.harden import harden_plan
from gatecrash.harden import main as harden_main
from gatecrash.harden import run as harden_run
from gatecrash.networks import NETWORKS, save_weights
from gatecrash.training.exposure import Exposure

PLAN: dict[str, Any] = {
    "methods": ["ce", ALOE],
    "training": {"epochs": 3, "batch_size": 12, "ema": 0.5, "crop": 1, "flip": True},
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without an interruption."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    harden_plan(small_model(**PLAN), out=folder)
    return folder


def assert_same(folder: Path, straight: Path) -> None:
    """Weights bit for bit, numbers, and no file more or less."""
    for name in ("ce", "aloe"):
        there, here = weights_in(straight / name), weights_in(folder / name)
        assert all(torch.equal(there[key], here[key]) for key in there), name
        assert (folder / name / "epochs.csv").read_text() == (straight / name / "epochs.csv").read_text()
    assert (folder / "results.json").read_text() == (straight / "results.json").read_text()
    assert files_in(folder) == files_in(straight)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name)


def stopping(monkeypatch: pytest.MonkeyPatch, when: Callable[[Exposure, Batch], bool], error: BaseException) -> None:
    """Every step raises an error once `when` says so; the rehearsal's step, which is of epoch 0, is left alone."""
    real = Exposure.__call__

    def step(self: Exposure, model: nn.Module, batch: Batch) -> Outcome:
        if when(self, batch):
            raise error
        return real(self, model, batch)

    monkeypatch.setattr(Exposure, "__call__", step)


def second_method(step: Exposure, batch: Batch) -> bool:
    return step.outliers == "attacked" and batch.epoch == 2


def test_a_killed_process_resumes_to_the_same_weights(tmp_path: Path, straight: Path) -> None:
    path = written(tmp_path / "plan.yaml", **PLAN)
    script = f"""
import os, signal, torch
torch.set_num_threads(1)
from gatecrash.training.exposure import Exposure
from gatecrash.harden import harden_plan
real = Exposure.__call__
def step(self, model, batch):
    if self.outliers == "attacked" and batch.epoch == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, model, batch)
Exposure.__call__ = step
harden_plan({str(path)!r}, out={str(tmp_path / "run")!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run/ce/model.json").is_file() and (tmp_path / "run/aloe/checkpoint.json").is_file()
    assert not (tmp_path / "run/aloe/model.json").exists()
    before = (tmp_path / "run/ce/model.safetensors").stat().st_mtime_ns
    harden_plan(path, out=tmp_path / "run", resume=True)
    assert (tmp_path / "run/ce/model.safetensors").stat().st_mtime_ns == before
    assert_same(tmp_path / "run", straight)


def test_what_is_finished_is_neither_trained_nor_evaluated_again(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stopping(patch, second_method, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            harden_plan(small_model(**PLAN), out=tmp_path / "run")
    done: list[str] = []
    fit, evaluated = harden_run.fit, harden_main.evaluated
    monkeypatch.setattr(harden_run, "fit", lambda *a, **k: (done.append(k["folder"].name), fit(*a, **k))[1])
    monkeypatch.setattr(harden_main, "evaluated", lambda *a, **k: (done.append(f"{a[0]} table"), evaluated(*a, **k))[1])
    with pytest.raises(ValueError, match="holds another run; choose another --out, or go on with it: --resume"):
        harden_plan(small_model(**PLAN), out=tmp_path / "run")
    first = harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True)
    assert done == ["aloe", "aloe table"]
    assert_same(tmp_path / "run", straight)
    before = (tmp_path / "run/results.json").stat().st_mtime_ns
    assert harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True) == first
    assert done == ["aloe", "aloe table"] and (tmp_path / "run/results.json").stat().st_mtime_ns == before
    assert not list((tmp_path / "run").rglob("*checkpoint*"))


@pytest.mark.parametrize("place", ["weights", "manifest", "complete", "table", "results"])
def test_a_kill_while_a_bundle_is_written_costs_nothing(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The process ends before a file, or right after the one that makes the bundle complete."""
    names = {"manifest": "manifest.json", "table": "evaluation.json", "results": "results.json"}
    with monkeypatch.context() as patch:
        for module in (harden_run, harden_main):
            write = module.write_text

            def stopped(path: Path, text: str, write: Callable[[Path, str], None] = write) -> None:
                if Path(path).name == names.get(place):
                    raise KeyboardInterrupt
                write(path, text)
                if place == "complete" and Path(path).name == "model.json":
                    raise KeyboardInterrupt

            patch.setattr(module, "write_text", stopped)
        if place == "weights":
            patch.setattr(harden_run, "save_weights", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            harden_plan(small_model(**PLAN), out=tmp_path / "run")
    harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", straight)


def test_a_kill_at_the_very_beginning_leaves_a_folder_that_can_be_used(tmp_path: Path, straight: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "begun.json").write_text("{")
    (folder / ".plan.abc.yaml").write_text("mod")
    harden_plan(small_model(**PLAN), out=folder)
    assert (folder / "results.json").read_text() == (straight / "results.json").read_text()


def test_a_loss_that_is_not_finite_keeps_the_last_good_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Exposure.__call__

    def step(self: Exposure, model: nn.Module, batch: Batch) -> Outcome:
        outcome = real(self, model, batch)
        return Outcome(outcome.loss * float("nan"), outcome.facts) if batch.epoch == 1 else outcome

    with monkeypatch.context() as patch:
        patch.setattr(Exposure, "__call__", step)
        with pytest.raises(
            ValueError, match="the loss is nan in batch 1 of epoch 2; the checkpoint of epoch 1 is kept"
        ):
            harden_plan(small_model(**PLAN), out=tmp_path / "run")
    state = json.loads((tmp_path / "run/ce/checkpoint.json").read_text())
    assert state["epoch"] == 1 and (tmp_path / "run/ce" / state["file"]).is_file()
    assert (tmp_path / "run/plan.yaml").is_file()
    harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True)
    assert (tmp_path / "run/results.json").is_file()


@pytest.mark.parametrize("place", ["checkpoint-2.safetensors", "checkpoint.json", "epochs.csv", "model.safetensors"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == place and (target.parent / "checkpoint.json").is_file():
            raise OSError(28, "No space left on device")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(ValueError, match=rf"^No space left on device \(.*ce/{place}\); .* kept.* --resume goes on"):
            harden_plan(small_model(**PLAN), out=tmp_path / "run")
    harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", straight)


def test_a_disk_that_is_full_before_an_epoch_is_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("gatecrash.fitting.checkpoint.save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: .*ce/checkpoint-1.safetensors"):
        harden_plan(small_model(**PLAN), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["plan", "images", "weights", "version", "begun"])
def test_another_run_is_refused_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    source = write_images(tmp_path / "out.npz", torch.rand(6, 1, 16, 16))
    plan = {"data": {"outliers": [source]}, "methods": ["ce"], "model": {"weights": "w.safetensors"}}
    save_weights(NETWORKS["small_cnn"](**OPTIONS), tmp_path / "w.safetensors")
    harden_plan(small_model(**plan), out=tmp_path / "run", folder=tmp_path)
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    message = f"begun with another {change}"
    if change == "plan":
        plan["seed"] = 2
    elif change == "images":
        write_images(tmp_path / "out.npz", torch.rand(6, 1, 16, 16))
        message = "begun with other images"
    elif change == "weights":
        save_weights(NETWORKS["small_cnn"](**OPTIONS), tmp_path / "w.safetensors")
        message = "begun with other weights"
    elif change == "version":
        monkeypatch.setattr(harden_main, "code_hash", lambda: "another")
    else:
        (tmp_path / "run/begun.json").write_text("[1")
        kept[tmp_path / "run/begun.json"] = b"[1"
        message = "begun.json cannot be read"
    with pytest.raises(ValueError, match=message):
        harden_plan(small_model(**plan), out=tmp_path / "run", folder=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == kept


def test_a_damaged_checkpoint_or_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stopping(patch, second_method, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            harden_plan(small_model(**PLAN), out=tmp_path / "run")
    (held,) = (tmp_path / "run/aloe").glob("checkpoint-*.safetensors")
    held.write_bytes(held.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"^the checkpoint in .*aloe is damaged"):
        harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True)
    (tmp_path / "run/ce/model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"model\.safetensors are truncated"):
        harden_plan(small_model(**PLAN), out=tmp_path / "run", resume=True)
    assert (tmp_path / "run/aloe/checkpoint.json").is_file()
