"""A triage with everything loaded, ready to run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gatecrash.audit.job import build_detector, encoders_of, load_images
from gatecrash.audit.models import completed, load_model
from gatecrash.audit.plan import SourcePlan, plan_text
from gatecrash.ball import BALLS, Ball
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector, build
from gatecrash.encoder import Encoder
from gatecrash.networks import hash_of
from gatecrash.triage.plan import AdversarialPlan, PurifyPlan, TriagePlan


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
        whole = abs(levels - round(levels)) < 1e-6
        return f"{self.plan.name} {f'{round(levels)}/255' if whole else f'{self.eps:g}'}"


@dataclass(frozen=True)
class TriageJob:
    """All that a triage needs."""

    plan: str
    """The resolved plan, as YAML."""
    detectors: dict[str, Detector]
    """As they are for the first repeat; fitted where there is nothing to fit on."""
    encoder: Encoder
    """The classifier's logits."""
    features: Encoder | None
    """The layer that purification moves."""
    inliers: ImageSet
    outliers: dict[str, ImageSet]
    adversarial: Sequence[AdversarialPlan]
    device: torch.device
    fooled_only: bool = False
    purify: PurifyPlan | None = None
    purified: Sequence[str] = ()
    repeats: int = 1
    folds: int = 5
    seed: int = 0
    batch_size: int = 100
    fit: ImageSet | None = None
    held_out: ImageSet | None = None
    fit_outliers: ImageSet | None = None

    @property
    def adversaries(self) -> list[Adversary]:
        """Every attack with every radius."""
        return [Adversary(plan, eps) for plan in self.adversarial for eps in plan.eps]

    @property
    def sets(self) -> dict[str, ImageSet]:
        """Every set of images by the part it plays."""
        optional = {"fit": self.fit, "held_out": self.held_out, "fit_outliers": self.fit_outliers}
        return {
            "inliers": self.inliers,
            **{f"outliers.{name}": images for name, images in self.outliers.items()},
            **{name: images for name, images in optional.items() if images is not None},
        }

    @property
    def networks(self) -> dict[str, str]:
        """The SHA-256 of every network's weights."""
        parts = [part for d in self.detectors.values() for part in d.modules() if isinstance(part, Encoder)]
        models = {id(encoder.model): encoder.model for encoder in [self.encoder, *parts]}
        return {f"{type(model).__name__} {number}": hash_of(model) for number, model in enumerate(models.values())}

    def repeat(self, number: int) -> dict[str, Detector]:
        """The detectors of one repeat, each with a seed of its own; those without a seed are the same in all."""
        return {title: reseeded(detector, number) for title, detector in self.detectors.items()}


def reseeded(detector: Detector, number: int) -> Detector:
    """The detector with its seed raised by a number, not fitted; the detector itself where it has no seed."""
    spec = copy.deepcopy(detector.spec)
    if number == 0 or not raise_seeds(spec, number):
        return detector
    return build(spec, encoders_of(detector))


def raise_seeds(spec: dict[str, Any], number: int) -> bool:
    """Raise every seed in a detector's spec and its members'; whether there was one."""
    found = "seed" in spec["options"]
    if found:
        spec["options"]["seed"] += number
    return any([found, *(raise_seeds(member, number) for member in spec.get("members", []))])


def job_of_triage(plan: TriagePlan, folder: Path, device: torch.device, *, trust: bool = False) -> TriageJob:
    """Load the network and the images of a plan; paths in it are relative to `folder`.

    Raises:
        ValueError: in one line, whatever is missing or does not fit.
    """
    about = completed(plan.model, folder)
    model = load_model(about, folder, trust=trust).to(device)
    encoder = Encoder(model, None, about.mean, about.std, about.resize)
    features = None if about.layer is None else encoder.at(about.layer)

    def images(source: SourcePlan | None) -> ImageSet | None:
        if source is None:
            return None
        return load_images(source, folder, channels=about.channels, size=about.size, seed=plan.seed)

    data = plan.data
    return TriageJob(
        plan=plan_text(plan),
        detectors={part.title: build_detector(part, encoder, features) for part in plan.detectors},
        encoder=encoder,
        features=features,
        inliers=load_images(data.inliers, folder, channels=about.channels, size=about.size, seed=plan.seed),
        outliers={name: found for name, source in data.outliers.items() if (found := images(source)) is not None},
        adversarial=plan.adversarial,
        device=device,
        fooled_only=plan.fooled_only,
        purify=plan.purify,
        purified=plan.purified,
        repeats=plan.repeats,
        folds=plan.folds,
        seed=plan.seed,
        batch_size=plan.batch_size,
        fit=images(data.fit),
        held_out=images(data.held_out),
        fit_outliers=images(data.fit_outliers),
    )
