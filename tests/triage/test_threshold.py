"""The threshold against brute force, and cross-validation against a computation by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatecrash.triage.threshold import Rates, best_threshold, choose_threshold, rates, share_above

INF = math.inf


def f1_by_hand(scores: list[float], wanted: list[bool], threshold: float) -> float:
    hits = sum(w for s, w in zip(scores, wanted, strict=True) if s > threshold)
    above, all_wanted = sum(s > threshold for s in scores), sum(wanted)
    return 2 * hits / (above + all_wanted)


def tensors(scores: list[float], wanted: list[bool], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return torch.tensor(scores, dtype=dtype), torch.tensor(wanted)


few_levels = st.integers(-3, 3).map(float)
any_level = st.floats(-1e300, 1e300, allow_nan=False, allow_subnormal=False)
pairs = st.one_of(
    st.lists(st.tuples(few_levels, st.booleans()), min_size=1, max_size=12),
    st.lists(st.tuples(any_level, st.booleans()), min_size=1, max_size=12),
)


@settings(max_examples=300, deadline=None)
@given(pairs)
def test_no_cut_is_better_than_the_best_threshold(pairs: list[tuple[float, bool]]) -> None:
    scores, wanted = [s for s, _ in pairs], [w for _, w in pairs]
    wanted[0] = True
    found = best_threshold(*tensors(scores, wanted))
    reached = f1_by_hand(scores, wanted, found)
    # Every cut that a threshold can make: above the largest, or between two distinct scores, or below the smallest.
    levels = sorted(set(scores))
    cuts = [*levels, -INF]
    values = {cut: f1_by_hand(scores, wanted, cut) for cut in cuts}
    assert reached == pytest.approx(max(values.values()), abs=1e-12)
    highest = max(cut for cut in cuts if values[cut] >= max(values.values()) - 1e-12)
    above = [s for s in scores if s > highest]
    assert [s for s in scores if s > found] == above  # the highest of equally good cuts
    assert math.isfinite(found)


def test_the_threshold_lies_halfway_between_two_scores() -> None:
    assert best_threshold(*tensors([0.0, 1.0, 4.0, 5.0], [False, False, True, True])) == 2.5


def test_a_threshold_does_not_part_equal_scores() -> None:
    # Cutting through the three 2s would give F1 = 1; the cuts there are give 2·1/(1+2) and 2·2/(4+2), both 2/3.
    scores, wanted = [3.0, 2.0, 2.0, 2.0, 0.0], [True, True, False, False, False]
    assert best_threshold(*tensors(scores, wanted)) == 2.5
    assert best_threshold(*tensors([2.0, 2.0, 2.0], [True, False, False])) < 2.0


@pytest.mark.parametrize("level", [1e20, -1e20, 1.7e308, 0.0])
def test_equal_scores_of_any_size_are_all_above(level: float) -> None:
    scores, wanted = tensors([level, level], [True, True])
    assert rates(scores, wanted, best_threshold(scores, wanted)) == Rates(1.0, 1.0)


@pytest.mark.parametrize(
    "scores", [[0.0, 1.0, INF, INF], [-INF, -INF, 0.0, 1.0], [-INF, -INF, INF, INF], [-1.7e308, 0.0, 1.7e308, 1.7e308]]
)
def test_a_threshold_beside_infinite_scores_is_finite_and_parts_them(scores: list[float]) -> None:
    wanted = [False, False, True, True]
    found = best_threshold(*tensors(scores, wanted))
    assert math.isfinite(found)
    assert [s > found for s in scores] == wanted


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float32, 2.0**-23), (torch.float64, 2.0**-52)])
@pytest.mark.parametrize("steps", range(4))
def test_scores_next_to_each_other_are_parted(dtype: torch.dtype, ulp: float, steps: int) -> None:
    low, high = 1 + steps * ulp, 1 + (steps + 1) * ulp
    scores, wanted = tensors([low, low, high, high], [False, False, True, True], dtype)
    found = best_threshold(scores, wanted)
    assert rates(scores, wanted, found) == Rates(1.0, 1.0)
    assert share_above(scores, found) == 0.5


def test_rates_are_counted() -> None:
    scores, wanted = tensors([1.0, 2.0, 3.0, 4.0, 5.0], [True, False, True, False, True])
    found = rates(scores, wanted, 2.0)
    assert (found.precision, found.recall) == (2 / 3, 2 / 3)
    assert found.f1 == pytest.approx(2 / 3)
    assert rates(scores, wanted, 5.0) == Rates(1.0, 0.0)  # nothing is above
    assert rates(scores, wanted, 5.0).f1 == 0.0
    assert rates(scores, ~torch.ones(5).bool(), 0.0) == Rates(0.0, 1.0)
    assert Rates(0.0, 0.0).f1 == 0.0


def folds_by_hand(wanted: torch.Tensor, folds: int, seed: int) -> torch.Tensor:
    """The fold of every image: both kinds shuffled in turn, then dealt out like cards."""
    generator = torch.Generator().manual_seed(seed)
    fold = [0] * len(wanted)
    for kind in (True, False):
        members = [i for i, w in enumerate(wanted.tolist()) if w == kind]
        order = torch.randperm(len(members), generator=generator).tolist()
        for place, member in enumerate(order):
            fold[members[member]] = place % folds
    return torch.tensor(fold)


@pytest.mark.parametrize(("count", "folds", "seed"), [(40, 5, 0), (31, 3, 7), (12, 100, 1)])
def test_cross_validation_equals_the_computation_by_hand(count: int, folds: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(count)
    wanted = torch.arange(count) % 3 == 0
    scores = torch.randn(count, generator=generator) + wanted.float()
    used = min(folds, int(wanted.sum()))
    fold = folds_by_hand(wanted, used, seed)
    thresholds, precisions, recalls = [], [], []
    for left_out in range(used):
        rest, other = fold != left_out, fold == left_out
        levels = scores[rest].double().sort().values
        cuts = [float(levels[0]) - 1, *((levels[1:] + levels[:-1]) / 2).tolist()]
        best = max(
            cuts, key=lambda cut: (round(f1_by_hand(scores[rest].tolist(), wanted[rest].tolist(), cut), 12), cut)
        )
        thresholds.append(best)
        above = scores[other].double() > best
        hits = int((above & wanted[other]).sum())
        precisions.append(hits / int(above.sum()) if above.any() else 1.0)
        recalls.append(hits / int(wanted[other].sum()))
    found = choose_threshold(scores, wanted, folds, seed)
    assert found.value == pytest.approx(sorted(thresholds)[used // 2] if used % 2 else median(thresholds))
    assert found.validated.precision == pytest.approx(sum(precisions) / used)
    assert found.validated.recall == pytest.approx(sum(recalls) / used)


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2


def test_perfect_scores_are_validated_as_perfect_and_useless_ones_are_not() -> None:
    wanted = torch.arange(30) >= 20
    perfect = choose_threshold(torch.arange(30.0), wanted)
    assert 19 < perfect.value < 20.5
    assert perfect.validated.recall > 0.85 and perfect.validated.precision > 0.85
    useless = choose_threshold(torch.zeros(30), wanted)
    assert useless.validated == Rates(pytest.approx(1 / 3), 1.0)  # all are above, a third should be


def test_the_seed_decides_the_split_and_nothing_else_does() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, wanted = torch.randn(60, generator=generator), torch.arange(60) % 4 == 0
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = choose_threshold(scores, wanted, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert choose_threshold(scores, wanted, seed=3) == first
    assert any(choose_threshold(scores, wanted, seed=s) != first for s in range(4, 9))


@pytest.mark.parametrize(
    ("scores", "wanted", "folds", "message"),
    [
        ([1.0, 2.0, 3.0], [True, False, False], 5, "at least 2 images of either kind, got 1"),
        ([1.0, 2.0], [True, True], 5, "at least 2 images of either kind, got 0"),
        ([], [], 5, "at least 2 images of either kind, got 0"),
        ([1.0, 2.0, 3.0, 4.0], [True, True, False], 5, r"both be \(N,\), got \(4,\) and \(3,\)"),
        ([1.0, math.nan, 3.0, 4.0], [True, True, False, False], 5, "must not hold NaN"),
        ([1.0, 2.0, 3.0, 4.0], [True, True, False, False], 1, "folds must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_validated_is_refused(scores: list[float], wanted: list[bool], folds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_threshold(torch.tensor(scores), torch.tensor(wanted), folds)
