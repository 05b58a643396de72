from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic_bundle import COLLIDE, STRONG, WEAK, Attack, make_bundle, make_pictures
from torch import Tensor

from gatecrash.bundle import SAMPLES, Bundle, Row
from gatecrash.report import write_report
from gatecrash.report.auroc_table import band_of, lines
from gatecrash.report.bins import shared_bins
from gatecrash.report.charts import COORDINATES, latents_drawing
from gatecrash.report.formats import counted, listed, percent, radius, span
from gatecrash.report.page import _environment
from gatecrash.report.pictures import LARGEST, data_uri, difference, factor_of, strips
from gatecrash.report.scores import Samples
from gatecrash.report.table import Pair, Setting, Table
from gatecrash.report.words import findings, headline


class Page(HTMLParser):
    """A parsed report: its tags with their attributes, its scripts, its tables and its words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._inside, self._cell = "", False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag in ("script", "style") else self._inside
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data
            if self._cell:
                self.tables[-1][-1][-1] += data

    @property
    def charts(self) -> dict[str, Any]:
        charts: dict[str, Any] = json.loads(self.scripts[0])["charts"]
        return charts

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(bundle: Bundle) -> Page:
    return Page(write_report(bundle).read_text(encoding="utf-8"))


def pixels_of(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("bundle"), pictures=[make_pictures(), make_pictures(channels=3)])


@pytest.fixture(scope="module")
def page(bundle: Bundle) -> Page:
    return page_of(bundle)


# What a page may not do

EVIL = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
]


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_bundle_becomes_markup(evil: str, tmp_path: Path, page: Page) -> None:
    bundle = make_bundle(
        tmp_path,
        detectors=[evil, "energy"],
        outliers=[evil, "noise"],
        attacks=[COLLIDE._replace(name=evil), STRONG],
        plan=f"title: {evil}\n",
        checks=[{"name": evil, "status": "fail", "sentence": evil}],
        pictures=[replace(make_pictures(title=evil), names=[evil, evil], attack=evil), make_pictures(channels=3)],
    )
    attacked = page_of(bundle)
    assert [tag for tag, _ in attacked.tags if tag in ("script", "img")] == [
        tag for tag, _ in page.tags if tag in ("script", "img")
    ]
    assert {name for _, attributes in attacked.tags for name in attributes} == {
        name for _, attributes in page.tags for name in attributes
    }
    assert attacked.scripts[1:] == page.scripts[1:]
    assert attacked.tables[0][1][:2] == [evil, evil]
    assert f"title: {evil}" in attacked.text


def test_data_in_a_script_cannot_end_it() -> None:
    value = {"</script>": "<!-- & \u2028\u2029 ' -->"}
    text = _environment().from_string("{{ value | tojson }}").render(value=value)
    assert not set(text) & set("<>&'\u2028\u2029")
    assert json.loads(text) == value


def test_the_page_loads_nothing(page: Page) -> None:
    loads = [
        attributes[name]
        for tag, attributes in page.tags
        for name in ("src", "href", "srcset", "data", "action", "poster")
        if name in attributes
    ]
    assert len(loads) > 10
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in loads)
    style = page.html.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_lets_the_pages_own_scripts_run_and_no_other(page: Page) -> None:
    policy = next(item["content"] for item in page.attributes("meta") if "http-equiv" in item)
    assert "default-src 'none'" in policy
    assert "'unsafe-eval'" not in policy
    allowed = policy.split("script-src ")[1]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]]
    assert allowed == " ".join(f"'sha256-{digest}'" for digest in hashes)


def test_a_name_that_is_no_unicode_does_not_stop_the_report(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    results = bundle.results()
    for row in results["rows"]:
        row["inliers"] = "folder:\udcff"
    bundle.write_results(results["rows"], [], {})
    assert "folder:?" in page_of(bundle).text


# Headline


def row_of(auroc: float, detector: str = "msp", outliers: str = "noise", attack: Attack | None = None) -> Row:
    return {
        "detector": detector,
        "inliers": "fashion:test",
        "outliers": outliers,
        "attack": attack.name if attack else "none",
        "side": attack.side if attack else "none",
        "norm": attack.norm if attack else None,
        "eps": attack.eps if attack else None,
        "steps": 10 if attack else None,
        "restarts": 1 if attack else None,
        "auroc": auroc,
        "auroc_ci": [auroc - 0.01, auroc + 0.01],
        "aupr_in": 0.5,
        "aupr_out": 0.5,
        "fpr95": 0.5,
        "detection_error": 0.5,
        "n_in": 200,
        "n_out": 200,
    }


def words_of(*rows: Row) -> tuple[str, list[str]]:
    """The headline and the findings, with plain spaces."""
    table = Table(rows)
    said = [headline(table), *(f"{label}: {sentence}" for label, sentence in findings(table))]
    plain = [sentence.replace("\N{NO-BREAK SPACE}", " ") for sentence in said]
    return plain[0], plain[1:]


def test_words_when_all_are_broken() -> None:
    title, said = words_of(
        *(row_of(0.9, detector) for detector in ("msp", "energy")),
        *(row_of(auroc, detector, attack=COLLIDE) for detector, auroc in (("msp", 0.48), ("energy", 0.52))),
    )
    damage = "none can tell noise from fashion:test (AUROC 0.48 to 0.52)."
    assert title == f"2 of 2 detectors are broken: after collide of features (L2 ε = 5) {damage}"
    assert said == [f"collide of features (L2 ε = 5): {damage}"]


def test_words_when_scores_are_reversed() -> None:
    title, _ = words_of(row_of(0.9), row_of(0.02, attack=STRONG))
    assert title == (
        "The detector is broken: after worst_case (L∞ ε = 8/255, both sides) "
        "msp ranks noise below fashion:test (AUROC 0.02)."
    )


def test_words_when_none_is_broken() -> None:
    title, said = words_of(
        row_of(0.9), row_of(0.95, "energy"), row_of(0.83, attack=WEAK), row_of(0.94, "energy", attack=WEAK)
    )
    assert title == "None of 2 detectors is broken: under attack, AUROC 0.83 to 0.94."
    assert said == ["admit (L∞ ε = 4/255): breaks none of 2 detectors (AUROC 0.83 to 0.94)."]


def test_words_when_some_are_broken_on_some_sets() -> None:
    title, said = words_of(
        *(row_of(0.9, detector, outliers) for detector in ("msp", "energy") for outliers in ("noise", "digits")),
        row_of(0.50, "msp", "noise", COLLIDE),
        row_of(0.51, "msp", "digits", COLLIDE),
        row_of(0.52, "energy", "noise", COLLIDE),
        row_of(0.80, "energy", "digits", COLLIDE),
    )
    assert title == (
        "2 of 2 detectors are broken: after collide of features (L2 ε = 5) "
        "outliers get past msp; energy on noise (AUROC 0.50 to 0.52)."
    )
    assert said == [
        "collide of features (L2 ε = 5): breaks msp; energy on noise (AUROC 0.50 to 0.52), "
        "but not energy on digits (AUROC 0.80)."
    ]


def test_none_means_none_of_all_and_not_of_those_tried() -> None:
    title, _ = words_of(
        *(row_of(0.9, detector) for detector in ("msp", "energy", "mahalanobis")),
        *(row_of(0.5, detector, attack=COLLIDE) for detector in ("msp", "energy")),
    )
    assert title.endswith("msp and energy cannot tell noise from fashion:test (AUROC 0.50).")


def test_a_detector_that_never_told_is_not_broken() -> None:
    title, said = words_of(row_of(0.5), row_of(0.1, attack=STRONG))
    assert title == "The detector is not broken: under attack, AUROC 0.10."
    assert said[0] == "without attack: no better than guessing: msp on noise."
    assert said[1].startswith("worst_case (L∞ ε = 8/255, both sides): there was nothing to break")


def test_words_without_an_attack() -> None:
    title, said = words_of(row_of(0.9), row_of(0.76, "energy"))
    assert title == "2 detectors were measured without any attack (AUROC 0.76 to 0.90)."
    assert said == []
    assert words_of(row_of(0.9))[0] == "1 detector was measured without any attack (AUROC 0.90)."
    assert words_of() == ("No detector was measured.", [])


def test_the_clean_auroc_may_stand_in_an_attacked_row() -> None:
    attacked = row_of(0.5, attack=COLLIDE)
    assert words_of(attacked)[0].startswith("The detector is not broken")
    attacked["clean_auroc"] = 0.9
    assert words_of(attacked)[0].startswith("The detector is broken")


def test_settings_that_differ_in_effort_only_are_told_apart() -> None:
    longer = row_of(0.5, attack=COLLIDE)
    longer["steps"] = 300
    table = Table([row_of(0.9), row_of(0.6, attack=COLLIDE), longer])
    assert [table.label(setting).replace("\N{NO-BREAK SPACE}", " ") for setting in table.settings] == [
        "collide of features (L2 ε = 5, 10 steps, 1 restart)",
        "collide of features (L2 ε = 5, 300 steps, 1 restart)",
    ]


def test_one_side_of_a_two_sided_attack_is_no_column_of_its_own() -> None:
    halves = [row_of(auroc, attack=STRONG._replace(side=side)) for side, auroc in (("out", 0.3), ("in", 0.4))]
    table = Table([row_of(0.9), *halves, row_of(0.1, attack=STRONG), row_of(0.6, attack=WEAK)])
    assert [(setting.attack, setting.side) for setting in table.settings] == [("worst_case", "both"), ("admit", "out")]
    assert table.has_halves
    assert [cell.text for cell in lines(table)[0].cells] == ["0.90", "0.10", "0.60"]
    assert [setting.side for setting in Table([row_of(0.9), *halves]).settings] == ["out", "in"]


def test_numbers_and_lists_in_words() -> None:
    tied = "\N{NO-BREAK SPACE}"
    assert radius("linf", 8 / 255) == f"L∞{tied}ε{tied}={tied}8/255"
    assert radius("linf", 0.03) == f"L∞{tied}ε{tied}={tied}0.03"
    assert radius(None, None) == ""
    assert percent(0.0002345) == f"0.023{tied}%"
    assert (percent(None), percent(math.inf)) == ("–", "–")
    assert span([0.501, 0.499]) == "0.50"
    assert listed(["a", "b", "c"], "or") == "a, b or c"
    assert (counted(1, "step"), counted(2, "step")) == ("1 step", "2 steps")


# Tables


def test_the_table_shows_the_rows(bundle: Bundle, page: Page) -> None:
    rows = {(row["detector"], row["outliers"], row["attack"]): row["auroc"] for row in bundle.results()["rows"]}
    table, attacks = page.tables[0], ["none", COLLIDE.name, STRONG.name]
    assert len(table) == 1 + 4
    for detector, outliers, *cells in table[1:]:
        assert cells == [f"{rows[detector, outliers, attack]:.2f}" for attack in attacks]


def test_the_full_table_holds_every_column_of_every_row(bundle: Bundle, page: Page) -> None:
    rows = bundle.results()["rows"]
    columns, *body = page.tables[1]
    assert set(columns) == {name for row in rows for name in row}
    assert len(body) == len(rows)
    for cells, row in zip(body, rows, strict=True):
        shown = dict(zip(columns, cells, strict=True))
        assert shown["attack"] == row["attack"]
        assert float(shown["fpr95"]) == pytest.approx(row["fpr95"], rel=1e-3)
        assert [float(end) for end in shown["auroc_ci"].split(", ")] == pytest.approx(row["auroc_ci"], rel=1e-3)


def test_a_cell_tells_its_interval() -> None:
    absent, cell = lines(Table([row_of(0.9, "energy"), row_of(0.5123, attack=COLLIDE)]))[1].cells
    assert (absent.text, absent.band, absent.hint) == ("–", None, "not tried")
    assert (cell.text, cell.hint) == ("0.51", "AUROC 0.5123, 95 % interval 0.502 to 0.522")


def test_a_cell_tells_what_is_proven() -> None:
    row: Row = {**row_of(0.9876, attack=COLLIDE), "certified_auroc": 0.7654}
    cell = lines(Table([row]))[0].cells[1]
    assert cell.text == "0.99 ≥ 0.77"
    assert cell.hint.endswith("; proven: no attack on the outliers comes below 0.7654")


@pytest.mark.parametrize(
    ("auroc", "band"),
    [(0.0, 0), (0.449, 0), (0.45, 1), (0.55, 1), (0.551, 2), (0.7, 3), (0.85, 4), (0.95, 5), (1.0, 5)],
)
def test_colours_change_where_the_words_do(auroc: float, band: int) -> None:
    assert band_of(auroc) == band


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    levels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_numbers_stand_out_from_their_cells(page: Page, scheme: int) -> None:
    block = page.html.split(":root {")[1 + scheme].split("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for name in ["paper", "panel", *(f"band-{band}" for band in range(6))]:
        dark, light = sorted(luminance(colours[key]) for key in ("ink", name))
        assert (light + 0.05) / (dark + 0.05) >= 7
    for name in ("muted", "link", "pass", "warn", "fail"):
        dark, light = sorted(luminance(colours[key]) for key in (name, "panel"))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


# Histograms


@pytest.mark.parametrize("log", [False, True])
def test_counts_are_those_of_numpy(log: bool) -> None:
    values = np.random.default_rng(0).normal(size=(2, 300))
    values = np.exp(4 * values) if log else values
    bins = shared_bins(list(values))
    assert bins.log == log
    assert len(bins.edges) == 41
    assert (bins.low, bins.high) == pytest.approx((values.min(), values.max()))
    inside = values.clip(bins.low, bins.high)
    for group, clipped in zip(values, inside, strict=True):
        np.testing.assert_array_equal(bins.counts(group), np.histogram(clipped, bins.edges)[0])
        assert bins.counts(group).sum() == 300


def test_infinite_scores_are_in_the_outermost_bins_and_nan_in_none() -> None:
    values = np.array([0.0, 0.5, 1.0, np.inf, np.inf, -np.inf, np.nan, 1e305])
    bins = shared_bins([values], count=4)
    np.testing.assert_allclose(bins.edges, [0, 0.25, 0.5, 0.75, 1])
    assert bins.counts(values).tolist() == [2, 0, 1, 4]
    assert bins.beyond(values) == 4


def test_a_far_outlier_does_not_stretch_the_axis() -> None:
    values = np.append(np.linspace(-1, 1, 999), 1e6)
    bins = shared_bins([values])
    assert bins.high < 1.01
    assert bins.beyond(values) >= 1
    assert bins.counts(values).sum() == 1000


@pytest.mark.parametrize(
    "values", [[], [3.0, 3.0], [0.0], [1e16, 1e16], [np.nan], [np.inf, -np.inf], [-1e299, 1e299], [1e-320, 1.0]]
)
@pytest.mark.parametrize("log", [None, True])
def test_bins_exist_for_any_values(values: list[float], log: bool | None) -> None:
    array = np.array(values, dtype=np.float64)
    bins = shared_bins([array], log=log)
    assert np.isfinite(bins.edges).all()
    assert bins.low < bins.high
    assert bins.counts(array).sum() == (~np.isnan(array)).sum()


def samples_of(bundle: Bundle, **wanted: object) -> np.ndarray:
    rows = [row for row in bundle.samples().to_pylist() if all(row[name] == value for name, value in wanted.items())]
    return np.array([row["attacked_score"] for row in rows])


def drawings(page: Page, *specs: str) -> Iterator[dict[str, list[Any]]]:
    for chart in page.charts.values():
        if chart["spec"] in specs:
            yield chart["data"]["bins"]


def test_the_pages_histograms_count_the_samples(bundle: Bundle, page: Page) -> None:
    charts = drawings(page, "scores", "scores_log")
    for outliers in ("digits", "noise"):
        for detector in ("msp", "energy"):
            for attack in ("none", COLLIDE.name, STRONG.name):
                shown = next(charts)
                edges = np.array([*shown["low"], shown["high"][-1]])
                moved = {"inliers": STRONG.name if attack == STRONG.name else "none", "outliers": attack}
                for role, name in (("inliers", "fashion:test"), ("outliers", outliers)):
                    values = samples_of(bundle, detector=detector, set=name, attack=moved[role])
                    assert sum(shown[role]) == len(values) == 60
                    np.testing.assert_array_equal(shown[role], np.histogram(values.clip(edges[0], edges[-1]), edges)[0])
    assert next(charts, None) is None


def test_the_side_that_was_not_attacked_keeps_its_clean_scores(tmp_path: Path) -> None:
    evict = Attack("evict", "in", "linf", 4 / 255, gap=0)
    bundle = make_bundle(tmp_path, attacks=[STRONG])
    samples, pair = Samples(bundle.samples()), Pair("msp", "fashion:test", "noise")
    clean, both = samples.scores(pair, None), samples.scores(pair, setting_of(STRONG))
    np.testing.assert_allclose(both.inliers, clean.inliers + 1)
    inward = samples.scores(pair, setting_of(STRONG._replace(side="in")))
    np.testing.assert_array_equal(inward.inliers, both.inliers)
    np.testing.assert_array_equal(inward.outliers, clean.outliers)
    assert len(samples.scores(pair, setting_of(evict)).inliers) == 0


def test_the_only_inliers_are_found_under_any_name(bundle: Bundle) -> None:
    samples = Samples(bundle.samples())
    named, other = (samples.scores(Pair("msp", name, "noise"), None) for name in ("fashion:test", "another name"))
    assert len(other.inliers) == 60
    np.testing.assert_array_equal(other.inliers, named.inliers)


def setting_of(attack: Attack) -> Setting:
    return Setting(attack.name, attack.side, attack.norm, attack.eps, 100, 1)


def test_a_collision_that_detectors_share_is_counted_once(bundle: Bundle, page: Page) -> None:
    collisions = Samples(bundle.samples()).collisions()
    assert [collision.outliers for collision in collisions] == ["digits", "noise"]
    for collision, shown in zip(collisions, drawings(page, "mape"), strict=True):
        expected = 10 ** (-4 + np.arange(60) / 60)
        np.testing.assert_allclose(np.sort(collision.mape), expected)
        assert sum(shown["count"]) == 60
        assert shown["low"][0] == pytest.approx(100 * expected.min(), rel=1e-5)
        ratios = np.array(shown["high"]) / np.array(shown["low"])
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-4)


def test_a_repeated_index_is_counted_once(bundle: Bundle) -> None:
    table = bundle.samples()
    doubled = Samples(type(table).from_batches([*table.to_batches(), *table.to_batches()], schema=SAMPLES))
    pair = Pair("msp", "fashion:test", "noise")
    for mine, theirs in zip(doubled.scores(pair, None), Samples(table).scores(pair, None), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_infinite_and_missing_scores_are_told(tmp_path: Path) -> None:
    page = page_of(make_bundle(tmp_path, edit={"msp": math.inf, "energy": math.nan}, outliers=["noise"]))
    assert "1 score beyond the axis, 1 of them infinite: in the outermost bins." in page.text
    assert "1 score NaN: left out." in page.text
    first = next(drawings(page, "scores"))
    assert sum(first["outliers"]) == 60


# Pictures


def test_a_difference_is_scaled_around_grey() -> None:
    start = torch.full((1, 2, 2), 0.5)
    change = torch.tensor([[[0.0, 0.015], [-0.015, 0.005]]])
    pixels = pixels_of(data_uri(difference(start, start + change, 20.0)))
    np.testing.assert_array_equal(pixels, [[128, 204], [51, 153]])


@pytest.mark.parametrize(("largest", "factor"), [(0.02, 20), (0.3, 1.5), (1.0, 0.5), (4 / 255, 30), (0.05, 10)])
def test_the_factor_is_the_largest_round_one_that_cuts_nothing_off(largest: float, factor: float) -> None:
    group = make_pictures()
    start = torch.zeros_like(group.start)
    found = start.clone()
    found[0, 0, 0, 0] = largest
    assert factor_of(replace(group, start=start, found=found)) == pytest.approx(factor)
    assert factor_of(replace(group, start=start, found=start)) == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_survives_its_encoding(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(0)) / 255
    pixels = pixels_of(data_uri(image)).reshape(5, 7, channels)
    np.testing.assert_array_equal(pixels, (image * 255).round().permute(1, 2, 0).byte().numpy())


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (torch.rand(3, 2 * LARGEST, LARGEST), (LARGEST, LARGEST // 2, 3)),
        (torch.full((4, 6, 6), math.nan), (6, 6)),
        (torch.full((1, 6, 6), math.inf), (6, 6)),
    ],
)
def test_odd_pictures_are_shown_nevertheless(image: Tensor, shape: tuple[int, ...]) -> None:
    assert pixels_of(data_uri(image)).shape == shape


def test_every_group_gets_its_first_picture_before_any_gets_its_second() -> None:
    groups = [make_pictures(count=3), make_pictures(count=2)]
    cost = max(strip.length for shown in strips(groups) for strip in shown)
    assert [len(shown) for shown in strips(groups)] == [3, 2]
    assert [len(shown) for shown in strips(groups, budget=round(3.5 * cost))] == [2, 1]
    assert [len(shown) for shown in strips(groups, budget=1)] == [1, 0]


def test_pictures_stand_beside_their_numbers(bundle: Bundle, page: Page) -> None:
    images = page.attributes("img")
    assert len(images) == 2 * 2 * 4
    assert all(image["alt"] for image in images)
    group = bundle.pictures()[0]
    for number in range(2):
        assert percent(group.mape[number]) in page.text
        assert f"{group.distance[number]:.3g}" in page.text
        assert f"{group.target_distance[number]:.3g}" in page.text
    np.testing.assert_array_equal(pixels_of(images[0]["src"]), (group.target[0, 0] * 255).round().byte().numpy())


def test_latents_are_drawn_coordinate_by_coordinate() -> None:
    target, start, found = torch.arange(4.0), -torch.arange(4.0), torch.tensor([0.1, 1, math.inf, 3])
    drawing = latents_drawing(target, start, found, 0.0125)
    assert drawing["data"]["points"] == {
        "coordinate": [0, 1, 2, 3],
        "target": [0, 1, 2, 3],
        "start": [0, -1, -2, -3],
        "found": [0.1, 1, None, 3],
    }
    assert drawing["data"]["note"]["text"] == [f"MAPE {percent(0.0125)}"]


def test_a_long_latent_is_thinned_evenly() -> None:
    target = torch.arange(5000.0)
    points = latents_drawing(target, target, target, None)["data"]["points"]
    assert len(points["coordinate"]) == COORDINATES
    assert (points["coordinate"][0], points["coordinate"][-1]) == (0, 4999)
    assert points["target"] == points["coordinate"]


# The whole page


def test_a_large_bundle_makes_a_small_page(tmp_path: Path) -> None:
    bundle = make_bundle(
        tmp_path,
        detectors=[f"detector {number}" for number in range(5)],
        outliers=["digits", "noise", "spiral"],
        attacks=[COLLIDE, COLLIDE._replace(name="collide of logits"), WEAK, STRONG],
        count=200,
        pictures=[make_pictures(3, channels=3, size=224, dimensions=2048), make_pictures(3, size=56)],
    )
    page = page_of(bundle)
    assert len(page.html.encode()) < 4_000_000
    assert len(list(drawings(page, "scores", "scores_log"))) == 5 * 3 * 5
    assert [option["value"] for option in page.attributes("option")] == ["0", "1", "2"]
    assert "are shown; all are in images.safetensors" in page.text


def test_a_clean_audit_of_one_detector_is_a_page_too(tmp_path: Path) -> None:
    page = page_of(make_bundle(tmp_path, detectors=["msp"], outliers=["noise"], attacks=[], checks=[]))
    assert "1 detector was measured without any attack" in page.text
    for sentence in ("This run kept no pictures.", "This run holds no collisions.", "This run holds no checks."):
        assert sentence in page.text
    assert page.attributes("select") == []
    assert len(page.charts) == 1


def test_a_bundle_without_rows_is_a_page_too(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    bundle.write_results([], [], {})
    assert "No detector was measured." in page_of(bundle).text


def test_checks_plan_and_manifest_are_on_the_page(page: Page) -> None:
    assert ["more steps", "warn", "Twice the steps lower the AUROC by another 0.02."] in page.tables[2]
    assert "1 of 2 checks passed." in page.text
    assert "seed: 0" in page.text
    assert ["versions.torch", "2.15.0"] in page.tables[3]
    assert ["hashes.model", "ab" * 32] in page.tables[3]


def test_the_page_can_be_read_without_seeing_it(page: Page) -> None:
    assert page.attributes("html") == [{"lang": "en"}]
    assert all(heading["scope"] in ("col", "row") for heading in page.attributes("th"))
    charts = [place for place in page.attributes("div") if "data-chart" in place]
    assert {place["data-chart"] for place in charts} == set(page.charts)
    assert all(place["role"] == "img" and place["aria-label"] for place in charts)


def test_a_report_is_the_same_each_time(bundle: Bundle, page: Page) -> None:
    assert page_of(bundle).html == page.html


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle(tmp_path)
    bundle.report.write_text("the report before")
    files = sorted(tmp_path.iterdir())

    def fail(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("gatecrash.files.os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_report(bundle)
    assert bundle.report.read_text() == "the report before"
    assert sorted(tmp_path.iterdir()) == files


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no finished run"):
        write_report(Bundle(tmp_path))
