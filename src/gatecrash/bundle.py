"""What a run leaves behind: a directory with its plan, results, samples, pictures and manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gatecrash.files import replacing, write_text

SCHEMA = 1

Side = Literal["none", "out", "in", "both"]


class Row(TypedDict):
    """One line of an audit's table: a detector on a pair of sets, before or after an attack; fractions in 0..1."""

    detector: str
    inliers: str
    outliers: str
    attack: str
    """"none", or the attack's name with what it was aimed at."""
    side: Side
    norm: str | None
    eps: float | None
    steps: int | None
    restarts: int | None
    auroc: float
    auroc_ci: list[float]
    aupr_in: float
    aupr_out: float
    fpr95: float
    detection_error: float
    n_in: int
    n_out: int
    fpr95_frozen: NotRequired[float]
    fpr95_out_positive: NotRequired[float]
    clean_auroc: NotRequired[float]
    mape_median: NotRequired[float]
    mape_p90: NotRequired[float]
    target_distance_median: NotRequired[float]
    certified_auroc: NotRequired[float]
    """The AUROC that no attack on outliers inside the ball comes below, where the detector has a proof: clean inliers
    against the least score that each outlier can be brought to."""


class Check(TypedDict):
    """One doubt about the result, and how it came out."""

    name: str
    status: Literal["pass", "warn", "fail"]
    sentence: str


class Results(TypedDict):
    """The content of `results.json`."""

    schema: int
    rows: list[Row]
    checks: list[Check]
    manifest: dict[str, Any]


class TriageRow(TypedDict):
    """One line of a triage's table: a detector and what it is to find; means over the repeats, fractions in 0..1."""

    detector: str
    task: Literal["mistakes", "adversarial", "outliers"]
    against: str
    """What is to be found: "mistakes", an attack with its radius, or a set of outliers."""
    norm: str | None
    eps: float | None
    n_in: int
    n_out: int
    repeats: int
    auroc: float
    auroc_std: float
    aupr_in: float
    aupr_in_std: float
    aupr_out: float
    aupr_out_std: float
    fpr95: float
    fpr95_std: float
    detection_error: float
    detection_error_std: float
    per_repeat: list[dict[str, float]]
    """The same numbers for every repeat."""
    u: NotRequired[float]
    """The smaller statistic of the U test of correct against wrong."""
    p: NotRequired[float]
    """Its two-sided p-value, the median over the repeats."""
    threshold: NotRequired[float]
    """Chosen by cross-validation on the classifier's mistakes, the same in every task."""
    threshold_std: NotRequired[float]
    rejected_in: NotRequired[float]
    """The share above the threshold of those that are in."""
    rejected_in_std: NotRequired[float]
    rejected_out: NotRequired[float]
    rejected_out_std: NotRequired[float]
    precision: NotRequired[float]
    precision_std: NotRequired[float]
    recall: NotRequired[float]
    recall_std: NotRequired[float]
    validated_precision: NotRequired[float]
    """On the folds that were left out."""
    validated_precision_std: NotRequired[float]
    validated_recall: NotRequired[float]
    validated_recall_std: NotRequired[float]
    accuracy: NotRequired[float]
    """The classifier's, under the attack."""


class PurifiedRow(TypedDict):
    """The classifier's accuracy before and after purification, for one point of the grid."""

    detector: str
    step: float
    pull: float
    repeats: int
    validation_before: NotRequired[float]
    validation_after: NotRequired[float]
    validation_std: NotRequired[float]
    test_before: NotRequired[float]
    test_after: NotRequired[float]
    test_std: NotRequired[float]


class TriageResults(TypedDict):
    """The content of a triage's `results.json`."""

    schema: int
    kind: Literal["triage"]
    accuracy: dict[str, float]
    """The classifier's, on test and validation images and under every attack."""
    rows: list[TriageRow]
    purified: list[PurifiedRow]
    checks: list[Check]
    manifest: dict[str, Any]


TRIAGE_SAMPLES = pa.schema(
    [
        ("detector", pa.string()),
        ("repeat", pa.int64()),
        ("set", pa.string()),
        ("role", pa.string()),
        ("index", pa.int64()),
        ("score", pa.float64()),
        ("predicted", pa.int64()),
        ("label", pa.int64()),
    ]
)
"""A row per image, detector and repeat of a triage. `role` is "in", "held_out", "out" or "adversarial"; adversarial
images have the index and label of the test image they were made from. Detectors without a seed are the same in every
repeat, and have rows in repeat 0 only."""

SAMPLES = pa.schema(
    [
        ("detector", pa.string()),
        ("attack", pa.string()),
        ("side", pa.string()),
        ("norm", pa.string()),
        ("eps", pa.float64()),
        ("set", pa.string()),
        ("role", pa.string()),
        ("index", pa.int64()),
        ("clean_score", pa.float64()),
        ("attacked_score", pa.float64()),
        ("l2", pa.float64()),
        ("linf", pa.float64()),
        ("steps", pa.int64()),
        ("evaluations", pa.int64()),
        ("mape", pa.float64()),
        ("target_index", pa.int64()),
        ("target_distance", pa.float64()),
    ]
)
"""A row per image and attack. `role` is "in" or "out"; `side` is the side attacked, that of the image itself ("none"
for the clean rows, whose attacked score is the clean one). `mape`, `target_index` and `target_distance` are filled for
collisions only: the inlier that the image was made to collide with, and how far that is in the attack's own norm."""


@dataclass(frozen=True)
class Pictures:
    """A few collisions to look at: n targets, starts and what was found, with the latents of all three."""

    title: str
    attack: str
    norm: str
    eps: float
    target: Tensor
    """(n, C, H, W), the inliers."""
    start: Tensor
    """(n, C, H, W)."""
    found: Tensor
    """(n, C, H, W)."""
    z_target: Tensor
    """(n, D)."""
    z_start: Tensor
    """(n, D)."""
    z_found: Tensor
    """(n, D)."""
    mape: list[float] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)
    """From start to found, in `norm`."""
    target_distance: list[float] = field(default_factory=list)
    """From start to target, in `norm`."""
    names: list[str] = field(default_factory=list)
    """What the targets show, where that is known."""


_TENSORS = ("target", "start", "found", "z_target", "z_start", "z_found")


class Bundle:
    """A run's directory. Every file is written whole or not at all."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def report(self) -> Path:
        """Where the report stands."""
        return self.folder / "report.html"

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self.folder / "plan.yaml").is_file()

    def discard(self) -> None:
        """Remove a run that came to nothing: its plan and manifest, and the folder where nothing else is in it."""
        for name in ("plan.yaml", "manifest.json"):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def write_plan(self, text: str) -> None:
        """The resolved plan, as YAML."""
        write_text(self.folder / "plan.yaml", text)

    def plan_text(self) -> str:
        """The resolved plan, as YAML."""
        return self._existing("plan.yaml").read_text(encoding="utf-8")

    def write_results(self, rows: Sequence[Row], checks: Sequence[Check], manifest: Mapping[str, Any]) -> None:
        """`results.json` and `manifest.json`."""
        results = {"schema": SCHEMA, "rows": rows, "checks": checks, "manifest": manifest}
        write_text(self.folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
        self.write_manifest(manifest)

    def write_triage(self, results: TriageResults) -> None:
        """`results.json` and `manifest.json` of a triage."""
        write_text(self.folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
        self.write_manifest(results["manifest"])

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """`manifest.json`, which stands there from the beginning of a run."""
        write_text(self.folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")

    def manifest(self) -> dict[str, Any]:
        """The content of `manifest.json`."""
        content: dict[str, Any] = json.loads(self._existing("manifest.json").read_text(encoding="utf-8"))
        return content

    def results(self) -> Results:
        """The content of an audit's `results.json`.

        Raises:
            ValueError: the folder holds no finished audit, or one of another schema.
        """
        results: Results = self._results("audit")
        return results

    def triage(self) -> TriageResults:
        """The content of a triage's `results.json`.

        Raises:
            ValueError: the folder holds no finished triage, or one of another schema.
        """
        results: TriageResults = self._results("triage")
        return results

    def _results(self, kind: str) -> Any:
        path = self._existing("results.json")
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if results.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {results.get('schema')}, this version reads {SCHEMA}")
        found = results.get("kind", "audit")
        if found != kind:
            raise ValueError(f"{self.folder} holds another kind of run: {found} instead of {kind}")
        return results

    def write_samples(self, rows: Sequence[Mapping[str, Any]] | pa.Table) -> None:
        """`samples.parquet`."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=SAMPLES)
        with replacing(self.folder / "samples.parquet") as draft:
            pq.write_table(table, draft)

    def samples(self) -> pa.Table:
        """The rows of `samples.parquet`."""
        return pq.read_table(self._existing("samples.parquet"))

    def write_pictures(self, groups: Sequence[Pictures]) -> None:
        """`images.safetensors`."""
        tensors, about = {}, []
        for number, group in enumerate(groups):
            facts = {name: value for name, value in shallow(group).items() if name not in _TENSORS}
            about.append(facts)
            for name in _TENSORS:
                tensors[f"{number}/{name}"] = getattr(group, name).detach().cpu().float().contiguous().clone()
        with replacing(self.folder / "images.safetensors") as draft:
            save_file(tensors, draft, metadata={"pictures": json.dumps(about)})

    def pictures(self) -> list[Pictures]:
        """The groups of pictures, in the order written; none where the run kept none."""
        path = self.folder / "images.safetensors"
        if not path.is_file():
            return []
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("pictures", "[]"))
                return [
                    Pictures(**facts, **{name: file.get_tensor(f"{number}/{name}") for name in _TENSORS})
                    for number, facts in enumerate(about)
                ]
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def _existing(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"{self.folder} holds no finished run: {name} is missing")
        return path


def shallow(group: Pictures) -> dict[str, Any]:
    """The fields of a group by name."""
    return {name: getattr(group, name) for name in group.__dataclass_fields__}
