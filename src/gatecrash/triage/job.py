"""A triage with everything loaded, ready to run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gatecrash.audit.job import build_detector, encoders_in, encoders_of, load_images
from gatecrash.audit.models import completed, load_model
from gatecrash.audit.plan import SourcePlan, plan_text
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector, build
from gatecrash.encoder import Encoder
from gatecrash.networks import hash_of
from gatecrash.triage.plan import AdversarialPlan, Adversary, PurifyPlan, TriagePlan, adversaries_of


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
        return adversaries_of(self.adversarial)

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
        parts = [part for detector in self.detectors.values() for part in encoders_in(detector)]
        models = {id(encoder.model): encoder.model for encoder in [self.encoder, *parts]}
        return {f"{type(model).__name__} {number}": hash_of(model) for number, model in enumerate(models.values())}

    def repeats_of(self, title: str) -> range:
        """The repeats in which a detector is another one: all where it has a seed and learns, else the first."""
        detector = self.detectors[title]
        return range(self.repeats if has_seed(detector.spec) and detector.to_fit() else 1)

    def repeat(self, number: int) -> dict[str, Detector]:
        """The detectors that are new in a repeat, each with a seed of its own; in the first all of them."""
        return {
            title: reseeded(detector, number)
            for title, detector in self.detectors.items()
            if number in self.repeats_of(title)
        }


def has_seed(spec: dict[str, Any]) -> bool:
    """Whether a detector, or a member of it, draws random numbers: EM's, or those of training."""
    options = spec["options"]
    own = isinstance(options.get("seed"), int) or isinstance(options.get("training"), dict)
    return own or any(map(has_seed, spec.get("members", [])))


def reseeded(detector: Detector, number: int) -> Detector:
    """The detector with every seed raised by a number, not fitted; in the first repeat the detector itself."""
    return detector if number == 0 else build(raised(detector.spec, number), encoders_of(detector))


def raised(spec: dict[str, Any], number: int) -> dict[str, Any]:
    """A detector's spec with its seed, and its members', raised by a number."""
    spec = copy.deepcopy(spec)
    options = spec["options"]
    if isinstance(options.get("seed"), int):
        options["seed"] += number
    if isinstance(options.get("training"), dict):
        options["training"]["seed"] = options["training"].get("seed", 0) + number
    if "members" in spec:
        spec["members"] = [raised(member, number) for member in spec["members"]]
    return spec


def job_of_triage(plan: TriagePlan, folder: Path, device: torch.device, *, trust: bool = False) -> TriageJob:
    """Load the network and the images of a plan; paths in it are relative to `folder`.

    Raises:
        ValueError: in one line, whatever is missing or does not fit.
    """
    about = completed(plan.model, folder)
    model = load_model(about, folder, trust=trust).to(device)
    encoder = Encoder(model, None, about.mean, about.std, about.resize, checkpointing=about.checkpointing)
    features = None if about.layer is None else encoder.at(about.layer)

    def images(source: SourcePlan | None) -> ImageSet | None:
        if source is None:
            return None
        return load_images(source, folder, channels=about.channels, size=about.size, seed=plan.seed)

    data = plan.data
    return TriageJob(
        plan=plan_text(plan),
        detectors={part.title: build_detector(part, encoder, features, folder) for part in plan.detectors},
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
