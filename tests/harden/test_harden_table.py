"""The table at the end: its numbers computed once more, by other means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_harden import ALOE, small_model
from torch import Tensor

import gatecrash as gate
from gatecrash.audit.models import load_model
from gatecrash.audit.plan import ModelPlan
from gatecrash.data import load_source
from gatecrash.harden import HardenResults, harden_plan

EPS, STEP, SEED = 8 / 255, 2 / 255, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HardenResults]:
    """A run that learns enough for its numbers not to be all the same."""
    folder = tmp_path_factory.mktemp("table")
    outliers = {"digits": {"source": "digits", "limit": 30}, "inliers": {"source": "spiral", "limit": 20}}
    plan = small_model(
        data={
            "train": {"source": "fashion:train", "limit": 200},
            "test": {"source": "fashion:test", "limit": 40},
            "test_outliers": outliers,
        },
        methods=["ce", ALOE],
        model={"options": {"width": 4, "latent": 8, "size": 16}},
        training={"epochs": 3, "lr": 0.01, "optimiser": "adamw"},
        evaluation={
            "eps": EPS, "step": STEP, "steps": 5, "pgd_steps": 10, "pgd_eps": "3/255", "batch_size": 16,
            "detectors": ["msp", "energy"],
        },
        seed=SEED,
    )  # fmt: skip
    return folder / "run", harden_plan(plan, out=folder / "run")


def scores_of(encoder: gate.Encoder, x: Tensor) -> dict[str, Tensor]:
    """What the two detectors say, from their definitions."""
    with torch.no_grad():
        logits = encoder(x).double()
    return {"msp": -logits.softmax(dim=1).amax(dim=1), "energy": -logits.exp().sum(dim=1).log()}


def pairs_won(inliers: Tensor, outliers: Tensor) -> float:
    """AUROC from its definition."""
    apart = outliers[None] - inliers[:, None]
    return float(((apart > 0).double() + (apart == 0).double() / 2).mean())


def accepted(inliers: Tensor, outliers: Tensor) -> float:
    """FPR95 by trying every inlier's score as the threshold, the lowest that accepts 95 % of them first."""
    for threshold in inliers.sort().values:
        if (inliers <= threshold).double().mean() >= 0.95:
            return float((outliers <= threshold).double().mean())
    raise AssertionError


def least_error(inliers: Tensor, outliers: Tensor) -> float:
    """The detection error by trying every threshold."""
    errors = [
        ((inliers > t).double().mean() + (outliers <= t).double().mean()) / 2 for t in torch.cat([inliers, outliers])
    ]
    return float(min(errors))


def test_every_number_of_the_table(run: tuple[Path, HardenResults]) -> None:
    folder, results = run
    assert len(results["rows"]) == 2 * 2 * 2
    test = load_source("fashion:test", limit=40, channels=1, size=16)
    sets = {
        "digits": load_source("digits", limit=30, channels=1, size=16).x,
        "inliers": load_source("spiral", limit=20, channels=1, size=16, seed=SEED).x,
    }
    assert test.y is not None
    for name in ("ce", "aloe"):
        encoder = gate.Encoder(load_model(ModelPlan(name=f"bundle:{name}"), folder), None, [0.3], [0.35])
        moved = gate.pgd(encoder, test.x, test.y, gate.Linf(3 / 255), steps=10, generator=SEED, batch_size=16).x
        with torch.no_grad():
            clean, attacked = (float((encoder(x).argmax(dim=1) == test.y).double().mean()) for x in (test.x, moved))
        led = {
            side: gate.attack_softmax(
                encoder, x, gate.Linf(EPS), side="in" if side == "test" else "out", steps=5, step=STEP,
                generator=SEED, batch_size=16,
            ).x
            for side, x in {"test": test.x, **{f"out {key}": x for key, x in sets.items()}}.items()
        }  # fmt: skip
        for row in (row for row in results["rows"] if row["method"] == name):
            detector, against = row["detector"], row["outliers"]
            assert (row["accuracy"], row["pgd_accuracy"]) == pytest.approx((clean, attacked))
            for prefix, inside, outside in (
                ("", test.x, sets[against]),
                ("attacked_", led["test"], led[f"out {against}"]),
            ):
                pair = scores_of(encoder, inside)[detector], scores_of(encoder, outside)[detector]
                found = [row[f"{prefix}{key}"] for key in ("auroc", "fpr95", "detection_error")]  # type: ignore[literal-required]
                assert found == pytest.approx([pairs_won(*pair), accepted(*pair), least_error(*pair)], abs=2e-3)


def test_the_attacks_are_felt_and_the_rows_are_not_all_alike(run: tuple[Path, HardenResults]) -> None:
    rows = run[1]["rows"]
    plain = rows[0]
    assert (plain["method"], plain["detector"], plain["outliers"]) == ("ce", "msp", "digits")
    assert plain["accuracy"] > 0.3 and plain["pgd_accuracy"] < plain["accuracy"]
    for row in rows:
        assert row["attacked_auroc"] < row["auroc"] and row["attacked_detection_error"] > row["detection_error"]
    assert len({row["auroc"] for row in rows}) == len(rows)
