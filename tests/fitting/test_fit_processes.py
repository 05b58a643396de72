"""Several processes, with gloo on the CPU, against one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_toys import Plain, linear, material, network, same, weights
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gatecrash.encoder import Encoder
from gatecrash.fitting import Material, Recipe, Step, fit, make_fabric, seeded
from gatecrash.training.confident import ConfidentClassifier
from gatecrash.training.exposure import Exposure
from gatecrash.training.temporal import TemporalEnsembling, few_labels

DATA = material(23, outliers=15, dtype=torch.float64)
ODD = Material(DATA.x, DATA.y, DATA.outliers, outliers_per_image=1.4)


def forked(work: Any, *arguments: Any) -> Any:
    """What the first of two processes gives back."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    return fabric.launch(work, *arguments)


def shared(fabric: Fabric, step_for: Any, data: Material, recipe: Recipe, make: Any, folder: Path) -> Any:
    """Train in two processes; history, weights, and every process's own weights as files."""
    model = make()
    step = step_for(model)
    history = fit(model, step, data, recipe, fabric=fabric, folder=folder, resume=True)
    save_file(weights(model), folder / f"rank{fabric.global_rank}.safetensors")
    save_file(step.state() or {"none": torch.zeros(1)}, folder / f"step{fabric.global_rank}.safetensors")
    fabric.barrier()
    return history


def exposed(model: nn.Module) -> Step:
    return Exposure(Encoder(model), outliers="plain", weight=0.7)


def temporal(model: nn.Module) -> Step:
    return TemporalEnsembling(few_labels(DATA.y, 4, seed=0), 3, ramp=2, weight=20)


def close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("step_for", "ema"), [(exposed, None), (temporal, 0.8)], ids=["oe", "temporal"])
def test_two_processes_learn_what_one_learns(step_for: Any, ema: float | None, tmp_path: Path) -> None:
    """23 images and 11 outliers, which two cannot share evenly: every image must count the same all the same."""
    recipe = Recipe(epochs=4, batch_size=8, lr=0.3, clip=0.6, ema=ema)
    alone = linear()
    history = fit(alone, step_for(alone), ODD, recipe)
    together = forked(shared, step_for, ODD, recipe, linear, tmp_path)
    tolerance = 1e-12 if step_for is exposed else 1e-6  # the ensemble is in single precision
    for rank in range(2):
        close(load_file(tmp_path / f"rank{rank}.safetensors"), weights(alone), tolerance)
    for here, there in zip(history, together, strict=True):
        for name in ("epoch", "loss", "accuracy"):
            assert there[name] == pytest.approx(here[name], rel=1e-6)
    assert same(load_file(tmp_path / "step0.safetensors"), load_file(tmp_path / "step1.safetensors"))


def stopped(fabric: Fabric, step_for: Any, data: Material, recipe: Recipe, make: Any, folder: Path) -> Any:
    """The same, given up in the third epoch."""

    def quit_after(_: nn.Module) -> dict[str, float]:
        if (folder / "checkpoint-2.safetensors").is_file():
            raise KeyboardInterrupt
        return {}

    model = make()
    try:
        fit(model, step_for(model), data, recipe, fabric=fabric, folder=folder, evaluate=quit_after)
    except KeyboardInterrupt:
        fabric.barrier()


def test_two_processes_resume_what_two_began_with_batch_statistics_and_an_ensemble(tmp_path: Path) -> None:
    data = material(23)
    recipe = Recipe(epochs=4, batch_size=8, lr=0.1, ema=0.7)
    (tmp_path / "whole").mkdir()
    whole = forked(shared, temporal, data, recipe, network, tmp_path / "whole")
    forked(stopped, temporal, data, recipe, network, tmp_path / "cut")
    assert (tmp_path / "cut" / "checkpoint-2.safetensors").is_file()
    assert forked(shared, temporal, data, recipe, network, tmp_path / "cut") == whole
    ends = [load_file(tmp_path / run / f"rank{rank}.safetensors") for run in ("whole", "cut") for rank in range(2)]
    assert all(same(ends[0], end) for end in ends[1:])


def pooled() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16, 2))


def beside_a_gan(model: nn.Module) -> Step:
    return ConfidentClassifier(Encoder(model), 1, width=2, seed=0)


def test_two_processes_train_one_gan(tmp_path: Path) -> None:
    """Each has its own images and noise, so without averaged gradients there would soon be two of them."""
    x = torch.rand(8, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    forked(shared, beside_a_gan, Material(x, torch.arange(8) % 2), Recipe(2, 4, lr=0.01), pooled, tmp_path)
    fresh = ConfidentClassifier(Encoder(pooled()), 1, width=2, seed=0)
    ends = [load_file(tmp_path / f"step{rank}.safetensors") for rank in range(2)]
    for part, module in (("generator", fresh.generator), ("discriminator", fresh.discriminator)):
        for name, first in module.named_parameters():
            assert torch.equal(ends[0][f"{part}.{name}"], ends[1][f"{part}.{name}"])
            assert not torch.equal(ends[0][f"{part}.{name}"], first)
    assert same(*(load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)))


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from fit_toys import Plain, linear, material, weights
from gatecrash.fitting import Recipe, disband, fit, make_fabric
from safetensors.torch import save_file
fabric = make_fabric("float32", torch.device("cpu"))
assert fabric.world_size == 2
model = linear()
fit(model, Plain(), material(23, dtype=torch.float64), Recipe(epochs=2, batch_size=8, lr=0.3), fabric=fabric)
save_file(weights(model), f"{sys.argv[2]}/rank{fabric.global_rank}.safetensors")
disband(fabric)
"""


def test_torchrun_starts_the_processes_that_make_fabric_finds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "train.py"), str(Path(__file__).parent), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    alone = linear()
    fit(alone, Plain(), material(23, dtype=torch.float64), Recipe(epochs=2, batch_size=8, lr=0.3))
    for rank in range(2):
        close(load_file(tmp_path / f"rank{rank}.safetensors"), weights(alone), 1e-12)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_one_process_gets_one_device_in_the_precision_asked_for(precision: Any) -> None:
    fabric = make_fabric(precision, torch.device("cpu"))
    assert (fabric.world_size, fabric.device) == (1, torch.device("cpu"))
    with fabric.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


def test_more_processes_than_images_in_a_batch_are_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fabric, "world_size", 9)
        with pytest.raises(ValueError, match="9 processes need batches of at least 9 images"):
            fit(linear(), Plain(), DATA, Recipe(epochs=1, batch_size=8), fabric=fabric)
