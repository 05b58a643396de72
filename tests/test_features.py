"""Latents of any amount of data: one pass for several taps, kept once, remembered by what they were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gatecrash import features
from gatecrash.encoder import Encoder
from gatecrash.features import Cache, Fingerprint, Keeper, data_hash, encoded, shared_pass
from gatecrash.images import Images
from gatecrash.protocols import leaves
from small_models import fragile_net, one_thread, squares, trained_net  # noqa: F401

CPU = torch.device("cpu")


def counted(network: nn.Module) -> list[int]:
    """A list that grows by the size of the batch whenever the network runs."""
    calls: list[int] = []
    network.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    return calls


def watched(data: Images) -> Fingerprint:
    """What a pass over the data leaves behind."""
    seen = Fingerprint()
    list(seen.watch(data))
    return seen


class Twice(Encoder):
    """An encoder of somebody else's, which does more than pick from one pass."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


# One pass


def test_taps_of_one_pass_are_those_of_their_own_and_the_network_runs_once() -> None:
    network, x = trained_net(), squares(7)[0]
    readers = [
        Encoder(network),
        Encoder(network, "maps"),
        Encoder(network, ["hidden", None, "maps"], pool="flatten"),
        Encoder(network, "maps", pool=None),
        Encoder(network, ["head"]),
        Encoder(network),
    ]
    expected = [reader(x) for reader in readers]
    calls = counted(network)
    found = shared_pass(readers)(x)
    assert calls == [7]
    assert [type(z) for z in found] == [type(z) for z in expected]
    for z, wanted in zip(found, expected, strict=True):
        for leaf, right in zip(leaves(z), leaves(wanted), strict=True):
            assert torch.equal(leaf, right)
    assert found[2][0].shape == (7, 5) and found[3].shape == (7, 4, 2, 2)


def test_other_networks_sizes_and_normalisations_have_passes_of_their_own() -> None:
    network, other, x = trained_net(), trained_net(7), squares(5)[0]
    readers = [
        Encoder(network, "maps"),
        Encoder(other, "maps"),
        Encoder(network, "maps", mean=[0.5]),
        Encoder(network, "maps", std=[0.5]),
        Encoder(network, "maps", size=(6, 6)),
        Encoder(network, "hidden"),
    ]
    expected = [reader(x) for reader in readers]
    calls, others = counted(network), counted(other)
    found = shared_pass(readers)(x)
    assert (calls, others) == ([5] * 4, [5])
    assert all(torch.equal(z, wanted) for z, wanted in zip(found, expected, strict=True))


def test_what_is_no_plain_encoder_is_asked_itself() -> None:
    network, x = trained_net(), squares(5)[0]
    plain, twice, brightness = shared_pass([Encoder(network), Twice(network), lambda x: x.mean(dim=(1, 2, 3))])(x)
    assert torch.equal(plain, network(x))
    assert torch.equal(twice, 2 * plain)
    assert torch.equal(brightness, x.mean(dim=(1, 2, 3)))


def test_latents_come_batch_by_batch_with_their_labels_and_without_their_history() -> None:
    network, (x, y) = trained_net(), squares(10)
    found = list(encoded(shared_pass([Encoder(network), Encoder(network, "hidden")]), (x, y), CPU, batch_size=4))
    assert [len(labels) for _, labels in found] == [4, 4, 2]
    assert torch.equal(torch.cat([labels for _, labels in found]), y)
    for (logits, hidden), _ in found:
        assert not logits.requires_grad and torch.equal(network.head(hidden), logits)
    assert [labels for _, labels in encoded(shared_pass([Encoder(network)]), x, CPU)] == [None]


@pytest.mark.parametrize("reader", [0, 1])
def test_nan_in_any_latent_names_its_batch(reader: int) -> None:
    x = squares(12)[0]
    x[9, 0, 5, 5] = 1.0
    readers = [Encoder(trained_net()), Encoder(trained_net(), "maps")]
    readers[reader] = Encoder(fragile_net(), "maps")
    with pytest.raises(ValueError, match=r"^the network's output has NaN or infinity, first in batch 2$"):
        list(encoded(shared_pass(readers), x, CPU, batch_size=4))


# Keeping


@pytest.mark.parametrize("sizes", [[3], [1, 2, 3, 4], [5, 5], [4, 4, 1], [12, 1]])
def test_batches_are_put_together_in_their_order(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "ROWS", 5)
    vectors, maps = torch.rand(sum(sizes), 3), torch.rand(sum(sizes), 2, 2, dtype=torch.float64)
    keeper = Keeper()
    for z, m in zip(vectors.split(sizes), maps.split(sizes), strict=True):
        keeper.take((z, (m, z)))
    whole = keeper.whole()
    assert torch.equal(whole[0], vectors) and torch.equal(whole[1][0], maps) and torch.equal(whole[1][1], vectors)
    assert whole[1][0].dtype == torch.float64


def test_a_keeper_without_batches_says_so_and_one_that_was_emptied_is_new() -> None:
    keeper = Keeper()
    for value in (1.0, 2.0):
        with pytest.raises(ValueError, match="no images to learn from"):
            keeper.whole()
        keeper.take(torch.full((2, 3), value))
        assert torch.equal(keeper.whole(), torch.full((2, 3), value))


def test_a_batch_may_be_overwritten_after_it_was_taken() -> None:
    keeper, buffer = Keeper(), torch.empty(2, 3)
    for value in (1.0, 2.0):
        keeper.take(buffer.fill_(value))
    assert torch.equal(keeper.whole(), torch.tensor([[1.0], [1.0], [2.0], [2.0]]).expand(4, 3))


def test_a_view_does_not_keep_all_that_it_is_a_view_of() -> None:
    keeper = Keeper()
    keeper.take(torch.rand(4, 100, 3)[:, 0])
    (kept,) = (part for block in keeper.columns[0].blocks for part in block)
    assert kept.untyped_storage().nbytes() == 4 * 3 * 4


# Hashes


def test_the_hash_of_images_does_not_depend_on_their_batches_or_labels() -> None:
    x, y = squares(20)
    forms: list[Images] = [
        (x, y),
        (x, y + 1),
        [x[:1], x[1:]],
        [(x[:13], y[:13]), x[13:]],
        DataLoader(TensorDataset(x, y), batch_size=6),
        x.flip(0).flip(0),
        x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    ]
    assert {data_hash(form) for form in forms} == {data_hash(x)}


def test_the_hash_of_images_depends_on_all_else() -> None:
    x = squares(20)[0]
    pixel = x.clone()
    pixel[19, 0, 5, 5] += 1e-7
    forms: list[Images] = [
        x,
        pixel,
        x.flip(0),
        x[:19],
        x.double(),
        x.view(20, 1, 4, 9),
        x.view(20, 4, 3, 3),
        x.view(80, 1, 3, 3),
        [x[:10], x[10:].view(10, 1, 4, 9)],
        [x[:11], x[11:].view(9, 1, 4, 9)],
        [x[:10].view(10, 1, 4, 9), x[10:]],
        [],
    ]
    assert len({data_hash(form) for form in forms}) == len(forms)


# The cache


class Shifted(nn.Module):
    """A network with a number in a buffer that is not saved."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + self.shift


def with_another_weight(network: nn.Module) -> nn.Module:
    with torch.no_grad():
        network.get_parameter("head.bias")[1] += 1e-6
    return network


def test_the_path_is_that_of_the_weights_the_images_and_the_taps() -> None:
    x = squares(9)[0]
    network = trained_net()

    def path(encoder: Encoder, data: Images = x) -> Path | None:
        return Cache("folder", data).path(encoder)

    same = [
        path(Encoder(network, "hidden")),
        path(Encoder(deepcopy(network), "hidden")),
        path(Encoder(network.train(), "maps").at("hidden")),
        path(Encoder(network, "hidden"), [x[:4], (x[4:], squares(9)[1][4:])]),
    ]
    assert len(set(same)) == 1 and same[0] is not None and same[0].parent == Path("folder")
    different = [
        same[0],
        path(Encoder(network)),
        path(Encoder(network, "maps")),
        path(Encoder(network, ["hidden"])),
        path(Encoder(network, ["hidden", "maps"])),
        path(Encoder(network, ["maps", "hidden"])),
        path(Encoder(network, ["hidden", None])),
        path(Encoder(network, "hidden", pool="flatten")),
        path(Encoder(network, "hidden", mean=[0.5])),
        path(Encoder(network, "hidden", std=[0.5])),
        path(Encoder(network, "hidden", size=6)),
        path(Encoder(with_another_weight(deepcopy(network)), "hidden")),
        path(Encoder(trained_net(7), "hidden")),
        path(Encoder(network, "hidden"), x.flip(0)),
        path(Encoder(network, "hidden"), x[1:]),
        path(Encoder(deepcopy(network).double(), "hidden"), x),
    ]
    assert None not in different
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Sequential(nn.Flatten(), nn.ReLU()), nn.Sequential(nn.Flatten(), nn.Tanh())),
        (nn.AvgPool2d(2), nn.AvgPool2d(3)),
        (Shifted(0.25), Shifted(0.5)),
    ],
    ids=["layers", "options", "buffers that are not saved"],
)
def test_networks_of_the_same_weights_are_not_taken_for_each_other(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict() == other.state_dict()
    cache = Cache("folder", squares(3)[0])
    assert cache.path(Encoder(one)) == Cache("folder", squares(3)[0]).path(Encoder(deepcopy(one)))
    assert cache.path(Encoder(one)) != cache.path(Encoder(other))


@pytest.mark.parametrize(
    "make",
    [
        lambda network: Encoder(network, "maps", pool=None),
        lambda network: Encoder(network, ["maps", None], pool=None),
        Twice,
        lambda network: network.forward,
    ],
    ids=["maps", "maps among several", "another encoder", "a function"],
)
def test_maps_and_what_is_no_plain_encoder_are_not_kept(make: Callable[..., Encoder], tmp_path: Path) -> None:
    x = squares(4)[0]
    cache, reader = Cache(tmp_path, x), make(trained_net())
    cache.write(reader, torch.rand(4, 3), watched(x))
    assert cache.path(reader) is None and cache.read(reader, CPU) is None
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_read_only_once_is_not_read_for_its_hash() -> None:
    def stream() -> Iterator[Tensor]:
        yield from squares(4)[0].split(2)

    data = stream()
    assert Cache("folder", data).path(Encoder(trained_net())) is None
    assert len(list(data)) == 2


@pytest.mark.parametrize("layer", [None, "hidden", ["maps"], ["hidden", None]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_is_read_bit_for_bit(layer: str | list[str] | None, dtype: torch.dtype, tmp_path: Path) -> None:
    x = squares(6, dtype=dtype)[0]
    encoder = Encoder(trained_net(dtype=dtype), layer)
    z = encoder(x)
    Cache(tmp_path / "new", x).write(encoder, z, watched(x))
    again = Cache(tmp_path / "new", [x[:2], x[2:]]).read(encoder, CPU)
    assert type(again) is type(z)
    for leaf, wanted in zip(leaves(again), leaves(z), strict=True):
        assert leaf.dtype == dtype and torch.equal(leaf, wanted)
    assert Cache(tmp_path / "new", x.flip(0)).read(encoder, CPU) is None


def test_latents_of_other_images_than_those_hashed_are_not_written(tmp_path: Path) -> None:
    x = squares(6)[0]
    encoder = Encoder(trained_net())
    for other in (x.flip(0), x[:5]):
        Cache(tmp_path, x).write(encoder, encoder(other), watched(other))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["empty", "header", "short", "one bit", "text", "another's"])
def test_a_damaged_file_is_as_good_as_none(damage: str, tmp_path: Path) -> None:
    x = squares(6)[0]
    encoder, cache = Encoder(trained_net()), Cache(tmp_path, x)
    cache.write(encoder, encoder(x), watched(x))
    assert cache.read(encoder, CPU) is not None
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "header": content[:20],
            "short": content[:-1],
            "one bit": content[:-1] + bytes([content[-1] ^ 1]),
            "text": b"no tensors at all",
            "another's": content.replace(b'"0"', b'"9"'),
        }[damage]
    )
    assert cache.read(encoder, CPU) is None
    cache.write(encoder, encoder(x), watched(x))
    assert torch.equal(cache.read(encoder, CPU), encoder(x))
