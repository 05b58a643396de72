"""The rows of an audit arranged as a table: a line per detector and pair of sets, a column per attack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gatecrash.bundle import Row, Side
from gatecrash.report.formats import counted, known, named, radius

_SIDES = {"in": "inliers attacked", "both": "both sides"}


class Pair(NamedTuple):
    """A detector and the two sets that it has to tell apart."""

    detector: str
    inliers: str
    outliers: str


class Setting(NamedTuple):
    """An attack with everything that was set, or no attack."""

    attack: str
    side: Side
    norm: str | None
    eps: float | None
    steps: int | None
    restarts: int | None

    @property
    def is_clean(self) -> bool:
        """Whether nothing was attacked."""
        return self.attack == "none"


class Table:
    """The rows by pair and setting, both in the order in which they first appear.

    Where an attack moved both sides, the rows in which only one of them is moved are no settings of their own.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(_pair(row), _setting(row)): row for row in rows}
        self.pairs = list(dict.fromkeys(pair for pair, _ in self._rows))
        tried = list(dict.fromkeys(setting for _, setting in self._rows if not setting.is_clean))
        self.settings = _whole(tried)
        self.has_halves = len(self.settings) < len(tried)
        self.detectors = list(dict.fromkeys(pair.detector for pair in self.pairs))
        self._labels = _labels(self.settings)

    def clean(self, pair: Pair) -> Row | None:
        """The row of a pair without attack."""
        return next((row for key, row in self._rows.items() if key[0] == pair and key[1].is_clean), None)

    def attacked(self, pair: Pair, setting: Setting) -> Row | None:
        """The row of a pair under an attack; None where it was not tried."""
        return self._rows.get((pair, setting))

    def clean_auroc(self, pair: Pair) -> float | None:
        """The AUROC of a pair without attack, from its own row or from what an attacked row says of it."""
        row = self.clean(pair)
        stated = [row["auroc"]] if row else []
        stated += [row["clean_auroc"] for key, row in self._rows.items() if key[0] == pair and "clean_auroc" in row]
        return next(iter(known(stated)), None)

    def auroc(self, pair: Pair, setting: Setting) -> float | None:
        """The AUROC of a pair under an attack; None where it was not tried."""
        row = self.attacked(pair, setting)
        return next(iter(known([row["auroc"]])), None) if row else None

    def label(self, setting: Setting) -> str:
        """What a setting is called; no two are called the same."""
        return self._labels[setting]


def _pair(row: Row) -> Pair:
    return Pair(row["detector"], row["inliers"], row["outliers"])


def _setting(row: Row) -> Setting:
    return Setting(row["attack"], row["side"], row["norm"], row["eps"], row["steps"], row["restarts"])


def _whole(settings: Sequence[Setting]) -> list[Setting]:
    return [setting for setting in settings if setting.side == "both" or setting._replace(side="both") not in settings]


def _labels(settings: Sequence[Setting]) -> dict[Setting, str]:
    short = {setting: _short_label(setting) for setting in settings}
    uses = Counter(short.values())
    return {setting: name if uses[name] == 1 else _long_label(setting) for setting, name in short.items()}


def _short_label(setting: Setting) -> str:
    return named(setting.attack, radius(setting.norm, setting.eps), _SIDES.get(setting.side, ""))


def _long_label(setting: Setting) -> str:
    effort = (counted(setting.steps or 0, "step"), counted(setting.restarts or 0, "restart"))
    return named(setting.attack, radius(setting.norm, setting.eps), _SIDES.get(setting.side, ""), *effort)
