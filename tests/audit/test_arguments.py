"""What a careless or malicious user gives to `gate.audit`: one line, and no folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import gatecrash as gate
from gatecrash.audit.arguments import checked_detectors, checked_list, shown, whole_numbers
from gatecrash.detectors import Card, Detector, Energy
from gatecrash.protocols import Latent
from small_models import squares, trained_net

BALL = {"norm": "linf", "eps": 0.1}
COLLISION = {"name": "collide", "of": "logits", "ball": BALL, "start": ["nois", "noise"]}
SIX = squares(6)[0]


class Untouched(Detector):
    """No image may be scored."""

    card = Card(paper="none", year=2000, reads="logits")

    def encode(self, x: Tensor) -> Latent:
        raise AssertionError("an image was scored")

    def judge(self, z: Latent) -> Tensor:
        raise AssertionError("an image was scored")


def detector() -> Detector:
    return Untouched(trained_net())


NOT_A_DETECTOR = r"detectors must be detectors such as MSP\(encoder\), got"
NOT_BALLS = r"balls must be a list of balls such as \[Linf\(8 / 255\)\]"
NOT_ATTACKS = r'attacks must be a list of attacks such as \[\{"name": "admit", .*\}\]'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"detectors": None}, f"{NOT_A_DETECTOR} None$"),
        ({"detectors": {}}, "^there is no detector$"),
        ({"detectors": []}, "^there is no detector$"),
        ({"detectors": Energy}, f"{NOT_A_DETECTOR} the class Energy$"),
        ({"detectors": [Energy]}, f"{NOT_A_DETECTOR} the class Energy$"),
        ({"detectors": trained_net()}, f"{NOT_A_DETECTOR} a SmallNet$"),
        ({"detectors": "msp"}, f"{NOT_A_DETECTOR} 'msp'$"),
        ({"detectors": [detector(), None]}, f"{NOT_A_DETECTOR} None$"),
        ({"detectors": {"a": None}}, f"{NOT_A_DETECTOR} None$"),
        ({"detectors": {"a": [detector()]}}, f"{NOT_A_DETECTOR} a list$"),
        ({"detectors": {3: detector()}}, "detectors: the name of one must be a string, got 3"),
        ({"balls": gate.Linf(0.1)}, "^balls must be a list of balls, got one; put it in brackets$"),
        ({"balls": [None]}, f"{NOT_BALLS}, and one of it is None$"),
        ({"balls": ["linf"]}, f"{NOT_BALLS}, and one of it is 'linf'$"),
        ({"balls": "linf"}, f"{NOT_BALLS}, got 'linf'$"),
        ({"balls": None}, f"{NOT_BALLS}, got None$"),
        ({"balls": 0.1}, f"{NOT_BALLS}, got 0.1$"),
        ({"attacks": {"name": "admit", "ball": BALL}}, "^attacks must be a list of attacks, got one; put it in brackets$"),
        ({"attacks": [3]}, f"{NOT_ATTACKS}, and one of it is 3$"),
        ({"attacks": [["name", "admit"]]}, f"{NOT_ATTACKS}, and one of it is a list$"),
        ({"attacks": "admit"}, f"{NOT_ATTACKS}, got 'admit'$"),
        ({"attacks": None}, f"{NOT_ATTACKS}, got None$"),
        ({"attacks": [{"name": "admit", "bal": BALL}]}, "^attacks: unknown key 'bal'; did you mean 'ball'"),
        ({"attacks": [{3: 4}]}, "^attacks: unknown key '3'; known: name, ball"),
        ({"attacks": [COLLISION]}, "^unknown outlier set in start 'nois'; did you mean 'noise'"),
        ({"outliers": SIX}, 'outliers must be sets of images by name, {"noise": images}, got a Tensor$'),
        ({"outliers": [SIX]}, "outliers must be sets of images by name, .*, got a list$"),
        ({"outliers": {3: SIX}}, "outliers must be sets of images by name"),
        ({"outliers": None}, "outliers must hold at least one set of images"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**62}, r"seed must be less than 2\^62"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 2.0}, "steps must be a whole number, got 2.0"),
        ({"steps": "x"}, "steps must be a whole number, got 'x'"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"features": trained_net()}, r"features must be an Encoder, got a SmallNet; wrap it: Encoder\(network\)"),
        ({"features": "hidden"}, "features must be an Encoder, got 'hidden'"),
        ({"out": None}, "out must be the path of the bundle's folder, got None"),
        ({"out": 3}, "out must be the path of the bundle's folder, got 3"),
        ({"out": ""}, "out must be the path of the bundle's folder, got ''"),
        ({"resume": "x"}, "resume must be True or False, got 'x'"),
        ({"resume": 1}, "resume must be True or False, got 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_before_any_image_is_scored(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "detectors": detector(), "inliers": SIX, "outliers": {"noise": SIX}, "out": tmp_path / "run",
        "balls": [gate.Linf(0.1)],
    }  # fmt: skip
    with pytest.raises(ValueError, match=message) as caught:
        gate.audit(**given | changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_class_is_shown_by_its_name() -> None:
    assert [shown(value) for value in (Energy, trained_net(), "a", None)] == [
        "the class Energy",
        "a SmallNet",
        "'a'",
        "None",
    ]


def test_whole_numbers_have_their_own_least_value() -> None:
    found = whole_numbers(seed=0, folds=np.int64(2), repeats=1, steps=np.uint8(1), batch_size=2**62 - 1)
    assert found == [0, 2, 1, 1, 2**62 - 1] and {type(number) for number in found} == {int}
    for name, least in (("seed", 0), ("folds", 2), ("repeats", 1), ("steps", 1), ("batch_size", 1)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
            whole_numbers(**{name: least - 1})


def test_whatever_gives_detectors_one_by_one_is_taken() -> None:
    first, second = detector(), Energy(trained_net())
    for several in ([first, second], (first, second), nn.ModuleList([first, second]), (d for d in (first, second))):
        assert list(checked_detectors(several).values()) == [first, second]


def test_a_tuple_is_a_list_too() -> None:
    balls = (gate.Linf(0.1), gate.L2(1.0))
    assert checked_list("balls", balls, gate.Ball, "balls", "[…]") == list(balls)
    assert checked_list("balls", {0: balls[0], 1: balls[1]}.values(), gate.Ball, "balls", "[…]") == list(balls)
    assert checked_list("balls", (), gate.Ball, "balls", "[…]") == []
