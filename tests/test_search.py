"""The one loop: best iterates, compaction, restarts, ladders, trajectories, and what it leaves untouched."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatecrash import L2, Adamax, Apgd, Ball, Encoder, Found, Langevin, Linf, Normalised, Sign, search
from gatecrash.objective import MatchLatent
from gatecrash.protocols import State, Stepper, Walk

STEPPERS = [Sign(0.01), Normalised(0.1), Adamax(), Apgd(), Langevin(0.01, 0.01)]


def ripples(x: Tensor, rows: Tensor) -> Tensor:
    """A smooth objective with many local minima, a different one for every row."""
    flat = x.flatten(1)
    phases = (rows.to(x.dtype) + 1).unsqueeze(1)
    return (torch.sin(9 * flat + phases) + (flat - 0.3).square()).sum(dim=1)


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def run(**options: object) -> Found:
    defaults: dict[str, object] = {"stepper": Apgd(), "steps": 20}
    return search(ripples, images(), Linf(0.2), **(defaults | options))


@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("ball", [L2(0.4), Linf(0.1), L2(0.4, box=None)])
def test_the_search_improves_and_stays_in_ball_and_box(stepper: Stepper, ball: Ball) -> None:
    start = images()
    found = search(ripples, start, ball, stepper=stepper, steps=30, restarts=2)
    assert (found.value < found.start_value).all()
    assert ball.contains(found.x, start).all()
    torch.testing.assert_close(found.value, ripples(found.x, torch.arange(6)))
    torch.testing.assert_close(found.start_value, ripples(start, torch.arange(6)))
    assert found.distance("l2").max() <= 0.4 + 1e-6 or isinstance(ball, Linf)
    assert found.success.all()


class Recorder:
    """Walks downhill then uphill, so that the last iterate is not the best."""

    needs_gradient = True

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def begin(self, walk: Walk) -> State:
        return {}

    def move(self, walk: Walk, state: State) -> Tensor:
        self.values.append(walk.value)
        assert walk.gradient is not None
        sign = 1 if walk.step < 5 else -1
        return walk.x - sign * 0.02 * walk.gradient.sign()


def test_the_best_iterate_of_every_sample_is_kept_and_the_last_on_request() -> None:
    seen = Recorder()
    best = run(stepper=seen, steps=10)
    every = torch.stack(seen.values)
    last = run(stepper=Recorder(), steps=10, keep="last")
    torch.testing.assert_close(best.value, torch.minimum(every.amin(dim=0), last.value))
    assert (last.value > best.value).all()
    torch.testing.assert_close(last.value, ripples(last.x, torch.arange(6)))


@pytest.mark.parametrize("random_start", [False, True])
def test_what_is_not_measured_is_not_evaluated_and_the_same_is_found(random_start: bool) -> None:
    calls: list[Tensor] = []

    def watched(x: Tensor, rows: Tensor) -> Tensor:
        calls.append(x.detach().clone())
        return ripples(x, rows)

    options = {"stepper": Sign(0.03), "steps": 5, "keep": "last", "random_start": random_start}
    measured = search(ripples, images(), Linf(0.2), **options)
    found = search(watched, images(), Linf(0.2), measure=False, **options)
    assert torch.equal(found.x, measured.x)
    assert len(calls) == 5 and found.evaluations.tolist() == [5] * 6 and found.steps.tolist() == [5] * 6
    rows = torch.arange(6)
    torch.testing.assert_close(found.start_value, ripples(calls[0], rows))
    torch.testing.assert_close(found.value, ripples(calls[-1], rows))
    assert torch.equal(calls[0], images()) is not random_start


def test_a_gradient_in_another_layout_is_laid_out_like_the_images() -> None:
    def spread_out(x: Tensor, rows: Tensor) -> Tensor:
        return ripples(x.contiguous(memory_format=torch.channels_last).sin(), rows)

    class Looking(Recorder):
        def move(self, walk: Walk, state: State) -> Tensor:
            assert walk.gradient is not None and walk.gradient.stride() == walk.x.stride()
            return super().move(walk, state)

    start = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    search(spread_out, start, Linf(0.1), stepper=Looking(), steps=3)


def test_the_last_iterate_can_be_the_best() -> None:
    def slope(x: Tensor, rows: Tensor) -> Tensor:
        return x.flatten(1).sum(dim=1)

    found = search(slope, torch.full((2, 1, 2, 2), 0.5), Linf(0.3), stepper=Sign(0.1), steps=3)
    torch.testing.assert_close(found.x, torch.full((2, 1, 2, 2), 0.2))


def test_nothing_worse_than_the_start_is_returned() -> None:
    def at_the_minimum(x: Tensor, rows: Tensor) -> Tensor:
        return (x - 0.5).square().flatten(1).sum(dim=1)

    start = torch.full((3, 1, 2, 2), 0.5)
    found = search(at_the_minimum, start, Linf(0.3), stepper=Sign(0.1), steps=1, random_start=True)
    assert torch.equal(found.x, start)
    assert not found.success.any()


@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_finished_samples_leave_and_change_nothing_for_the_others(stepper: Stepper) -> None:
    whole = run(stepper=stepper, steps=25, record=True)
    assert whole.trajectory is not None
    stop = float(whole.value.median())
    early = run(stepper=stepper, steps=25, stop=stop, record=True)
    reached = whole.value <= stop
    assert torch.equal(early.success, reached)
    assert 0 < int(reached.sum()) < 6
    torch.testing.assert_close(early.x[~reached], whole.x[~reached], rtol=0, atol=0)
    first = (whole.trajectory.value <= stop).int().argmax(dim=0)
    assert torch.equal(early.steps[reached], first[reached])
    torch.testing.assert_close(early.value[reached], whole.trajectory.value[first, torch.arange(6)][reached])
    assert torch.equal(early.evaluations, early.steps + 1)


def test_finished_samples_are_not_evaluated_again() -> None:
    sizes = []

    def counted(x: Tensor, rows: Tensor) -> Tensor:
        sizes.append(len(x))
        assert len(rows) == len(x)
        return ripples(x, rows)

    stop = torch.tensor([1e9, -1e9, 1e9, -1e9, 1e9, 1e9])
    found = search(counted, images(), Linf(0.2), stepper=Apgd(), steps=5, restarts=2, stop=stop)
    assert sizes == [6, 2, 2, 2, 2, 2] + [2] * 6
    assert found.success.tolist() == [True, False, True, False, True, True]
    assert found.steps.tolist() == [0, 10, 0, 10, 0, 0]
    assert found.evaluations.tolist() == [1, 12, 1, 12, 1, 1]


def test_a_search_that_is_done_before_it_starts_goes_nowhere() -> None:
    found = run(stop=1e9, random_start=True)
    assert torch.equal(found.x, images())
    assert found.steps.sum() == 0


@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_restarts_never_worsen(stepper: Stepper) -> None:
    values = [run(stepper=stepper, restarts=count, random_start=True).value for count in (1, 2, 4, 8)]
    for fewer, more in pairwise(values):
        assert (more <= fewer).all()
    assert (values[-1] < values[0]).any()


@pytest.mark.parametrize("random_start", [True, False])
@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_a_list_of_eps_equals_separate_searches_or_is_better(stepper: Stepper, random_start: bool) -> None:
    options = {"stepper": stepper, "steps": 10, "restarts": 2, "random_start": random_start}
    ladder = search(ripples, images(), Linf([0.3, 0.05, 0.1]), **options)
    assert len(ladder.rungs) == 3
    assert torch.equal(ladder.x, ladder.rungs[0].x)
    for eps, rung in zip((0.3, 0.05, 0.1), ladder.rungs, strict=True):
        alone = search(ripples, images(), Linf(eps), **options)
        assert (rung.value <= alone.value).all()
        assert Linf(eps).contains(rung.x, images()).all()
    assert (ladder.rungs[2].value <= ladder.rungs[1].value).all()
    assert (ladder.rungs[0].value <= ladder.rungs[2].value).all()


@pytest.mark.parametrize(
    "options", [{"keep": "best", "restarts": 3, "random_start": True}, {"keep": "last"}, {"stop": 0.0}]
)
def test_the_trajectory_ends_with_what_is_returned(options: dict[str, object]) -> None:
    found = run(steps=12, record=True, stepper=Sign(0.03), **options)
    path = found.trajectory
    assert path is not None
    assert path.value.shape == path.l2.shape == path.linf.shape == (13, 6)
    torch.testing.assert_close(path.value[-1], found.value, rtol=0, atol=0)
    torch.testing.assert_close(path.l2[-1], found.distance("l2"))
    torch.testing.assert_close(path.linf[-1], found.distance("linf"))


def test_without_random_start_the_trajectory_begins_at_the_start() -> None:
    found = run(steps=6, record=True, stepper=Sign(0.03), keep="last")
    path = found.trajectory
    assert path is not None
    torch.testing.assert_close(path.value[0], found.start_value, rtol=0, atol=0)
    assert path.l2[0].abs().max() == 0
    torch.testing.assert_close(path.linf[1], torch.full((6,), 0.03))


def test_batches_cover_every_sample_with_its_own_row() -> None:
    whole = run(steps=8, record=True)
    parts = run(steps=8, record=True, batch_size=4)
    torch.testing.assert_close(parts.x, whole.x, rtol=0, atol=0)
    assert parts.trajectory is not None and whole.trajectory is not None
    torch.testing.assert_close(parts.trajectory.value, whole.trajectory.value, rtol=0, atol=0)
    ladder = search(ripples, images(), Linf([0.1, 0.2]), stepper=Apgd(), steps=8, batch_size=4, stop=torch.arange(6.0))
    assert [len(rung.x) for rung in ladder.rungs] == [6, 6]


def test_a_seed_decides_and_global_random_state_is_not_touched() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again, other = (run(stepper=Langevin(), random_start=True, generator=seed).x for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(run(stepper=Langevin(), random_start=True, generator=generator).x, first)
    assert not torch.equal(run(stepper=Langevin(), random_start=True, generator=generator).x, first)


def test_no_gradient_reaches_a_parameter_and_no_tensor_of_the_caller_is_written_to() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start = images().requires_grad_()
    original = start.detach().clone()
    encoder = Encoder(model)
    target = encoder(images(seed=1))
    assert isinstance(target, Tensor)
    found = search(MatchLatent(encoder, target.detach()), start, L2(1.0), stepper=Adamax(), steps=5)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert start.grad is None
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(start, original)
    assert not found.x.requires_grad


class Proposer:
    """A gradient-free stepper: propose, look at the value, keep or take back."""

    needs_gradient = False

    def begin(self, walk: Walk) -> State:
        assert walk.gradient is None
        return {"kept": walk.x, "kept_value": walk.value}

    def move(self, walk: Walk, state: State) -> Tensor:
        better = (walk.value < state["kept_value"]).view(-1, 1, 1, 1)
        state["kept"] = torch.where(better, walk.x, state["kept"])
        state["kept_value"] = torch.minimum(walk.value, state["kept_value"])
        return state["kept"] + 0.1 * walk.normal() * (walk.uniform() < 0.3)


def test_a_stepper_may_go_without_a_gradient() -> None:
    @torch.no_grad()
    def opaque(x: Tensor, rows: Tensor) -> Tensor:
        return ripples(x, rows)

    found = search(opaque, images(), Linf(0.2), stepper=Proposer(), steps=60)
    assert (found.value < found.start_value - 0.5).all()


class Borrower:
    """Goes to points whose memory is somebody else's, which a projection must not write into."""

    needs_gradient = True

    def begin(self, walk: Walk) -> State:
        return {"far": walk.centre + 1.0}

    def move(self, walk: Walk, state: State) -> Tensor:
        if walk.step == 1:
            assert bool((state["far"] == walk.centre + 1.0).all())
        elsewhere = (state["far"], walk.x, walk.centre, torch.tensor(0.4).expand_as(walk.x), state["far"][:, :, :, :])
        return elsewhere[walk.step % 5]


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_stepper_may_return_what_it_or_the_caller_holds(keep: str) -> None:
    start, first = images(), images(seed=1)
    found = search(ripples, start, Linf(0.2), stepper=Borrower(), steps=7, keep=keep, first=first)
    assert torch.equal(start, images()) and torch.equal(first, images(seed=1))
    torch.testing.assert_close(found.value, ripples(found.x, torch.arange(6)))


def test_the_results_of_several_eps_share_no_memory() -> None:
    """Steps of 0.01 lead to the goal, and steps of 0.03 past it: the larger ball's best is what the smaller one found."""
    start = 0.3 + 0.4 * images()

    def near(x: Tensor, rows: Tensor) -> Tensor:
        return (x - start[rows] - 0.01).abs().flatten(1).sum(dim=1)

    found = search(near, start, Linf([0.1, 0.3]), stepper=Sign(share=0.1), steps=3)
    small, large = found.rungs
    assert torch.equal(small.x, large.x)
    small.x.fill_(0.5)
    torch.testing.assert_close(large.x, start + 0.01)


def test_what_is_found_is_never_the_callers_own_tensor() -> None:
    start = images()
    for options in ({}, {"random_start": True}, {"stop": 1e9}, {"keep": "last", "stepper": Borrower(), "steps": 2}):
        found = search(
            lambda x, rows: 1 + 0 * x.flatten(1).sum(dim=1),
            start,
            Linf(0.2),
            **{"stepper": Sign(), "steps": 3} | options,
        )
        found.x.fill_(0.5)
        assert torch.equal(start, images()), options


class LineSearcher:
    """A stepper with evaluations of its own."""

    needs_gradient = True

    def begin(self, walk: Walk) -> State:
        return {}

    def move(self, walk: Walk, state: State) -> Tensor:
        assert walk.gradient is not None
        trials = [walk.x - size * walk.gradient for size in (0.001, 0.01)]
        values = torch.stack([walk.evaluate(trial) for trial in trials])
        return torch.stack(trials)[values.argmin(dim=0), torch.arange(len(walk.x))]


def test_a_stepper_may_evaluate_on_its_own_and_pays_for_it() -> None:
    found = run(stepper=LineSearcher(), steps=4)
    assert found.evaluations.tolist() == [4 * 3 + 1] * 6
    assert found.success.all()


def test_an_objective_without_gradient_is_named() -> None:
    class Detached:
        def encode(self, x: Tensor) -> Tensor:
            return x.detach()

        def judge(self, z: Tensor) -> Tensor:
            return z.flatten(1).sum(dim=1)

        def __call__(self, x: Tensor) -> Tensor:
            return self.judge(self.encode(x))

    from gatecrash import admit

    with pytest.raises(ValueError, match="Detached has no gradient with respect to the images"):
        admit(Detached(), images(), Linf(0.1))

    weight = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="has no gradient"):
        search(lambda x, rows: x.detach().flatten(1).sum(dim=1) * weight, images(), Linf(0.1), stepper=Apgd(), steps=2)


def test_nan_at_the_start_is_named() -> None:
    def broken(x: Tensor, rows: Tensor) -> Tensor:
        return torch.where(rows == 2, torch.nan, 1.0) * x.flatten(1).sum(dim=1)

    with pytest.raises(ValueError, match="NaN for 1 of 6 starting images, first at index 2"):
        search(broken, images(), Linf(0.1), stepper=Apgd(), steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, got 2.5"),
        ({"restarts": 0}, "restarts must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"keep": "worst"}, "keep must be 'best' or 'last', got 'worst'"),
        ({"keep": "last", "restarts": 2}, "keep='last' follows one run"),
        ({"measure": False}, "measure=False goes with keep='last', without stop, record and mixed precision"),
        ({"measure": False, "keep": "last", "stop": 0.0}, "measure=False goes with keep='last'"),
        ({"measure": False, "keep": "last", "record": True}, "measure=False goes with keep='last'"),
        ({"measure": False, "keep": "last", "precision": "mixed"}, "measure=False goes with keep='last'"),
        ({"first": torch.zeros(1)}, "first must have the start's shape"),
        ({"stop": "low"}, r"stop must be one number or of shape \(6,\), got 'low'"),
        ({"stop": float("nan")}, r"stop must be one number or of shape \(6,\), got NaN, which no score reaches"),
        ({"stop": torch.tensor([0, 0, 0, 0, 0, float("nan")])}, r"stop must be .*, got NaN"),
        ({"stop": torch.zeros(3)}, r"stop must be one number or of shape \(6,\), got shape \(3,\)"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (torch.rand(2, 1, 4, 4) * 255, r"start must lie in \[0, 1\]"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "start must be float in"),
        (torch.full((2, 1, 4, 4), torch.nan), "start must not hold NaN"),
        (torch.rand(1, 4, 4), r"start must have shape \(N, C, H, W\)"),
    ],
)
def test_bad_starts_are_refused(start: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(ripples, start, Linf(0.1), stepper=Apgd(), steps=2)


def test_a_value_per_batch_instead_of_per_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one value per sample, \(6,\), got \(\)"):
        search(lambda x, rows: x.sum(), images(), Linf(0.1), stepper=Apgd(), steps=2)


def test_what_happens_in_one_batch_leaves_the_numbers_of_the_next_alone() -> None:
    """A batch that finishes at once draws fewer random numbers; the batch after it must not notice."""
    stop = torch.tensor([1e9, 1e9, 1e9, -1e9, -1e9, -1e9])
    options = {"stepper": Langevin(), "random_start": True, "restarts": 2, "batch_size": 3}
    early, whole = run(stop=stop, **options), run(**options)
    assert torch.equal(early.x[3:], whole.x[3:])
    ladder = search(ripples, images(), Linf([0.1, 0.2]), steps=20, **options)
    for eps, rung in zip((0.1, 0.2), ladder.rungs, strict=True):
        assert (rung.value <= search(ripples, images(), Linf(eps), steps=20, **options).value).all()


@pytest.mark.parametrize("options", [{"keep": "last"}, {"record": True, "random_start": True}])
def test_float64_images_meet_a_float32_objective(options: dict[str, object]) -> None:
    def single_precision(x: Tensor, rows: Tensor) -> Tensor:
        return ripples(x.float(), rows)

    found = search(single_precision, images().double(), Linf(0.2), stepper=Apgd(), steps=5, stop=-1e9, **options)
    assert found.value.dtype == found.start_value.dtype == torch.float64


def test_the_last_iterates_of_several_eps_are_separate_walks() -> None:
    found = search(ripples, images(), Linf([0.1, 0.2]), stepper=Sign(share=1.0), steps=1, keep="last")
    torch.testing.assert_close(
        torch.stack([rung.distance("linf").amax() for rung in found.rungs]), torch.tensor([0.1, 0.2])
    )


def test_a_start_outside_the_box_and_an_index_behind_the_first_batch_are_named() -> None:
    with pytest.raises(ValueError, match=r"start must lie in the ball's box \(0.2, 0.8\)"):
        search(ripples, images(), Linf(0.1, box=(0.2, 0.8)), stepper=Apgd(), steps=2)

    def broken(x: Tensor, rows: Tensor) -> Tensor:
        return torch.where(rows == 5, torch.nan, 1.0) * x.flatten(1).sum(dim=1)

    with pytest.raises(ValueError, match="first at index 5"):
        search(broken, images(), Linf(0.1), stepper=Apgd(), steps=2, batch_size=4)


def test_a_search_works_in_inference_mode() -> None:
    with torch.inference_mode():
        found = run(steps=3)
        again = search(ripples, found.x.clone(), Linf(0.1), stepper=Apgd(), steps=3)
    assert found.success.all() and again.success.any()


@pytest.mark.parametrize("stepper", ["sign", Sign, 0.01], ids=str)
def test_what_is_no_stepper_is_told(stepper: Any) -> None:
    with pytest.raises(TypeError, match=r"^stepper must say how to move, such as Apgd\(\) or Sign\(0.01\), got"):
        search(lambda x, rows: x.flatten(1).sum(dim=1), torch.rand(2, 1, 2, 2), Linf(0.1), stepper=stepper, steps=1)
