"""What `triage` was given in Python, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping

from gatecrash.audit.arguments import (
    check_encoder,
    check_folder,
    check_switches,
    checked_detectors,
    checked_list,
    checked_outliers,
    part_of,
    shown,
    whole_numbers,
)
from gatecrash.triage.plan import AdversarialPlan, PurifyPlan

__all__ = [
    "check_classifier",
    "check_folder",
    "check_switches",
    "checked_attacks",
    "checked_detectors",
    "checked_grid",
    "checked_outliers",
    "whole_numbers",
]


def check_classifier(classifier: object) -> None:
    """Raises a ValueError unless the classifier is an encoder, or not given."""
    check_encoder("classifier", classifier)


def checked_attacks(adversarial: object) -> list[AdversarialPlan]:
    """The attacks on the classifier.

    Raises:
        ValueError: they are no list of attacks, or one of them is none.
    """
    attacks = checked_list("adversarial", adversarial, Mapping, "attacks", '[{"name": "fgsm", "eps": 8/255}]')
    return [part_of(AdversarialPlan, attack, "adversarial") for attack in attacks]


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
