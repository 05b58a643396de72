"""What `triage` was given in Python, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gatecrash.audit.job import named_detectors
from gatecrash.audit.plan import Part, sentence
from gatecrash.detectors import Detector
from gatecrash.encoder import Encoder
from gatecrash.registry import unknown
from gatecrash.triage.plan import AdversarialPlan, PurifyPlan

LEAST = {"repeats": 1, "folds": 2, "seed": 0, "batch_size": 1}
"""The smallest value of every whole number."""

MOST = 2**62
"""Every whole number is smaller, as in a plan."""

P = TypeVar("P", bound=Part)


def checked_detectors(detectors: object) -> dict[str, Detector]:
    """Detectors by name.

    Raises:
        ValueError: there is none, or something among them is not a detector.
    """
    listed: list[Any]
    if isinstance(detectors, Mapping):
        listed = list(detectors.values())
        for title in detectors:
            if not isinstance(title, str):
                raise ValueError(f"detectors: the name of one must be a string, got {title!r}")
    elif isinstance(detectors, Sequence) and not isinstance(detectors, str):
        listed = list(detectors)
    else:
        listed = [detectors]
    for detector in listed:
        if not isinstance(detector, Detector):
            raise ValueError(f"detectors must be detectors such as MSP(encoder), got {shown(detector)}")
    if not listed:
        raise ValueError("there is no detector")
    return named_detectors(detectors if isinstance(detectors, Mapping) else listed)


def check_numbers(**numbers: object) -> None:
    """Raises a ValueError that names a number which is not whole, or too small or large."""
    for name, value in numbers.items():
        if type(value) is not int:
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if not LEAST[name] <= value < MOST:
            words = f"at least {LEAST[name]}" if value < LEAST[name] else "less than 2^62"
            raise ValueError(f"{name} must be {words}, got {value}")


def check_switches(**switches: object) -> None:
    """Raises a ValueError that names a switch which is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_folder(out: object) -> None:
    """Raises a ValueError unless `out` can name a folder."""
    if not isinstance(out, str | Path) or not str(out):
        raise ValueError(f"out must be the path of the bundle's folder, got {out!r}")


def check_classifier(classifier: object) -> None:
    """Raises a ValueError unless the classifier is an encoder, or not given."""
    if not (classifier is None or isinstance(classifier, Encoder)):
        raise ValueError(f"classifier must be an Encoder, got {shown(classifier)}; wrap it: Encoder(network)")


def checked_outliers(outliers: object) -> dict[str, Any]:
    """The sets of outliers by name.

    Raises:
        ValueError: they have no names.
    """
    if outliers is None:
        return {}
    if not isinstance(outliers, Mapping) or not all(isinstance(name, str) for name in outliers):
        raise ValueError(f'outliers must be sets of images by name, {{"noise": images}}, got {shown(outliers)}')
    return dict(outliers)


def checked_attacks(adversarial: object) -> list[AdversarialPlan]:
    """The attacks on the classifier.

    Raises:
        ValueError: they are no list of attacks, or one of them is none.
    """
    example = 'a list of attacks such as [{"name": "fgsm", "eps": 8/255}]'
    if isinstance(adversarial, Mapping):
        raise ValueError("adversarial must be a list of attacks, got one; put it in brackets")
    if not isinstance(adversarial, Sequence) or isinstance(adversarial, str):
        raise ValueError(f"adversarial must be {example}, got {shown(adversarial)}")
    for attack in adversarial:
        if not isinstance(attack, Mapping):
            raise ValueError(f"adversarial must be {example}, and one of it is {shown(attack)}")
    return [part_of(AdversarialPlan, attack, "adversarial") for attack in adversarial]


def checked_grid(purify: object) -> PurifyPlan | None:
    """The grid of purification; True is the paper's, False is none.

    Raises:
        ValueError: it is no grid.
    """
    if purify is None or isinstance(purify, bool):
        return PurifyPlan() if purify else None
    if not isinstance(purify, Mapping):
        raise ValueError(f'purify must be True or a grid such as {{"step": [0.01]}}, got {shown(purify)}')
    return part_of(PurifyPlan, purify, "purify")


def part_of(schema: type[P], content: Mapping[str, Any], name: str) -> P:
    """A part of a plan, checked; `name` stands in messages. A misspelt key is named rather than what it leaves out."""
    for key in content:
        if key not in schema.model_fields:
            raise ValueError(f"{name}: {unknown('key', str(key), list(schema.model_fields))}")
    try:
        return schema.model_validate(dict(content))
    except ValidationError as error:
        raise ValueError(f"{name}: {sentence(error, schema)}") from None


def shown(value: object) -> str:
    """A value in a message: a string or a number as it is, anything else by its kind."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
