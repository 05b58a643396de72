"""docs/detectors.md is what tools/detectors_page.py makes of the cards, and says what the classes say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from gatecrash.detectors import DETECTORS, Card, Detector

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detectors_page", ROOT / "tools" / "detectors_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Made(Detector):
    """A score a * b that is made up,
    with a < b.

    More of it.

    Args:
        encoder: taps `some_layer`.
        first: one thing,
            told on two lines.
        **options: anything.

    Raises:
        ValueError: never: really.
    """

    card = Card(paper="Nobody, 2026", year=2026, reads="pixels", fit="inliers", gradient="omitted")

    def __init__(self, encoder: nn.Module, *, first: str = "a", second: int | None = None, **options: int) -> None:
        super().__init__(encoder)

    def judge(self, z):
        return z


def test_the_page_is_not_stale(tool: ModuleType) -> None:
    message = "docs/detectors.md is stale; run: python tools/detectors_page.py"
    assert (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8") == tool.page(), message


def test_a_section_has_the_class_what_its_docstring_says_and_its_options(tool: ModuleType) -> None:
    assert tool.section("made", Made) == (
        "## made\n\n"
        f"`{__name__}.Made`\n\n"
        "A score a \\* b that is made up, with a \\< b.\n\n"
        "More of it.\n\n"
        "- `encoder`: taps `some_layer`.\n"
        "- `first = 'a'`: one thing, told on two lines.\n"
        "- `second = None`\n"
    )


def test_the_table_has_every_detector_of_the_package_and_its_card(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name for name in DETECTORS if DETECTORS[name].__module__.startswith("gatecrash.")}
    monkeypatch.setitem(DETECTORS._entries, "made", Made)
    assert tool.table(["made"]).splitlines() == [
        "| name | paper | year | reads | fit | gradient |",
        "| --- | --- | --- | --- | --- | --- |",
        "| [made](#made) | Nobody, 2026 | 2026 | pixels | inliers | omitted |",
    ]
    headings = [line.removeprefix("## ") for line in tool.page().splitlines() if line.startswith("## ")]
    assert headings == sorted(names) and "mahalanobis" in names


def test_the_page_says_how_it_is_made(tool: ModuleType) -> None:
    assert "`python tools/detectors_page.py`" in tool.page()
