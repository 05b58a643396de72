"""The main job end to end: what a bundle holds, resuming, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_plan import small_plan, write_small_plan

from gatecrash import L2, Encoder, Linf, audit, audit_plan
from gatecrash.audit.demo import run_demo
from gatecrash.audit.plan import plan_from
from gatecrash.bundle import SAMPLES, Bundle
from gatecrash.data import load_source
from gatecrash.detectors import MSP, GlowLikelihood, Mahalanobis
from gatecrash.metrics import auroc
from gatecrash.networks import PRETRAINED, SmallCNN, hash_of, load_weights
from small_models import blank, squares, trained_net


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("audit")
    audit_plan(write_small_plan(folder / "plan.yaml"), out=folder / "run", device="cpu")
    return Bundle(folder / "run")


def rows_by(results: Any, **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if all(row[key] == value for key, value in wanted.items())]


def test_the_bundle_holds_all_it_should_and_nothing_else(finished: Bundle) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    assert names == {
        "plan.yaml", "results.json", "samples.parquet", "images.safetensors", "report.html", "manifest.json",
    }  # fmt: skip


def test_there_is_a_row_for_every_detector_set_attack_eps_and_side(finished: Bundle) -> None:
    results = finished.results()
    keys = {(r["detector"], r["outliers"], r["attack"], r["side"], r["eps"]) for r in results["rows"]}
    per_pair = {("none", "none", None), ("collide features", "out", 5.0)} | {
        ("admit + evict", side, eps / 255) for side in ("in", "out", "both") for eps in (4, 8)
    }
    assert keys == {
        (detector, outliers, *rest)
        for detector in ("msp", "mahalanobis")
        for outliers in ("digits", "noise")
        for rest in per_pair
    }
    assert len(results["rows"]) == len(keys)
    for row in results["rows"]:
        assert (row["n_in"], row["n_out"]) == (20, 20 if row["outliers"] == "digits" else 15)
        assert row["auroc_ci"][0] <= row["auroc"] <= row["auroc_ci"][1]


def test_the_rows_follow_from_the_samples(finished: Bundle) -> None:
    table = finished.samples()
    assert table.schema.names == SAMPLES.names
    samples = table.to_pylist()
    results = finished.results()

    def scores(column: str, **wanted: Any) -> torch.Tensor:
        chosen = [s for s in samples if all(s[key] == value for key, value in wanted.items())]
        return torch.tensor([s[column] for s in sorted(chosen, key=lambda s: s["index"])], dtype=torch.float64)

    for row in results["rows"]:
        about = {"detector": row["detector"], "attack": row["attack"], "eps": row["eps"]}
        clean_in = scores("clean_score", detector=row["detector"], attack="none", set="inliers")
        clean_out = scores("clean_score", detector=row["detector"], attack="none", set=row["outliers"])
        inside = scores("attacked_score", **about, set="inliers") if row["side"] in ("in", "both") else clean_in
        outside = (
            scores("attacked_score", **about, set=row["outliers"]) if row["side"] in ("out", "both") else clean_out
        )
        assert row["auroc"] == pytest.approx(auroc(inside, outside), abs=1e-12)
        if row["side"] != "none":
            assert row["clean_auroc"] == pytest.approx(auroc(clean_in, clean_out), abs=1e-12)


def test_the_attacks_work_and_stay_in_their_balls(finished: Bundle) -> None:
    samples = finished.samples().to_pylist()
    for sample in samples:
        if sample["attack"] != "none":
            assert sample[sample["norm"]] <= sample["eps"] + 1e-6
        if sample["attack"] == "collide features":
            assert sample["target_distance"] > 2 * sample["eps"]
            assert sample["target_index"] == sample["index"] % 20
    results = finished.results()
    for row in rows_by(results, attack="collide features"):
        assert row["mape_median"] < 0.02
        assert abs(row["auroc"] - 0.5) < 0.15
    for row in rows_by(results, side="both", eps=8 / 255):
        assert row["auroc"] < 0.5 < row["clean_auroc"]


def test_a_resolved_plan_repeats_the_run(finished: Bundle, tmp_path: Path) -> None:
    again = audit_plan(finished.folder / "plan.yaml", out=tmp_path / "again", device="cpu")
    assert again["rows"] == finished.results()["rows"]


def test_pictures_show_what_the_plan_asks_for(finished: Bundle) -> None:
    groups = finished.pictures()
    assert groups[0].title == "a retinal photograph"
    assert groups[0].names == ["Ankle boot", "Bag"]
    assert {group.attack for group in groups[1:]} == {"collide features"}
    for group in groups:
        assert group.found.shape == group.start.shape == group.target.shape
        assert group.z_found.shape[1] == group.z_target.shape[1] <= 32
        assert max(group.distance) <= group.eps + 1e-6


def test_the_manifest_names_what_numbers_depend_on(finished: Bundle) -> None:
    manifest = json.loads((finished.folder / "manifest.json").read_text())
    assert manifest == finished.results()["manifest"]
    assert manifest["seed"] == 3
    assert {"inliers", "fit", "outliers.digits", "outliers.noise"} == set(manifest["data"])
    assert all(len(entry["sha256"]) == 64 for entry in manifest["data"].values())
    assert "resized 28 → 56" in manifest["data"]["inliers"]["notes"]
    assert set(manifest["threat_model"]) == {"goal", "knowledge", "capability"}
    assert all(len(digest) == 64 for digest in manifest["networks"].values())


def test_a_killed_run_goes_on_and_ends_with_the_same_rows(finished: Bundle, tmp_path: Path) -> None:
    plan = write_small_plan(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "gatecrash", "audit", str(plan), "--out", str(tmp_path / "run"), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    work = tmp_path / "run" / "work"
    deadline = time.monotonic() + 120
    while not (work.is_dir() and len(list(work.glob("[!.]*.safetensors"))) >= 9):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "results.json").exists()
    saved = {path: path.stat().st_mtime_ns for path in work.glob("[!.]*.safetensors")}
    with pytest.raises(ValueError, match="holds another run; choose another --out, or go on with it: --resume"):
        audit_plan(plan, out=tmp_path / "run", device="cpu")
    victim = max(saved, key=lambda path: saved[path])
    victim.write_bytes(victim.read_bytes()[:40])  # the last piece was cut off by a full disk
    begun = Bundle(tmp_path / "run")
    begun.write_manifest(begun.manifest() | {"device": "cuda: another"})
    results = audit_plan(plan, out=tmp_path / "run", device="cpu", resume=True)
    assert results["manifest"]["earlier"]["1"]["device"] == "cuda: another"
    assert results["manifest"]["device"].startswith("cpu") and begun.manifest() == results["manifest"]
    assert "earlier.1.device" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert results["rows"] == finished.results()["rows"]
    assert not work.exists()
    assert audit_plan(plan, out=tmp_path / "run", device="cpu", resume=True) == results


def test_a_run_is_not_mixed_with_another(finished: Bundle, tmp_path: Path) -> None:
    other = write_small_plan(tmp_path / "plan.yaml", seed=4)
    with pytest.raises(ValueError, match="was begun with another plan"):
        audit_plan(other, out=finished.folder, device="cpu", resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files and no run"):
        audit_plan(other, out=tmp_path / "full", device="cpu")
    with pytest.raises(ValueError, match="is a file; --out must name a folder"):
        audit_plan(other, out=tmp_path / "full" / "letter.txt", device="cpu")
    manifest = Bundle(tmp_path / "changed")
    manifest.write_plan(finished.plan_text())
    manifest.write_manifest(finished.manifest() | {"networks": {}})
    with pytest.raises(ValueError, match="was begun with other weights"):
        audit_plan(finished.folder / "plan.yaml", out=manifest.folder, device="cpu", resume=True)


def test_nothing_is_written_for_a_plan_that_cannot_run(tmp_path: Path) -> None:
    plan = small_plan()
    plan["model"]["weights"] = "nowhere.safetensors"
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    with pytest.raises(ValueError, match=r"cannot read weights .*nowhere.safetensors"):
        audit_plan(path, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model", "mean"), [0.1, 0.2, 0.3], "mean has 3 channels, the images have 1"),
        (("model", "channels"), 3, "mean has 1 channels|does not take images of shape"),
        (("model", "channels"), None, "the inliers have .*; model.channels and model.size make them alike"),
        (("model", "size"), 40, "SmallCNN does not take images of shape"),
        (("attacks", 0, "of"), "nope", "SmallCNN has no layer 'nope'"),
        (("pictures", 0, "of"), "nope", "SmallCNN has no layer 'nope'"),
        (
            ("data", "fit"),
            {"source": "noise", "limit": 20},
            "mahalanobis needs labelled inliers to fit on, and noise has no labels",
        ),
        (("data", "fit"), {"source": "fashion:train", "limit": 1}, "do not vary at all"),
    ],
)
def test_a_mistake_that_only_the_network_shows_leaves_nothing_behind(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    plan = small_plan()
    inner: Any = plan
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ValueError, match=message):
        audit_plan(tmp_path / "plan.yaml", out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_run_killed_before_its_plan_was_written_can_begin_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    (tmp_path / "run" / ".plan.x1.yaml").write_text("mod")
    plan = write_small_plan(tmp_path / "plan.yaml", detectors=["msp"], attacks=[], pictures=[])
    assert audit_plan(plan, out=tmp_path / "run", device="cpu")["rows"]


def test_a_model_may_come_from_a_module_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "model_beside_plan.py").write_text(
        "from gatecrash.networks import PRETRAINED\n"
        "def make():\n    return PRETRAINED['fashion_small_cnn'].load()\n"
        "def broken():\n    raise KeyError('oops')\n"
    )
    plan = small_plan(detectors=["msp"], attacks=[], pictures=[])
    plan["model"] |= {"name": "model_beside_plan:make", "weights": None}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    before = list(sys.path)
    assert audit_plan(tmp_path / "plan.yaml", out=tmp_path / "run", device="cpu", trust=True)["rows"]
    assert sys.path == before
    plan["model"]["name"] = "model_beside_plan:broken"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ValueError, match="model_beside_plan:broken': KeyError: 'oops'"):
        audit_plan(tmp_path / "plan.yaml", out=tmp_path / "other", device="cpu", trust=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"detectors": [{"name": "mahalanobis", "layers": ["nope"]}]}, "SmallCNN has no layer 'nope'"),
        ({"detectors": [{"name": "odin", "magnitude": -1}]}, "magnitude must not be negative"),
        ({"detectors": [{"name": "mahalanobis", "combine": "logistic"}]}, "needs held-out inliers and outliers"),
        ({"pictures": [{"title": "t", "start": "fundus", "targets": {"source": "fashion:test", "classes": ["Dog"]}, "ball": {"norm": "l2", "eps": 1}}]}, "has no class 'Dog'; its classes: T-shirt"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit_plan(write_small_plan(tmp_path / "plan.yaml", **change), out=tmp_path / "run", device="cpu")


def test_other_parts_of_the_schema_run_too(tmp_path: Path) -> None:
    """Held-out data, ensembles, labels, the softmax attack, a detector's own encoding, a start that serves one set."""
    plan = small_plan(
        detectors=[
            {"name": "mahalanobis", "combine": "logistic", "layers": ["latent"], "label": "fitted"},
            {"name": "ensemble", "members": ["msp", {"name": "odin", "magnitude": 0.001}]},
        ],
        attacks=[
            {"name": "softmax", "ball": {"norm": "linf", "eps": "8/255"}, "steps": 5},
            {"name": "collide", "of": "detector", "start": "noise", "ball": {"norm": "l2", "eps": 3}, "steps": 5},
            {"name": "evict", "ball": {"norm": "linf", "eps": "8/255"}, "steps": 3, "step": "1/255"},
        ],
        pictures=[],
    )
    plan["data"] |= {
        "held_out": {"source": "fashion:val", "limit": 20},
        "fit_outliers": {"source": "gaussian", "limit": 20},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    results = audit_plan(tmp_path / "plan.yaml", out=tmp_path / "run", device="cpu")
    assert {row["detector"] for row in results["rows"]} == {"fitted", "ensemble"}
    assert len(rows_by(results, attack="softmax")) == 2 * 2 * 3
    assert {row["outliers"] for row in rows_by(results, attack="collide detector")} == {"noise"}
    assert {row["side"] for row in rows_by(results, attack="evict")} == {"in"}
    assert all(
        s["linf"] <= 3 / 255 + 1e-6 for s in Bundle(tmp_path / "run").samples().to_pylist() if s["attack"] == "evict"
    )


def test_the_python_door_does_the_same(tmp_path: Path) -> None:
    images, labels = squares(40)
    encoder = Encoder(trained_net(), layer="hidden")
    detectors = {"softmax": MSP(encoder), "distance": Mahalanobis(encoder).fit((images, labels))}
    noise = load_source("noise", limit=30, channels=1, size=images.shape[-1])
    results = audit(
        detectors,
        images,
        {"noise": noise, "flat": torch.full_like(images[:10], 0.5)},
        balls=[Linf([0.1, 0.3]), L2(0.5)],
        attacks=[{"name": "collide", "of": "logits", "ball": {"norm": "l2", "eps": 2}, "steps": 30}],
        steps=10,
        out=tmp_path / "first",
    )
    assert {row["detector"] for row in results["rows"]} == {"softmax", "distance"}
    assert {(row["norm"], row["eps"]) for row in rows_by(results, side="both")} == {
        ("linf", 0.1),
        ("linf", 0.3),
        ("l2", 0.5),
    }
    for detector in detectors:
        clean, small, large = (
            next(r["auroc"] for r in rows_by(results, detector=detector, outliers="noise", side=side, eps=eps))
            for side, eps in (("none", None), ("both", 0.1), ("both", 0.3))
        )
        assert large <= small <= clean
    assert (tmp_path / "first" / "report.html").is_file()


def test_the_python_door_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    images, _ = squares(4)
    encoder = Encoder(trained_net(), layer="hidden")
    with pytest.raises(ValueError, match="Mahalanobis is not fitted"):
        audit(Mahalanobis(encoder), images, {"a": images}, out=tmp_path / "run")
    with pytest.raises(ValueError, match="at least one set"):
        audit(MSP(encoder), images, {}, out=tmp_path / "run")
    with pytest.raises(ValueError, match="attacks: unknown attack 'colide'"):
        audit(MSP(encoder), images, {"a": images}, attacks=[{"name": "colide"}], out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"of: features needs model.layer"):
        audit(
            MSP(encoder),
            images,
            {"a": images},
            attacks=[{"name": "collide", "ball": {"norm": "l2", "eps": 1}}],
            out=tmp_path / "run",
        )
    assert [d.name for d in (MSP(encoder), MSP(encoder))] == ["msp", "msp"]


def test_the_demo_can_train_its_network_on_the_spot(tmp_path: Path) -> None:
    plan = plan_from(small_plan(detectors=["msp"], attacks=[], pictures=[]))
    results = run_demo(tmp_path / "demo", seed=1, device="cpu", train=True, plan=plan)
    weights = tmp_path / "demo-network.safetensors"
    trained = load_weights(SmallCNN(), weights)
    shipped = PRETRAINED["fashion_small_cnn"].load()
    assert hash_of(trained) in results["manifest"]["networks"].values()
    assert hash_of(trained) != hash_of(shipped)
    before = weights.stat().st_mtime_ns
    assert run_demo(tmp_path / "demo", seed=1, device="cpu", train=True, resume=True, plan=plan) == results
    assert weights.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds another run"):
        run_demo(tmp_path / "demo", device="cpu", train=True, plan=plan)


def glow() -> GlowLikelihood:
    return GlowLikelihood(model={"steps": 1, "hidden": 8}, training={"epochs": 3, "lr": 0.02}).fit(squares(60))


def test_detectors_without_any_network_are_attacked_through_their_scores(tmp_path: Path) -> None:
    attacks = [
        {"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": 0.05}, "steps": 4},
        {"name": "collide", "of": "detector", "ball": {"norm": "l2", "eps": 0.5}, "steps": 4},
        {"name": "worst_case", "budget": "quick", "side": "out", "ball": {"norm": "linf", "eps": 0.02}},
    ]
    detector = glow()
    results = audit({"glow": detector}, squares(6)[0], {"blank": blank(6)}, out=tmp_path / "run", attacks=attacks)
    assert [(row["attack"], row["side"]) for row in results["rows"]] == [
        ("none", "none"),
        *(("admit + evict", side) for side in ("out", "in", "both")),
        ("collide detector", "out"),
        ("worst case, quick", "out"),
    ]
    samples = Bundle(tmp_path / "run").samples().to_pylist()
    lowered = [row for row in samples if row["side"] == "out" and row["attack"] != "collide detector"]
    assert len(lowered) == 12 and all(row["attacked_score"] < row["clean_score"] for row in lowered)
    assert results["manifest"]["networks"] == {"GlowLikelihood 0": hash_of(detector)}


def test_attacks_of_a_plan_can_be_in_whole_grey_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector, seen = MSP(Encoder(trained_net(), layer="hidden")), []
    scored = MSP.scores

    def scores(self: MSP, x: torch.Tensor, batch_size: int = 100) -> torch.Tensor:
        seen.append(x)
        return scored(self, x, batch_size)

    monkeypatch.setattr(MSP, "scores", scores)
    ball = {"norm": "linf", "eps": 10.4 / 255}
    attacks = [
        {"name": "collide", "of": "logits", "ball": ball, "steps": 3},
        {"name": "softmax", "ball": ball, "steps": 3},
        {"name": "admit", "side": "both", "ball": ball, "steps": 3},
        {"name": "worst_case", "budget": "quick", "ball": ball},
    ]
    both = [attack | {"eight_bit": bits} for attack in attacks for bits in (True, False)]
    inliers, outliers = ((255 * x).round() / 255 for x in (squares(4)[0], blank(4)))
    results = audit({"msp": detector}, inliers, {"blank": outliers}, out=tmp_path / "run", attacks=both)
    names = {row["attack"] for row in results["rows"]}
    assert names == {
        "none",
        *(
            title + bits
            for title in ("collide logits", "softmax", "admit + evict", "worst case, quick")
            for bits in ("", ", 8 bit")
        ),
    }
    whole = [bool(((255 * x) - (255 * x).round()).abs().max() < 1e-4) for x in seen[2:16]]
    assert whole == [True, False, *([True] * 2 + [False] * 2) * 3]  # after the clean ones; a collision has one side


def test_the_suite_can_leave_what_has_crossed_alone_and_no_auroc_is_another(tmp_path: Path) -> None:
    detector = MSP(Encoder(trained_net(), layer="hidden"))
    found = {}
    for until in ("end", "crossed"):
        attack = {"name": "worst_case", "budget": "quick", "ball": {"norm": "linf", "eps": 0.3}, "until": until}
        audit({"msp": detector}, squares(8)[0], {"blank": blank(8)}, out=tmp_path / until, attacks=[attack])
        bundle = Bundle(tmp_path / until)
        samples = [row for row in bundle.samples().to_pylist() if row["side"] != "none"]
        found[until] = [row["auroc"] for row in bundle.results()["rows"]], samples
    assert found["end"][0] == found["crossed"][0] and found["end"][0][1:] == [0.0, 0.0, 0.0]
    clean = {side: [row["clean_score"] for row in found["end"][1] if row["side"] == side] for side in ("in", "out")}
    for row in found["crossed"][1]:
        score = row["attacked_score"]
        assert score <= min(clean["in"]) + 1e-6 if row["side"] == "out" else score >= max(clean["out"]) - 1e-6
    spent = {until: sum(row["evaluations"] for row in samples) for until, (_, samples) in found.items()}
    assert spent["crossed"] < spent["end"] / 3


@pytest.mark.parametrize(
    ("attack", "title"),
    [({"name": "softmax"}, "softmax"), ({"name": "collide"}, "collide features"), ({"name": "collide", "of": "logits"}, "collide logits")],
)  # fmt: skip
def test_attacks_that_read_a_network_need_one(attack: dict[str, Any], title: str, tmp_path: Path) -> None:
    wanted = [attack | {"ball": {"norm": "l2", "eps": 1}}]
    with pytest.raises(ValueError, match=f"^{title} reads a network, and no detector has an Encoder; admit, evict"):
        audit(glow(), squares(6)[0], {"blank": blank(6)}, out=tmp_path / "run", attacks=wanted)
    assert not (tmp_path / "run").exists()
