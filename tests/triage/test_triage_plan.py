"""The plan and the command as a user meets them: every mistake is one line, exit code 2, and no folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_plan import small_plan

from gatecrash import cli
from gatecrash.audit.plan import parse_plan, plan_text, read_plan
from gatecrash.bundle import Bundle
from gatecrash.triage import EXAMPLES, TriagePlan, example_text, triage_plan
from small_clip import write_clip
from small_models import one_thread  # noqa: F401

Command = Callable[..., tuple[int, str, str]]


def triage_of(**changes: Any) -> dict[str, Any]:
    """A plan that runs in about a second; keys with dots reach inside."""
    plan: dict[str, Any] = {
        "model": small_plan()["model"],
        "data": {
            "fit": {"source": "fashion:train", "limit": 120},
            "held_out": {"source": "fashion:val", "limit": 40},
            "inliers": {"source": "fashion:test", "limit": 40},
            "outliers": {"digits": {"source": "digits", "limit": 10}},
        },
        "detectors": [{"name": "gmm", "components": 3, "steps": 2}, "msp"],
        "adversarial": [{"name": "fgsm", "eps": "8/255"}],
        "batch_size": 25,
    }
    for key, value in changes.items():
        part = plan
        *path, last = key.split("__")
        for step in path:
            part = part[int(step) if isinstance(part, list) else step]
        part[int(last) if isinstance(part, list) else last] = value
    return plan


def written(folder: Path, plan: dict[str, Any]) -> str:
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    return str(folder / "plan.yaml")


@pytest.fixture
def gatecrash(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Exit code, standard output and standard error of a command."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gatecrash", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def refused(gatecrash: Command, folder: Path, plan: dict[str, Any], *options: str) -> str:
    """The one line that a command says of a plan that cannot be."""
    code, out, err = gatecrash("triage", written(folder, plan), "--out", str(folder / "run"), *options)
    assert (code, out) == (2, "")
    assert err.startswith("gatecrash: ") and err.count("\n") == 1 and "Traceback" not in err
    assert not (folder / "run").exists()
    return err.removeprefix("gatecrash: ").strip()


TWICE = [{"name": "msp"}, {"name": "msp"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"detektors": []}, "unknown key 'detektors'; did you mean 'detectors'?"),
        ({"data__inlier": "noise"}, "unknown key in data 'inlier'; did you mean 'inliers'?"),
        ({"adversarial__0__epsilon": 1}, "unknown key in adversarial.0 'epsilon'"),
        ({"purify": {"stepp": [1]}}, "unknown key in purify 'stepp'; did you mean 'step'"),
        ({"data__fit": None}, "data.fit is missing: gmm must be fitted on inliers"),
        ({"detectors": TWICE}, "two detectors are called 'msp'; give one a label"),
        ({"detectors": []}, "detectors: list should have at least 1 item"),
        ({"detectors": ["gmmm"]}, "unknown detector 'gmmm'; did you mean 'gmm'"),
        ({"detectors": ["msp"], "purify": True}, "purify needs a detector of features: name one, or add a gmm"),
        ({"purify": {"detectors": ["nobody"]}}, "purify.detectors: 'nobody' is none of the plan's: gmm, msp"),
        ({"purify": {"step": [0.1, 0.1]}}, "step names something twice: 0.1, 0.1"),
        ({"purify": {"step": [0]}}, "purify.step.0: input should be greater than 0, got 0"),
        ({"purify": {"step": [float("inf")]}}, "purify.step.0: input should be a finite number"),
        ({"purify": {"pull": [-1]}}, "purify.pull.0: input should be greater than or equal to 0, got -1"),
        ({"adversarial__0__eps": 0}, "adversarial.0.eps.0: input should be greater than 0, got 0"),
        ({"adversarial__0__eps": -0.1}, "adversarial.0.eps.0: input should be greater than 0, got -0.1"),
        ({"adversarial__0__eps": float("inf")}, "adversarial.0.eps.0: input should be a finite number"),
        ({"adversarial__0__eps": 1e300}, "adversarial.0.eps.0: input should be less than or equal to 1000000, got 1e+300"),
        ({"adversarial": [{"name": "bim", "eps": 1, "step": 1e300}]}, "adversarial.0.step: input should be less than"),
        ({"adversarial": [{"name": "bim", "eps": 1, "step": 0}]}, "adversarial.0.step: input should be greater than 0"),
        ({"purify": {"step": 1e300}}, "purify.step.0: input should be less than or equal to 1000000, got 1e+300"),
        ({"adversarial__0__eps": "8/0"}, "must be a number or a fraction such as 8/255, got '8/0'"),
        ({"adversarial__0__eps": "much"}, "must be a number or a fraction such as 8/255, got 'much'"),
        ({"adversarial__0__eps": []}, "adversarial.0.eps: list should have at least 1 item"),
        ({"adversarial__0__eps": True}, "must be a number or a fraction such as 8/255, got True"),
        ({"adversarial__0__eps": [0.1, 0.1]}, "two attacks are called 'fgsm 0.1'; once is enough"),
        ({"adversarial__0__steps": 5}, "fgsm takes one step of length eps; steps and step are for bim"),
        ({"adversarial__0__step": 0.1}, "fgsm takes one step of length eps; steps and step are for bim"),
        ({"adversarial__0__norm": "l1"}, "unknown norm 'l1'; did you mean 'l2'?"),
        ({"adversarial__0__name": "pgd"}, "adversarial.0.name: input should be 'fgsm' or 'bim', got 'pgd'"),
        ({"adversarial": [{"name": "bim", "eps": 1}, {"name": "bim", "eps": 2}]}, "two attacks are called 'bim linf'"),
        ({"data__outliers": {"inliers": "noise"}}, "outliers: a set cannot be called 'inliers'"),
        ({"data__outliers": {"mistakes": "noise"}}, "outliers: a set cannot be called 'mistakes'"),
        ({"data__outliers": {"fgsm 8/255": "noise"}}, "outliers: a set cannot be called 'fgsm 8/255'"),
        ({"repeats": 0}, "repeats: input should be greater than or equal to 1, got 0"),
        ({"folds": 1}, "folds: input should be greater than or equal to 2, got 1"),
        ({"batch_size": 0}, "batch_size: input should be greater than 0, got 0"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
        # What only the network and the images show:
        ({"data__inliers": {"source": "noise", "limit": 5}}, "inliers must have labels, and noise has none"),
        ({"data__held_out": {"source": "noise", "limit": 5}}, "held_out must have labels, and noise has none"),
        (
            {"detectors": ["mahalanobis"], "data__fit": {"source": "noise", "limit": 50}},
            "mahalanobis needs labelled inliers to fit on, and noise has no labels",
        ),
        ({"model__layer": None}, "gmm reads features: give model.layer"),
        ({"model__layer": "nope"}, "SmallCNN has no layer 'nope'"),
        ({"model__size": 40}, "SmallCNN does not take images of shape"),
        ({"model__weights": "nowhere.safetensors"}, "cannot read weights"),
        ({"detectors": [{"name": "gmm", "components": 1000}]}, "1000 components need at least as many samples"),
        ({"detectors": [{"name": "gmm", "layers": "conv3"}], "purify": True}, "purification needs a detector"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    gatecrash: Command, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in refused(gatecrash, tmp_path, triage_of(**changes))


def test_plans_that_are_none_are_refused(gatecrash: Command, tmp_path: Path) -> None:
    assert gatecrash("triage")[0] == 2
    assert "which plan? gatecrash triage PLAN.yaml" in gatecrash("triage")[2]
    assert "cannot read plan" in gatecrash("triage", str(tmp_path / "none.yaml"))[2]
    for text, message in (("[1, 2", "is not YAML"), ("just words", "must be a mapping with the keys model, data")):
        (tmp_path / "bad.yaml").write_text(text)
        code, _, err = gatecrash("triage", str(tmp_path / "bad.yaml"))
        assert code == 2 and message in err and err.count("\n") == 1
    code, _, err = gatecrash("triage", "--example", "imagenet")
    assert (code, err) == (2, "gatecrash: there is no example 'imagenet'; there are demo, cifar10\n")


def test_a_device_that_is_not_there_is_refused(gatecrash: Command, tmp_path: Path) -> None:
    assert "device must be auto, cpu, cuda or mps" in refused(gatecrash, tmp_path, triage_of(), "--device", "tpu")
    if not torch.cuda.is_available():
        assert "this machine has none" in refused(gatecrash, tmp_path, triage_of(), "--device", "cuda")


def test_a_clip_is_refused_in_one_line(gatecrash: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "small")
    capsys.readouterr()  # transformers says that it writes
    words = [{"name": "mcm", "inside": ["cat", "dog"]}]
    plan = triage_of(model={"name": "clip:small"}, detectors=words, adversarial=[])
    assert "a triage needs a classifier, and a CLIP gives embeddings of images" in refused(gatecrash, tmp_path, plan)
    plan["detectors"] = ["clip"]
    assert "inside must hold at least 1 word, got 0" in refused(gatecrash, tmp_path, plan)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_plans(gatecrash: Command, name: str) -> None:
    code, out, err = gatecrash("triage", "--example", name)
    assert (code, err, out) == (0, "", example_text(name))
    plan = parse_plan(out, name, TriagePlan)
    assert [a.name for a in plan.adversarial] == ["fgsm", "bim"] and plan.repeats >= 3
    assert {d.name for d in plan.detectors} == {"gmm", "mahalanobis", "zheng_hong", "maxlogit", "temperature"}
    assert plan.purified and len(plan.adversarial[0].eps) == 3


def test_a_resolved_plan_is_the_same_plan() -> None:
    for name in EXAMPLES:
        plan = parse_plan(example_text(name), name, TriagePlan)
        assert parse_plan(plan_text(plan), name, TriagePlan) == plan
        assert list(yaml.safe_load(plan_text(plan)))[:3] == ["model", "data", "detectors"]


def test_eps_are_numbers_or_fractions_alone_or_in_a_list() -> None:
    plan = parse_plan(yaml.safe_dump(triage_of(adversarial__0__eps="8/255")), "it", TriagePlan)
    assert plan.adversarial[0].eps == [8 / 255]
    plan = parse_plan(yaml.safe_dump(triage_of(adversarial__0__eps=["1/255", 0.5])), "it", TriagePlan)
    assert plan.adversarial[0].eps == [1 / 255, 0.5]


EVIL = ("a/b|c", "<script>alert(1)</script>", "🦊 [bold]x[/bold] [/]", "predictions")


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """A triage whose user chose the worst names."""
    folder = tmp_path_factory.mktemp("evil")
    detectors = [
        {"name": "gmm", "components": 3, "steps": 2, "label": EVIL[0]},
        {"name": "msp", "label": EVIL[1]},
        {
            "name": "ensemble",
            "label": EVIL[2],
            "members": [{"name": "gmm", "components": 2, "steps": 2}, "mahalanobis"],
        },
    ]
    outliers = {EVIL[3]: {"source": "digits", "limit": 10}, "scores.0.<b>": {"source": "noise", "limit": 6}}
    plan = triage_of(detectors=detectors, data__outliers=outliers, repeats=2, purify={"steps": 2})
    path = Path(written(folder, plan))
    triage_plan(path, out=folder / "run", device="cpu")
    return path, Bundle(folder / "run")


def test_any_label_and_set_name_will_do(evil: tuple[Path, Bundle]) -> None:
    results = evil[1].triage()
    assert list(dict.fromkeys(row["detector"] for row in results["rows"])) == list(EVIL[:3])
    assert {row["against"] for row in results["rows"] if row["task"] == "outliers"} == {EVIL[3], "scores.0.<b>"}
    assert {row["n_out"] for row in results["rows"] if row["against"] == EVIL[3]} == {10}
    assert "<script>alert(1)" not in evil[1].report.read_text(encoding="utf-8")
    assert {row["detector"] for row in results["purified"]} == {EVIL[0]}


def test_labels_are_printed_as_they_are(gatecrash: Command, evil: tuple[Path, Bundle]) -> None:
    path, bundle = evil
    code, out, err = gatecrash("triage", str(path), "--out", str(bundle.folder), "--resume", "--device", "cpu")
    assert (code, err) == (0, "")
    assert all(label in out for label in EVIL)
    row = bundle.triage()["rows"][0]
    assert f"{row['auroc']:.3f} ± {row['auroc_std']:.3f}" in out
    assert f"The classifier's mistakes: {row['n_out']} of 40 test images" in out
    assert "Accuracy before and after purification" in out and f"report: {bundle.report}" in out
    assert f"accuracy of the classifier: inliers {bundle.triage()['accuracy']['inliers']:.4f}" in out


def test_a_finished_run_is_given_again_as_json(gatecrash: Command, evil: tuple[Path, Bundle]) -> None:
    path, bundle = evil
    before = {file.name: file.read_bytes() for file in bundle.folder.iterdir()}
    arguments = ("triage", str(path), "--out", str(bundle.folder), "--device", "cpu", "--json")
    code, out, err = gatecrash(*arguments, "--resume")
    assert (code, err) == (0, "") and json.loads(out) == bundle.triage()
    code, out, err = gatecrash(*arguments)
    assert (code, out) == (2, "") and "holds another run; choose another --out, or go on with it" in err
    assert {file.name: file.read_bytes() for file in bundle.folder.iterdir()} == before


def test_the_bundles_plan_repeats_the_run(evil: tuple[Path, Bundle], tmp_path: Path) -> None:
    again = triage_plan(evil[1].folder / "plan.yaml", out=tmp_path / "again", device="cpu")
    assert again == evil[1].triage()


def test_an_audits_folder_is_not_gone_on_with(gatecrash: Command, tmp_path: Path) -> None:
    audit = Bundle(tmp_path / "audit")
    audit.write_manifest({})
    audit.write_plan(yaml.safe_dump(small_plan()))
    plan = written(tmp_path, triage_of())
    code, _, err = gatecrash("triage", plan, "--out", str(audit.folder), "--resume")
    assert code == 2 and "was begun with another plan" in err


def test_strict_fails_with_a_check_that_fails(gatecrash: Command, tmp_path: Path) -> None:
    plan = triage_of(detectors=["msp"], adversarial=[], data__inliers={"source": "fashion:test", "limit": 1})
    code, out, _ = gatecrash(
        "triage", written(tmp_path, plan), "--out", str(tmp_path / "run"), "--strict", "--device", "cpu"
    )
    assert code == 1 and "check mistakes_suffice failed: " in out


DIES = """
import os, sys
from gatecrash import cli
from gatecrash.triage import run
original, made = run.score_adversarial, []
def dying(*arguments, **options):
    if len(made) == 1:
        os._exit(9)
    made.append(1)
    return original(*arguments, **options)
run.score_adversarial = dying
cli.main()
"""


def test_a_killed_command_goes_on_and_ends_with_the_same_results(gatecrash: Command, tmp_path: Path) -> None:
    path = written(tmp_path, triage_of())
    out = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", DIES, "triage", path, "--out", str(out), "--device", "cpu"]
    died = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert died.returncode == 9, died.stderr
    assert (out / "plan.yaml").is_file() and not (out / "results.json").exists()
    code, _, err = gatecrash("triage", path, "--out", str(out), "--device", "cpu")
    assert code == 2 and "--resume" in err
    code, text, _ = gatecrash("triage", path, "--out", str(out), "--device", "cpu", "--resume", "--json")
    assert code == 0
    straight = triage_plan(path, out=tmp_path / "straight", device="cpu")
    assert json.loads(text)["rows"] == straight["rows"]
    assert read_plan(out / "plan.yaml", TriagePlan) == read_plan(path, TriagePlan)


def test_a_terminal_without_our_signs_still_gets_its_table(evil: tuple[Path, Bundle]) -> None:
    path, bundle = evil
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "gatecrash", "triage", str(path), "--out", str(bundle.folder), "--resume"]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"AUROC" in done.stdout and b" ? 0." in done.stdout and b"report: " in done.stdout
