"""Purification with a score whose descent is known in closed form, and the grid of the paper's Appendix B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_triage import detectors_of, mislabelled, small_triage
from torch import Tensor, nn

from gatecrash.audit.work import Work
from gatecrash.detectors import GMM, MSP, Card, Detector, Mahalanobis
from gatecrash.encoder import Encoder
from gatecrash.objective import single
from gatecrash.protocols import Latent
from gatecrash.triage.job import TriageJob
from gatecrash.triage.main import set_of
from gatecrash.triage.plan import PurifyPlan, TriagePlan
from gatecrash.triage.run import measure
from small_models import one_thread, squares, trained_net  # noqa: F401

HALF, STEPS = 0.5, 7


class Quadratic(Detector):
    """τ = ½‖z − c‖², whose descent is a straight line towards c."""

    card = Card(paper="none", year=2000, reads="features")

    def __init__(self, encoder: nn.Module, centre: Tensor) -> None:
        super().__init__(encoder)
        self.centre = centre

    def judge(self, z: Latent) -> Tensor:
        return HALF * (single(z) - self.centre).square().sum(dim=1)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatecrash.report.write_triage_report", lambda bundle: bundle.report)


def measured(detector: Detector, network: nn.Module, folder: Path, **grid: Any) -> Any:
    """What a triage with one detector that purifies measures."""
    job = TriageJob(
        plan="",
        detectors={"it": detector},
        encoder=Encoder(network),
        features=None,
        inliers=set_of(mislabelled(), "inliers"),
        held_out=set_of(mislabelled(40, seed=3), "held_out"),
        outliers={},
        adversarial=[],
        device=torch.device("cpu"),
        purify=PurifyPlan.model_validate(grid),
        purified=["it"],
    )
    return measure(job, Work(folder / "work", 0)).purified


def test_purified_classes_are_those_of_the_closed_form(tmp_path: Path) -> None:
    network = trained_net()
    encoder = Encoder(network, "hidden")
    with torch.no_grad():
        centre = single(encoder(squares(1)[0])).double()[0]  # an image of class 0
    found = measured(
        Quadratic(encoder, centre.float()), network, tmp_path, step=[0.05, 0.1], pull=[0.0, 0.5, 20.0], steps=STEPS
    )  # fmt: skip
    assert [(part.step, part.pull) for part in found] == [(s, p) for s in (0.05, 0.1) for p in (0.0, 0.5, 20.0)]
    zeros = set()
    for part in found:
        for name, (x, _) in {"inliers": mislabelled(), "held_out": mislabelled(40, seed=3)}.items():
            with torch.no_grad():
                start = single(encoder(x)).double()
            # Gradient descent on ½‖z−c‖² + ν‖z−z₀‖²: the distance to the minimum shrinks by one factor every step.
            minimum = (HALF * centre + part.pull * start) / (HALF + part.pull)
            factor = (1 - 2 * part.step * (HALF + part.pull)) ** STEPS
            purified = minimum + factor * (start - minimum)
            logits = purified @ network.head.weight.double().T + network.head.bias.double()
            assert torch.equal(part.predictions[name], logits.argmax(dim=1))
            zeros.add(int((part.predictions[name] == 0).sum()))
    assert len(zeros) >= 4  # the points of the grid really differ


def test_the_accuracy_before_and_after_is_counted(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    encoder = Encoder(network, "hidden")
    with torch.no_grad():
        centre = single(encoder(squares(1)[0]))[0]
    detectors = {"GMM": detectors_of(network)["GMM"], "pull": Quadratic(encoder, centre)}
    purify = {"detectors": ["pull"], "step": [0.999999], "pull": [0, 1e-9], "steps": 1}
    results, _ = small_triage(tmp_path / "run", detectors, purify=purify, adversarial=[])
    rows = results["purified"]
    assert [(row["detector"], row["step"], row["pull"]) for row in rows] == [
        ("pull", 0.999999, 0.0),
        ("pull", 0.999999, 1e-9),
    ]
    for row in rows:  # one step of length 1 goes all the way to the centre, an image of class 0
        assert (row["test_before"], row["validation_before"]) == (0.75, 0.75)
        assert row["test_after"] == pytest.approx(float((mislabelled()[1] == 0).double().mean()))
        assert row["validation_after"] == pytest.approx(float((mislabelled(40, seed=3)[1] == 0).double().mean()))
        assert (row["repeats"], row["test_std"], row["validation_std"]) == (1, 0.0, 0.0)


def test_the_grid_is_complete_and_averaged_over_the_repeats(tmp_path: Path, no_report: None) -> None:
    network = trained_net()
    detectors = {title: detectors_of(network, count)["GMM"] for title, count in (("GMM", 4), ("other", 5))}
    results, _ = small_triage(
        tmp_path / "run", detectors, purify={"steps": 3}, repeats=2, held_out=None, adversarial=[]
    )
    keys = [(row["detector"], row["step"], row["pull"]) for row in results["purified"]]
    grid = [(step, pull) for step in (0.1, 0.01) for pull in (0.0, 0.01, 0.1, 1.0)]  # Table 4 of the paper
    assert keys == [(title, *point) for title in detectors for point in grid]
    assert all(row["repeats"] == 2 and "validation_before" not in row for row in results["purified"])
    assert any(row["test_std"] > 0 for row in results["purified"])
    alone = []
    for seed in (0, 1):
        mixture = GMM(Encoder(network, "hidden"), components=4, steps=3, seed=seed)
        options: dict[str, Any] = {"repeats": 1, "held_out": None, "adversarial": []}
        alone.append(
            small_triage(tmp_path / f"{seed}", {"GMM": mixture}, purify={"steps": 3}, **options)[0]["purified"]
        )
    for row, first, second in zip(results["purified"][:8], *alone, strict=True):
        after = first["test_after"], second["test_after"]
        assert row["test_after"] == pytest.approx(sum(after) / 2)
        assert row["test_std"] == pytest.approx(abs(after[0] - after[1]) / 2**0.5)


@pytest.mark.parametrize(("step", "pull"), [(1e5, 0.0), (3.0, 0.0), (1.0, 10.0)])
def test_features_that_fly_away_are_of_no_class(tmp_path: Path, step: float, pull: float) -> None:
    network = trained_net()
    encoder = Encoder(network, "hidden")
    mixture = GMM(encoder, components=3, steps=3).fit(squares(90))
    for number, detector in enumerate((Quadratic(encoder, torch.zeros(5)), mixture)):
        [part] = measured(detector, network, tmp_path / str(number), step=[step], pull=[pull], steps=100)
        assert set(part.predictions["inliers"].tolist()) == {-1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: GMM(Encoder(net, "maps"), components=2), "it judges maps; purification needs"),
        (lambda net: GMM(Encoder(net), components=2), "it judges the output; purification needs"),
        (lambda net: GMM(Encoder(net, "hidden.1"), components=2), "hidden.1, which is not what the last linear layer"),
        (
            lambda net: Mahalanobis(Encoder(net, "hidden"), magnitude=0.01),
            "it does not judge one vector of features per image",
        ),
        (lambda net: MSP(Encoder(net)), "it judges the output; purification needs"),
    ],
)
def test_a_layer_that_is_not_in_front_of_the_head_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        small_triage(tmp_path / "run", {"it": make(trained_net())}, purify={"detectors": ["it"]})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_purify_takes_numbers_fractions_true_and_false() -> None:
    plan = PurifyPlan.model_validate({"step": "1/10", "pull": 0})
    assert (plan.step, plan.pull, plan.steps) == ([0.1], [0.0], 100)
    base = {"model": {"name": "builtin:small_cnn"}, "data": {"inliers": "noise", "fit": "noise"}, "detectors": ["gmm"]}
    assert TriagePlan.model_validate(base | {"purify": True}).purified == ["gmm"]
    assert TriagePlan.model_validate(base | {"purify": False}).purify is None
