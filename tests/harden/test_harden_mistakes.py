"""`gatecrash harden` as a user meets it: the table, the listings, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_harden import ALOE, OPTIONS, small_harden, write_images, written

from gatecrash import cli
from gatecrash.audit.plan import parse_plan
from gatecrash.data import load_source
from gatecrash.fitting import Material, fit
from gatecrash.harden import EXAMPLES, HardenPlan, example_text
from gatecrash.harden.methods import METHODS
from gatecrash.harden.rehearsal import rehearse_method
from gatecrash.harden.run import job_of_harden, made_step, recipe_of
from gatecrash.training import Prepared

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gatecrash(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Exit code, standard output and standard error of a command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gatecrash", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def refused(gatecrash: Command, *arguments: str) -> str:
    """The one line that a mistake comes to."""
    code, out, err = gatecrash("harden", *arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("gatecrash: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["alo"]}, "methods.0.name: unknown method 'alo'; did you mean 'aloe'?"),
        ({"methods": ["ce:1"]}, "unknown method 'ce:1'"),
        ({"methods": []}, "methods: list should have at least 1 item"),
        ({"methods": [{"name": "ce", "eps": 0.1}]}, "methods.0: ce does not take eps; it takes nothing"),
        ({"methods": [{"name": "oe", "labels_per_class": 3}]}, "oe does not take labels_per_class; it takes weight"),
        ({"methods": [{"name": "aloe", "epz": 0.1}]}, "unknown key in methods.0 'epz'; did you mean 'eps'?"),
        ({"methods": ["aloe"]}, "methods.0: aloe needs eps"),
        ({"methods": ["temporal_ensembling"]}, "temporal_ensembling needs labels_per_class"),
        ({"methods": [{"name": "aloe", "eps": 0}]}, "methods.0.eps: input should be greater than 0, got 0"),
        ({"methods": [{"name": "adv", "eps": 2}]}, "methods.0.eps: input should be less than or equal to 1, got 2"),
        ({"methods": [{"name": "adv", "eps": "8/0"}]}, "must be a number or a fraction such as 8/255, got '8/0'"),
        ({"methods": [{"name": "adv", "eps": float("nan")}]}, "methods.0.eps"),
        ({"methods": [{"name": "oe", "weight": float("inf")}]}, "methods.0.weight: input should be a finite number"),
        ({"methods": [{"name": "oe", "weight": -1}]}, "methods.0.weight: input should be greater than or equal to 0"),
        ({"methods": [{"name": "ce", "label": "../x"}]}, "label must be at most 64 letters, digits"),
        ({"methods": [{"name": "ce", "label": "plan.yaml"}]}, "no method can be called 'plan.yaml', which is taken"),
        ({"methods": [{"name": "ce", "label": "a" * 300}]}, "label must be at most 64 letters"),
        ({"methods": [{"name": "ce", "label": ".."}]}, "since a folder is named so: '..'"),
        ({"methods": ["ce", "ce"]}, "two methods are called 'ce'; give one a label"),
        ({"methods": ["ce", {"name": "oe", "label": "CE"}]}, "two methods are called 'ce'; give one a label"),
        ({"methods": ["oe"], "data": {"outliers": []}}, "data.outliers is missing: oe must be exposed to outliers"),
        ({"methods": [{"name": "ce", "label": "Given"}]}, "no method can be called 'Given', which is taken"),
        ({"methods": ["ce", {"name": "jem", "buffer": 11}]}, "jem: a buffer of 11 samples is smaller than a batch of 12"),
        ({"training": {"epochs": True}}, "training.epochs: input should be a valid integer, got True"),
        ({"training": {"epochs": 0}}, "training.epochs: input should be greater than 0, got 0"),
        ({"training": {"lr": 0}}, "training.lr: input should be greater than 0"),
        ({"training": {"lr": float("inf")}}, "training.lr: input should be a finite number"),
        ({"training": {"epoch": 3}}, "unknown key in training 'epoch'; did you mean 'epochs'?"),
        ({"training": {"optimiser": "adam"}}, "training.optimiser: input should be 'sgd' or 'adamw', got 'adam'"),
        ({"training": {"crop": -1}}, "training.crop: input should be greater than or equal to 0"),
        ({"training": {"outliers_per_image": float("inf")}}, "training.outliers_per_image: input should be a finite"),
        ({"evaluation": {"eps": 2}}, "evaluation.eps: input should be less than or equal to 1, got 2"),
        ({"evaluation": {"detectors": []}}, "evaluation.detectors: list should have at least 1 item"),
        ({"evaluation": {"detectors": ["msp", "msp"]}}, "two detectors are called 'msp'"),
        ({"evaluation": {"detectors": ["mps"]}}, "unknown detector 'mps'; did you mean 'msp'?"),
        ({"data": {"test_outliers": {}}}, "data.test_outliers: dictionary should have at least 1 item"),
        ({"data": {"train": {"source": "fashoin:train"}}}, "unknown source 'fashoin'"),
        ({"data": {"train": {"source": "fashion:train", "limit": 0}}}, "data.train.limit: input should be greater"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"model": {"name": "bundle:x", "options": {}, "weights": "random"}}, "model.weights: bundle:x has its own"),
        ({"model": {"name": "bundle:x"}}, "model.options: bundle:x has its own; leave options out"),
        ({"model": {"name": "clip:x"}}, "model.name: a CLIP has no classes that could be trained"),
    ],
)  # fmt: skip
def test_a_plan_that_is_none(gatecrash: Command, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written(tmp_path / "plan.yaml", **changes)
    assert message in refused(gatecrash, "plan.yaml", "--out", "run")
    assert not Path("run").exists()


TOO_MANY = {"name": "temporal_ensembling", "labels_per_class": 20}
LATE = {"methods": ["ce", TOO_MANY]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "builtin:small_cn"}}, "unknown network 'small_cn'; did you mean 'small_cnn'?"),
        ({"model": {"options": OPTIONS | {"depth": 3}}}, "do not suit builtin:small_cnn"),
        ({"model": {"weights": "none.safetensors"}}, "cannot read weights none.safetensors: No such file"),
        ({"model": {"name": "bundle:none", "options": {}}}, "none is no model bundle: model.json is missing"),
        ({"model": {"options": OPTIONS | {"num_classes": 3}}}, "data.train: labels must be from 0 to 2, the network's"),
        ({"model": {"options": OPTIONS | {"num_classes": 1}}}, "logits of shape (N, classes), got (2, 1)"),
        ({"model": {"channels": 3, "mean": None, "std": None}}, "SmallCNN does not take images of shape (3, 16, 16)"),
        ({"model": {"layer": "latnet"}}, "SmallCNN has no layer 'latnet'; did you mean 'latent'"),
        ({"model": {"layer": None}, "evaluation": {"detectors": ["mahalanobis"]}}, "mahalanobis reads features: give"),
        ({"evaluation": {"detectors": [{"name": "gmm", "components": 60}]}}, "60 components need at least"),
        ({"data": {"train": {"source": "digits", "limit": 5}, "test": "noise"}}, "data.test must have labels, and noise"),
        ({"data": {"train": {"source": "noise", "limit": 5}}}, "data.train must have labels, and noise has none"),
        ({"data": {"train": "npz:negative.npz"}}, "data.train: labels must be from 0 to 9, the network's classes, got -1"),
        ({"data": {"train": "npz:gone.npz"}}, "gone.npz is not there"),
        ({"data": {"test": {"source": "digits", "limit": 5}}}, "data.train and data.test have other classes: label 0 is "),
        ({"data": {"outliers": ["npz:none.npz"]}}, "there is no image"),
        ({"model": {"size": None}}, "data.outliers has images of shape (1, 32, 32), data.train has (1, 28, 28)"),
        ({"model": {"size": None, "channels": None}, "data": {"outliers": ["npz:colour.npz", "npz:grey.npz"]}},
         "data.outliers have images of several shapes, [(1, 9, 9), (3, 9, 9)]"),
        ({"data": {"outliers": ["npz:mixed.npz"]}}, "3 of 7 outliers are among the inliers, and 2 nearly"),
        ({"data": {"outliers": [{"source": "fashion:test", "limit": 4}]}}, "4 of 4 outliers are among the inliers"),
        ({"data": {"outliers": [{"source": "digits", "limit": 3}]}},
         "3 of 10 images of data.test_outliers.digits are among data.outliers, and 0 nearly; the test must be of images"),
        ({"data": {"test_outliers": {"x": {"source": "fashion:test", "limit": 4}}}},
         "4 of 4 images of data.test_outliers.x are among data.test, and 0 nearly; they belong"),
        ({"methods": ["ce"], "data": {"outliers": [], "test_outliers": {"x": "npz:mixed.npz"}}},
         "3 of 7 images of data.test_outliers.x are among data.train, and 2 nearly; they belong"),
        ({"data": {"outliers": ["npz:noise.npz"], "test_outliers": {"x": "npz:nearly.npz"}}},
         "0 of 4 images of data.test_outliers.x are among data.outliers, and 3 nearly; the test must be of images"),
        ({"training": {"crop": 16}}, "training.crop must be less than the side of the images, 16, got 16"),
        (LATE, "images, fewer than 20"),
        ({"methods": ["ce", "confident"]}, "the GAN makes images of 32×32, the training images have (16, 16)"),
        ({"training": {"lr": 1e30}}, "in batch 2 of epoch 1"),
        ({"data": {"balance": 2, "train": {"source": "noise", "limit": 4}}}, "data.train must have labels"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_carried_out_leaves_no_trace(
    gatecrash: Command, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = torch.Generator().manual_seed(0)
    write_images(tmp_path / "negative.npz", torch.rand(4, 1, 16, 16, generator=given), torch.tensor([0, -1, 2, 3]))
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 1, 16, 16), dtype=np.float32))
    write_images(tmp_path / "colour.npz", torch.rand(2, 3, 9, 9, generator=given))
    write_images(tmp_path / "grey.npz", torch.rand(2, 1, 9, 9, generator=given))
    train = load_source("fashion:train", limit=24, channels=1, size=16).x
    nearly = (train[10:12] + 0.01 * torch.rand(2, 1, 16, 16, generator=given)).clamp(0, 1)
    write_images(tmp_path / "mixed.npz", torch.cat([train[:3], nearly, torch.rand(2, 1, 16, 16, generator=given)]))
    noise = torch.rand(4, 1, 16, 16, generator=given)
    write_images(tmp_path / "noise.npz", noise)
    write_images(tmp_path / "nearly.npz", torch.cat([(noise[:3] + 0.01).clamp(0, 1), 1 - noise[3:]]))
    written(tmp_path / "plan.yaml", **changes)
    assert message in refused(gatecrash, "plan.yaml", "--out", "run")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:googlenet", "GoogLeNet gives several outputs in training (GoogLeNetOutputs), and the logits"),
        ("torchvision:inception_v3", "Inception3 fails on the training images: "),
        ("odd_harden:odd", "Odd fails on the training images: not in training"),
    ],
)
def test_what_a_network_cannot_do_in_training_is_one_line(
    gatecrash: Command, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "odd_harden.py").write_text(
        "from torch import nn\n\nclass Odd(nn.Sequential):\n    def forward(self, x):\n        if self.training:\n"
        "            raise RuntimeError('not in\\ntraining')\n        return super().forward(x)\n\n"
        "def odd():\n    return Odd(nn.Flatten(), nn.Linear(3 * 75 * 75, 10))\n"
    )
    auxiliary = name.startswith("torchvision")
    options = {"init_weights": False, "num_classes": 10} if auxiliary else {}
    model = {"name": name, "options": options, "layer": None, "channels": 3, "mean": None, "std": None, "resize": 75}
    written(tmp_path / "plan.yaml", model=model, methods=["ce"])
    said = refused(gatecrash, "plan.yaml", "--out", "run", "--trust")
    assert message in said and ("give options: {aux_logits: false}" in said) == auxiliary
    assert not Path("run").exists()


def test_a_mistake_in_the_second_method_costs_no_training(gatecrash: Command, tmp_path: Path) -> None:
    """Known before the first is trained: the folder would hold its model otherwise."""
    written(tmp_path / "plan.yaml", **LATE)
    refused(gatecrash, "plan.yaml", "--out", "run")
    assert not Path("run").exists()


def test_an_empty_folder_of_the_users_stays(gatecrash: Command, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    written(tmp_path / "plan.yaml", training={"lr": 1e30}, methods=["ce"])
    assert "lr" in refused(gatecrash, "plan.yaml", "--out", "run")
    assert not Path("run").exists() or not list(Path("run").iterdir())
    written(tmp_path / "plan.yaml", methods=["ce"])
    assert gatecrash("harden", "plan.yaml", "--out", "run")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which plan? gatecrash harden PLAN.yaml"),
        (("none.yaml",), "cannot read plan none.yaml"),
        (("list.yaml",), "list.yaml must be a mapping with the keys model, data, methods"),
        (("evil.yaml",), "evil.yaml has a tag that plans may not have in line 1"),
        (("plan.yaml", "--device", "tpu"), "device must be auto, cpu, cuda or mps, got 'tpu'"),
        (("plan.yaml", "--out", "file"), "file is a file; --out must name a folder"),
        (("plan.yaml", "--out", "full"), "full holds other files and no run"),
        (("plan.yaml", "--out", "full", "--resume"), "full holds other files and no run"),
        (("plan.yaml", "--out", "file/run"), "Not a directory"),
        (("--example", "dmo"), "there is no example 'dmo'; there are demo, jem, ccu, confident, cifar10"),
        (("plan.yaml", "--reusme"), "No such option"),
    ],
)  # fmt: skip
def test_a_command_that_is_none(gatecrash: Command, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    written(tmp_path / "plan.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "evil.yaml").write_text("!!python/object/apply:os.system ['true']\n")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    assert message in refused(gatecrash, *arguments)
    assert not Path("runs").exists() and (tmp_path / "full/mine.txt").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there(gatecrash: Command, tmp_path: Path) -> None:
    written(tmp_path / "plan.yaml")
    message = refused(gatecrash, "plan.yaml", "--device", "cuda")
    assert "device 'cuda' was asked for, but this machine has none" in message
    assert not Path("runs").exists()


def test_the_table_and_where_the_models_are(gatecrash: Command, tmp_path: Path) -> None:
    written(tmp_path / "mine.yaml", data={"test_outliers": {"[red]x": {"source": "digits", "limit": 5}}})
    code, out, _ = gatecrash("harden", "mine.yaml")
    results = json.loads((tmp_path / "runs/mine/results.json").read_text())
    lines = out.splitlines()
    for row in results["rows"]:
        (line,) = (line for line in lines if f"│ {row['method']} " in line)
        shown = [
            f"{row['accuracy']:.3f} → {row['pgd_accuracy']:.3f}",
            f"{row['auroc']:.3f} → {row['attacked_auroc']:.3f}",
            f"{row['fpr95']:.3f} → {row['attacked_fpr95']:.3f}",
            f"{row['detection_error']:.3f} → {row['attacked_detection_error']:.3f}",
        ]
        assert all(part in line for part in ["msp", "[red]x", *shown])
    assert code == 0 and lines[-2:] == ["ce: model bundle:runs/mine/ce", "aloe: model bundle:runs/mine/aloe"]
    assert "8/255" in out and "1/255" in out
    code, out, _ = gatecrash("harden", "mine.yaml", "--resume", "--json")
    assert code == 0 and json.loads(out) == results
    assert "holds another run" in refused(gatecrash, "mine.yaml")


def test_without_a_plain_model_one_line_says_how_to_get_it(gatecrash: Command, tmp_path: Path) -> None:
    sentence = "ce among the methods gives the plain model to compare with"
    written(tmp_path / "alone.yaml", methods=[ALOE])
    assert sentence in gatecrash("harden", "alone.yaml")[1].splitlines()
    written(tmp_path / "both.yaml", methods=[ALOE, {"name": "ce", "label": "usual"}])
    assert sentence not in gatecrash("harden", "both.yaml")[1]
    plain = [json.loads((tmp_path / f"runs/{name}/results.json").read_text())["plain"] for name in ("alone", "both")]
    assert plain == [None, "usual"]


def test_the_methods_are_listed(gatecrash: Command) -> None:
    code, out, _ = gatecrash("harden", "--list", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0 and list(entries) == list(METHODS)
    assert entries["aloe"]["takes"] == "eps, step, steps, weight" and entries["aloe"]["outliers"] == "needed"
    assert entries["ce"]["takes"] == "nothing" and entries["adv"]["outliers"] == "no"
    code, out, _ = gatecrash("harden", "--list")
    assert code == 0 and all(name in out for name in METHODS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_plans(gatecrash: Command, name: str) -> None:
    code, out, _ = gatecrash("harden", "--example", name)
    assert code == 0 and out.rstrip("\n") == example_text(name).rstrip("\n")
    plan = parse_plan(out, name, HardenPlan)
    eps = 1 / 255 if name == "cifar10" else 8 / 255
    attacked = [method for method in plan.methods if method.eps is not None]
    last = name if name in METHODS else "aloe"
    assert plan.methods[-1].name == last and all(method.eps == pytest.approx(eps) for method in attacked)
    assert plan.methods[0].name == "ce" and plan.evaluation.eps == pytest.approx(eps) and plan.evaluation.steps == 10
    assert (plan.evaluation.pgd_eps, plan.evaluation.pgd_steps) == (pytest.approx(1 / 255), 10)


@pytest.mark.parametrize("name", ["jem", "confident"])
def test_examples_of_generative_models_pass_the_rehearsal_and_are_small(name: str) -> None:
    plan = parse_plan(example_text(name), name, HardenPlan)
    job = job_of_harden(plan, Path(), torch.device("cpu"))
    rehearse_method(job, plan.methods[-1])
    assert len(job.train) == 6000 and sum(part.numel() for part in job.network().model.parameters()) < 100_000


def test_the_joint_energy_based_example_has_no_batch_norm_and_learns_without_its_loss_running_away() -> None:
    plan = parse_plan(example_text("jem"), "jem", HardenPlan)
    job = job_of_harden(plan, Path(), torch.device("cpu"))
    encoder, method = job.network(), plan.methods[-1]
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in encoder.modules())
    y, recipe = job.train.y, replace(recipe_of(job), epochs=3)
    assert y is not None
    history = fit(Prepared(encoder), made_step(job, method, encoder), Material(job.train.x[:256], y[:256]), recipe)
    assert all(abs(row["loss"]) < 5 for row in history)
    assert history[-1]["accuracy"] > history[0]["accuracy"]


def test_the_resolved_plan_is_a_plan(gatecrash: Command, tmp_path: Path) -> None:
    written(tmp_path / "plan.yaml", methods=["ce", {**ALOE, "label": "mine"}])
    assert gatecrash("harden", "plan.yaml", "--out", "run")[0] == 0
    again = yaml.safe_load((tmp_path / "run/mine/plan.yaml").read_text())
    assert again["training"]["momentum"] == 0.9 and again["methods"][1]["eps"] == pytest.approx(8 / 255)
    code, _, err = gatecrash("harden", "run/mine/plan.yaml", "--out", "again")
    assert code == 0, err
    assert (tmp_path / "run/results.json").read_text() == (tmp_path / "again/results.json").read_text()
    assert small_harden()["seed"] == again["seed"]
