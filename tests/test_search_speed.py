"""What makes a search fast and must change nothing: few looks, and most of a run in half precision."""

import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gatecrash as gate
from gatecrash import L2, Adamax, Apgd, Ball, Encoder, Found, Langevin, Linf, Normalised, Sign, search
from gatecrash.objective import MatchLatent
from gatecrash.prepared import facts, preparing
from gatecrash.protocols import Stepper
from gatecrash.search import LOOK_EVERY, change_per_pixel, pays_off
from gatecrash.speed import current_pace, is_exact
from gatecrash.stepper import Square
from gatecrash.training.exposure import Inner
from gatecrash.training.jem import langevin

STEPPERS = [Sign(0.01), Normalised(0.1), Adamax(), Apgd(), Langevin(0.01, 0.01), Square()]
BALLS = [Linf(0.2), L2(0.4), L2(0.4, box=None), Linf([0.3, 0.1])]
OPTIONS = [
    {},
    {"restarts": 3, "random_start": True, "batch_size": 5},
    {"keep": "last"},
    {"first": torch.full((8, 1, 4, 4), 0.4)},
]
EASY_TO_HARD = torch.tensor([2.0, 1.0, 0.0, -2.0, -4.0, -6.0, -8.0, -1e9])
CASES = [(ball, {}, None) for ball in BALLS] + list(product(BALLS, OPTIONS, [-3.0, EASY_TO_HARD]))


def ripples(x: Tensor, rows: Tensor) -> Tensor:
    """A smooth objective with many local minima, a different one for every row."""
    flat = x.flatten(1)
    phases = (rows.to(x.dtype) + 1).unsqueeze(1)
    return (torch.sin(9 * flat + phases) + (flat - 0.3).square()).sum(dim=1)


def images(count: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)


def as_on_a_device(patch: pytest.MonkeyPatch, look_every: int) -> None:
    """Search as where a look makes the host wait."""
    for name in ("ball", "search", "kept", "stepper"):
        patch.setattr(sys.modules[f"gatecrash.{name}"], "waits", lambda tensor: True)
    patch.setattr(sys.modules["gatecrash.search"], "LOOK_EVERY", look_every)


class Looks(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2"):
            self.count += 1
        return func(*args, **(kwargs or {}))

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Count what dispatches nothing on a CPU too."""
        for name in ("cpu", "numpy", "tolist"):
            patch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))
        to = Tensor.to

        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.count += any(
                str(where) == "cpu" for where in (*args, kwargs.get("device")) if not isinstance(where, Tensor)
            )
            return to(tensor, *args, **kwargs)

        patch.setattr(Tensor, "to", moved)

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return method(*args, **kwargs)

        return counted


def looks_before_every_evaluation(stepper: Stepper, ball: Ball, stop: object, **options: object) -> list[int]:
    """How often the host had looked when the objective was called, call by call."""
    counts = []

    def counted(x: Tensor, rows: Tensor) -> Tensor:
        counts.append(looks.count)
        return ripples(x, rows)

    with Looks() as looks:
        search(counted, images(), ball, stepper=stepper, steps=23, stop=stop, **options)
    return counts


@pytest.mark.parametrize("stop", [None, EASY_TO_HARD], ids=["no stop", "stop"])
@pytest.mark.parametrize("ball", [Linf(0.2), L2(0.4), L2(0.4, box=None)], ids=str)
@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_the_host_waits_at_looks_only(
    stepper: Stepper, ball: Ball, stop: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = looks_before_every_evaluation(stepper, ball, stop, record=True)
    as_on_a_device(monkeypatch, 7)
    few = looks_before_every_evaluation(stepper, ball, stop, record=True)
    waited = [step for step in range(1, len(few)) if few[step] > few[step - 1]]
    # The first value is checked for NaN; after that it takes a stop to look, after steps 0, 7, 14 and 21.
    assert waited == ([1] if stop is None else [1, 8, 15, 22])
    if stop is not None:
        assert all(later > before for before, later in pairwise(every))


def test_looks_are_ten_steps_apart_where_the_host_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_device(monkeypatch, LOOK_EVERY)
    few = looks_before_every_evaluation(Sign(0.01), Linf(0.2), EASY_TO_HARD)
    assert [step for step in range(1, len(few)) if few[step] > few[step - 1]] == [1, 11, 21]


@pytest.mark.parametrize("stop", [None, 1e9, "some"], ids=str)
def test_what_a_mixed_search_reports_is_evaluated_without_tf32(stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.manual_seed(0)
    encoder = Encoder(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)))
    objective = MatchLatent(encoder, encoder(images().flip(0)).detach())  # type: ignore[union-attr]
    start = objective(images(), torch.arange(8)).detach()
    stop = torch.where(torch.arange(8) < 4, 0.9 * start, -1.0) if stop == "some" else stop
    exact = []

    def watched(x: Tensor, rows: Tensor) -> Tensor:
        if current_pace() == "plain":
            exact.append(is_exact())
        return objective(x, rows)

    with preparing(devices=("cpu",), compile_after=None):
        found = search(watched, images(), L2(0.5), stepper=Adamax(), steps=20, stop=stop, precision="mixed")
    assert len(exact) >= 2 and all(exact)
    assert torch.backends.cudnn.allow_tf32
    assert bool(found.success.any())


@pytest.mark.parametrize("stepper", [Adamax(), Apgd(), Sign(0.01)], ids=lambda s: type(s).__name__)
def test_a_mixed_search_waits_no_oftener_in_more_steps(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared copies included, and whatever brings numbers to the host."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    encoder = Encoder(network)
    objective = MatchLatent(encoder, encoder(images().flip(0)).detach())  # type: ignore[union-attr]
    as_on_a_device(monkeypatch, LOOK_EVERY)
    counts = {}
    with preparing(devices=("cpu",), compile_after=None):
        for steps in (20, 20, 40, 80):  # the first prepares
            with Looks() as looks, pytest.MonkeyPatch.context() as patch:
                looks.watch(patch)
                search(objective, images(), L2(0.5), stepper=stepper, steps=steps, precision="mixed")
            counts[steps] = looks.count
        assert {fact["pace"] for fact in facts(network)} == {"half", "prepared"}
    assert 0 < counts[20] == counts[40] == counts[80]


def same(found: Found, other: Found) -> bool:
    pairs = [
        (getattr(a, name), getattr(b, name))
        for a, b in zip(found.rungs, other.rungs, strict=True)
        for name in ("x", "value", "start_value", "success", "steps", "evaluations")
    ]
    for a, b in zip(found.rungs, other.rungs, strict=True):
        assert a.trajectory is not None and b.trajectory is not None
        pairs += [(getattr(a.trajectory, name), getattr(b.trajectory, name)) for name in ("value", "l2", "linf")]
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_what_is_found_does_not_depend_on_when_the_search_looks(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[tuple[Found, Tensor]]:
        found = []
        for ball, options, stop in CASES:
            source = torch.Generator().manual_seed(3)
            settings = {"stepper": stepper, "steps": 16, "stop": stop, "record": True, "generator": source}
            found.append((search(ripples, images(), ball, **settings, **options), source.get_state()))
        return found

    always = results()
    assert any(len(set(found.steps.tolist())) > 2 for found, _ in always)
    as_on_a_device(monkeypatch, 7)
    for (a, state), (b, other) in zip(always, results(), strict=True):
        assert same(a, b)
        assert torch.equal(state, other)


class Paced:
    """The ripples with an offset of the pace's own, and a list of the paces it was called at."""

    def __init__(self, half: float = 64.0, prepared: float = -32.0, trembling: float = 0.0) -> None:
        self.offsets = {"plain": 0.0, "prepared": prepared, "half": half}
        self.trembling = trembling
        self.paces: list[str] = []

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        pace = current_pace()
        self.paces.append(pace)
        value = ripples(x, rows) + self.offsets[pace]
        return value + self.trembling * torch.sin(1000 * x.detach().flatten(1).sum(dim=1)) if pace == "half" else value


def test_a_mixed_run_goes_from_half_to_prepared_and_is_verified_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gatecrash.half"], "ROUGH", 1e9)
    objective = Paced(trembling=0.3)
    found = search(objective, images(), Linf(0.2), stepper=Apgd(), steps=20, precision="mixed", record=True)
    doubted = ["half"] * 10 + ["prepared"] + ["half"] * 4
    assert objective.paces == ["plain"] + doubted + ["prepared"] + ["prepared"] * 7 + ["plain"]
    assert current_pace() == "plain"
    assert found.evaluations.tolist() == [len(objective.paces)] * 8
    assert found.steps.tolist() == [20] * 8
    assert torch.equal(found.value, ripples(found.x, torch.arange(8)))
    assert torch.equal(found.start_value, ripples(images(), torch.arange(8)))
    assert (found.value < found.start_value - 1).all()
    assert found.trajectory is not None
    assert torch.equal(found.trajectory.value[-1], found.value)
    objective = Paced(trembling=0.3)
    search(objective, images(), Linf(0.2), stepper=Adamax(), steps=20, precision="mixed")
    doubted = ["half"] * 10 + ["prepared"] + ["half"] * 5 + ["prepared"] + ["half"] * 4
    assert objective.paces == ["plain"] + doubted + ["prepared"] + ["prepared"] * 2 + ["plain"]


@pytest.mark.parametrize("ball", [Linf(0.2), L2(0.4)], ids=str)
def test_steps_and_projections_go_at_the_pace_of_the_run(ball: Ball, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, projections = [], []
    stepper, projection = Adamax(), type(ball).projection

    def move(walk: Any, state: Any) -> Tensor:
        steps.append(current_pace())
        return Adamax.move(stepper, walk, state)

    def projecting(self: Ball, centre: Tensor) -> Any:
        project = projection(self, centre)

        def watched(x: Tensor) -> Tensor:
            projections.append(current_pace())
            return project(x)

        return watched

    monkeypatch.setattr(sys.modules["gatecrash.half"], "ROUGH", 1e9)
    object.__setattr__(stepper, "move", move)
    monkeypatch.setattr(type(ball), "projection", projecting)
    search(Paced(trembling=0.0), images(), ball, stepper=stepper, steps=20, precision="mixed")
    assert steps == projections == ["half"] * 19 + ["prepared"]
    search(Paced(trembling=0.0), images(), ball, stepper=stepper, steps=3, precision="float32")
    assert steps[20:] == projections[20:] == ["plain"] * 3


@pytest.mark.parametrize(
    ("stepper", "steps"),
    [(Sign(0.01), 36), (Normalised(0.1), 36), (Sign(0.01, "cosine"), 28), (Apgd(), 28), (Adamax(), 38)],
    ids=str,
)
def test_how_much_of_a_run_is_in_half_precision(stepper: Stepper, steps: int) -> None:
    objective = Paced(0.0, 0.0)
    search(objective, images(), Linf(0.2), stepper=stepper, steps=40, precision="mixed")
    assert objective.paces.count("half") == steps


SPOILT = {"none": 0.0, "not finite": torch.inf}
"""What a gradient is multiplied by."""


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize(("few", "steps"), [(0, 14), (1, 14), (2, 1)])
def test_half_precision_is_left_where_it_has_no_gradient(how: str, few: int, steps: int) -> None:
    """Of eight samples one may."""
    assert half_steps(how, few, 20) == steps


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize(("few", "steps"), [(1, 42), (2, 4)])
def test_in_a_long_run_that_is_looked_at_while_the_device_has_work(how: str, few: int, steps: int) -> None:
    assert half_steps(how, few, 60) == steps


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize(("begins", "steps"), [(0, 4), (1, 30), (29, 30), (30, 42)])
def test_gradients_are_looked_at_in_the_first_step_and_before_half_of_them(how: str, begins: int, steps: int) -> None:
    assert half_steps(how, 2, 60, begins) == steps


def half_steps(how: str, few: int, steps: int, begins: int = 0) -> int:
    """The evaluations in half precision when some of eight samples have spoilt gradients in it, from a step on."""
    paces = []

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        paces.append(current_pace())
        value = ripples(x, rows)
        if value.requires_grad and current_pace() == "half" and paces.count("half") > begins:
            value.register_hook(lambda gradient: torch.where(rows < few, SPOILT[how], 1.0) * gradient)
        return value

    search(objective, images(), Linf(0.2), stepper=Apgd(), steps=steps, precision="mixed")
    return paces.count("half")


@pytest.mark.parametrize(("half", "steps"), [(-1e-3, 14), (-64.0, 10), (64.0, 10), (float("nan"), 10)])
def test_half_precision_is_left_as_soon_as_it_is_too_rough(half: float, steps: int) -> None:
    objective = Paced(half, 0.0)
    found = search(objective, images(), Linf(0.2), stepper=Apgd(), steps=20, precision="mixed")
    assert objective.paces.count("half") == steps
    assert torch.equal(found.value, ripples(found.x, torch.arange(8)))
    assert found.evaluations.tolist() == [len(objective.paces)] * 8


@pytest.mark.parametrize("options", [{}, {"restarts": 2}, {"random_start": True}, {"keep": "last"}], ids=str)
@pytest.mark.parametrize("ball", [Linf(0.2), L2([0.4, 0.2])], ids=str)
@pytest.mark.parametrize("stepper", STEPPERS, ids=lambda s: type(s).__name__)
def test_values_of_two_paces_are_never_compared(stepper: Stepper, ball: Ball, options: dict[str, object]) -> None:
    """Where the paces differ by a constant, whoever compares like with like walks the same way at all of them."""
    start = images(dtype=torch.float64)
    plain = search(ripples, start, ball, stepper=stepper, steps=30, **options)
    for half in (64.0, -64.0):
        mixed = search(Paced(half), start, ball, stepper=stepper, steps=30, precision="mixed", **options)
        for one, other in zip(plain.rungs, mixed.rungs, strict=True):
            torch.testing.assert_close(other.x, one.x)
            torch.testing.assert_close(other.value, one.value)


@pytest.mark.parametrize("half", [-2.0, 0.0, 2.0])
def test_a_sample_leaves_a_mixed_run_only_when_it_is_done_plainly(half: float) -> None:
    start, every = images(), torch.arange(8)
    plain = search(ripples, start, Linf(0.2), stepper=Apgd(), steps=40, record=True)
    assert plain.trajectory is not None
    stop = plain.trajectory.value[20] + 1e-4  # within reach of every sample, while half precision still reigns
    stop[6:] = -1e9
    found = search(Paced(half, 0.0), start, Linf(0.2), stepper=Apgd(), steps=40, stop=stop, precision="mixed")
    assert found.success.tolist() == [True] * 6 + [False] * 2
    assert torch.equal(found.value, ripples(found.x, every))
    assert (found.steps[:6] % LOOK_EVERY == 0).all() and (found.steps[6:] == 40).all()
    assert (found.steps[:6] <= (30 if half > 0 else 20)).all()


@pytest.mark.parametrize("half", [-2.0, 2.0])
def test_a_sample_that_is_done_at_the_start_stays_there(half: float) -> None:
    stop = torch.where(torch.arange(8) < 4, ripples(images(), torch.arange(8)) + 1e-3, -1e9)
    found = search(Paced(half), images(), Linf(0.2), stepper=Apgd(), steps=20, stop=stop, precision="mixed")
    assert torch.equal(found.x[:4], images()[:4])
    assert found.steps.tolist() == [0] * 4 + [20] * 4
    assert found.evaluations.tolist() == [3] * 4 + [25] * 4  # one of them in doubt of half precision


def test_too_good_a_value_at_the_end_is_no_success() -> None:
    """The last steps reach the stop in the prepared network only."""
    stop = search(ripples, images(), Linf(0.2), stepper=Apgd(), steps=12).value - 0.5
    found = search(Paced(-1.0, -1.0), images(), Linf(0.2), stepper=Apgd(), steps=12, stop=stop, precision="mixed")
    assert not found.success.any()
    assert (found.steps == 12).all()


def test_auto_is_mixed_for_long_searches_on_cuda_and_plain_on_the_cpu() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert pays_off(cuda, Apgd(), 50, "best")
    assert not pays_off(cuda, Apgd(), 49, "best")
    assert not pays_off(cuda, Apgd(), 50, "last")
    assert not pays_off(cuda, Square(), 50, "best")
    assert not pays_off(cpu, Apgd(), 1000, "best")
    objective = Paced()
    search(objective, images(), Linf(0.2), stepper=Apgd(), steps=60)
    assert objective.paces == ["plain"] * 61
    with pytest.raises(ValueError, match="precision must be 'auto', 'float32' or 'mixed', got 'half'"):
        search(ripples, images(), Linf(0.2), stepper=Apgd(), steps=5, precision="half")  # type: ignore[arg-type]


class Watched(nn.Module):
    """A classifier that remembers the paces it ran at."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 3)
        self.paces: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.paces.add(current_pace())
        return self.fc(x.flatten(1))


@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_an_audit_tells_all_of_its_searches_how_precise_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    monkeypatch.setattr(sys.modules["gatecrash.search"], "pays_off", lambda *args: True)
    network, sets = Watched(), {"noise": images()}
    attacks = [
        {"name": "collide", "of": "logits", "ball": {"norm": "l2", "eps": 1}, "steps": 5},
        {"name": "worst_case", "ball": {"norm": "linf", "eps": 0.1}, "budget": "quick"},
    ]
    options: Any = {"attacks": attacks, "steps": 5, "precision": precision}
    detector = gate.detectors.Energy(Encoder(network))
    gate.audit(detector, images().flip(0), sets, out=tmp_path, balls=[Linf(0.1)], **options)
    assert network.paces == ({"plain"} if precision == "float32" else {"plain", "half", "prepared"})
    with pytest.raises(ValueError, match="precision must be 'auto' or 'float32', got 'mixed'"):
        gate.audit(detector, images(), sets, out=tmp_path / "b", balls=[Linf(0.1)], precision="mixed")


def test_named_attacks_pass_the_precision_on_and_training_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gatecrash.search"], "pays_off", lambda *args: True)
    labels = torch.zeros(8, dtype=torch.long)
    for precision, paces in (("mixed", {"plain", "half", "prepared"}), ("float32", {"plain"})):
        network = Watched()
        gate.pgd(network, images(), labels, Linf(0.1), steps=10, precision=precision)
        assert network.paces == paces
        network = Watched()
        gate.collide(network, images(), images().flip(0), L2(0.1), steps=10, precision=precision)
        assert network.paces == paces
        network = Watched()
        gate.admit(gate.detectors.Energy(Encoder(network)), images(), L2(0.1), steps=10, precision=precision)
        assert network.paces == paces
    network = Watched()
    Inner(0.1).attack(lambda x, rows: network(x)[:, 0], images(), torch.Generator().manual_seed(0))
    langevin(Encoder(network), images(), steps=5)
    assert network.paces == {"plain"}


@pytest.mark.parametrize(
    ("ball", "change"),
    [(Linf(1 / 255), 1 / 255), (Linf([8 / 255, 2 / 255]), 2 / 255), (L2(3.0), 1.0), (L2([6.0, 0.3]), 0.1)],
)
def test_a_small_ball_is_told_from_a_large_one_by_what_a_pixel_may_change(ball: Ball, change: float) -> None:
    assert change_per_pixel(ball, 9) == pytest.approx(change)
