"""A job: the plan with everything loaded, ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.audit.models import completed, load_model
from gatecrash.audit.plan import (
    AttackPlan,
    DetectorPlan,
    PicturePlan,
    Plan,
    SearchPrecision,
    SourcePlan,
    check_nothing_to_learn,
    plan_text,
)
from gatecrash.data import ImageSet, load_source
from gatecrash.detectors import DETECTORS, Detector, Expected, ScoreEnsemble, build
from gatecrash.encoder import Encoder
from gatecrash.files import at_home
from gatecrash.images import Images, batches


@dataclass(frozen=True)
class Showcase:
    """One image and the inliers it is to collide with."""

    plan: PicturePlan
    start: ImageSet
    targets: ImageSet


@dataclass(frozen=True)
class Job:
    """All that a run needs."""

    plan: str
    """The resolved plan, as YAML."""
    detectors: dict[str, Detector]
    encoder: Encoder | None
    """The network's output, which collisions of logits and the softmax attack read; None where no detector has one."""
    features: Encoder | None
    """The layer that `of: features` means."""
    inliers: ImageSet
    outliers: dict[str, ImageSet]
    attacks: Sequence[AttackPlan]
    device: torch.device
    seed: int = 0
    batch_size: int = 100
    precision: SearchPrecision = "auto"
    fit: ImageSet | None = None
    held_out: ImageSet | None = None
    fit_outliers: ImageSet | None = None
    showcases: Sequence[Showcase] = field(default_factory=list)

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Every network, and every detector without one, by what the manifest calls it."""
        alone = [detector for detector in self.detectors.values() if not encoders_in(detector)]
        models = {id(model): model for model in [*(encoder.model for encoder in self.encoders), *alone]}
        return {f"{type(model).__name__} {number}": model for number, model in enumerate(models.values())}

    @property
    def encoders(self) -> list[Encoder]:
        """The network's and those of the detectors."""
        first = [] if self.encoder is None else [self.encoder]
        return [*first, *(part for detector in self.detectors.values() for part in encoders_in(detector))]

    @property
    def prepares(self) -> bool:
        """Whether a network may be run as a prepared copy: one that is not checkpointed, and that an encoder reads."""
        return any(not encoder.checkpointing for encoder in self.encoders)

    @property
    def output(self) -> Encoder:
        """The network's output.

        Raises:
            ValueError: there is no network.
        """
        if self.encoder is None:
            raise ValueError("no detector has an Encoder, so there is no network whose output could be read")
        return self.encoder

    @property
    def sets(self) -> dict[str, ImageSet]:
        """Every set of images by the part it plays."""
        optional = {"fit": self.fit, "held_out": self.held_out, "fit_outliers": self.fit_outliers}
        return {
            "inliers": self.inliers,
            **{f"outliers.{name}": images for name, images in self.outliers.items()},
            **{name: images for name, images in optional.items() if images is not None},
        }


def job_of_plan(plan: Plan, folder: Path, device: torch.device, *, trust: bool = False) -> Job:
    """Load the network and the images of a plan; paths in it are relative to `folder`.

    Raises:
        ValueError: in one line, whatever is missing or does not fit.
    """
    about = completed(plan.model, folder)
    model = load_model(about, folder, trust=trust).to(device)
    encoder = Encoder(model, None, about.mean, about.std, about.resize, checkpointing=about.checkpointing)
    features = None if about.layer is None else encoder.at(about.layer)

    def images(source: SourcePlan, seed: int = plan.seed) -> ImageSet:
        return load_images(source, folder, channels=about.channels, size=about.size, seed=seed)

    def optional(source: SourcePlan | None) -> ImageSet | None:
        return None if source is None else images(source)

    detectors = {part.title: build_detector(part, encoder, features, folder) for part in plan.detectors}
    if plan.data.fit is None:  # a bundle may give a detector something, and not all it needs
        check_nothing_to_learn([title for title, detector in detectors.items() if detector.to_fit()])
    return Job(
        plan=plan_text(plan),
        detectors=detectors,
        encoder=encoder,
        features=features,
        inliers=images(plan.data.inliers),
        outliers={name: images(source) for name, source in plan.data.outliers.items()},
        attacks=plan.attacks,
        device=device,
        seed=plan.seed,
        batch_size=plan.batch_size,
        precision=plan.precision,
        fit=optional(plan.data.fit),
        held_out=optional(plan.data.held_out),
        fit_outliers=optional(plan.data.fit_outliers),
        showcases=[Showcase(part, images(part.start), images(part.targets)) for part in plan.pictures],
    )


def build_detector(plan: DetectorPlan, encoder: Encoder, features: Encoder | None, folder: Path) -> Detector:
    """The detector of a plan; one that reads features gets the model's layer unless it names its own.

    A folder that it names is relative to `folder`.
    """
    if plan.members is not None:
        members = [build_detector(member, encoder, features, folder) for member in plan.members]
        return Expected(members[0], **plan.options) if plan.name == "expected" else ScoreEnsemble(members)
    kind = DETECTORS[plan.name]
    base = encoder
    if kind.card.reads in ("features", "maps") and not plan.options.get("layers"):
        if features is None:
            raise ValueError(f"{plan.title} reads features: give model.layer, or layers beside the detector's name")
        base = features
    options = dict(plan.options)
    for name in ("bundle", "checkpoints"):
        if isinstance(options.get(name), str):
            options[name] = str(at_home(folder, options[name]))
    try:
        return build({"name": plan.name, "options": options}, base)
    except TypeError as error:
        raise ValueError(f"the options {plan.options} do not suit {plan.name}: {error}") from error


def encoders_of(detector: Detector) -> Any:
    """What `load` and `build` need beside a detector's spec: its encoder, or a list with every member's."""
    if isinstance(detector, ScoreEnsemble):
        return [encoders_of(member) for member in detector.detectors]
    if isinstance(detector, Expected):
        return encoders_of(detector.detector)
    if detector.encoder is not None:
        return detector.encoder
    return encoders_in(detector)


def encoders_in(module: nn.Module) -> list[Encoder]:
    """The encoders among a module's parts, each once."""
    return [part for part in module.modules() if isinstance(part, Encoder)]


def load_images(
    plan: SourcePlan, folder: Path, *, channels: int | None = None, size: int | None = None, seed: int = 0
) -> ImageSet:
    """The images of one source of a plan."""
    root = folder if plan.root is None else at_home(folder, plan.root)
    limit = None if plan.classes is not None else plan.limit
    images = load_source(
        plan.source, limit=limit, shuffle=plan.shuffle, channels=channels, size=size, root=root, seed=seed
    )
    return images if plan.classes is None else one_per_class(images, plan.classes)


def one_per_class(images: ImageSet, classes: Sequence[str | int]) -> ImageSet:
    """The first image of each of some classes, by name or label number."""
    names = images.classes or []
    rows = []
    for wanted in classes:
        label = names.index(wanted) if isinstance(wanted, str) and wanted in names else wanted
        hits = [] if images.y is None or isinstance(label, str) else (images.y == label).nonzero().flatten().tolist()
        if not hits:
            raise ValueError(f"{images.name} has no class {wanted!r}; its classes: {', '.join(names) or 'not named'}")
        rows.append(hits[0])
    y = None if images.y is None else images.y[rows]
    return ImageSet(images.x[rows], y, images.name, images.classes, images.notes)


def as_set(data: Images | ImageSet, name: str) -> ImageSet:
    """Any data as one set of images."""
    if isinstance(data, ImageSet):
        return data
    parts = list(batches(data, name=name))
    if not parts:
        raise ValueError(f"{name}: there are no images")
    labels = [y for _, y in parts if y is not None]
    y = torch.cat(labels) if len(labels) == len(parts) else None
    return ImageSet(torch.cat([x for x, _ in parts]), y, name)


def labelled(images: ImageSet) -> Tensor | tuple[Tensor, Tensor]:
    """The images, with their labels where there are some, as `fit` takes them."""
    return images.x if images.y is None else (images.x, images.y)


def named_detectors(detectors: Detector | Sequence[Detector] | Mapping[str, Detector]) -> dict[str, Detector]:
    """Detectors by what they are called in tables; two of one name get a number."""
    if isinstance(detectors, Mapping):
        return dict(detectors)
    listed: list[Any] = [detectors] if isinstance(detectors, Detector) else list(detectors)
    names = [detector.name or type(detector).__name__ for detector in listed]
    return {
        name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}": detector
        for i, (name, detector) in enumerate(zip(names, listed, strict=True))
    }
