"""The column of an audit that no attack can change."""

from __future__ import annotations

import torch
from small_audit import BOTH, Brightness, finished

from gatecrash.detectors import CCU
from gatecrash.metrics import auroc
from gatecrash.printing import proven
from small_models import blank, one_thread, squares, trained_net

assert one_thread


def test_rows_of_attacked_outliers_say_what_is_proven_and_no_others() -> None:
    inliers, outliers = squares(12, 5)[0], blank(10, 6)
    attack = BOTH | {"ball": {"norm": "linf", "eps": [0.001, 0.1]}, "steps": 5}
    detectors = {"ccu": CCU(trained_net(), components=3), "brightness": Brightness()}
    job, measured, rows = finished(
        detectors, [attack], inliers=inliers, outliers=outliers, fit=squares(60)[0], fit_outliers=blank(30, 2)
    )
    certified = [row for row in rows if "certified_auroc" in row]
    assert [(row["detector"], row["side"], row["eps"]) for row in certified] == [
        ("ccu", "out", 0.001),
        ("ccu", "out", 0.1),
    ]
    ccu = job.detectors["ccu"]
    assert isinstance(ccu, CCU)
    clean = measured.clean["ccu", "inliers"]
    for row in certified:
        bound = ccu.score_bound(outliers, row["eps"], "linf")
        assert row["certified_auroc"] == auroc(clean, bound.to(clean)) <= row["auroc"]
    assert certified[0]["certified_auroc"] == 1 > certified[1]["certified_auroc"]
    assert all(bool(torch.isfinite(torch.tensor(row["certified_auroc"]))) for row in certified)


def test_the_terminal_tells_what_is_proven() -> None:
    row = {"certified_auroc": 0.7654, "auroc": 0.9}
    assert proven(row) == " ≥ 0.765"  # type: ignore[arg-type]
    assert proven({"auroc": 0.9}) == ""  # type: ignore[arg-type]
