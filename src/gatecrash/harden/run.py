"""The work of hardening: every method's network trained and written as a model bundle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gatecrash.audit.job import load_images
from gatecrash.audit.manifest import code_hash, device_name, versions
from gatecrash.audit.models import bundled, completed, load_model
from gatecrash.audit.plan import ModelPlan, SourcePlan, plan_text
from gatecrash.data import ImageSet, fingerprint
from gatecrash.data.augment import Augmentation
from gatecrash.data.balance import balanced_set
from gatecrash.data.duplicates import overlap, refuse_overlap
from gatecrash.encoder import Encoder
from gatecrash.files import write_text
from gatecrash.fitting import History, Material, Recipe, Step, fit, seed_of, seeded
from gatecrash.harden.methods import METHODS, Subject
from gatecrash.harden.plan import HardenPlan, MethodPlan
from gatecrash.networks import hash_of, load_weights, save_weights
from gatecrash.objective import single
from gatecrash.training.prepared import Prepared

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@dataclass(frozen=True)
class HardenJob:
    """The plan with its images loaded."""

    plan: HardenPlan
    about: ModelPlan
    """The network, with what a bundle knows filled in."""
    folder: Path
    """What paths in the plan are relative to."""
    train: ImageSet
    outliers: ImageSet | None
    test: ImageSet
    test_outliers: dict[str, ImageSet]
    device: torch.device
    trust: bool

    @property
    def sets(self) -> dict[str, ImageSet]:
        """Every set of images by its place in the plan."""
        exposed = {} if self.outliers is None else {"data.outliers": self.outliers}
        tested = {f"data.test_outliers.{name}": images for name, images in self.test_outliers.items()}
        return {"data.train": self.train, **exposed, "data.test": self.test, **tested}

    @property
    def has_weights(self) -> bool:
        """Whether training begins with weights that are given."""
        return self.about.name.startswith("bundle:") or self.about.weights not in (None, "random")

    def network(self) -> Encoder:
        """The network as training finds it: with its weights, or fresh ones that the seed determines."""
        weights = self.about.weights or ("random" if not self.about.name.startswith("bundle:") else None)
        with seeded(self.plan.seed):
            model = load_model(self.about.model_copy(update={"weights": weights}), self.folder, trust=self.trust)
        return Encoder(model.to(self.device), None, self.about.mean, self.about.std, self.about.resize)


def job_of_harden(plan: HardenPlan, folder: Path, device: torch.device, *, trust: bool = False) -> HardenJob:
    """Load the images of a plan.

    Outliers that are drawn for training are others than those that the same seed draws for a test.

    Raises:
        ValueError: in one line, whatever is missing or does not fit.
    """
    about = completed(plan.model, folder)

    def images(source: SourcePlan, seed: int = plan.seed) -> ImageSet:
        return load_images(source, folder, channels=about.channels, size=about.size, seed=seed)

    train, test = images(plan.data.train), images(plan.data.test)
    for name, part in (("data.train", train), ("data.test", test)):
        if part.y is None:
            raise ValueError(f"{name} must have labels, and {part.name} has none")
    refuse_other_classes(train, test)
    mixed = [images(source, seed_of(plan.seed, "exposure")) for source in plan.data.outliers]
    job = HardenJob(
        plan=plan,
        about=about,
        folder=folder,
        train=train if plan.data.balance is None else balanced_set(train, plan.data.balance, seed=plan.seed),
        outliers=mixed_set(mixed) if mixed else None,
        test=test,
        test_outliers={name: images(source) for name, source in plan.data.test_outliers.items()},
        device=device,
        trust=trust,
    )
    shape = tuple(train.x.shape[1:])
    for name, part in job.sets.items():
        if tuple(part.x.shape[1:]) != shape:
            raise ValueError(
                f"{name} has images of shape {tuple(part.x.shape[1:])}, data.train has {shape}; "
                "model.channels and model.size make them alike"
            )
    crop, side = plan.training.crop, min(shape[1:])
    if crop >= side:
        raise ValueError(f"training.crop must be less than the side of the images, {side}, got {crop}")
    refuse_leaks(job.outliers, train, test, job.test_outliers)
    return job


def refuse_other_classes(train: ImageSet, test: ImageSet) -> None:
    """Raises a ValueError when both sets name their classes, and not alike: a label would mean two things."""
    if train.classes is None or test.classes is None or train.classes == test.classes:
        return
    pairs = zip_longest(train.classes, test.classes)
    label, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise ValueError(
        f"data.train and data.test have other classes: label {label} is {one!r} in the one and {other!r} in the other"
    )


def refuse_leaks(
    outliers: ImageSet | None, train: ImageSet, test: ImageSet, test_outliers: dict[str, ImageSet]
) -> None:
    """Raises a ValueError with the count when outliers are inliers, or those of the test are learnt from."""
    known = {"data.train": (train, "they belong"), "data.test": (test, "they belong")}
    if outliers is not None:
        for inliers in (train, test):
            refuse_overlap(outliers.x, inliers.x)
        known["data.outliers"] = (outliers, "the test must be of images that training does not see")
    for name, images in test_outliers.items():
        for place, (others, why) in known.items():
            same, alike = (int(found.sum()) for found in overlap(images.x, others.x))
            if same or alike:
                raise ValueError(
                    f"{same} of {len(images)} images of data.test_outliers.{name} are among {place}, and {alike} "
                    f"nearly; {why}: leave out those that gatecrash.data.duplicates.overlap finds"
                )


def mixed_set(parts: list[ImageSet]) -> ImageSet:
    """Several sets of outliers as one."""
    shapes = {tuple(part.x.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"data.outliers have images of several shapes, {sorted(shapes)}; give model.size and channels")
    notes = [note for part in parts for note in part.notes]
    return ImageSet(torch.cat([part.x for part in parts]), None, " + ".join(part.name for part in parts), None, notes)


def train_method(job: HardenJob, method: MethodPlan, out: Path, fabric: Fabric) -> Encoder:
    """Train one method's network, or read it where it is finished; `out` is then a model bundle."""
    encoder = job.network()
    if (out / "model.json").is_file():
        load_weights(encoder.model, out / "model.safetensors")
    else:
        step, material = made_step(job, method, encoder), material_of(job, method)
        history = fit(
            Prepared(encoder),
            step,
            material,
            recipe_of(job),
            folder=out,
            resume=True,
            fabric=fabric,
            title=method.title,
        )
        if fabric.is_global_zero:
            leave = METHODS[method.name].leave
            if leave is not None:
                leave(step, out)
            write_model(job, method, encoder.model, history, out)
        fabric.barrier()
    if fabric.is_global_zero:
        for leftover in out.glob("checkpoint*"):
            leftover.unlink()
    return encoder


def made_step(job: HardenJob, method: MethodPlan, encoder: Encoder) -> Step:
    """What a method learns from a batch, made for a network."""
    labels = job.train.y if job.train.y is not None else torch.empty(0)
    with torch.no_grad():
        classes = single(encoder(job.train.x[:1].to(job.device))).shape[1]
    outliers = None if job.outliers is None else job.outliers.x
    subject = Subject(encoder, job.train.x, labels, outliers, classes, job.plan.seed)
    return METHODS[method.name].make(subject, method.options)


def material_of(job: HardenJob, method: MethodPlan) -> Material:
    """What a method learns from."""
    training = job.plan.training
    augmentation = Augmentation(crop=training.crop, flip=training.flip)
    return Material(
        job.train.x,
        job.train.y if job.train.y is not None else torch.empty(0),
        job.outliers.x if job.outliers is not None and METHODS[method.name].exposes else None,
        outliers_per_image=training.outliers_per_image,
        augment=augmentation if training.crop or training.flip else None,
    )


def recipe_of(job: HardenJob) -> Recipe:
    """How every method's network is trained."""
    said = job.plan.training.model_dump()
    return Recipe(**{key: said[key] for key in Recipe.__dataclass_fields__ if key in said}, seed=job.plan.seed)


def write_model(job: HardenJob, method: MethodPlan, model: nn.Module, history: History, out: Path) -> None:
    """The model bundle: weights, then plan and manifest, then `model.json`, with which it is complete."""
    save_weights(model, out / "model.safetensors")
    write_text(out / "plan.yaml", plan_text(job.plan))
    about = job.about.model_dump(mode="json", exclude={"weights"})
    if job.about.name.startswith("bundle:"):
        inner = bundled(job.folder / job.about.name.partition(":")[2])
        about |= {"name": inner.name, "options": inner.options}
    exposed = job.outliers if METHODS[method.name].exposes else None
    manifest = {
        "method": method.model_dump(mode="json"),
        "seed": job.plan.seed,
        "device": device_name(job.device),
        "versions": versions(),
        "code_sha256": code_hash(),
        "weights_sha256": hash_of(model),
        "data": {
            name: {"source": images.name, "n": len(images), "sha256": fingerprint(images), "notes": images.notes}
            for name, images in (("train", job.train), ("outliers", exposed))
            if images is not None
        },
        "epochs": history,
    }
    write_text(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    write_text(out / "model.json", json.dumps(about | {"classes": job.train.classes}, indent=1) + "\n")
