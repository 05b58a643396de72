"""The plan of an audit: the YAML file's schema, its checks and their messages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, overload

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from gatecrash.ball import BALLS, Ball
from gatecrash.data import SOURCES
from gatecrash.detectors import DETECTORS
from gatecrash.registry import Registry, unknown
from gatecrash.stepper import SCHEDULES, ScheduleName


def number(value: Any) -> Any:
    """A fraction such as "8/255" as a number; anything else as it is."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number or a fraction such as 8/255, got {value}")
    if isinstance(value, str):
        try:
            return float(Fraction(value.replace(" ", "")))
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"must be a number or a fraction such as 8/255, got {value!r}") from None
    return value


def numbers(value: Any) -> Any:
    """A number or a list of numbers, fractions allowed."""
    return [number(part) for part in value] if isinstance(value, list) else number(value)


def named(table: Registry[Any]) -> AfterValidator:
    """A check that a name is in a table; what follows a colon is the entry's own."""

    def check(name: str) -> str:
        table[name.partition(":")[0]]
        return name

    return AfterValidator(check)


Eps = Annotated[float | list[float], BeforeValidator(numbers)]
Number = Annotated[float, BeforeValidator(number)]
Side = Annotated[int, Field(gt=0, le=8192)]
Seed = Annotated[int, BeforeValidator(number), Field(ge=0, lt=2**62)]
SearchPrecision = Literal["auto", "float32"]


class Part(BaseModel):
    """A part of a plan; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPlan(Part):
    """The network under audit."""

    name: str
    """`torchvision:NAME`, `timm:NAME`, `builtin:NAME`, `clip:DIR`, `bundle:DIR`, or `module:function` with --trust."""
    weights: str | None = None
    """A .safetensors or .pth file (for timm's ViTs also .npz), relative to the plan; "default"; "random"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the network's constructor takes, e.g. {num_classes: 43}."""
    layer: str | list[str] | None = None
    """The features: what detectors of features read and `of: features` collides."""
    mean: list[Number] | None = None
    std: list[Number] | None = None
    channels: Literal[1, 3] | None = None
    """What images are converted to: 1 grey, 3 RGB."""
    size: Side | None = None
    """The side that images are converted to; attacks act on images of this size."""
    resize: Side | None = None
    """The side the network wants, where that is another: resized inside, differentiably."""
    checkpointing: bool = False
    """For large transformers: gradients take less memory and a forward pass more."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class SourcePlan(Part):
    """Images from a source."""

    source: Annotated[str, named(SOURCES)]
    limit: PositiveInt | None = None
    shuffle: bool = False
    root: str | None = None
    """Where the data set lies, relative to the plan."""
    classes: list[str | int] | None = Field(default=None, min_length=1)
    """One image of each of these classes instead of the first ones: names or label numbers."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


class DataPlan(Part):
    """Which images play which part."""

    inliers: SourcePlan
    outliers: dict[str, SourcePlan] = Field(min_length=1)
    fit: SourcePlan | None = None
    """Labelled inliers to fit the detectors on, where one needs them."""
    held_out: SourcePlan | None = None
    """Further inliers, for detectors with an option that needs them."""
    fit_outliers: SourcePlan | None = None
    """Known outliers, likewise; not those of the test."""


class DetectorPlan(BaseModel):
    """A detector by its registry name, with its options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, named(DETECTORS)]
    label: str | None = None
    """What it is called in tables; needed to tell two of one name apart."""
    members: list[DetectorPlan] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _known_options(self) -> DetectorPlan:
        if self.name == "deep_ensemble":
            raise ValueError(
                "deep_ensemble needs several networks, and a plan has one; audit it with gate.audit in Python"
            )
        takes = list(inspect.signature(DETECTORS[self.name].__init__).parameters.values())[2:]
        allowed = [parameter.name for parameter in takes if parameter.kind is not parameter.VAR_KEYWORD]
        for key in self.options:
            if key not in allowed:
                raise ValueError(unknown(f"option of {self.name}", key, [*allowed, "label"]))
        if (self.members is not None) != (self.name in ("ensemble", "expected")):
            raise ValueError("members: an ensemble has them, and expected has one, and no other detector")
        if self.name == "expected" and len(self.members or ()) != 1:
            raise ValueError("members: expected averages one detector over draws")
        return self

    @property
    def learns(self) -> bool:
        """Whether it, or a member of it, must be fitted."""
        own = DETECTORS[self.name].card.fit != "nothing" and "bundle" not in self.options
        return own or any(member.learns for member in self.members or [])

    @property
    def options(self) -> dict[str, Any]:
        """The detector's own options."""
        return dict(self.model_extra or {})

    @property
    def title(self) -> str:
        """What it is called in tables."""
        return self.label or self.name


LARGEST = 1e6
"""The largest radius that a plan may name; no image is further away."""


class BallPlan(Part):
    """How far an attack may go."""

    norm: Annotated[str, named(BALLS)]
    eps: Eps

    @model_validator(mode="after")
    def _positive(self) -> BallPlan:
        if max(self.ball().ladder) > LARGEST:
            raise ValueError(f"eps must be at most {LARGEST:g}, in pixels from 0 to 1")
        return self

    def ball(self) -> Ball:
        """The ball itself."""
        return BALLS[self.norm](self.eps)


SIDES: dict[str, tuple[str, ...]] = {
    "collide": ("out",),
    "admit": ("out", "both"),
    "evict": ("in", "both"),
    "softmax": ("both", "out", "in"),
    "worst_case": ("both", "out", "in"),
}
"""The attacks that a plan can name, and the sides that each can take, the one it takes when not told first."""


class AttackPlan(Part):
    """An attack by its registry name, and what it may do."""

    name: Literal["collide", "admit", "evict", "softmax", "worst_case"]
    ball: BallPlan
    of: str | list[str] | None = None
    """For `collide`: "logits", "features" (the model's layer), "detector" (each detector's own encoding), or layers."""
    side: Literal["out", "in", "both"] | None = None
    """Whom it attacks; "both" lowers the outliers' scores and raises the inliers', and reports each side as well."""
    start: list[str] | None = None
    """For `collide`: only these outlier sets."""
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    step: Annotated[float, BeforeValidator(number), Field(gt=0, allow_inf_nan=False)] | None = None
    schedule: ScheduleName | None = None
    budget: Literal["quick", "standard", "thorough"] | None = None
    """For `worst_case`, which takes no steps, step or restarts: "standard" when not given."""
    eight_bit: bool = False
    """Whether what it finds is put into whole grey levels, inside the ball, before it is scored."""
    until: Literal["end", "crossed"] | None = None
    """For `worst_case`: "crossed" leaves an image alone once its score has passed every clean one of the other side,
    which is as wrong as AUROC can tell; "end", when not given, goes on for every image's strongest perturbation."""

    @model_validator(mode="before")
    @classmethod
    def _one_start(cls, value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("name")
            if isinstance(name, str) and name not in SIDES:
                raise ValueError(unknown("attack", name, list(SIDES)))
            schedule = value.get("schedule")
            if isinstance(schedule, str) and schedule not in SCHEDULES:
                raise ValueError(unknown("schedule", schedule, list(SCHEDULES)))
            if isinstance(value.get("start"), str):
                value = value | {"start": [value["start"]]}
        return value

    @model_validator(mode="after")
    def _sensible(self) -> AttackPlan:
        if self.name != "collide":
            for key in ("of", "start", "schedule"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is for collide; {self.name} does not take it")
        if self.name == "worst_case":
            for key in ("steps", "step", "restarts"):
                if key in self.model_fields_set and getattr(self, key) != AttackPlan.model_fields[key].default:
                    raise ValueError(f"{key} is not for worst_case, which takes a budget: quick, standard or thorough")
        elif self.budget is not None:
            raise ValueError(f"budget is for worst_case; {self.name} takes steps and restarts")
        elif self.until is not None:
            raise ValueError(f"until is for worst_case; {self.name} does not take it")
        if self.until == "crossed" and self.eight_bit:
            raise ValueError("until: crossed ends where an image has just crossed, which rounding to 8 bit may undo")
        natural = SIDES[self.name]
        if self.side is not None and self.side not in natural:
            raise ValueError(f"side of {self.name} must be one of {', '.join(natural)}, got {self.side!r}")
        return self

    @property
    def sides(self) -> tuple[Literal["out", "in"], ...]:
        """The sides that are attacked."""
        side = self.side or SIDES[self.name][0]
        return ("out", "in") if side == "both" else ("in",) if side == "in" else ("out",)

    @property
    def target(self) -> str | list[str]:
        """What a collision is of."""
        return self.of or "features"

    @property
    def reads_network(self) -> bool:
        """Whether it reads a network and no detector, so that one run serves all detectors."""
        return self.name == "softmax" or (self.name == "collide" and self.target != "detector")

    @property
    def title(self) -> str:
        """What it is called in tables."""
        return f"{self._plain_title}, 8 bit" if self.eight_bit else self._plain_title

    @property
    def _plain_title(self) -> str:
        if self.name == "collide":
            return f"collide {self.target if isinstance(self.target, str) else '+'.join(self.target)}"
        if self.name == "worst_case":
            return f"worst case, {self.budget or 'standard'}"
        return "admit + evict" if self.name in ("admit", "evict") and len(self.sides) == 2 else self.name


class PicturePlan(Part):
    """One image made to collide with a few inliers, to look at."""

    title: str
    start: SourcePlan
    targets: SourcePlan
    ball: BallPlan
    of: str | list[str] = "features"
    steps: PositiveInt = 300


class Plan(Part):
    """All that an audit does."""

    model: ModelPlan
    data: DataPlan
    detectors: list[DetectorPlan] = Field(min_length=1)
    attacks: list[AttackPlan] = Field(default_factory=list)
    pictures: list[PicturePlan] = Field(default_factory=list)
    seed: Seed = 0
    batch_size: PositiveInt = 100
    """Images that are attacked together, and saved together."""
    precision: SearchPrecision = "auto"
    """Of the searches: networks prepared for speed where that pays, or as they are."""

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        check_titles([detector.title for detector in self.detectors], "detector", "give one a label")
        labels = [(a.title, a.ball.norm, str(a.ball.eps)) for a in self.attacks]
        check_titles([" ".join(label) for label in labels], "attack", "once is enough")
        check_titles([picture.title for picture in self.pictures], "picture group", "give one another title")
        if "inliers" in self.data.outliers:
            raise ValueError("data.outliers: a set of outliers cannot be called 'inliers'")
        check_starts(self.attacks, list(self.data.outliers))
        if self.data.fit is None:
            check_nothing_to_learn([detector.title for detector in self.detectors if detector.learns])
        return self


def check_starts(attacks: Sequence[AttackPlan], sets: Sequence[str]) -> None:
    """Raises a ValueError where an attack begins at a set of outliers that is not there."""
    for name in (name for attack in attacks for name in attack.start or []):
        if name not in sets:
            raise ValueError(unknown("outlier set in start", name, list(sets)))


def check_nothing_to_learn(needy: Sequence[str]) -> None:
    """Raises a ValueError that names the detectors that must be fitted, and there is nothing to fit them on."""
    if needy:
        raise ValueError(f"data.fit is missing: {', '.join(needy)} must be fitted on inliers")


def check_titles(titles: Sequence[str], noun: str, advice: str) -> None:
    """Raises a ValueError when two of the same noun have one title."""
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"two {noun}s are called {title!r}; {advice}")


P = TypeVar("P", bound=BaseModel)


@overload
def read_plan(path: str | Path) -> Plan: ...
@overload
def read_plan(path: str | Path, schema: type[P]) -> P: ...


def read_plan(path: str | Path, schema: type[BaseModel] = Plan) -> BaseModel:
    """The plan in a YAML file, an audit's unless another schema is given.

    Raises:
        ValueError: in one line: the file is missing, is not YAML, has tags that would build objects, or does not fit
            the schema; it names the key and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read plan {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    return parse_plan(text, str(path), schema)


@overload
def parse_plan(text: str, name: str = "plan") -> Plan: ...
@overload
def parse_plan(text: str, name: str, schema: type[P]) -> P: ...


def parse_plan(text: str, name: str = "plan", schema: type[BaseModel] = Plan) -> BaseModel:
    """The plan in a YAML text; `name` stands in messages."""
    try:
        content = yaml.safe_load(text)
    except yaml.constructor.ConstructorError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{name} has a tag that plans may not have{where}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be a mapping with the keys {', '.join(schema.model_fields)}")
    return plan_from(content, name, schema)


@overload
def plan_from(content: Mapping[str, Any], name: str = "plan") -> Plan: ...
@overload
def plan_from(content: Mapping[str, Any], name: str, schema: type[P]) -> P: ...


def plan_from(content: Mapping[str, Any], name: str = "plan", schema: type[BaseModel] = Plan) -> BaseModel:
    """The plan in a mapping, as YAML would give it."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{name}: {sentence(error, schema)}") from None


def plan_text(plan: BaseModel) -> str:
    """The plan as YAML, defaults filled in."""
    return str(yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def sentence(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first mistake in a plan as one line: the key, what is wrong, what is allowed."""
    first = error.errors()[0]
    location = [str(step) for step in first["loc"] if not str(step).startswith(("float", "list[", "str", "function"))]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        fields = allowed_keys(schema, location[:-1])
        where = f" in {'.'.join(location[:-1])}" if len(location) > 1 else ""
        return unknown(f"key{where}", location[-1], fields)
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {first['input']!r}"


def allowed_keys(schema: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The keys that the part of a plan at a location may have."""
    for step in location:
        if step in schema.model_fields:
            schema = part_in(schema.model_fields[step].annotation) or schema
    return list(schema.model_fields)


def part_in(annotation: Any) -> type[BaseModel] | None:
    """The part of a plan that a field holds, alone, in a list or in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for inner in get_args(annotation) if (part := part_in(inner)) is not None), None)
