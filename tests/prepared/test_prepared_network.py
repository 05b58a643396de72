"""How a prepared copy runs: few batch sizes, each compiled once, and uncompiled where compiling fails."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small_networks import SIZES, Smooth, fast, images, with_gradient
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

from gatecrash.encoder import Encoder
from gatecrash.prepared import Preparation, PreparedNetwork, facts
from gatecrash.prepared.network import filled
from gatecrash.prepared.run import _records
from gatecrash.prepared.tapped import Tapped


class Sums(nn.Module):
    """The sum over every image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(dim=1, keepdim=True)


def never(x: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError("the network itself is not needed")


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, []), (2, [4]), (4, [4]), (5, [8]), (8, [8]), (10, [8, 4]), (16, [8, 8]), (21, [8, 8, 8])]
)
def test_a_batch_is_split_and_filled_up_to_few_sizes(count: int, sizes: list[int]) -> None:
    network, seen = watched()
    network(images(SIZES[0]), never)
    x = images(count)
    (sums,) = network(x, never)
    assert seen[1:] == sizes  # one image alone is not worth three copies
    torch.testing.assert_close(sums, x.flatten(1).sum(dim=1, keepdim=True))


def test_the_first_batch_is_as_large_as_it_is_and_no_smaller_one_is_filled_up_beyond_it() -> None:
    network, seen = watched()
    for count in (1, 6, 5, 3, 7, 6):
        network(images(count), never)
    assert SIZES[:2] == (4, 8) and seen == [6, 6, 4, 8, 6]


def watched() -> tuple[PreparedNetwork, list[int]]:
    """A network of a few sizes, and the sizes of the batches that its compiled code got."""
    seen: list[int] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*args: Tensor) -> Any:
            seen.append(len(args[0]))
            return graph(*args)

        return run

    preparation = Preparation(sizes=SIZES, compile_after=0, backend=backend)
    return PreparedNetwork(Tapped(Sums(), (None,)), preparation), seen


def test_a_batch_is_filled_with_copies_that_no_gradient_reaches() -> None:
    x = images(2).requires_grad_()
    batch = filled(x, 5)
    assert torch.equal(batch[:2], x)
    assert torch.equal(batch[2:], x[:1].expand(3, -1, -1, -1))
    batch.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("channels", [1, 3])
def test_nothing_is_compiled_again_when_the_batch_size_changes(channels: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    encoder = Encoder(nn.Sequential(nn.Conv2d(channels, 3, 1), Smooth()), ["1.norm1", None])

    def visit(*counts: int) -> int:
        for count in counts:
            with_gradient(encoder, images(count)[:, :channels])
            with torch.no_grad():
                encoder(images(count)[:, :channels])
        return counter.frame_count

    with fast(compile_after=0, backend=counter):
        assert visit(*SIZES) == 2 * len(SIZES)  # with and without a gradient
        assert visit(1, 2, 3, 5, 7, 8, 11, 16, 19, 20, 1) == 2 * len(SIZES)


def test_many_networks_of_one_class_are_all_compiled() -> None:
    counter = CompileCounterWithBackend("eager")
    for seed in range(12):  # more than torch compiles of one function when left alone
        encoder, x = Encoder(Smooth(seed).requires_grad_(False), ["norm1", None][seed % 2 :]), images(4 + seed % 3)
        encoder.model.scale = 1.0 + seed
        expected = encoder(x)
        with fast(sizes=(4, 5, 6), compile_after=0, backend=counter):
            torch.testing.assert_close(encoder(x), expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 12


def test_a_size_is_compiled_after_as_many_calls_as_asked_for() -> None:
    encoder, counter = Encoder(Smooth()), CompileCounterWithBackend("eager")
    compiled = []
    with fast(compile_after=2, backend=counter):
        for count in (4, 8, 4, 4, 8, 4, 8):
            encoder(images(count).requires_grad_())
            compiled.append(counter.frame_count)
    assert compiled == [0, 0, 0, 1, 1, 1, 2]


def test_without_a_gradient_it_takes_ten_times_as_many_calls_and_the_facts_tell_of_both() -> None:
    encoder, counter = Encoder(Smooth()), CompileCounterWithBackend("eager")
    with fast(compile_after=2, backend=counter), torch.no_grad():
        for _ in range(20):
            encoder(images(4))
        (fact,) = facts(encoder.model)
        assert (fact["pace"], fact["compiled"], fact["calls"]) == ("prepared", False, {"4": 20})
        encoder(images(4))
    (fact,) = facts(encoder.model)
    assert counter.frame_count == 1 and fact["compiled"] and fact["precision"] == "torch.float32"
    assert facts(nn.Identity()) == []


def test_what_comes_out_of_a_graph_is_not_overwritten_by_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, place = [], torch.zeros(4, 5)

    def recorded(tapped: Tapped, **options: Any) -> Any:
        modes.append(options["mode"])
        return lambda x: tuple(place.copy_(output) for output in tapped(x))

    monkeypatch.setattr(torch, "compile", recorded)
    encoder, network = Encoder(Smooth()), Smooth().eval()
    with fast(compile_after=0, graphs=SIZES[-1]), torch.no_grad():
        first, second = encoder(images(4)), encoder(images(4, seed=1))
        torch.testing.assert_close(first, network(images(4)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(second, network(images(4, seed=1)), rtol=1e-4, atol=1e-5)
    assert modes == ["reduce-overhead"]


def test_only_small_batches_are_recorded_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def compiled(tapped: Tapped, **options: Any) -> Any:
        modes.append(options["mode"])
        return tapped

    monkeypatch.setattr(torch, "compile", compiled)
    encoder = Encoder(Smooth())
    with fast(compile_after=0, graphs=SIZES[0]), torch.no_grad():
        for count in (4, 8, 3, 7):
            encoder(images(count))
    assert modes == ["reduce-overhead", None]


def test_no_graph_is_launched_while_the_gradient_of_another_is_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def compiled(tapped: Tapped, **options: Any) -> Any:
        def run(x: Tensor) -> Any:
            launched.append(options["mode"])
            return tapped(x)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    first, second = Encoder(Smooth()), Encoder(Smooth())
    x = images(4).requires_grad_()
    with fast(compile_after=0, graphs=SIZES[-1]):
        both = first(x).sum() + second(x).sum()  # type: ignore[union-attr]
        torch.autograd.grad(both, x)
        assert launched == ["reduce-overhead", None]
        torch.autograd.grad(first(x).sum(), x)  # type: ignore[union-attr]
        abandoned = first(x)
        assert launched[2:] == ["reduce-overhead", "reduce-overhead"]
        del abandoned
        again = first(x).sum()  # type: ignore[union-attr]
        torch.autograd.grad(again, x, retain_graph=True)
        second(x)
        assert launched[4:] == ["reduce-overhead", None]
        torch.autograd.grad(again, x)
        (slope,) = torch.autograd.grad(first(x).square().sum(), x, create_graph=True)  # type: ignore[union-attr]
        second(x)
        torch.autograd.grad(slope.sum(), x)
        del slope, again
        second(x)
    assert launched[6:] == ["reduce-overhead", None, "reduce-overhead"]


def test_a_gradient_out_of_a_graph_is_a_copy() -> None:
    x = images(4)
    (plain,), wanted = with_gradient(Encoder(Smooth()), x)
    with fast(graphs=SIZES[-1]):
        (found,), gradient = with_gradient(Encoder(Smooth()), x)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def refusing(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    raise RuntimeError("no compiler here\nand more")


class LateRefusal(torch.autograd.Function):
    """An identity whose gradient's code turns out to be missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no compiler here")


def refusing_late(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    return lambda *args: tuple(LateRefusal.apply(output) for output in graph(*args))


@pytest.mark.parametrize("backend", [refusing, refusing_late])
def test_where_compiling_fails_the_copy_runs_uncompiled_and_says_so_once(backend: Any) -> None:
    encoder, x = Encoder(Smooth()), images(4)
    latents, gradient = with_gradient(encoder, x)
    with fast(compile_after=0, backend=backend), pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            found, other = with_gradient(encoder, x)
            torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-5)
    (message,) = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert message.startswith("Smooth cannot be compiled, and runs uncompiled, which is slower: ")
    assert "no compiler here" in message
    assert "and more" not in message


def out_of_memory(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    def run(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    return run


def test_too_little_memory_is_the_callers_to_know() -> None:
    encoder = Encoder(Smooth())
    with (
        fast(compile_after=0, backend=out_of_memory),
        warnings.catch_warnings(),
        pytest.raises(torch.OutOfMemoryError),
    ):
        warnings.simplefilter("error")
        encoder(images(4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_several_gradients_can_be_taken_of_one_pass(backend: str) -> None:
    encoder, x = Encoder(Smooth(), ["norm1", None]), images(3).requires_grad_()

    def gradients() -> list[Tensor]:
        maps, logits = encoder(x)
        return [
            torch.autograd.grad(maps.square().sum(), x, retain_graph=True)[0],
            torch.autograd.grad(logits.square().sum(), x, retain_graph=True)[0],
            torch.autograd.grad(logits.square().sum() + maps.sum(), x)[0],
        ]

    expected = gradients()
    with fast(compile_after=0, backend=backend), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with_gradient(encoder, x.detach())  # compiled for one gradient only
        torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-5)
    (network,) = _records[encoder.model].networks.values()
    assert network is not None
    assert network.compiles


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_gradient_of_a_graph_that_was_not_kept_is_refused(backend: str) -> None:
    encoder, x = Encoder(Smooth()), images(3).requires_grad_()
    with fast(compile_after=0, backend=backend):
        total = encoder(x).sum()
        torch.autograd.grad(total, x)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(total, x)
    (network,) = _records[encoder.model].networks.values()
    assert network is not None
    assert network.compiles


class Constant(nn.Module):
    """Gives every image's sum, and a layer that gives the same for every image."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = Fixed()

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(dim=1, keepdim=True) + self.fixed(x)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), 1)


def test_a_layer_that_does_not_depend_on_the_images_has_no_gradient() -> None:
    encoder, x = Encoder(Constant(), ["fixed", None]), images(3).requires_grad_()
    with fast():
        fixed, sums = encoder(x)
    assert not fixed.requires_grad
    (gradient,) = torch.autograd.grad(sums.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
