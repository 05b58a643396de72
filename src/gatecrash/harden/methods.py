"""The ways of training by name, and how each is made of its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from gatecrash.encoder import Encoder
from gatecrash.fitting import Step
from gatecrash.registry import Registry
from gatecrash.training.confident import ConfidentClassifier
from gatecrash.training.exposure import PIXEL, Exposure, Inner
from gatecrash.training.temporal import TemporalEnsembling, few_labels


@dataclass(frozen=True)
class Subject:
    """What a method is made for."""

    encoder: Encoder
    """The network, with its normalisation."""
    labels: Tensor
    classes: int
    channels: int
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
    weight = options.get("weight", 1.0)
    return ConfidentClassifier(subject.encoder, subject.channels, weight=weight, seed=subject.seed)


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
        confident, "Lee et al., ICLR 2018", "cross-entropy, and a GAN's images to uniform; 32×32 images", ("weight",)
    )
)
