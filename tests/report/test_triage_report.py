from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_triage import BIM, FGSM, make_grid, make_triage
from test_report import EVIL, Page, luminance

from gatecrash.bundle import Bundle, TriageRow
from gatecrash.metrics import aupr_out, auroc, pr_curve, roc_curve
from gatecrash.report import write_report, write_triage_report
from gatecrash.report.formats import probability, spread
from gatecrash.report.triage_charts import POINTS, SERIES, colour, is_dashed, thinned
from gatecrash.report.triage_scores import TriageSamples
from gatecrash.report.triage_tables import auroc_cell, label_of, points
from gatecrash.report.triage_words import findings, headline

TASKS = ("mistakes", "adversarial", "outliers")


def page_of(bundle: Bundle) -> Page:
    return Page(write_triage_report(bundle).read_text(encoding="utf-8"))


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def table_with(page: Page, *headings: str) -> list[list[str]]:
    """The first table whose first line begins with the headings, its texts with plain spaces."""
    tables = [[[plain(cell) for cell in row] for row in table] for table in page.tables]
    return next(table for table in tables if tuple(table[0][: len(headings)]) == headings)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_triage(tmp_path_factory.mktemp("triage"))


@pytest.fixture(scope="module")
def page(bundle: Bundle) -> Page:
    return page_of(bundle)


def rows_of(bundle: Bundle, task: str) -> list[TriageRow]:
    return [row for row in bundle.triage()["rows"] if row["task"] == task]


def with_spread(row: Any, name: str) -> str:
    return f"{row[name]:.3f} ± {row[f'{name}_std']:.3f}"


# Tables


def test_the_table_of_mistakes_shows_the_rows(bundle: Bundle, page: Page) -> None:
    _, _, *lines = table_with(page, "detector", "AUROC")
    for line, row in zip(lines, rows_of(bundle, "mistakes"), strict=True):
        assert line == [
            row["detector"],
            *(with_spread(row, name) for name in ("auroc", "aupr_in", "aupr_out")),
            probability(row["p"]),
            "1.5 ± 1",
            *(with_spread(row, n) for n in ("precision", "recall", "validated_precision", "validated_recall")),
            with_spread(row, "rejected_in"),
        ]


def test_the_table_of_adversarial_images_shows_the_rows(bundle: Bundle, page: Page) -> None:
    head, *lines, last = table_with(page, "detector", "fgsm 2/255 (L∞)")
    rows = {(row["detector"], row["against"]): row for row in rows_of(bundle, "adversarial")}
    assert head[1:] == ["fgsm 2/255 (L∞)", "bim 0.5 (L2)"]
    for detector, *cells in lines:
        assert cells == [with_spread(rows[detector, attack.title], "auroc") for attack in (FGSM, BIM)]
    assert len(lines) == 2
    assert last == ["classifier’s accuracy (0.800 without attack)", "0.250", "0.250"]


def test_the_table_of_outliers_shows_the_rows(bundle: Bundle, page: Page) -> None:
    _, *lines = table_with(page, "outliers", "detector")
    for line, row in zip(lines, rows_of(bundle, "outliers"), strict=True):
        names = ("auroc", "aupr_in", "aupr_out", "fpr95", "rejected_out")
        assert line == [row["against"], row["detector"], *(with_spread(row, name) for name in names)]


def test_the_grid_of_purification_is_shown_and_its_best_point_marked(page: Page) -> None:
    _, _, *lines = table_with(page, "detector", "ε", "ν")
    assert len(lines) == 4
    assert lines[2] == [
        *("gmm", "0.01", "0", "0.875", "0.879 ± 0.001", "+0.004", "0.800", "0.803 ± 0.003", "+0.003"),
        "best on validation",
    ]
    assert [line[-1] for line in lines] == ["", "", "best on validation", ""]


def test_every_detector_has_its_own_best_point() -> None:
    grid = make_grid(["a", "b"])
    grid[4]["validation_after"] = 0.9
    assert [point.best for point in points(grid)] == [False, False, True, False, True, False, False, False]
    for row in grid:
        del row["validation_after"]
    assert not any(point.best for point in points(grid))


def test_a_change_too_small_to_be_seen_has_no_sign() -> None:
    grid = make_grid(["a"])[:1]
    grid[0]["test_after"] = grid[0]["test_before"] - 0.0001
    assert points(grid)[0].cells[-1] == "+0.000"


def test_the_full_table_holds_every_column_but_the_repeats(bundle: Bundle, page: Page) -> None:
    rows = bundle.triage()["rows"]
    columns, *body = table_with(page, "detector", "task", "against")
    assert set(columns) == {name for row in rows for name in row} - {"per_repeat"}
    for cells, row in zip(body, rows, strict=True):
        shown = dict(zip(columns, cells, strict=True))
        assert (shown["detector"], shown["against"]) == (row["detector"], row["against"])
        assert float(shown["fpr95"]) == pytest.approx(row["fpr95"], rel=1e-3)


def test_a_high_auroc_has_the_colour_of_good(bundle: Bundle) -> None:
    row = rows_of(bundle, "outliers")[0]
    row["auroc"], row["rejected_out"] = 0.97, 0.5
    cell = auroc_cell(row)
    assert cell.band == 5
    assert plain(cell.hint) == "AUROC 0.9700, 80 against 80 images; 50 % rejected at the threshold"
    assert auroc_cell(None) == ("–", None, "not tried")


# Curves


def charts_of(page: Page, spec: str) -> Iterator[dict[str, dict[str, list[Any]]]]:
    return (chart["data"] for chart in page.charts.values() if chart["spec"].removesuffix("_log") == spec)


def curve(data: dict[str, dict[str, list[Any]]], detector: str) -> tuple[np.ndarray, np.ndarray]:
    points = data["points"]
    own = [place for place, name in enumerate(points["detector"]) if name == detector]
    return np.array(points["x"])[own], np.array(points["y"])[own]


def scores_of(bundle: Bundle, detector: str, name: str, *, right: bool | None = None) -> torch.Tensor:
    rows = [
        row["score"]
        for row in bundle.samples().to_pylist()
        if (row["repeat"], row["detector"], row["set"]) == (0, detector, name)
        and (right is None or (row["predicted"] == row["label"]) == right)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def sides_of(bundle: Bundle, row: TriageRow) -> tuple[torch.Tensor, torch.Tensor]:
    if row["task"] == "mistakes":
        return tuple(scores_of(bundle, row["detector"], "inliers", right=right) for right in (True, False))
    return tuple(scores_of(bundle, row["detector"], name) for name in ("inliers", row["against"]))


def area_under(y: np.ndarray, x: np.ndarray) -> float:
    """By straight lines between the points."""
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))


@pytest.mark.parametrize("task", TASKS)
def test_curves_are_those_of_the_metrics(task: str, bundle: Bundle, page: Page) -> None:
    rows = rows_of(bundle, task)
    rocs, prs = list(charts_of(page, f"{task}_roc")), list(charts_of(page, f"{task}_pr"))
    against = list(dict.fromkeys(row["against"] for row in rows))
    assert len(rocs) == len(prs) == len(against)
    for row in rows:
        inside, outside = sides_of(bundle, row)
        roc, place = roc_curve(inside, outside), against.index(row["against"])
        x, y = curve(rocs[place], row["detector"])
        np.testing.assert_allclose(x, roc.fpr, atol=1e-5)
        np.testing.assert_allclose(y, roc.tpr, atol=1e-5)
        assert area_under(y, x) == pytest.approx(row["per_repeat"][0]["auroc"], abs=1e-4)
        found = pr_curve(-outside, -inside)
        x, y = curve(prs[place], row["detector"])
        np.testing.assert_allclose(x, found.recall, atol=1e-5)
        np.testing.assert_allclose(y, found.precision, atol=1e-5)
        assert float(np.sum(np.diff(x) * y[1:])) == pytest.approx(row["per_repeat"][0]["aupr_out"], abs=1e-3)
        share = len(outside) / (len(inside) + len(outside))
        assert prs[place]["chance"] == {"x": [0, 1], "y": pytest.approx([share, share], abs=1e-5)}


def test_a_long_curve_is_thinned_to_points_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(2, 5000, generator=generator, dtype=torch.float64)
    roc = roc_curve(inside, outside + 1)
    x, y = roc.fpr.numpy(), roc.tpr.numpy()
    shown = thinned(x, y)
    assert len(shown) <= POINTS
    assert shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (0, len(x) - 1)
    assert area_under(y[shown], x[shown]) == pytest.approx(auroc(inside, outside + 1), abs=1e-3)
    assert np.max(np.diff(x[shown]) + np.diff(y[shown])) < 2.5 * 2 / POINTS
    found = pr_curve(-(outside + 1), -inside)
    recall, precision = found.recall.numpy(), found.precision.numpy()
    shown = thinned(recall, precision)
    assert len(shown) <= POINTS
    area = float(np.sum(np.diff(recall[shown]) * precision[shown][1:]))
    assert area == pytest.approx(aupr_out(inside, outside + 1), abs=0.01)


def test_the_axes_say_who_is_accepted(page: Page) -> None:
    for inside, outside in (("correct", "wrong"), ("clean", "adversarial"), ("inliers", "outliers")):
        for title in (f"{outside} accepted (FPR)", f"{inside} accepted (TPR)", f"{outside} rejected (recall)"):
            assert f'"title":"share of {title}"' in page.scripts[0]


def test_detectors_keep_their_look_in_every_chart(page: Page) -> None:
    charts = [chart["data"]["points"] for chart in page.charts.values() if "points" in chart["data"]]
    looks = {look for data in charts for look in zip(data["detector"], data["colour"], strict=True)}
    assert looks == {("msp", colour(0)), ("gmm", colour(1))}
    many = [(colour(place), is_dashed(place)) for place in range(2 * SERIES)]
    assert len(set(many)) == len(many)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_curves_stand_out_from_the_paper(page: Page, scheme: int) -> None:
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", page.html.split(":root {")[1 + scheme].split("}")[0]))
    for series in range(SERIES):
        dark, light = sorted(luminance(colours[name]) for name in ("paper", f"series-{series}"))
        assert (light + 0.05) / (dark + 0.05) >= 3


# Histograms


@pytest.mark.parametrize("task", TASKS)
def test_histograms_count_the_samples_and_mark_the_threshold(task: str, bundle: Bundle, page: Page) -> None:
    names = {"mistakes": ("correct", "wrong"), "adversarial": ("clean", "adversarial")}.get(
        task, ("inliers", "outliers")
    )
    for row, data in zip(rows_of(bundle, task), charts_of(page, f"{task}_scores"), strict=True):
        bins = data["bins"]
        edges = np.array([*bins["low"], bins["high"][-1]])
        for name, values in zip(names, sides_of(bundle, row), strict=True):
            expected = np.histogram(values.numpy().clip(edges[0], edges[-1]), edges)[0]
            np.testing.assert_array_equal(bins[name], expected)
            np.testing.assert_allclose(bins[f"share_{name}"], expected / len(values), atol=1e-5)
        assert data["marks"] == {"threshold": [row["per_repeat"][0]["threshold"]]}


def test_odd_scores_and_a_far_threshold_are_told(tmp_path: Path) -> None:
    bundle = make_triage(tmp_path, edit={"msp": math.inf, "gmm": math.nan}, attacks=[], outliers=["noise"])
    results = bundle.triage()
    for row in results["rows"]:
        if row["task"] == "outliers" and row["detector"] == "msp":
            row["per_repeat"][0]["threshold"] = 1e6
    bundle.write_triage(results)
    page = page_of(bundle)
    assert "1 score beyond the axis, in the outermost bins; the threshold is beyond the axis" in page.text
    assert "1 score NaN, left out" in page.text
    first, second = charts_of(page, "outliers_scores")
    assert first["marks"] == {"threshold": []}
    assert (sum(first["bins"]["outliers"]), sum(second["bins"]["outliers"])) == (80, 79)
    data = next(charts_of(page, "outliers_roc"))
    assert curve(data, "gmm")[1][-1] == 1


def test_only_images_that_fool_count_where_the_rows_say_so(tmp_path: Path) -> None:
    bundle = make_triage(tmp_path, fooled_only=True)
    samples = TriageSamples(bundle.samples())
    for row in rows_of(bundle, "adversarial"):
        sides = samples.sides(row)
        assert [len(side) for side in sides] == [row["n_in"], row["n_out"]]
        assert 0 < row["n_in"] < 80
        inside, outside = (torch.from_numpy(side) for side in sides)
        assert auroc(inside, outside) == pytest.approx(row["per_repeat"][0]["auroc"])


# Words


def triage_row(
    detector: str, value: float, task: str = "mistakes", against: str = "mistakes", **more: Any
) -> TriageRow:
    row: dict[str, Any] = {"detector": detector, "task": task, "against": against, "norm": None, "eps": None}
    row |= {"repeats": 1, "auroc": value, "auroc_std": 0.004, "n_in": 90, "n_out": 10, "per_repeat": []}
    return row | ({"p": 9.64e-8} if task == "mistakes" else {}) | more  # type: ignore[return-value]


def test_the_headline_names_who_leads() -> None:
    rows = [
        triage_row("msp", 0.91, repeats=3),
        triage_row("gmm", 0.7),
        *(triage_row(name, value, "adversarial", "fgsm") for name, value in (("msp", 0.8), ("gmm", 0.6))),
        *(triage_row(name, value, "adversarial", "bim") for name, value in (("msp", 0.6), ("gmm", 0.7))),
    ]
    claim = "msp finds the classifier’s mistakes best (AUROC 0.910 ± 0.004, p = 9.6e-8)"
    assert plain(headline(rows)) == f"{claim} and also leads on adversarial images."
    rows += [triage_row(name, value, "outliers", "noise") for name, value in (("msp", 0.8), ("gmm", 0.99))]
    also = "and also leads on adversarial images; on outliers gmm leads (mean AUROC 0.990)."
    assert plain(headline(rows)) == f"{claim} {also}"
    rows[2]["auroc"] = 0.1
    assert (
        plain(headline(rows))
        == f"{claim}; on adversarial images gmm leads (mean AUROC 0.650), on outliers gmm (0.990)."
    )


def test_the_headline_when_there_is_one_detector_or_several_are_alike() -> None:
    one = [triage_row("msp", 0.91, p=0.2), triage_row("msp", 0.8, "outliers", "noise")]
    assert plain(headline(one)) == (
        "msp finds the classifier’s mistakes (AUROC 0.910, p = 0.2, which may be chance); "
        "on outliers it reaches mean AUROC 0.800."
    )
    alike = [triage_row("msp", 0.91), triage_row("gmm", 0.9101)]
    assert plain(headline(alike)) == "msp and gmm find the classifier’s mistakes best (AUROC 0.910, p = 9.6e-8)."
    many = [triage_row(name, 0.91, p=0.0) for name in "abcde"]
    assert plain(headline(many)) == "a, b and 3 others find the classifier’s mistakes best (AUROC 0.910, p < 1e-300)."


def test_the_headline_when_nothing_was_found() -> None:
    assert headline([]) == "No detector was measured."
    guess = [triage_row("msp", 0.52), triage_row("gmm", 0.5)]
    assert headline(guess) == "No detector finds the classifier’s mistakes: the best is at AUROC 0.520."
    none = [triage_row("msp", 0.8, "outliers", "noise"), triage_row("gmm", 0.7, "outliers", "noise")]
    assert headline(none) == "There were no mistakes to find; on outliers msp leads (mean AUROC 0.800)."


def test_findings_tell_the_best_and_the_worst(bundle: Bundle) -> None:
    results = bundle.triage()
    results["rows"] = [
        *(triage_row(name, value) for name, value in (("msp", 0.9), ("gmm", 0.5))),
        triage_row("msp", 0.8, "adversarial", "fgsm 2/255", norm="linf", accuracy=0.25),
    ]
    assert [(label, plain(sentence)) for label, sentence in findings(results)] == [
        ("mistakes", "msp is best (AUROC 0.900), gmm worst (0.500); no better than guessing: gmm."),
        ("fgsm 2/255 (L∞)", "accuracy 0.800 → 0.250; msp has AUROC 0.800."),
        ("purification", "gmm with ε = 0.01 and ν = 0, chosen on validation: test accuracy 0.800 → 0.803 ± 0.003."),
    ]


def test_tiles_hold_the_key_numbers(bundle: Bundle, page: Page) -> None:
    best = max(row["auroc"] for row in rows_of(bundle, "mistakes"))
    for text in ("0.875 on validation images", "of 80 test images", f"{best:.3f}", "± is the standard deviation"):
        assert text in page.text


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (9.64e-8, "9.6e-8"),
        (0.04321, "0.043"),
        (0.001, "0.001"),
        (2.7e-36, "2.7e-36"),
        (0.0, "< 1e-300"),
        (1.0, "1"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_p_values_can_be_read(p: float | None, text: str) -> None:
    assert plain(probability(p)) == text


def test_a_standard_deviation_stands_beside_its_mean() -> None:
    assert plain(spread(0.9123, 0.0041, 3)) == "0.912 ± 0.004"
    assert spread(0.9123, 0.0, 1) == "0.912"
    assert spread(None, None, 3) == "–"


def test_attacks_are_named_with_their_norm() -> None:
    assert label_of(triage_row("msp", 0.5, "adversarial", "bim 0.5", norm="l2")) == "bim 0.5 (L2)"
    assert label_of(triage_row("msp", 0.5, "outliers", "noise")) == "noise"


# What a page may not do


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_bundle_becomes_markup(evil: str, tmp_path: Path, page: Page) -> None:
    attacked = page_of(
        make_triage(
            tmp_path,
            detectors=[evil, "gmm"],
            outliers=[evil, "noise"],
            attacks=[FGSM._replace(title=f"{evil} 1"), BIM],
            plan=f"title: {evil}\n",
            checks=[{"name": evil, "status": "fail", "sentence": evil}],
            manifest={"data": {"inliers": {"source": evil}}, evil: evil},
            purified=make_grid([evil]),
        )
    )
    assert [tag for tag, _ in attacked.tags if tag in ("script", "img")] == ["script"] * 3
    assert {name for _, attributes in attacked.tags for name in attributes} == {
        name for _, attributes in page.tags for name in attributes
    }
    assert attacked.scripts[1:] == page.scripts[1:]
    assert table_with(attacked, "outliers", "detector")[1][:2] == [evil, evil]
    assert f"title: {evil}" in attacked.text


def test_the_page_loads_nothing(page: Page) -> None:
    loads = [
        attributes[name]
        for _, attributes in page.tags
        for name in ("src", "href", "srcset", "data", "action", "poster")
        if name in attributes
    ]
    assert loads
    assert all(load.startswith("#") for load in loads)
    assert {load[1:] for load in loads} <= {attributes.get("id") for _, attributes in page.tags}


def test_the_policy_lets_the_pages_own_scripts_run_and_no_other(page: Page) -> None:
    policy = next(item["content"] for item in page.attributes("meta") if "http-equiv" in item)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]]
    assert policy.split("script-src ")[1] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert policy.startswith("default-src 'none'")


def test_a_name_that_is_no_unicode_does_not_stop_the_report(tmp_path: Path) -> None:
    bundle = make_triage(tmp_path)
    results = bundle.triage()
    for row in results["rows"]:
        row["detector"] += "\udcff"
    results["manifest"] = {"data": {"inliers": {"source": "folder:\udcff"}}}
    bundle.write_triage(results)
    page = page_of(bundle)
    assert "Triage of folder:?" in page.text
    assert "msp?" in page.text
    assert "no scores were kept" in page.text
    assert page.charts == {}


# The whole page


def test_empty_sections_say_so(tmp_path: Path) -> None:
    page = page_of(make_triage(tmp_path, attacks=[], outliers=[], purified=[], checks=[], manifest={}))
    for sentence in (
        "The results hold no adversarial images.",
        "The results hold no outliers.",
        "The results hold no purification.",
        "This run holds no checks.",
    ):
        assert sentence in page.text
    assert page.attributes("select") == []
    assert [chart["spec"] for chart in page.charts.values()][:2] == ["mistakes_roc", "mistakes_pr"]
    assert len(page.charts) == 4


def test_a_classifier_without_mistakes_is_a_page_too(tmp_path: Path) -> None:
    page = page_of(make_triage(tmp_path, mistakes=False))
    assert "There were no mistakes to find" in page.text
    assert "The results hold no mistakes to be found." in page.text


def test_a_bundle_without_rows_is_a_page_too(tmp_path: Path) -> None:
    page = page_of(make_triage(tmp_path, detectors=[], purified=[]))
    assert "No detector was measured." in page.text
    assert "The results hold no rows." in page.text
    assert page.charts == {}


def test_one_repeat_has_no_deviation(tmp_path: Path) -> None:
    page = page_of(make_triage(tmp_path, repeats=1))
    assert "±" not in page.text
    assert "no standard deviations" in page.text


def test_a_run_without_validation_images_or_threshold_is_a_page_too(tmp_path: Path) -> None:
    grid = make_grid(["gmm"])
    for point in grid:
        for name in ("validation_before", "validation_after", "validation_std"):
            del point[name]  # type: ignore[misc]
    bundle = make_triage(tmp_path, purified=grid)
    results = bundle.triage()
    del results["accuracy"]["held_out"]
    gone = (
        "threshold",
        "rejected_in",
        "rejected_out",
        "precision",
        "recall",
        "validated_precision",
        "validated_recall",
    )
    for row in results["rows"]:
        for name in gone:
            for key in (name, f"{name}_std"):
                row.pop(key, None)  # type: ignore[misc]
            for numbers in row["per_repeat"]:
                numbers.pop(name, None)
    bundle.write_triage(results)
    page = page_of(bundle)
    assert "There were no validation images to choose a point by." in page.text
    assert table_with(page, "detector", "AUROC")[2][5:] == ["–"] * 6
    assert all(data["marks"] == {"threshold": []} for data in charts_of(page, "mistakes_scores"))


def test_a_large_bundle_makes_a_small_page(tmp_path: Path) -> None:
    bundle = make_triage(
        tmp_path,
        detectors=[f"detector {number}" for number in range(6)],
        attacks=[FGSM._replace(title=f"fgsm {number}/255") for number in range(6)],
        outliers=[f"set {number}" for number in range(4)],
        count=1000,
        repeats=1,
    )
    page = page_of(bundle)
    assert len(page.html.encode()) < 5_000_000
    assert len(page.charts) == 11 * (2 + 6)
    for data in [*charts_of(page, "adversarial_roc"), *charts_of(page, "adversarial_pr")]:
        assert len(data["points"]["x"]) <= 6 * POINTS
    assert [option["value"] for option in page.attributes("option")] == [*"012345", *"0123"]


def test_checks_plan_and_manifest_are_on_the_page(page: Page) -> None:
    assert ["adversaries_fool", "warn", "fgsm 2/255 fools hardly anybody."] in table_with(page, "check", "status")
    assert "1 of 2 checks passed." in page.text
    assert "seed: 0" in page.text
    assert ["versions.torch", "2.15.0"] in table_with(page, "what", "value")
    assert "Triage of fashion:test" in page.text


def test_the_page_can_be_read_without_seeing_it(page: Page) -> None:
    assert page.attributes("html") == [{"lang": "en"}]
    assert all(heading["scope"] in ("col", "colgroup", "row") for heading in page.attributes("th"))
    charts = [place for place in page.attributes("div") if "data-chart" in place]
    assert {place["data-chart"] for place in charts} == set(page.charts)
    assert all(place["role"] == "img" and place["aria-label"] for place in charts)


def test_a_report_is_the_same_each_time(bundle: Bundle, page: Page) -> None:
    assert page_of(bundle).html == page.html


def test_what_is_no_finished_triage_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another kind of run: triage instead of audit"):
        write_report(bundle)
    with pytest.raises(ValueError, match="holds no finished run"):
        write_triage_report(Bundle(tmp_path / "nothing"))
