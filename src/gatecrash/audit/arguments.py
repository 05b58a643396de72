"""What an audit or a triage was given in Python, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic import ValidationError
from torch import Tensor, nn

from gatecrash.audit.job import named_detectors
from gatecrash.audit.plan import AttackPlan, Part, check_titles, sentence
from gatecrash.ball import BALLS, Ball
from gatecrash.detectors import Detector
from gatecrash.encoder import Encoder
from gatecrash.registry import unknown

LEAST = {"folds": 2, "seed": 0}
"""The smallest value of every whole number for which it is not 1."""

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
    elif isinstance(detectors, nn.ModuleList) or is_several(detectors):
        listed = list(detectors)
    else:
        listed = [detectors]
    for detector in listed:
        if not isinstance(detector, Detector):
            raise ValueError(f"detectors must be detectors such as MSP(encoder), got {shown(detector)}")
    if not listed:
        raise ValueError("there is no detector")
    return named_detectors(detectors if isinstance(detectors, Mapping) else listed)


def is_several(things: object) -> TypeGuard[Iterable[Any]]:
    """Whether it is a list or whatever else gives one thing after the other, and no thing itself."""
    return isinstance(things, Iterable) and not isinstance(things, str | Mapping | Tensor | nn.Module)


def whole_numbers(**numbers: object) -> list[int]:
    """The numbers, of whatever type of whole numbers.

    Raises:
        ValueError: it names one that is not whole, or too small or large.
    """
    found = []
    for name, value in numbers.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        number, least = int(value), LEAST.get(name, 1)
        if not least <= number < MOST:
            words = f"at least {least}" if number < least else "less than 2^62"
            raise ValueError(f"{name} must be {words}, got {number}")
        found.append(number)
    return found


def check_switches(**switches: object) -> None:
    """Raises a ValueError that names a switch which is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_folder(out: object) -> None:
    """Raises a ValueError unless `out` can name a folder."""
    if not isinstance(out, str | Path) or not str(out):
        raise ValueError(f"out must be the path of the bundle's folder, got {out!r}")


def check_encoder(name: str, encoder: object) -> None:
    """Raises a ValueError unless it is an encoder, or not given."""
    if not (encoder is None or isinstance(encoder, Encoder)):
        raise ValueError(f"{name} must be an Encoder, got {shown(encoder)}; wrap it: Encoder(network)")


def checked_list(name: str, parts: object, kind: type, noun: str, example: str) -> list[Any]:
    """A list of things of one kind.

    Raises:
        ValueError: it is none; a single thing belongs in brackets.
    """
    if isinstance(parts, kind):
        raise ValueError(f"{name} must be a list of {noun}, got one; put it in brackets")
    wanted = f"a list of {noun} such as {example}"
    if not is_several(parts):
        raise ValueError(f"{name} must be {wanted}, got {shown(parts)}")
    listed = list(parts)
    for part in listed:
        if not isinstance(part, kind):
            raise ValueError(f"{name} must be {wanted}, and one of it is {shown(part)}")
    return listed


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


def check_set_names(names: Sequence[str]) -> None:
    """Raises a ValueError where there is no set of outliers, or one has the inliers' name."""
    if "inliers" in names:
        raise ValueError("a set of outliers cannot be called 'inliers'")
    if not names:
        raise ValueError("outliers must hold at least one set of images")


def checked_balls(balls: object) -> list[Ball]:
    """The balls.

    Raises:
        ValueError: they are no list of balls, or a plan, which has a norm and eps, would make another of one of them.
    """
    listed: list[Ball] = checked_list("balls", balls, Ball, "balls", "[Linf(8 / 255)]")
    for ball in listed:
        plain = BALLS[ball.norm]
        if type(ball) is not plain:
            raise ValueError(f"balls: for {ball.norm} a plan takes {plain.__name__}, so it cannot express {ball}")
        if ball.box != (0.0, 1.0):
            raise ValueError(f"balls: the balls of a plan have the box (0, 1), so it cannot express {ball}")
    return listed


def checked_attacks(attacks: object) -> list[Mapping[str, Any]]:
    """Attacks as in a plan, each of them still to be read.

    Raises:
        ValueError: they are no list of attacks.
    """
    example = '[{"name": "admit", "ball": {"norm": "linf", "eps": 8/255}}]'
    return checked_list("attacks", attacks, Mapping, "attacks", example)


def attack_plans(attacks: Sequence[Mapping[str, Any]]) -> list[AttackPlan]:
    """Attacks as in a plan, checked."""
    plans = [part_of(AttackPlan, attack, "attacks") for attack in attacks]
    check_titles([f"{p.title} {p.ball.norm} {p.ball.eps}" for p in plans], "attack", "once is enough")
    return plans


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
    """A value in a message: a string or a number as it is, a class by its name, anything else by its kind."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
