"""The command line as a user meets it: output, JSON, and one line with exit code 2 for every mistake."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_plan import small_plan, write_small_plan

from gatecrash import cli
from gatecrash.bundle import Check
from gatecrash.data import SOURCES
from gatecrash.detectors import DETECTORS
from gatecrash.printing import print_checks, strict_objection
from small_clip import SIZE, write_clip


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    monkeypatch.setattr(sys, "argv", ["gatecrash", *arguments])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def gatecrash(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


def test_version_and_listings(gatecrash) -> None:
    assert gatecrash("--version")[:2] == (0, "gatecrash 0.1.0\n")
    for command, key, expected in (
        ("detectors", "name", set(DETECTORS)),
        ("data", "name", set(SOURCES)),
        ("attacks", "name", {"collide", "admit", "evict", "softmax", "score_to", "fgsm", "bim", "pgd"}),
    ):
        code, out, _ = gatecrash(command, "--json")
        assert code == 0
        assert expected <= {entry[key] for entry in json.loads(out)}
        code, out, _ = gatecrash(command)
        assert code == 0 and all(name in out for name in expected)


def test_the_listing_of_detectors_has_the_whole_card_and_what_they_are(gatecrash) -> None:
    code, out, _ = gatecrash("detectors", "--json")
    entry = next(entry for entry in json.loads(out) if entry["name"] == "mahalanobis")
    assert code == 0 and entry == {
        "name": "mahalanobis",
        "paper": "Lee et al., NeurIPS 2018",
        "year": 2018,
        "reads": "features",
        "fit": "labelled inliers",
        "gradient": "exact",
        "what": "Distance to the nearest class mean under one shared covariance, in one layer or several.",
    }
    code, out, _ = gatecrash("detectors")
    assert code == 0 and all(str(value).split()[0] in out for value in entry.values()) and "what" in out


def test_doctor_says_what_is_there(gatecrash) -> None:
    code, out, _ = gatecrash("doctor", "--json")
    findings = json.loads(out)
    assert code == 0
    assert findings["data"] == {
        "fashion:train": 6000,
        "fashion:val": 1000,
        "fashion:test": 1000,
        "fundus": 1,
        "digits": 1797,
    }
    assert (
        findings["versions"]["torch"] == torch.__version__.split("+")[0]
        or findings["versions"]["torch"] == torch.__version__
    )
    code, out, _ = gatecrash("doctor")
    assert code == 0 and "device" in out and "missing" in out


def test_dims_shows_a_clip_which_has_its_weights_in_its_folder(
    gatecrash, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_clip(tmp_path / "small")
    capsys.readouterr()  # transformers' progress bar
    for side in (SIZE, 2 * SIZE):  # its own framing makes them as large as it takes them
        code, out, err = gatecrash("dims", "clip:small", "--input", f"3,{side},{side}", "--json")
        assert (code, err) == (0, "")
        rows = {row["layer"]: row for row in json.loads(out)}
        patches, whole = rows["clip.vision_model.embeddings.patch_embedding"], rows["image → output"]
        assert (patches["inputs"], patches["log2_inputs"]) == (3 * SIZE**2, 8 * 3 * SIZE**2)
        assert (patches["outputs"], patches["log2_outputs"]) == (16 * 4, 32 * 16 * 4)  # 16 numbers for 4 patches
        assert (rows["clip.visual_projection"]["inputs"], rows["clip.visual_projection"]["outputs"]) == (16, 12)
        assert (whole["kind"], whole["inputs"], whole["outputs"]) == ("ClipImages", 3 * side**2, 12)
        assert (whole["reduces"], whole["covering"]) == (True, 1.0)
        assert not any("text_model" in layer for layer in rows)
    code, out, _ = gatecrash("dims", "clip:small", "--input", "3,16,16", "--layer", "clip.vision_model.post_layernorm")
    assert code == 0 and "image → clip.vision_model.post_layernorm" in out
    code, out, err = gatecrash("dims", "clip:small", "--input", "1,16,16")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gatecrash: ClipImages does not take images of shape (1, 16, 16): ")
    assert "clip:DIR" in gatecrash("dims", "--help")[1]


def test_an_audit_prints_its_table_and_its_json(gatecrash, tmp_path: Path) -> None:
    plan = write_small_plan(tmp_path / "plan.yaml", detectors=["msp"], pictures=[])
    code, out, err = gatecrash("audit", str(plan), "--device", "cpu")
    assert code == 0
    assert "report: runs/plan/report.html" in out
    assert "L∞ 8/255" in out and "clean" in out and "median MAPE" in out
    assert err == ""
    code, out, _ = gatecrash("audit", str(plan), "--device", "cpu", "--resume", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "runs/plan/results.json").read_text())


def test_an_example_plan_can_be_printed_and_started_from(gatecrash) -> None:
    code, out, _ = gatecrash("audit", "--example", "demo")
    assert code == 0 and "builtin:small_cnn" in out
    code, _, err = gatecrash("audit", "--example", "dmo")
    assert (code, err) == (
        2,
        "gatecrash: there is no example 'dmo'; there are demo, generative, imagenet, timm_vit, clip\n",
    )


def test_collide_writes_pictures_and_charts(gatecrash, tmp_path: Path) -> None:
    arguments = ("--start", "fundus", "--target", "fashion:test", "--limit", "3", "--steps", "60", "--device", "cpu")
    code, out, _ = gatecrash("collide", *arguments, "--out", "c", "--json")
    assert code == 0
    pairs = json.loads(out)
    assert len(pairs) == 3
    assert all(pair["mape"] < 0.02 and pair["distance"] <= 5 + 1e-5 < pair["target_distance"] for pair in pairs)
    found = Image.open(tmp_path / "c" / pairs[0]["files"]["found"])
    assert found.size == (56, 56)
    for chart in ("mape.png", "latents.png"):
        assert min(Image.open(tmp_path / "c" / chart).size) > 200
    code, out, _ = gatecrash("collide", *arguments, "--out", "d")
    assert code == 0 and "MAPE" in out
    assert gatecrash("collide", *arguments, "--out", "c")[::2] == (
        2,
        "gatecrash: c is not an empty folder; choose another --out\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "none.yaml"], "gatecrash: cannot read plan none.yaml: No such file or directory"),
        (["audit"], "gatecrash: which plan? gatecrash audit PLAN.yaml"),
        (["audit", "plan.yaml", "--device", "tpu"], "gatecrash: device must be auto, cpu, cuda or mps, got 'tpu'"),
        (["audit", "plan.yaml", "--device", "cpu:x"], "gatecrash: device must be auto, cpu, cuda or mps, got 'cpu:x'"),
        (["collide", "--start", "folder:~nobody-at-all/x", "--target", "noise"], "~nobody-at-all/x"),
        (["audit", "plan.yaml", "--wat"], "gatecrash: No such option: --wat"),
        (["audti"], "gatecrash: No such command 'audti'."),
        (["collide", "--start", "nois", "--target", "noise"], "unknown source 'nois'; did you mean 'noise'"),
        (["collide", "--start", "noise", "--target", "noise", "--eps", "0"], "eps must be positive"),
        (["collide", "--start", "noise", "--target", "noise", "--norm", "l7"], "unknown norm 'l7'"),
        (["collide", "--start", "npz:x.npz", "--target", "noise"], "x.npz"),
        (["collide", "--start", "noise"], "gatecrash: Missing option '--target'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(gatecrash, arguments: list[str], message: str) -> None:
    write_small_plan(Path("plan.yaml"))
    code, out, err = gatecrash(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("gatecrash: ") and err.count("\n") == 1
    assert message in err
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(gatecrash) -> None:
    write_small_plan(Path("plan.yaml"))
    code, _, err = gatecrash("audit", "plan.yaml", "--device", "cuda")
    assert (code, err) == (
        2,
        "gatecrash: device 'cuda' was asked for, but this machine has none; use --device auto or cpu\n",
    )


def test_images_outside_the_range_are_named(gatecrash, tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "bad.npz", x=np.full((3, 56, 56), 7.0, dtype=np.float32))
    plan = small_plan()
    plan["data"]["outliers"] = {"bad": "npz:bad.npz"}
    write_small_plan(Path("plan.yaml"), data=plan["data"])
    code, _, err = gatecrash("audit", "plan.yaml")
    assert code == 2
    assert "must lie in [0, 1]" in err and err.count("\n") == 1


def test_a_full_disk_is_one_line(gatecrash, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", "runs/plan/work/x")

    write_small_plan(Path("plan.yaml"), detectors=["msp"])
    monkeypatch.setattr(sys.modules["gatecrash.audit.work"], "save_file", full)
    code, _, err = gatecrash("audit", "plan.yaml", "--device", "cpu")
    assert code == 2 and re.fullmatch(r"gatecrash: No space left on device \(runs/plan/work/\S+\)\n", err)


def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    plan = write_small_plan(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "gatecrash", "audit", str(plan), "--out", str(tmp_path / "run"), "--device", "cpu"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell in the background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    work, deadline = tmp_path / "run" / "work", time.monotonic() + 120
    while not (work.is_dir() and list(work.glob("[!.]*.safetensors"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "gatecrash: interrupted; what was finished is kept, and --resume goes on from there\n"
    assert list(work.glob("[!.]*.safetensors"))


def checked(name: str, status: str, sentence: str) -> Check:
    """A check as a bundle has it."""
    return {"name": name, "status": status, "sentence": sentence}  # type: ignore[typeddict-item]


SMALL = "Not run, too costly beside this small audit: it may take 80 network passes, and 3 are left of the 10."


def test_what_failed_and_what_warns_has_a_line_each_and_what_was_not_run_one_in_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_checks(
        [
            checked("leakage", "pass", "0 of 3 are among the others."),
            checked("planted", "warn", SMALL),
            checked("both_sides", "fail", "no attack on side in."),
            checked("steps_suffice", "warn", SMALL),
            checked("pixel_budget", "warn", "Not run, the plan has no attack."),
            checked("deterministic", "warn", "it is nearly so."),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "check both_sides failed: no attack on side in.",
        "check deterministic warns: it is nearly so.",
        "2 checks not run, too costly beside this small audit: planted, steps_suffice",
        "1 check not run, the plan has no attack: pixel_budget",
    ]


@pytest.mark.parametrize(
    ("status", "sentence", "objection"),
    [
        ("pass", "all is well.", None),
        ("warn", "it is nearly so.", None),
        ("warn", "Not run, the plan has no attack.", None),
        ("fail", "it is not so.", "1 check failed"),
        ("warn", SMALL, "1 check could not be run, and what is not checked has not passed; audit more images, "),
    ],
)
def test_strict_means_that_what_failed_or_could_not_be_looked_at_does_not_stand(
    status: str, sentence: str, objection: str | None
) -> None:
    said = strict_objection([checked("leakage", "pass", "fine."), checked("planted", status, sentence)])
    assert said is None if objection is None else (said or "").startswith(objection)


def test_a_small_audit_says_what_it_did_not_check_and_is_no_success_under_strict(gatecrash, tmp_path: Path) -> None:
    few = {"inliers": {"source": "fashion:test", "limit": 6}, "outliers": {"noise": {"source": "noise", "limit": 6}}}
    attack = {"name": "admit", "side": "both", "ball": {"norm": "linf", "eps": "4/255"}, "steps": 3}
    plan = str(write_small_plan(tmp_path / "p.yaml", data=few, detectors=["msp"], attacks=[attack], pictures=[]))
    code, out, err = gatecrash("audit", plan, "--out", "run", "--device", "cpu", "--strict")
    assert code == 1
    assert "checks not run, too costly beside this small audit: gradient_flows, " in out
    assert re.fullmatch(r"gatecrash: --strict: \d+ checks could not be run, and what is not checked .*\n", err)
