"""The plan's schema: examples that must pass, mistakes and the one line each gets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gatecrash.audit import EXAMPLES, example_plan, example_text, parse_plan, plan_text, read_plan

GOOD: dict[str, Any] = {
    "model": {"name": "builtin:resnet20", "weights": "random", "layer": "avgpool"},
    "data": {
        "fit": {"source": "fashion:train", "limit": 100},
        "inliers": "fashion:test",
        "outliers": {"noise": {"source": "noise", "limit": 5}},
    },
    "detectors": ["msp", {"name": "odin", "temperature": 1000, "magnitude": 0.0014}],
    "attacks": [{"name": "collide", "of": "logits", "ball": {"norm": "l2", "eps": 10}, "steps": 100, "start": "noise"}],
}


def changed(*path: str | int, to: Any) -> str:
    """The good plan as YAML with one place changed; `...` removes it."""
    plan = yaml.safe_load(yaml.safe_dump(GOOD))
    inner = plan
    for step in path[:-1]:
        inner = inner[step]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return str(yaml.safe_dump(plan))


def test_the_good_plan_is_read_with_its_defaults() -> None:
    plan = parse_plan(yaml.safe_dump(GOOD))
    assert plan.seed == 0
    assert plan.data.inliers.source == "fashion:test"
    assert plan.detectors[1].options == {"temperature": 1000, "magnitude": 0.0014}
    assert plan.attacks[0].start == ["noise"]
    assert plan.attacks[0].sides == ("out",)
    assert plan.attacks[0].title == "collide logits"


def test_fractions_are_numbers_and_lists_are_ladders() -> None:
    plan = parse_plan(changed("attacks", 0, "ball", to={"norm": "linf", "eps": ["1/255", 0.1]}))
    assert plan.attacks[0].ball.ball().ladder == pytest.approx((1 / 255, 0.1))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_fit_the_schema_and_survive_being_written(name: str) -> None:
    plan = example_plan(name)
    assert parse_plan(plan_text(plan)) == plan
    assert example_text(name).startswith("# ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("atacks", to=[]), r"plan: unknown key 'atacks'; did you mean 'attacks'\? known: model, data, detectors"),
        (changed("model", "wieghts", to="x"), "unknown key in model 'wieghts'; did you mean 'weights'"),
        (changed("data", "inliers", to={"sorce": "noise"}), "unknown key in data.inliers 'sorce'|data.inliers.source is missing"),
        (changed("detectors", 0, to="mspp"), "detectors.0.name: unknown detector 'mspp'; did you mean 'msp'"),
        (changed("detectors", 1, to={"name": "odin", "temprature": 1}), "unknown option of odin 'temprature'; did you mean 'temperature'"),
        (changed("attacks", 0, "name", to="colide"), "unknown attack 'colide'; did you mean 'collide'"),
        (changed("attacks", 0, "name", to="nullspace"), "unknown attack 'nullspace'; known: collide, admit, evict, softmax, worst_case$"),
        (changed("attacks", 0, "ball", "norm", to="l3"), "unknown norm 'l3'"),
        (changed("attacks", 0, "ball", "eps", to=-1), "eps must be positive, got -1"),
        (changed("attacks", 0, "ball", "eps", to="a lot"), "must be a number or a fraction such as 8/255, got 'a lot'"),
        (changed("attacks", 0, "steps", to="many"), "attacks.0.steps: input should be a valid integer"),
        (changed("attacks", 0, "steps", to=0), "attacks.0.steps: input should be greater than 0"),
        (changed("attacks", 0, "start", to="svhn"), "unknown outlier set in start 'svhn'"),
        (changed("attacks", 0, "side", to="in"), "side of collide must be one of out, got 'in'"),
        (changed("attacks", 0, to={"name": "admit", "of": "logits", "ball": {"norm": "l2", "eps": 1}}), "of is for collide"),
        (changed("data", "outliers", "noise", to="nois"), "unknown source 'nois'; did you mean 'noise'"),
        (changed("data", "outliers", to={}), "data.outliers: .*at least 1"),
        (changed("model", to=...), "model is missing"),
        (changed("detectors", to=["msp", "msp"]), "two detectors are called 'msp'; give one a label"),
        (changed("seed", to="x"), "seed: must be a number or a fraction such as 8/255, got 'x'"),
        (changed("detectors", to=[{"name": "msp", "members": ["msp"]}]), "members: an ensemble has them"),
        (changed("detectors", to=["expected"]), "members: .*expected has one"),
        (changed("detectors", to=[{"name": "expected", "members": ["msp", "odin"]}]), "members: expected averages one detector over draws"),
        (changed("detectors", to=["deep_ensemble"]), "deep_ensemble needs several networks"),
        (changed("data", "outliers", to={"inliers": "noise"}), "cannot be called 'inliers'"),
        (changed("seed", to=True), "seed: must be a number"),
        (changed("seed", to=-1), "seed: input should be greater than or equal to 0"),
        (changed("attacks", 0, "step", to=0), "attacks.0.step: input should be greater than 0"),
        (changed("attacks", 0, "budget", to="quick"), "budget is for worst_case; collide takes steps"),
        (changed("attacks", 0, to={"name": "worst_case", "until": "crossed", "eight_bit": True, "ball": {"norm": "l2", "eps": 1}}), "rounding to 8 bit may undo$"),
        (changed("attacks", 0, "until", to="crossed"), "until is for worst_case; collide does not take it"),
        (changed("attacks", 0, to={"name": "worst_case", "steps": 3, "ball": {"norm": "l2", "eps": 1}}), "steps is not for worst_case"),
        (changed("model", "size", to=10**9), "model.size: input should be less than or equal to 8192"),
        ("- a\n- b", "plan must be a mapping with the keys model, data"),
        ("a: [", "plan is not YAML"),
        ("model: !!python/object/apply:os.system ['true']", "has a tag that plans may not have in line 1"),
        ("model: !mine {a: 1}", "has a tag that plans may not have"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_plan(text)
    assert "\n" not in str(caught.value)


def test_a_detector_that_must_be_fitted_needs_data_to_fit_on() -> None:
    plan = yaml.safe_load(changed("data", "fit", to=...))
    plan["detectors"] = ["mahalanobis"]
    with pytest.raises(ValueError, match=r"data.fit is missing: mahalanobis must be fitted"):
        parse_plan(yaml.safe_dump(plan))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read plan .*none.yaml: No such file"):
        read_plan(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01\x80")
    with pytest.raises(ValueError, match="not a text file"):
        read_plan(tmp_path / "binary.yaml")


def test_tags_build_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    with pytest.raises(ValueError, match="tag"):
        parse_plan(f"model: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{trap}']]")
    assert not trap.exists()


def test_titles_tell_attacks_apart() -> None:
    ball = {"norm": "linf", "eps": "1/255"}
    attacks = [
        {"name": "admit", "ball": ball, "side": "both"},
        {"name": "admit", "ball": ball},
        {"name": "evict", "ball": ball},
        {"name": "softmax", "ball": ball},
        {"name": "collide", "ball": ball, "of": ["layer1", "layer2"]},
    ]
    plan = parse_plan(changed("attacks", to=attacks))
    assert [a.title for a in plan.attacks] == ["admit + evict", "admit", "evict", "softmax", "collide layer1+layer2"]
    assert [a.sides for a in plan.attacks] == [("out", "in"), ("out",), ("in",), ("out", "in"), ("out",)]
