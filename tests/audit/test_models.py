"""Networks by name, and what a wrong name, a wrong file or an untrusted function gets."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import gatecrash.detectors.words  # registers clip and mcm
from gatecrash import audit_plan
from gatecrash.audit.models import completed, load_model
from gatecrash.audit.plan import ModelPlan, parse_plan, plan_text, read_plan
from gatecrash.networks import hash_of, save_weights
from gatecrash.networks.clip import load_clip
from small_clip import MEAN, STD, write_clip


def test_torchvision_timm_and_our_own_by_name(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    source = resnet18(num_classes=3)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    plan = ModelPlan(name="torchvision:resnet18", weights="weights.pth", options={"num_classes": 3})
    model = load_model(plan, tmp_path)
    assert hash_of(model) == hash_of(source)
    assert not model.training
    tiny = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 2}
    vit = load_model(ModelPlan(name="timm:vit_tiny_patch16_224", weights="random", options=tiny), tmp_path)
    assert vit(torch.rand(1, 3, 32, 32)).shape == (1, 2)
    assert load_model(ModelPlan(name="builtin:resnet20", weights="random"), tmp_path)(
        torch.rand(1, 3, 32, 32)
    ).shape == (1, 10)


def test_random_weights_are_random_all_the_way_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision fetches a segmentation's backbone unless it is told not to."""

    def fetch(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are fetched")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    model = load_model(ModelPlan(name="torchvision:lraspp_mobilenet_v3_large", weights="random"), tmp_path)
    assert model(torch.rand(1, 3, 64, 64))["out"].shape == (1, 21, 64, 64)


def test_a_hash_changes_with_any_weight() -> None:
    model = nn.Linear(3, 2)
    before = hash_of(model)
    model.weight.data[0, 0] += 1e-3
    assert hash_of(model) != before
    assert hash_of(model.bfloat16()) != before


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"name": "torchvision:resnet81"}, "unknown torchvision model 'resnet81'; did you mean 'resnet"),
        ({"name": "timm:vit_base_patch17"}, "unknown timm model 'vit_base_patch17'"),
        ({"name": "builtin:densenet_cb"}, "unknown network 'densenet_cb'; did you mean 'densenet_bc'"),
        ({"name": "resnet20"}, "model.name must be KIND:NAME"),
        ({"name": "torchvision:resnet18"}, "model.weights is missing: torchvision:resnet18 comes without any"),
        ({"name": "builtin:resnet20", "weights": "random", "options": {"depht": 3}}, "do not suit builtin:resnet20"),
        ({"name": "builtin:resnet20", "weights": "none.pth"}, "cannot read weights .*none.pth"),
        ({"name": "bundle:nowhere"}, "nowhere is no model bundle: model.json is missing"),
        ({"name": "clip:nowhere"}, "there is no folder .*nowhere; a CLIP is a folder as transformers saves it"),
        ({"name": "clip:x", "weights": "random"}, "model.weights: clip:x is all in its folder; leave weights out"),
        ({"name": "clip:x", "options": {"a": 1}}, "model.options: clip:x is all in its folder; leave options out"),
        ({"name": "builtin:resnet20", "weights": "w.npz"}, "w.npz: ResNetCifar has no .npz format"),
        ({"name": "os:getcwd"}, "'os' is not one of .*; if it is a module of yours whose code may run, say --trust"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, plan: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(ModelPlan.model_validate(plan), tmp_path)


def test_a_state_dict_that_does_not_fit_names_the_first_three_mismatches(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "wrong.pth")
    plan = ModelPlan(name="builtin:resnet20", weights="wrong.pth")
    with pytest.raises(
        ValueError, match=r"do not fit ResNetCifar: missing conv1.weight; missing .*; missing .*; and \d+ more"
    ):
        load_model(plan, tmp_path)


def test_a_function_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "from pathlib import Path\nimport torch\n"
        "Path(__file__).with_suffix('.ran').touch()\n"
        "def make(width=2):\n    return torch.nn.Linear(2, width)\n"
        "def broken():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = ModelPlan(name="mine_for_test:make", options={"width": 5})
    with pytest.raises(ValueError, match="--trust"):
        load_model(plan, tmp_path)
    assert not (tmp_path / "mine_for_test.ran").exists()
    assert load_model(plan, tmp_path, trust=True)(torch.rand(1, 2)).shape == (1, 5)
    with pytest.raises(ValueError, match=r"must give a torch.nn.Module, got int"):
        load_model(ModelPlan(name="mine_for_test:broken"), tmp_path, trust=True)
    with pytest.raises(ValueError, match="has no attribute 'nothing'"):
        load_model(ModelPlan(name="mine_for_test:nothing"), tmp_path, trust=True)
    with pytest.raises(ValueError, match="No module named 'not_there_at_all'"):
        load_model(ModelPlan(name="not_there_at_all:make"), tmp_path, trust=True)


def test_a_model_bundle_brings_its_own_description(tmp_path: Path) -> None:
    source = load_model(ModelPlan(name="builtin:resnet20", weights="random", options={"num_classes": 4}), tmp_path)
    folder = tmp_path / "trained"
    save_weights(source, folder / "model.safetensors")
    about = {
        "name": "builtin:resnet20",
        "options": {"num_classes": 4},
        "layer": "avgpool",
        "mean": [0.5, 0.5, 0.5],
        "extra": 1,
    }
    (folder / "model.json").write_text(json.dumps(about))
    plan = ModelPlan(name="bundle:trained", std=[0.2, 0.2, 0.2])
    assert hash_of(load_model(plan, tmp_path)) == hash_of(source)
    filled = completed(plan, tmp_path)
    assert (filled.layer, filled.mean, filled.std) == ("avgpool", [0.5, 0.5, 0.5], [0.2, 0.2, 0.2])
    (folder / "model.json").write_text("{")
    with pytest.raises(ValueError, match="does not describe a network"):
        load_model(plan, tmp_path)
    (folder / "model.json").write_text(json.dumps({"name": "bundle:trained"}))
    with pytest.raises(ValueError, match="bundle of a bundle"):
        load_model(plan, tmp_path)


def test_a_bundle_whose_weights_were_changed_is_refused(tmp_path: Path) -> None:
    source = load_model(ModelPlan(name="builtin:resnet20", weights="random"), tmp_path)
    folder = tmp_path / "trained"
    save_weights(source, folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps({"name": "builtin:resnet20"}))
    (folder / "manifest.json").write_text(json.dumps({"weights_sha256": hash_of(source)}))
    plan = ModelPlan.model_validate("bundle:trained")
    load_model(plan, tmp_path)
    with torch.no_grad():
        source.linear.bias[0] += 1  # type: ignore[union-attr, operator]
    save_weights(source, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors was changed"):
        load_model(plan, tmp_path)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        load_model(plan, tmp_path)


def test_a_bundle_of_a_users_own_network_needs_trust_and_finds_the_module_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "own_for_bundle.py").write_text("import torch\ndef make(): return torch.nn.Linear(2, 3)\n")
    source = torch.nn.Linear(2, 3)
    save_weights(source, tmp_path / "trained" / "model.safetensors")
    (tmp_path / "trained" / "model.json").write_text(json.dumps({"name": "own_for_bundle:make"}))
    plan = ModelPlan(name="bundle:trained")
    with pytest.raises(ValueError, match="say --trust"):
        load_model(plan, tmp_path)
    assert hash_of(load_model(plan, tmp_path, trust=True)) == hash_of(source)


class Bomb:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.path,))


def test_a_pickle_with_code_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.pth").write_bytes(pickle.dumps({"conv1.weight": Bomb(tmp_path / "ran")}))
    with pytest.raises(ValueError, match="refused: the file holds code"):
        load_model(ModelPlan(name="builtin:resnet20", weights="bomb.pth"), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_clip_brings_its_weights_and_its_preprocessing(tmp_path: Path) -> None:
    write_clip(tmp_path / "small")
    plan = ModelPlan(name="clip:small")
    assert hash_of(load_model(plan, tmp_path)) == hash_of(load_clip(tmp_path / "small"))
    filled = completed(plan, tmp_path)
    assert (filled.mean, filled.std, filled.resize, filled.channels) == (list(MEAN), list(STD), None, 3)
    said = completed(ModelPlan(name="clip:small", mean=[0.5, 0.5, 0.5], resize=8), tmp_path)
    assert (said.mean, said.std, said.resize) == ([0.5, 0.5, 0.5], list(STD), 8)


def test_an_audit_of_words(tmp_path: Path) -> None:
    write_clip(tmp_path / "small")
    plan = {
        "model": {"name": "clip:small", "size": 12},
        "data": {
            "inliers": {"source": "fashion:test", "limit": 8},
            "outliers": {"noise": {"source": "noise", "limit": 6}},
        },
        "detectors": [
            {"name": "clip", "inside": ["shirt", "shoe"], "outside": ["noise", "cat"]},
            {"name": "mcm", "inside": ["shirt", "shoe", "bag"], "prompt": "a {}", "temperature": 0.1},
        ],
        "attacks": [{"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": "8/255"}, "steps": 3}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    results = audit_plan(tmp_path / "plan.yaml", out=tmp_path / "run", device="cpu")
    rows = {(row["detector"], row["attack"], row["side"]): row["auroc"] for row in results["rows"]}
    for name in ("clip", "mcm"):
        assert rows[name, "admit + evict", "both"] < rows[name, "none", "none"]


def test_the_example_of_a_clip_fits_the_schema() -> None:
    path = Path(gatecrash.__file__).parent / "audit" / "examples" / "clip.yaml"
    plan = read_plan(path)
    assert [detector.name for detector in plan.detectors] == ["clip", "mcm"]
    assert [len(detector.options["inside"]) for detector in plan.detectors] == [100, 100]
    assert parse_plan(plan_text(plan)) == plan
    assert path.read_text().startswith("# ")
