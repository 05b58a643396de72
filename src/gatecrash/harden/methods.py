"""The ways of training by name, and how each is made of its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gatecrash.detectors.certified import CCU
from gatecrash.detectors.certified import FILE as MIXTURES
from gatecrash.encoder import Encoder
from gatecrash.fitting import Step
from gatecrash.registry import Registry
from gatecrash.training.ccu import CertifiedUncertainty
from gatecrash.training.confident import ConfidentClassifier, save_generator
from gatecrash.training.exposure import PIXEL, Exposure, Inner
from gatecrash.training.jem import JointEnergy
from gatecrash.training.temporal import TemporalEnsembling, few_labels


@dataclass(frozen=True)
class Subject:
    """What a method is made for."""

    encoder: Encoder
    """The network, with its normalisation."""
    images: Tensor
    """(N, C, H, W), to learn from."""
    labels: Tensor
    outliers: Tensor | None
    classes: int
    seed: int


@dataclass(frozen=True)
class Method:
    """A way of training."""

    make: Callable[[Subject, dict[str, Any]], Step]
    paper: str
    what: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    exposes: bool = False
    """Whether it needs outliers."""
    leave: Callable[[Any, Path], None] | None = None
    """Write what a step has trained beside the network into the model bundle."""


METHODS: Registry[Method] = Registry("method")

Kind = Literal["plain", "attacked"]


def exposure(
    subject: Subject, options: dict[str, Any], *, inliers: Kind = "plain", outliers: Literal["none"] | Kind = "none"
) -> Step:
    """CE, OE, ADV, AOE or ALOE."""
    inner = None
    if "attacked" in (inliers, outliers):
        inner = Inner(options["eps"], options.get("step", PIXEL), options.get("steps"))
    return Exposure(subject.encoder, inliers=inliers, outliers=outliers, inner=inner, weight=options.get("weight", 0.5))


def temporal(subject: Subject, options: dict[str, Any]) -> Step:
    """Temporal ensembling with so many labels per class."""
    known = few_labels(subject.labels, options["labels_per_class"], subject.seed)
    given = {key: options[key] for key in ("weight", "ramp") if key in options}
    return TemporalEnsembling(known, subject.classes, **given)


def confident(subject: Subject, options: dict[str, Any]) -> Step:
    """The confident classifier beside its GAN."""
    return ConfidentClassifier(subject.encoder, subject.images.shape[1], seed=subject.seed, **options)


def joint_energy(subject: Subject, options: dict[str, Any]) -> Step:
    """A joint energy-based model."""
    return JointEnergy(subject.encoder, **options)


def certified(subject: Subject, options: dict[str, Any]) -> Step:
    """Certified certain uncertainty."""
    if subject.outliers is None:
        raise ValueError("ccu must be exposed to outliers")
    given = {key: options[key] for key in ("components",) if key in options}
    detector = CCU(subject.encoder, seed=subject.seed, **given)
    return CertifiedUncertainty(detector, subject.images, subject.outliers, weight=options.get("weight", 1.0))


def leave_mixtures(step: CertifiedUncertainty, folder: Path) -> None:
    """The detector, which `CCU(encoder, bundle=folder)` takes."""
    step.trained.save(folder / MIXTURES)


def leave_generator(step: ConfidentClassifier, folder: Path) -> None:
    """The GAN's generator, which `load_generator(folder)` reads."""
    save_generator(step.generator, folder)


INNER = ("eps", "step", "steps")
CHEN = "Chen et al., AAAI 2021 workshop"

METHODS.register("ce")(Method(exposure, "", "plain cross-entropy"))
METHODS.register("oe")(
    Method(
        partial(exposure, outliers="plain"),
        "Hendrycks et al., ICLR 2019",
        "cross-entropy, and outliers to uniform",
        ("weight",),
        exposes=True,
    )
)
METHODS.register("adv")(
    Method(
        partial(exposure, inliers="attacked"),
        "Madry et al., ICLR 2018",
        "cross-entropy on attacked inliers",
        INNER,
        ("eps",),
    )
)
METHODS.register("aoe")(
    Method(
        partial(exposure, inliers="attacked", outliers="plain"),
        CHEN,
        "attacked inliers, and outliers to uniform",
        (*INNER, "weight"),
        ("eps",),
        exposes=True,
    )
)
METHODS.register("aloe")(
    Method(
        partial(exposure, inliers="attacked", outliers="attacked"),
        CHEN,
        "attacked inliers, and attacked outliers to uniform",
        (*INNER, "weight"),
        ("eps",),
        exposes=True,
    )
)
METHODS.register("temporal_ensembling")(
    Method(
        temporal,
        "Laine & Aila, ICLR 2017",
        "few labels, and agreement with one's own past predictions",
        ("labels_per_class", "weight", "ramp"),
        ("labels_per_class",),
    )
)
METHODS.register("confident")(
    Method(
        confident,
        "Lee et al., ICLR 2018",
        "cross-entropy, and a GAN's images to uniform; 32×32 images",
        ("weight", "width"),
        leave=leave_generator,
    )
)
METHODS.register("jem")(
    Method(
        joint_energy,
        "Grathwohl et al., ICLR 2020",
        "cross-entropy, and images likelier than the network's own samples",
        ("steps", "buffer"),
    )
)
METHODS.register("ccu")(
    Method(
        certified,
        "Meinke & Hein, ICLR 2020",
        "a classifier and two mixtures of pixels, unsure where inliers are unlikely",
        ("weight", "components"),
        exposes=True,
        leave=leave_mixtures,
    )
)
