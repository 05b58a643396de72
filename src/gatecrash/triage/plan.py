"""The plan of a triage: the YAML file's schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from gatecrash.audit.plan import (
    DetectorPlan,
    ModelPlan,
    Part,
    Seed,
    SourcePlan,
    check_titles,
    named,
    number,
    numbers,
)
from gatecrash.ball import BALLS, Ball

RESERVED = ("inliers", "held_out", "mistakes")
"""What no set of outliers can be called."""

LARGEST = 1e6
"""No radius or step of a plan is larger: nothing in an image or a feature is so far away, and 32 bits overflow."""

Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Listed = BeforeValidator(lambda value: numbers(value if isinstance(value, list) else [value]))
"""One number stands for a list of one; fractions such as 8/255 are numbers."""


class TriageData(Part):
    """Which images play which part."""

    inliers: SourcePlan
    """Labelled test images, on which the classifier makes its mistakes."""
    outliers: dict[str, SourcePlan] = Field(default_factory=dict)
    fit: SourcePlan | None = None
    """Labelled training images, to fit the detectors on."""
    held_out: SourcePlan | None = None
    """Labelled validation images: temperatures, thresholds and normalisations come from them."""
    fit_outliers: SourcePlan | None = None
    """Known outliers for detectors with an option that needs them; not those of the test."""


class AdversarialPlan(Part):
    """Adversarial images against the classifier."""

    name: Literal["fgsm", "bim"]
    eps: Annotated[list[Positive], Listed] = Field(min_length=1)
    norm: Annotated[str, named(BALLS)] = "linf"
    steps: PositiveInt = 10
    """For `bim`; `fgsm` takes one."""
    step: Annotated[Positive, BeforeValidator(number)] | None = None
    """For `bim`: eps / steps when not given."""

    @model_validator(mode="after")
    def _sensible(self) -> AdversarialPlan:
        if self.name == "fgsm" and (self.step is not None or self.steps != 10):
            raise ValueError("fgsm takes one step of length eps; steps and step are for bim")
        return self


@dataclass(frozen=True)
class Adversary:
    """One attack on the classifier with one radius."""

    plan: AdversarialPlan
    eps: float

    @property
    def ball(self) -> Ball:
        """How far it may go."""
        return BALLS[self.plan.norm](self.eps)

    @property
    def title(self) -> str:
        """What it is called in tables, small L∞ radii in grey levels."""
        if self.plan.norm != "linf":
            return f"{self.plan.name} {self.plan.norm.upper()} {self.eps:g}"
        levels = 255 * self.eps
        whole = round(levels) > 0 and abs(levels - round(levels)) < 1e-6
        return f"{self.plan.name} {f'{round(levels)}/255' if whole else f'{self.eps:g}'}"


def adversaries_of(attacks: Iterable[AdversarialPlan]) -> list[Adversary]:
    """Every attack with every radius."""
    return [Adversary(plan, eps) for plan in attacks for eps in plan.eps]


def check_sets(outliers: Iterable[str], attacks: Sequence[AdversarialPlan]) -> None:
    """Raises a ValueError when two sets of images, drawn or made, would have one name."""
    check_titles([f"{attack.name} {attack.norm}" for attack in attacks], "attack", "list its eps in one")
    titles = [adversary.title for adversary in adversaries_of(attacks)]
    check_titles(titles, "attack", "once is enough")
    for name in outliers:
        if name in (*RESERVED, *titles):
            raise ValueError(f"outliers: a set cannot be called {name!r}, which means something else in a triage")


class PurifyPlan(Part):
    """Purification of features: the grid of the paper's Appendix B."""

    detectors: list[str] | None = None
    """Titles of detectors that judge features; every `gmm` of the plan when not given."""
    step: Annotated[list[Positive], Listed] = Field(default=[0.1, 0.01], min_length=1)
    """ε, the learning rates."""
    pull: Annotated[list[NotNegative], Listed] = Field(default=[0.0, 0.01, 0.1, 1.0], min_length=1)
    """ν, how strongly features are held back."""
    steps: PositiveInt = 100

    @model_validator(mode="after")
    def _once(self) -> PurifyPlan:
        for name, values in (("detectors", self.detectors or []), ("step", self.step), ("pull", self.pull)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names something twice: {', '.join(map(str, values))}")
        return self


class TriagePlan(Part):
    """All that a triage does."""

    model: ModelPlan
    data: TriageData
    detectors: list[DetectorPlan] = Field(min_length=1)
    adversarial: list[AdversarialPlan] = Field(default_factory=list)
    fooled_only: bool = False
    """Whether only those adversarial images count that the classifier gets wrong and whose originals it got right."""
    purify: PurifyPlan | None = None
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often detectors with a seed are fitted, each time with another one."""
    folds: Annotated[int, Field(ge=2, le=100)] = 5
    """Of the cross-validation that chooses the threshold."""
    seed: Seed = 0
    batch_size: PositiveInt = 100
    """Images that are attacked together, and saved together."""

    @model_validator(mode="before")
    @classmethod
    def _grid(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("purify"), bool):
            value = value | {"purify": {} if value["purify"] else None}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TriagePlan:
        titles = [detector.title for detector in self.detectors]
        check_titles(titles, "detector", "give one a label")
        check_sets(self.data.outliers, self.adversarial)
        needy = [detector.title for detector in self.detectors if detector.learns]
        if needy and self.data.fit is None:
            raise ValueError(f"data.fit is missing: {', '.join(needy)} must be fitted on inliers")
        if self.purify is not None:
            for title in self.purify.detectors or []:
                if title not in titles:
                    raise ValueError(f"purify.detectors: {title!r} is none of the plan's: {', '.join(titles)}")
            if not self.purified:
                raise ValueError("purify needs a detector of features: name one, or add a gmm to the detectors")
        return self

    @property
    def purified(self) -> list[str]:
        """The titles of the detectors that purify."""
        if self.purify is None:
            return []
        return self.purify.detectors or [part.title for part in self.detectors if part.name == "gmm"]
