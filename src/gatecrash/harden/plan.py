"""The plan of hardening: the YAML file's schema."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from gatecrash.audit.plan import DetectorPlan, ModelPlan, Part, Seed, SourcePlan, check_titles, named, number
from gatecrash.harden.methods import METHODS

Radius = Annotated[float, BeforeValidator(number), Field(gt=0, le=1)]
Positive = Annotated[float, BeforeValidator(number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(number), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, gt=0)]
Share = Annotated[float, BeforeValidator(number), Field(ge=0, lt=1)]

GIVEN = "given"
"""What the model that training began with is called in tables."""

TAKEN = ("plan.yaml", "begun.json", "results.json", "given.json", GIVEN)
"""The files beside the models' folders and the given model, which no method may be called."""


class HardenData(Part):
    """Which images play which part."""

    train: SourcePlan
    """Labelled images to learn from."""
    outliers: list[SourcePlan] = Field(default_factory=list)
    """Images to be exposed to, all sources mixed; not those of the test."""
    test: SourcePlan
    """Labelled images that belong, for the table at the end."""
    test_outliers: dict[str, SourcePlan] = Field(min_length=1)
    """Images that do not belong, likewise; none of those in `outliers`."""
    balance: Count | None = None
    """Every class brought to so many training images, smaller ones by rotated, moved and warped copies."""

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("outliers"), str | dict):
            value = value | {"outliers": [value["outliers"]]}
        return value


class MethodPlan(Part):
    """One way of training, with its options; every method of a plan makes a model of its own."""

    name: Annotated[str, named(METHODS)]
    label: str | None = None
    eps: Radius | None = None
    """The inner attacker's radius, L∞."""
    step: Radius | None = None
    steps: Count | None = None
    """Of the inner attacker; of the Langevin dynamics of a joint energy-based model."""
    weight: NotNegative | None = None
    """λ of the outliers, w_max of temporal ensembling, β of the confident classifier."""
    width: Count | None = None
    """For the confident classifier: channels of the GAN's narrowest layer; 128 in the authors' release."""
    labels_per_class: Count | None = None
    """For temporal ensembling: how many labels are known."""
    ramp: Count | None = None
    buffer: Count | None = None
    """For a joint energy-based model: how many of its samples are kept."""
    components: Count | None = None
    """For certified certain uncertainty: Gaussians in each mixture."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sensible(self) -> MethodPlan:
        method = METHODS[self.name]
        for key in self.options:
            if key not in method.options:
                takes = ", ".join(method.options) or "nothing"
                raise ValueError(f"{self.name} does not take {key}; it takes {takes}")
        for key in method.needs:
            if key not in self.options:
                raise ValueError(f"{self.name} needs {key}")
        if self.title.lower() in TAKEN:
            raise ValueError(f"no method can be called {self.title!r}, which is taken; give another label")
        if not re.fullmatch(r"\w([\w .+-]{0,62}[\w+-])?", self.title):
            raise ValueError(
                f"label must be at most 64 letters, digits, spaces and .+-_, since a folder is named so: {self.title!r}"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """What was said of the method."""
        said = self.model_dump(exclude={"name", "label"})
        return {key: value for key, value in said.items() if value is not None}

    @property
    def title(self) -> str:
        """What it is called in tables, and its folder."""
        return self.label or self.name


class TrainingPlan(Part):
    """How the networks are trained, the same for every method."""

    epochs: Count
    batch_size: Count = 64
    optimiser: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = 0.1
    momentum: Share = 0.9
    weight_decay: NotNegative = 1e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warm_up: Share = 0.0
    clip: Positive | None = None
    ema: Annotated[float, BeforeValidator(number), Field(gt=0, lt=1)] | None = None
    precision: Literal["float32", "bf16"] = "float32"
    outliers_per_image: Positive = 2.0
    crop: Annotated[int, Field(strict=True, ge=0)] = 0
    flip: bool = False


class EvaluationPlan(Part):
    """The table at the end."""

    eps: Radius = 1 / 255
    """Of the two-sided attack on the detectors."""
    steps: Count = 10
    step: Radius = 1 / 255
    pgd_eps: Radius = 1 / 255
    """Of the attack on the classifier."""
    pgd_steps: Count = 10
    detectors: list[DetectorPlan] = Field(default_factory=lambda: [DetectorPlan(name="msp")], min_length=1)
    batch_size: Count = 200


class HardenPlan(Part):
    """All that hardening does."""

    model: ModelPlan
    """The network; weights of a file or bundle are where training begins, and without them it begins at random."""
    data: HardenData
    methods: list[MethodPlan] = Field(min_length=1)
    """`ce` among them is the plain model that the others are compared with."""
    training: TrainingPlan
    evaluation: EvaluationPlan = Field(default_factory=EvaluationPlan)
    seed: Seed = 0

    @model_validator(mode="after")
    def _consistent(self) -> HardenPlan:
        # Folders are named so, and some file systems do not tell upper from lower case.
        check_titles([method.title.lower() for method in self.methods], "method", "give one a label")
        check_titles([d.title for d in self.evaluation.detectors], "detector", "give one a label")
        for method in self.methods:
            if method.buffer is not None and method.buffer < self.training.batch_size:
                raise ValueError(
                    f"{method.title}: a buffer of {method.buffer} samples is smaller than a batch of "
                    f"{self.training.batch_size}; raise buffer"
                )
            if METHODS[method.name].exposes and not self.data.outliers:
                raise ValueError(f"data.outliers is missing: {method.title} must be exposed to outliers")
        if self.model.name.startswith("clip:"):
            raise ValueError("model.name: a CLIP has no classes that could be trained; give a classifier")
        if self.model.name.startswith("bundle:"):
            for key in ("weights", "options"):
                if getattr(self.model, key):
                    raise ValueError(f"model.{key}: {self.model.name} has its own; leave {key} out")
        return self
