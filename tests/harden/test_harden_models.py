"""What hardening leaves behind: a model per method, which an audit reads as the network that was trained."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from small_harden import ALOE, OPTIONS, small_harden, small_model, weights_in, write_images, written
from torch import Tensor

from gatecrash.audit import audit_plan
from gatecrash.audit.models import bundled, completed, load_model
from gatecrash.audit.plan import ModelPlan, read_plan
from gatecrash.data import fingerprint, load_source
from gatecrash.detectors import CCU
from gatecrash.encoder import Encoder
from gatecrash.harden import HardenPlan, harden_plan
from gatecrash.harden.methods import METHODS
from gatecrash.harden.run import job_of_harden
from gatecrash.metrics import auroc
from gatecrash.networks import NETWORKS, PRETRAINED, hash_of, save_weights
from gatecrash.objective import single
from gatecrash.training import gan_samples, load_generator
from gatecrash.training.prepared import Prepared

OPTIONS_OF: dict[str, dict[str, Any]] = {
    "adv": {"eps": "8/255", "steps": 1},
    "aoe": {"eps": "8/255", "steps": 1, "weight": 1},
    "aloe": {"eps": "8/255", "steps": 1},
    "temporal_ensembling": {"labels_per_class": 1, "ramp": 2},
    "jem": {"steps": 2, "buffer": 20},
    "ccu": {"components": 2},
    "confident": {"width": 4, "weight": 0.5},
}
STILL = {"lr": 1e-30, "weight_decay": 0, "momentum": 0}


@pytest.fixture(scope="module")
def every_method(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every method, on images of the side that the GAN makes."""
    folder = tmp_path_factory.mktemp("every")
    model = {"options": OPTIONS | {"size": 32}, "size": 32}
    methods = [{"name": name, **OPTIONS_OF.get(name, {})} for name in METHODS]
    train = {"source": "fashion:train", "limit": 24}
    plan = small_model(model=model, data={"train": train}, methods=methods, training={"batch_size": 12})
    results = harden_plan(plan, out=folder / "run")
    assert [row["method"] for row in results["rows"]] == list(METHODS) == list(results["bundles"])
    return folder / "run"


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_leaves_a_model_that_an_audit_reads(every_method: Path, name: str) -> None:
    asked = ModelPlan(name=f"bundle:{name}")
    model, about = load_model(asked, every_method), completed(asked, every_method)
    trained = weights_in(every_method / name)
    assert {key: tensor.tolist() for key, tensor in model.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in trained.items()
    }
    assert (about.layer, about.mean, about.std, about.channels, about.size) == ("latent", [0.3], [0.35], 1, 32)
    assert json.loads((every_method / name / "model.json").read_text())["classes"][1] == "Trouser"
    manifest = json.loads((every_method / name / "manifest.json").read_text())
    assert manifest["weights_sha256"] == hash_of(model)
    assert manifest["method"]["name"] == name and manifest["seed"] == 1
    (epoch,) = manifest["epochs"]
    (logged,) = csv.DictReader((every_method / name / "epochs.csv").open())
    assert epoch["epoch"] == 1 and float(logged["loss"]) == epoch["loss"] > 0
    assert not list((every_method / name).glob("*checkpoint*"))
    read = read_plan(every_method / name / "plan.yaml", HardenPlan)
    assert read == read_plan(every_method / "plan.yaml", HardenPlan) and read.methods[0].name == "ce"


def test_methods_differ_and_say_what_they_learnt_from(every_method: Path) -> None:
    weights = {name: weights_in(every_method / name)["fc.weight"] for name in METHODS}
    for name, other in ((a, b) for a in METHODS for b in METHODS if a < b):
        assert not torch.equal(weights[name], weights[other]), (name, other)
    columns = {name: next(csv.reader((every_method / name / "epochs.csv").open())) for name in METHODS}
    assert {name for name in METHODS if "loss out" in columns[name]} == {"oe", "aoe", "aloe", "ccu"}
    assert {name for name in METHODS if "attack success" in columns[name]} == {"adv", "aoe", "aloe"}
    assert {name for name in METHODS if "outlier attack gain" in columns[name]} == {"aloe"}
    data = {name: json.loads((every_method / name / "manifest.json").read_text())["data"] for name in METHODS}
    assert {name for name in METHODS if "outliers" in data[name]} == {"oe", "aoe", "aloe", "ccu"}
    train = load_source("fashion:train", limit=24, channels=1, size=32)
    assert data["oe"]["train"]["sha256"] == fingerprint(train) and data["oe"]["outliers"]["n"] == 10


def test_the_table_is_of_the_network_in_the_bundle(every_method: Path) -> None:
    test = load_source("fashion:test", limit=12, channels=1, size=32)
    for row in json.loads((every_method / "results.json").read_text())["rows"]:
        encoder = Encoder(load_model(ModelPlan(name=f"bundle:{row['method']}"), every_method), None, [0.3], [0.35])
        with torch.no_grad():
            right = single(encoder(test.x)).argmax(dim=1) == test.y
        assert row["accuracy"] == pytest.approx(float(right.double().mean()))


def test_an_audit_takes_a_model_by_its_folder_and_needs_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatecrash.report.write_report", lambda bundle: bundle.report, raising=False)
    hardened = harden_plan(small_model(methods=["ce"]), out=tmp_path / "run")["rows"][0]
    plan = {
        "model": "bundle:run/ce",
        "data": {"inliers": small_harden()["data"]["test"], "outliers": small_harden()["data"]["test_outliers"]},
        "detectors": ["msp"],
    }
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(plan))
    (row,) = audit_plan(tmp_path / "audit.yaml", out=tmp_path / "audit")["rows"]
    assert (row["auroc"], row["fpr95"]) == (hardened["auroc"], hardened["fpr95"])


def test_an_audit_takes_the_mixtures_that_were_trained_with_a_network(
    every_method: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatecrash.report.write_report", lambda bundle: bundle.report, raising=False)
    plan = {
        "model": {"name": f"bundle:{every_method / 'ccu'}"},
        "data": {
            "inliers": {"source": "fashion:test", "limit": 8},
            "outliers": {"noise": {"source": "noise", "limit": 6}},
        },
        "detectors": [{"name": "ccu", "bundle": str(every_method / "ccu")}],
        "attacks": [{"name": "admit", "ball": {"norm": "linf", "eps": ["1/255", "4/255"]}, "steps": 3}],
    }
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(plan))
    rows = audit_plan(tmp_path / "audit.yaml", out=tmp_path / "audit")["rows"]
    assert [("certified_auroc" in row, row["side"]) for row in rows] == [(False, "none"), (True, "out"), (True, "out")]
    assert all(row["certified_auroc"] <= row["auroc"] for row in rows[1:])
    encoder = Encoder(load_model(ModelPlan(name="bundle:ccu"), every_method), None, [0.3], [0.35])
    detector = CCU(encoder, bundle=str(every_method / "ccu"))
    inside = detector.scores(load_source("fashion:test", limit=8, channels=1, size=32).x)
    noise = load_source("noise", limit=6, channels=1, size=32, seed=0).x
    assert rows[0]["auroc"] == auroc(inside, detector.scores(noise))
    assert rows[2]["certified_auroc"] == auroc(inside, detector.score_bound(noise, 4 / 255, "linf").float())


def test_the_generator_of_a_confident_classifier_is_kept(every_method: Path) -> None:
    generator = load_generator(every_method / "confident")
    assert generator[0].weight.shape[1] == 4 * OPTIONS_OF["confident"]["width"]
    made = gan_samples(generator, 3)
    assert made.shape == (3, 1, 32, 32)
    assert not torch.equal(made[0], made[1])


def as_logits(folder: Path, name: str, x: Tensor) -> Tensor:
    """What a bundle's network makes of images that are normalised already."""
    with torch.no_grad():
        logits: Tensor = load_model(ModelPlan(name=name), folder)(x)
    return logits


def test_training_begins_with_the_weights_of_a_file(tmp_path: Path) -> None:
    torch.manual_seed(5)
    begun = NETWORKS["small_cnn"](**OPTIONS).eval()
    save_weights(begun, tmp_path / "begun.safetensors")
    plan = small_model(model={"weights": "begun.safetensors"}, methods=["ce", ALOE], training=STILL)
    harden_plan(plan, out=tmp_path / "run", folder=tmp_path)
    for name in ("ce", "aloe"):
        weights = weights_in(tmp_path / "run" / name)
        for key, parameter in begun.named_parameters():
            torch.testing.assert_close(weights[key], parameter.detach(), rtol=0, atol=1e-20)
        assert not torch.equal(weights["conv1.1.running_mean"], begun.state_dict()["conv1.1.running_mean"])


@pytest.mark.parametrize("kind", ["file", "bundle"])
def test_a_model_that_was_given_is_the_first_row_of_the_table(tmp_path: Path, kind: str) -> None:
    """A rate of 10⁻³⁰ moves batch statistics alone; in the given row not even these have moved."""
    first = harden_plan(small_model(methods=["ce"]), out=tmp_path / "first")
    model = {"weights": "first/ce/model.safetensors"}
    plan = small_harden(model=model, methods=[ALOE], training={"lr": 1e-30, "epochs": 2})
    if kind == "bundle":
        plan["model"] = {"name": "bundle:first/ce"}
    results = harden_plan(HardenPlan.model_validate(plan), out=tmp_path / "run", folder=tmp_path)
    assert [row["method"] for row in results["rows"]] == ["given", "aloe"]
    assert results["rows"][0] == first["rows"][0] | {"method": "given"} and first["plain"] == "ce"
    assert results["rows"][1]["auroc"] != results["rows"][0]["auroc"]
    assert results["plain"] == "given" and results["bundles"] == {"aloe": "aloe"}


def test_training_begins_with_the_weights_that_the_package_carries(tmp_path: Path) -> None:
    model = {"weights": "default", "options": {}, "size": 56, "mean": [0.2869], "std": [0.3377]}
    plan = small_model(model=model, methods=["ce"], training=STILL)
    results = harden_plan(plan, out=tmp_path / "run")
    begun = PRETRAINED["fashion_small_cnn"].load()
    weights = weights_in(tmp_path / "run/ce")
    for key, parameter in begun.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=0, atol=1e-20)
    assert results["rows"][0]["accuracy"] > 0.5  # a tenth at random
    assert bundled(tmp_path / "run/ce").weights == "model.safetensors"


def test_a_network_without_weights_begins_where_the_seed_says(tmp_path: Path) -> None:
    def begun(seed: int) -> dict[str, Tensor]:
        plan = small_model(methods=["ce"], training=STILL, seed=seed)
        harden_plan(plan, out=tmp_path / f"{seed}")
        return weights_in(tmp_path / f"{seed}" / "ce")

    torch.manual_seed(7)
    expected = NETWORKS["small_cnn"](**OPTIONS).state_dict()
    torch.manual_seed(8)
    before = torch.random.get_rng_state()
    assert torch.equal(begun(7)["fc.weight"], expected["fc.weight"])
    assert not torch.equal(begun(9)["fc.weight"], expected["fc.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_bundle_is_trained_on_and_is_not_wrapped(tmp_path: Path) -> None:
    harden_plan(small_model(methods=["ce"]), out=tmp_path / "first")
    plan = small_harden(methods=["ce"], training=STILL) | {"model": {"name": "bundle:first/ce"}}
    harden_plan(HardenPlan.model_validate(plan), out=tmp_path / "second", folder=tmp_path)
    first, second = weights_in(tmp_path / "first/ce"), weights_in(tmp_path / "second/ce")
    assert torch.equal(first["fc.weight"], second["fc.weight"])
    (tmp_path / "first/ce/model.json").rename(tmp_path / "first/ce/gone")  # the second must stand alone
    about = json.loads((tmp_path / "second/ce/model.json").read_text())
    assert about["name"] == "builtin:small_cnn" and about["options"] == OPTIONS
    assert (about["mean"], about["std"], about["layer"], about["size"]) == ([0.3], [0.35], "latent", 16)
    assert as_logits(tmp_path, "bundle:second/ce", torch.rand(2, 1, 16, 16)).shape == (2, 10)


def test_training_sees_the_images_as_the_encoder_shows_them_to_the_network() -> None:
    model = NETWORKS["small_cnn"](**OPTIONS | {"in_channels": 3}).eval()
    encoder = Encoder(model, None, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], 16)
    x = torch.rand(3, 3, 9, 9)
    prepared = Prepared(encoder)
    torch.testing.assert_close(prepared.eval()(x), encoder(x), rtol=0, atol=0)
    assert list(prepared.state_dict()) == [f"model.{name}" for name in model.state_dict()]
    prepared.train()
    assert model.training and not torch.equal(prepared(x), encoder(x))  # the batch's own statistics
    assert next(prepared.parameters()) is next(model.parameters())


def test_images_are_resized_inside_the_network_in_training_too(tmp_path: Path) -> None:
    x, y = torch.rand(12, 1, 9, 9), torch.arange(12) % 3
    source = {"source": write_images(tmp_path / "x.npz", x, y)}
    data = {"train": source, "test": source}
    plan = small_model(model={"size": 9, "resize": 16}, data=data, methods=["ce", ALOE])
    harden_plan(plan, out=tmp_path / "run", folder=tmp_path)
    about = completed(ModelPlan(name="bundle:run/aloe"), tmp_path)
    assert (about.size, about.resize) == (9, 16)


def test_sources_are_mixed_and_what_is_drawn_is_not_what_a_test_draws(tmp_path: Path) -> None:
    x = torch.rand(3, 1, 16, 16)
    outliers = [
        {"source": "noise", "limit": 4},
        write_images(tmp_path / "mine.npz", x),
        {"source": "blobs", "limit": 5},
    ]
    plan = small_model(data={"outliers": outliers, "test_outliers": {"noise": {"source": "noise", "limit": 4}}})
    job = job_of_harden(plan, tmp_path, torch.device("cpu"))
    assert job.outliers is not None and len(job.outliers) == 12 and job.outliers.y is None
    assert job.outliers.name == "noise + npz:mine.npz + blobs"
    torch.testing.assert_close(job.outliers.x[4:7], x)
    assert not torch.equal(job.outliers.x[:4], job.test_outliers["noise"].x)
    again = job_of_harden(plan, tmp_path, torch.device("cpu"))
    assert again.outliers is not None and torch.equal(again.outliers.x, job.outliers.x)


def test_one_source_of_outliers_needs_no_list() -> None:
    one = small_model(data={"outliers": "noise"}).data.outliers
    assert one == small_model(data={"outliers": [{"source": "noise"}]}).data.outliers


def test_classes_are_balanced(tmp_path: Path) -> None:
    x, y = torch.rand(9, 1, 16, 16), torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 1])
    data = {"train": write_images(tmp_path / "x.npz", x, y), "balance": 4}
    plan = small_model(data=data, methods=["ce"])
    job = job_of_harden(plan, tmp_path, torch.device("cpu"))
    assert job.train.y is not None and job.train.y.bincount().tolist() == [4, 4, 4]
    harden_plan(plan, out=tmp_path / "run", folder=tmp_path)
    described = json.loads((tmp_path / "run/ce/manifest.json").read_text())["data"]["train"]
    assert described["n"] == 12 and described["notes"] == ["9 images → 4 of every class, 12 in all"]


@pytest.mark.parametrize(
    "changed",
    [{"crop": 2}, {"flip": True}, {"epochs": 2}, {"batch_size": 8}, {"optimiser": "adamw"}, {"lr": 0.01},
     {"momentum": 0.5}, {"weight_decay": 0.1}, {"epochs": 2, "schedule": "constant"}, {"warm_up": 0.5},
     {"clip": 0.01}, {"ema": 0.5}, {"precision": "bf16"}, {"outliers_per_image": 1}],
    ids=lambda changed: "-".join(changed),
)  # fmt: skip
def test_every_word_on_training_is_heard(tmp_path: Path, changed: dict[str, Any], plain: dict[str, Tensor]) -> None:
    harden_plan(small_model(methods=[ALOE], training=changed), out=tmp_path / "run")
    weights = weights_in(tmp_path / "run/aloe")
    assert not torch.equal(weights["fc.weight"], plain["fc.weight"])
    if "schedule" in changed:
        harden_plan(small_model(methods=[ALOE], training={"epochs": 2}), out=tmp_path / "cosine")
        assert not torch.equal(weights["fc.weight"], weights_in(tmp_path / "cosine/aloe")["fc.weight"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of the plan as it is."""
    folder = tmp_path_factory.mktemp("plain")
    harden_plan(small_model(methods=[ALOE]), out=folder / "run")
    return weights_in(folder / "run/aloe")


@pytest.mark.parametrize("changed", [{"eps": "2/255"}, {"step": "1/255"}, {"steps": 1}, {"weight": 2}])
def test_every_option_of_a_method_is_heard(tmp_path: Path, changed: dict[str, Any], plain: dict[str, Tensor]) -> None:
    harden_plan(small_model(methods=[ALOE | changed]), out=tmp_path / "run")
    assert not torch.equal(weights_in(tmp_path / "run/aloe")["fc.weight"], plain["fc.weight"])


def test_a_seed_determines_every_weight_whatever_was_trained_before(tmp_path: Path, plain: dict[str, Tensor]) -> None:
    torch.manual_seed(99)
    harden_plan(small_model(methods=["oe", {**ALOE, "label": "Mine v1.2"}]), out=tmp_path / "run")
    again = weights_in(tmp_path / "run/Mine v1.2")
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_outliers_of_the_test_do_not_touch_the_training(tmp_path: Path, plain: dict[str, Tensor]) -> None:
    other = {"inliers": {"source": "blobs", "limit": 4}, "train": {"source": "spiral", "limit": 4}}
    results = harden_plan(small_model(methods=[ALOE], data={"test_outliers": other}), out=tmp_path / "run")
    assert [row["outliers"] for row in results["rows"]] == ["inliers", "train"]
    assert torch.equal(weights_in(tmp_path / "run/aloe")["fc.weight"], plain["fc.weight"])


def test_a_function_of_the_users_is_trained_only_with_trust(tmp_path: Path) -> None:
    (tmp_path / "my_harden_net.py").write_text(
        "from torch import nn\n\ndef make(n):\n    return nn.Sequential(nn.Flatten(), nn.Linear(256, n))\n"
    )
    model = {"name": "my_harden_net:make", "options": {"n": 10}, "layer": None}
    plan = small_model(model=model, methods=["ce"])
    with pytest.raises(ValueError, match="say --trust"):
        harden_plan(plan, out=tmp_path / "run", folder=tmp_path)
    assert not (tmp_path / "run").exists()
    harden_plan(plan, out=tmp_path / "run", folder=tmp_path, trust=True)
    assert weights_in(tmp_path / "run/ce")["1.weight"].shape == (10, 256)


def test_a_plan_file_names_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "elsewhere").mkdir()
    torch.manual_seed(3)
    begun = NETWORKS["small_cnn"](**OPTIONS)
    save_file({k: v.clone() for k, v in begun.state_dict().items()}, tmp_path / "plans/begun.safetensors")
    outliers = [write_images(tmp_path / "plans/out.npz", torch.rand(4, 1, 16, 16))]
    path = written(
        tmp_path / "plans/mine.yaml",
        model={"weights": "begun.safetensors"},
        data={"outliers": outliers},
        training=STILL,
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    harden_plan(path, out=tmp_path / "run")
    assert torch.equal(weights_in(tmp_path / "run/aloe")["fc.weight"], begun.state_dict()["fc.weight"])
