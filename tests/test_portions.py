"""Samples evaluated in portions, against the same in one piece."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.utils.parametrizations import weight_norm

import gatecrash as gate
from gatecrash import Encoder, Linf, portions
from gatecrash.detectors import ODIN, Energy
from gatecrash.portions import ON_CPU, Portions, in_portions
from gatecrash.search import search
from gatecrash.stepper import Apgd

CPU = torch.device("cpu")


class Small:
    """A quadratic objective for which memory runs out above a number of samples; it remembers the sizes it saw."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: list[int] = []

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("no room")
        return (x - 0.5).square().flatten(1).sum(dim=1) * (1 + rows)


def evaluated(parts: Portions, objective: Small, count: int) -> Tensor:
    """The values of some samples."""
    x = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    value, gradient = parts.evaluate(lambda x, rows: (objective(x, rows), x), x, torch.arange(count))
    assert gradient is not None
    assert torch.equal(gradient, x)
    return value


def test_portions_are_halved_until_they_fit_and_stay_so() -> None:
    parts, objective = Portions(CPU), Small(30)
    value = evaluated(parts, objective, 100)
    assert objective.seen == [100, 50, 25, 25, 25, 25]
    assert torch.equal(value, evaluated(Portions(CPU), Small(1000), 100))
    objective.seen.clear()
    evaluated(parts, objective, 60)
    assert objective.seen == [25, 25, 10]


def test_without_room_for_one_sample_memory_has_run_out() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(Portions(CPU), Small(0), 4)


def test_a_function_of_images_gets_as_many_as_it_has_room_for() -> None:
    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        seen.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("no room")
        return 2 * x

    x = torch.arange(11.0)
    assert torch.equal(torch.cat(in_portions(function, x)), 2 * x)
    assert seen == [11, 5, 2, 2, 2, 2, 2, 1]
    seen.clear()
    assert torch.equal(torch.cat(in_portions(function, x, 3)), 2 * x)
    assert seen == [3, 3, 3, 2]
    with pytest.raises(torch.OutOfMemoryError):
        in_portions(lambda x: function(x.repeat(4)), x)


def test_scoring_takes_smaller_batches_where_memory_runs_out() -> None:
    class Narrow(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 3:
                raise torch.OutOfMemoryError("no room")
            return super().forward(x)

    x = torch.rand(10, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    small, large = (Energy(Encoder(net)).scores(x) for net in (Narrow(), nn.Flatten()))
    assert torch.equal(small, large)


def test_a_cpu_evaluates_so_many_at_once() -> None:
    objective = Small(10**6)
    evaluated(Portions(CPU), objective, 2 * ON_CPU + 1)
    assert objective.seen == [342, 342, 341]


def test_a_search_finds_the_same_whatever_the_memory() -> None:
    start = torch.rand(20, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    plenty, little = (
        search(Small(most), start, Linf(0.1), stepper=Apgd(), steps=5, restarts=2, generator=1) for most in (100, 6)
    )
    assert torch.equal(plenty.x, little.x)
    assert torch.equal(plenty.evaluations, little.evaluations)


def test_one_value_for_all_samples_is_refused_in_portions_too() -> None:
    start = torch.rand(ON_CPU + 3, 1, 2, 2)
    with pytest.raises(ValueError, match=rf"one value per sample, \({ON_CPU + 3},\)"):
        search(lambda x, rows: x.sum(), start, Linf(0.1), stepper=Apgd(), steps=1)


class Layers(nn.Module):
    """Layers that store something of every kind for a gradient; it remembers the sizes it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: list[int] = []
        self.conv, self.norm, self.pool = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.linear = nn.Linear(36, 5)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.linear(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1)).sigmoid()


def pictures(count: int) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def stored_by_one() -> int:
    """Bytes that `Layers` stores of every image."""
    storage = portions.Storage(5)
    with saved_tensors_hooks(storage.take, storage.give):
        Layers()(pictures(5).requires_grad_())
    return storage.bytes // 5


def test_what_is_stored_is_counted_without_parameters_and_once() -> None:
    images, convolved, relu, places, probabilities = 3 * 64, 4 * 36, 4 * 36, 2 * 36, 5
    assert stored_by_one() == 4 * (images + convolved + relu + places + probabilities)
    wide = nn.Linear(192, 5000).requires_grad_(False)
    storage = portions.Storage(2)
    with saved_tensors_hooks(storage.take, storage.give):
        wide(pictures(2).flatten(1).requires_grad_())
    assert storage.bytes <= pictures(2).numel() * 4


def test_a_cpu_stores_only_so_much_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = Layers(), pictures(40)
    whole = gate.evict(Energy(network), x, Linf(0.1), steps=3, precision="float32")
    assert set(network.seen) == {40}
    network.seen.clear()
    monkeypatch.setattr(portions, "STORED", 12 * stored_by_one())
    small = gate.evict(Energy(network), x, Linf(0.1), steps=3, precision="float32")
    assert network.seen == [40, *[10] * 12]
    torch.testing.assert_close(small.x, whole.x, rtol=0, atol=1e-6)
    torch.testing.assert_close(small.value, whole.value)


def test_a_cpu_stores_no_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Layers()
    monkeypatch.setattr(portions, "LARGEST", 16 * 4 * 3 * 64)
    gate.evict(Energy(network), pictures(40), Linf(0.1), steps=1, precision="float32")
    assert network.seen == [40, 14, 13, 13]


def test_no_image_comes_alone_whatever_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "STORED", 1)
    network = Layers()
    gate.evict(Energy(network), pictures(5), Linf(0.1), steps=1, precision="float32")
    assert network.seen == [5, 2, 3]


def test_a_first_portion_is_small_where_images_are_large() -> None:
    objective = Small(10**6)
    x = torch.rand(7, 3, 224, 224)
    Portions(CPU).evaluate(lambda x, rows: (objective(x, rows), None), x, torch.arange(7))
    assert objective.seen == [2, 2, 3]


def test_a_detector_with_gradients_of_its_own_is_scored_in_portions_that_are_known_by_the_second_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, x = Layers(), pictures(96)
    whole = ODIN(network).scores(x)
    network.seen.clear()
    monkeypatch.setattr(portions, "STORED", 12 * stored_by_one())
    small = ODIN(network).scores(x, batch_size=32)
    assert network.seen[:2] == [32, 32] and max(network.seen[2:]) <= 12
    torch.testing.assert_close(small, whole)


def test_scores_come_in_small_batches_whatever_the_data_do() -> None:
    network, x = Layers(), pictures(300)
    torch.testing.assert_close(Energy(network).scores(x, batch_size=300), Energy(network)(x))
    assert network.seen == [*[60] * 5, 300]


def test_a_second_derivative_is_the_same_where_what_it_needs_is_counted() -> None:
    def twice(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (first,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    network, storage = Layers(), portions.Storage(4)
    with saved_tensors_hooks(storage.take, storage.give):
        counted = twice(pictures(4))
    assert torch.equal(counted, twice(pictures(4))) and storage.bytes > 0


def test_a_graph_that_nobody_follows_back_is_freed() -> None:
    storage, network, token = portions.Storage(4), nn.Sequential(nn.Sigmoid(), nn.ReLU(), nn.Softmax(dim=1)), Layers()
    gc.disable()
    try:
        with saved_tensors_hooks(storage.take, storage.give):
            graph = network(pictures(4).requires_grad_()).grad_fn
        assert graph is not None
        graph.register_hook(lambda *gradients, held=token: None)
        alive = weakref.ref(token)
        del graph, token
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("inside", [True, False])
def test_who_forbids_what_counts_is_attacked(inside: bool) -> None:
    def forbidding(x: Tensor, rows: Tensor) -> Tensor:
        with disable_saved_tensors_hooks("not here") if inside else nullcontext():
            return x.square().flatten(1).sum(dim=1)

    with nullcontext() if inside else disable_saved_tensors_hooks("nowhere"):
        found = search(forbidding, pictures(4), Linf(0.1), stepper=Apgd(), steps=3)
    assert bool(found.success.all())


def test_a_tensor_that_is_written_to_is_noticed_while_it_is_counted() -> None:
    class Overwritten(Layers):
        def forward(self, x: Tensor) -> Tensor:
            maps = self.conv(x).sigmoid()
            return (maps * 2).flatten(1) + maps.mul_(0.1).flatten(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gate.evict(Energy(Overwritten()), pictures(4), Linf(0.1), steps=1)


def test_sparse_matrices_and_computed_weights_do_not_count() -> None:
    storage, sparse = portions.Storage(4), torch.eye(192).to_sparse()
    with saved_tensors_hooks(storage.take, storage.give):
        torch.sparse.mm(sparse, pictures(4).flatten(1).T.requires_grad_()).sum().backward()
    assert storage.largest <= 4 * 4 * 192
    network = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(192, 75)))
    sizes: list[int] = []
    network.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    gate.evict(Energy(network), pictures(64), Linf(0.1), steps=1)
    assert sizes == [64, 64]


def test_a_scripted_network_is_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "STORED", 12 * stored_by_one())
    network = torch.jit.trace(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), pictures(2)
    )
    assert bool(gate.evict(Energy(network), pictures(64), Linf(0.1), steps=2).success.all())


def test_a_mistake_is_told_as_it_is() -> None:
    def mistaken(x: Tensor, rows: Tensor) -> Tensor:
        return x.flatten(1) @ torch.ones(5, 1)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        search(mistaken, pictures(4), Linf(0.1), stepper=Apgd(), steps=3)


def test_a_detector_with_derivatives_by_torch_func_is_attacked() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: x.pow(3).sum())(x).flatten(1).sum(dim=1)

    start = pictures(4)
    found = search(lambda x, rows: slope(x), start, Linf(0.1), stepper=Apgd(), steps=3)
    torch.testing.assert_close(found.start_value, (3 * start.square()).flatten(1).sum(dim=1))
    assert bool(found.success.all())
