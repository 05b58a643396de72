"""Fitting several detectors: one pass, the same answers as one by one, and a cache that is right or not used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gatecrash import features
from gatecrash.detectors import (
    GMM,
    MSP,
    Card,
    Detector,
    Learner,
    Mahalanobis,
    RelativeMahalanobis,
    ScoreEnsemble,
    Temperature,
    ZhengHong,
    distance,
    fit_all,
)
from gatecrash.encoder import Encoder
from gatecrash.images import Images
from gatecrash.objective import single
from gatecrash.protocols import Latent, leaves
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

Batch = tuple[Tensor, Tensor]


def counted(network: nn.Module) -> list[int]:
    """A list that grows by the size of the batch whenever the network runs."""
    calls: list[int] = []
    network.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    return calls


def state(detector: Detector) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in detector.state_dict().items() if ".model." not in key}


def assert_same_state(first: Detector, second: Detector) -> None:
    assert first.fitted and state(first).keys() == state(second).keys()
    for key, tensor in state(first).items():
        assert torch.equal(tensor, state(second)[key]), key


def in_batches(data: Batch, size: int = 16) -> list[Batch]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def several(network: nn.Module, other: nn.Module) -> list[Detector]:
    """Detectors of all kinds over two networks, some at the same layer, some of them members."""
    shared = Mahalanobis(network, layers=["maps", "hidden"])
    return [
        MSP(network),
        Mahalanobis(network, layers="hidden", magnitude=0.01),
        RelativeMahalanobis(network, layers="hidden"),
        RelativeMahalanobis(Encoder(network, pool="flatten"), layers="maps"),
        shared,
        ScoreEnsemble([shared, MSP(other), Mahalanobis(other), ScoreEnsemble([RelativeMahalanobis(network)])]),
    ]


class Streaming(Detector):
    """The distance from the mean, learnt batch by batch."""

    card = Card(paper="a test, 2026", year=2026, reads="features", fit="inliers")
    mean: Tensor

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__(encoder)
        self.taken: list[tuple[Tensor, Tensor | None]] = []
        self.finished = 0

    def learner(self) -> Learner:
        return Streamed(self)

    def judge(self, z: Latent) -> Tensor:
        return (single(z) - self.mean).norm(dim=1)


class Streamed:
    def __init__(self, detector: Streaming) -> None:
        self.detector = detector

    def take(self, z: Latent, y: Tensor | None, /) -> None:
        self.detector.taken.append((single(z), y))

    def finish(self) -> None:
        self.detector.finished += 1
        self.detector.mean = torch.cat([z for z, _ in self.detector.taken]).mean(dim=0)


# One pass


def test_every_network_runs_once_per_batch() -> None:
    network, other = trained_net(), trained_net(7)
    calls, others = counted(network), counted(other)
    detectors = several(network, other)
    fit_all(detectors, squares(40), batch_size=16)
    assert all(detector.fitted for detector in detectors)
    assert calls == others == [16, 16, 8]


def test_fitted_together_is_fitted_one_by_one_bit_for_bit() -> None:
    networks, data = (trained_net(), trained_net(7)), in_batches(squares(60))
    together, alone = several(*networks), several(*networks)
    fit_all(together, data)
    for detector in alone:
        detector.fit(data)
    for first, second in zip(together, alone, strict=True):
        assert_same_state(first, second)


def test_a_detector_named_twice_learns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[int] = []
    monkeypatch.setattr(Mahalanobis, "fit_latents", lambda self, z, y: learnt.append(len(z)))
    detector = Mahalanobis(trained_net())
    fit_all([detector, ScoreEnsemble([detector, detector]), detector], squares(9))
    assert learnt == [9]


def test_detectors_at_one_layer_are_given_the_same_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    for kind in (Mahalanobis, RelativeMahalanobis):
        monkeypatch.setattr(kind, "fit_latents", lambda self, z, y: given.append(z))
    network = trained_net()
    fit_all([Mahalanobis(network, layers="hidden"), RelativeMahalanobis(Encoder(network, "hidden"))], squares(9))
    assert len(given) == 2 and given[0] is given[1]


def test_a_layer_is_kept_once_however_it_is_combined_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[type, list[Tensor]] = {}
    kinds = (GMM, Mahalanobis, ZhengHong, Temperature)
    for kind in kinds:
        monkeypatch.setattr(kind, "fit_latents", lambda self, z, y: given.update({type(self): leaves(z)}))
    network, (x, y) = trained_net(), squares(9)
    fit_all(
        [
            GMM(network, layers="hidden"),
            Mahalanobis(network, layers=["maps", "hidden"]),
            ZhengHong(Encoder(network, "hidden")),
            Temperature(Encoder(network, pool="flatten")),
        ],
        in_batches((x, y), 4),
    )
    hidden, maps, logits = given[GMM][0], given[Mahalanobis][0], given[Temperature][0]
    wanted = {GMM: [hidden], Mahalanobis: [maps, hidden], ZhengHong: [hidden, logits], Temperature: [logits]}
    for kind in kinds:
        assert all(one is other for one, other in zip(given[kind], wanted[kind], strict=True))
    for tensor, name in ((hidden, "hidden"), (maps, "maps"), (logits, None)):
        torch.testing.assert_close(tensor, Encoder(network, name)(x).detach())


def test_one_layer_with_two_poolings_is_kept_as_both() -> None:
    network, data = trained_net(), in_batches(squares(40))
    together = [Mahalanobis(Encoder(network, "maps", pool=pool)) for pool in ("mean", "flatten")]
    fit_all(together, data)
    for detector in together:
        assert_same_state(detector, Mahalanobis(detector.encoder).fit(data))


def test_detectors_that_need_no_fitting_read_nothing() -> None:
    def stream() -> Iterator[Tensor]:
        raise AssertionError("the data was read")
        yield

    network = trained_net()
    calls = counted(network)
    fit_all([MSP(network), ScoreEnsemble([MSP(network)])], stream())
    fit_all([], stream())
    assert calls == []


def test_a_stream_that_can_be_read_once_is_enough(tmp_path: Path) -> None:
    network, data = trained_net(), in_batches(squares(40))
    from_list = several(network, trained_net(7))
    fit_all(from_list, data)
    for cache in (None, tmp_path):
        detectors = several(network, trained_net(7))
        fit_all(detectors, iter(data), cache=cache)
        for detector, wanted in zip(detectors, from_list, strict=True):
            assert_same_state(detector, wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_may_fill_the_same_tensors_again() -> None:
    def stream() -> Iterator[Batch]:
        x, y = torch.empty(16, 1, 6, 6), torch.empty(16, dtype=torch.long)
        for images, labels in in_batches(squares(48)):
            yield x.copy_(images), y.copy_(labels)

    network = trained_net()
    assert_same_state(
        RelativeMahalanobis(network, layers="hidden").fit(stream()),
        RelativeMahalanobis(network, layers="hidden").fit(in_batches(squares(48))),
    )


def test_held_out_data_that_can_be_read_once_serves_every_trial_of_every_detector() -> None:
    network = trained_net()
    held_out, outliers = squares(20, 1)[0], blank(20, 2)

    def fitted(held_out: Images, outliers: Images) -> list[Mahalanobis]:
        detectors = [
            Mahalanobis(network, layers="hidden", magnitude=[0.02, 0.0]),
            Mahalanobis(network, layers=["maps", "hidden"], combine="logistic"),
        ]
        fit_all(detectors, squares(60), held_out=held_out, outliers=outliers)
        return detectors

    from_streams = fitted(iter(held_out.split(8)), iter(outliers.split(8)))
    from_lists = fitted(held_out.split(8), outliers.split(8))
    for detector, wanted in zip(from_streams, from_lists, strict=True):
        assert_same_state(detector, wanted)


def test_missing_labels_are_noticed_before_the_whole_set_was_encoded() -> None:
    network = trained_net()
    calls = counted(network)
    with pytest.raises(ValueError, match=r"^RelativeMahalanobis\.fit needs labels"):
        fit_all([Streaming(network), RelativeMahalanobis(network)], squares(40)[0].split(8))
    assert len(calls) == 1


# Learning batch by batch


@pytest.mark.parametrize("cached", [False, True])
def test_a_learner_takes_every_batch_once_in_order_and_finishes(cached: bool, tmp_path: Path) -> None:
    network, (x, y) = trained_net(), squares(40)
    for _ in range(2):
        learning, keeping = Streaming(Encoder(network, "hidden")), Mahalanobis(network, layers="hidden")
        calls = counted(network)
        fit_all([learning, keeping], (x, y), batch_size=16, cache=tmp_path if cached else None)
        assert calls == [16, 16, 8] and learning.finished == 1
        assert [len(z) for z, _ in learning.taken] == [16, 16, 8]
        assert torch.equal(torch.cat([labels for _, labels in learning.taken]), y)
        expected = Encoder(network, "hidden")(x).detach()
        torch.testing.assert_close(torch.cat([z for z, _ in learning.taken]), expected)
        torch.testing.assert_close(learning.mean, expected.mean(dim=0))
        assert keeping.fitted


def test_a_learner_takes_images_without_labels() -> None:
    detector = Streaming(trained_net()).fit(squares(40)[0].split(16))
    assert [labels for _, labels in detector.taken] == [None] * 3 and detector.fitted


# The cache


def test_a_second_fit_on_the_same_data_runs_the_network_on_a_few_images_only(tmp_path: Path) -> None:
    network, other, data = trained_net(), trained_net(7), squares(60)
    first, second = several(network, other), several(deepcopy(network), deepcopy(other))
    fit_all(first, data, cache=tmp_path)
    calls = [counted(part.model) for detector in second for part in detector.modules() if isinstance(part, Encoder)]
    fit_all(second, DataLoader(TensorDataset(*data), batch_size=16), cache=tmp_path)
    assert len(calls) > 5 and {size for part in calls for size in part} == {features.FIRST}
    for detector, wanted in zip(second, first, strict=True):
        assert_same_state(detector, wanted)


def test_the_data_is_read_once_and_once_more_for_its_hash(tmp_path: Path) -> None:
    class Counted:
        reads = 0

        def __iter__(self) -> Iterator[Batch]:
            self.reads += 1
            return iter(in_batches(squares(40)))

    data = Counted()
    for cache, reads in ((None, 1), (tmp_path, 2), (tmp_path, 1)):
        data.reads = 0
        fit_all(several(trained_net(), trained_net(7)), data, cache=cache)
        assert data.reads == reads


def test_only_what_is_not_known_is_encoded(tmp_path: Path) -> None:
    network, data = trained_net(), squares(60)
    Mahalanobis(network, layers="hidden").fit(data, cache=tmp_path)
    calls = counted(network)
    known = [Mahalanobis(network, layers="hidden"), RelativeMahalanobis(network, layers="hidden")]
    fit_all(known, data, cache=tmp_path)
    assert calls == [features.FIRST]
    calls.clear()
    new = RelativeMahalanobis(network, layers="maps")
    fit_all([*known, new], data, cache=tmp_path)
    assert calls == [features.FIRST, 60]
    assert_same_state(new, RelativeMahalanobis(network, layers="maps").fit(data))
    assert_same_state(known[1], RelativeMahalanobis(network, layers="hidden").fit(data))


def with_another_weight(network: nn.Module) -> nn.Module:
    network = deepcopy(network)
    with torch.no_grad():
        network.get_parameter("maps.0.weight")[0, 0, 0, 0] += 0.1
    return network


def with_another_image(data: Batch) -> Batch:
    x = data[0].clone()
    x[7, 0, 2, 2] += 0.05
    return x, data[1]


CHANGES: dict[str, Callable[[nn.Module, Batch], tuple[Encoder, Batch]]] = {
    "a weight": lambda network, data: (Encoder(with_another_weight(network), "maps"), data),
    "an image": lambda network, data: (Encoder(network, "maps"), with_another_image(data)),
    "the order": lambda network, data: (Encoder(network, "maps"), (data[0].flip(0), data[1].flip(0))),
    "the tap": lambda network, data: (Encoder(network, "hidden"), data),
    "the number of taps": lambda network, data: (Encoder(network, ["maps"]), data),
    "the mean": lambda network, data: (Encoder(network, "maps", mean=[0.1]), data),
    "the std": lambda network, data: (Encoder(network, "maps", std=[0.5]), data),
    "the size": lambda network, data: (Encoder(network, "maps", size=7), data),
    "the pooling": lambda network, data: (Encoder(network, "maps", pool="flatten"), data),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_after_a_change_the_network_runs_again(
    change: Callable[[nn.Module, Batch], tuple[Encoder, Batch]], tmp_path: Path
) -> None:
    network, data = trained_net(), squares(60)
    Mahalanobis(Encoder(network, "maps")).fit(data, cache=tmp_path)
    encoder, changed = change(network, data)
    calls = counted(encoder.model)
    detector = Mahalanobis(encoder).fit(changed, cache=tmp_path)
    assert calls == [60]
    assert_same_state(detector, Mahalanobis(encoder).fit(changed))
    assert len(list(tmp_path.iterdir())) == 2


def test_other_labels_of_the_same_images_are_learnt_from_the_cache(tmp_path: Path) -> None:
    network, (x, y) = trained_net(), squares(60)
    Mahalanobis(network, layers="hidden").fit((x, y), cache=tmp_path)
    calls = counted(network)
    detector = Mahalanobis(network, layers="hidden").fit((x, (y > 0).long()), cache=tmp_path)
    assert calls == [features.FIRST]
    assert_same_state(detector, Mahalanobis(network, layers="hidden").fit((x, (y > 0).long())))


def test_missing_labels_are_an_error_when_the_latents_are_known_too(tmp_path: Path) -> None:
    network, (x, y) = trained_net(), squares(60)
    Mahalanobis(network).fit((x, y), cache=tmp_path)
    for data in (x, [(x[:30], y[:30]), x[30:]]):
        with pytest.raises(ValueError, match=r"^Mahalanobis\.fit needs labels"):
            Mahalanobis(network).fit(data, cache=tmp_path)


@pytest.mark.parametrize("kept", [0, 50, -1])
def test_latents_in_a_damaged_file_are_made_again(kept: int, tmp_path: Path) -> None:
    network, data = trained_net(), squares(60)
    wanted = Mahalanobis(network).fit(data, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    calls = counted(network)
    assert_same_state(Mahalanobis(network).fit(data, cache=tmp_path), wanted)
    assert calls == [60] and path.read_bytes() == whole
    assert_same_state(Mahalanobis(network).fit(data, cache=tmp_path), wanted)
    assert calls == [60, features.FIRST]


class Reordered:
    """A loader that gives its data in the next of several orders whenever it is read."""

    def __init__(self, data: Batch, orders: str) -> None:
        self.data = data
        seeds = [torch.Generator().manual_seed(ord(letter)) for letter in orders]
        self.orders = cycle([torch.randperm(len(data[0]), generator=seed) for seed in seeds])

    def __iter__(self) -> Iterator[Batch]:
        order = next(self.orders)
        return iter(in_batches((self.data[0][order], self.data[1][order])))


@pytest.mark.parametrize("orders", ["ABAC", "AAAB", "ABCD", "AABC"])
def test_a_loader_that_shuffles_never_mixes_the_labels_of_one_order_with_the_latents_of_another(
    orders: str, tmp_path: Path
) -> None:
    network, data = trained_net(), squares(60)
    loader, x = Reordered(data, orders), torch.cat([squares(10, 5)[0], blank(10)])
    wanted = Mahalanobis(network, layers="hidden").fit(data).scores(x)
    other = RelativeMahalanobis(network, layers="maps").fit(data).scores(x)
    first = Mahalanobis(network, layers="hidden").fit(loader, cache=tmp_path)
    second = Mahalanobis(network, layers="hidden")
    new = RelativeMahalanobis(network, layers="maps")
    fit_all([second, new], loader, cache=tmp_path)
    for detector, scores in ((first, wanted), (second, wanted), (new, other)):
        torch.testing.assert_close(detector.scores(x), scores, rtol=1e-3, atol=1e-3)


def test_latents_of_a_loader_that_shuffles_are_not_kept(tmp_path: Path) -> None:
    loader = DataLoader(
        TensorDataset(*squares(60)), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    Mahalanobis(trained_net()).fit(loader, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Scaled(nn.Module):
    """A network with a number and a function that are no part of its weights or of how it is shown."""

    def __init__(self, factor: float = 1.0, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor, self.activation = nn.Linear(36, 4), factor, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.activation(self.layer(x.flatten(1)))


@pytest.mark.parametrize("other", [Scaled(factor=1.1), Scaled(activation=torch.relu)], ids=["number", "function"])
@pytest.mark.parametrize("batch", [1, 60])
def test_what_a_network_made_that_only_looks_the_same_is_made_anew(
    other: nn.Module, batch: int, tmp_path: Path
) -> None:
    data = in_batches(squares(60), batch)
    first = Mahalanobis(Scaled()).fit(data, cache=tmp_path)
    assert features.network_hash(other) == features.network_hash(Scaled())
    with pytest.warns(UserWarning, match=r"holds what another network made of the images; it is made anew"):
        detector = Mahalanobis(other).fit(data, cache=tmp_path)
    assert_same_state(detector, Mahalanobis(other).fit(data))
    assert not torch.equal(detector.scores(squares(5)[0]), first.scores(squares(5)[0]))
    calls = counted(other)
    assert_same_state(Mahalanobis(other).fit(data, cache=tmp_path), detector)
    assert sum(calls) == features.FIRST


# Arguments that are none


def test_one_detector_is_not_a_list_of_them() -> None:
    network = trained_net()
    with pytest.raises(ValueError, match=r"^detectors must be a list of them, got one MSP; put it in brackets$"):
        fit_all(MSP(network), squares(9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^detectors must be a list of them, got str$"):
        fit_all("gmm", squares(9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^detectors must be a list of them, and one of it is a SmallNet$"):
        fit_all([MSP(network), network], squares(9))  # type: ignore[list-item]


@pytest.mark.parametrize("size", [0, -1, 2.5, "16", True])
def test_a_batch_of_no_size_is_refused_before_anything_is_forgotten(size: int) -> None:
    detector = Mahalanobis(trained_net()).fit(squares(60))
    with pytest.raises(ValueError, match=f"^batch_size must be a whole number of at least 1, got {size!r}$"):
        fit_all([detector], squares(9), batch_size=size)
    assert detector.fitted
    with pytest.raises(ValueError, match=r"^batch_size must be a whole number of at least 1"):
        detector.scores(squares(9)[0], batch_size=size)


def test_a_cache_that_cannot_be_a_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    detector = Mahalanobis(network := trained_net()).fit(squares(60))
    calls = counted(network)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"^cache must be a folder, and {folder} cannot be one: "):
            detector.fit(squares(60), cache=folder)
    with pytest.raises(ValueError, match=r"^cache must be the path of a folder, got 3$"):
        detector.fit(squares(60), cache=3)  # type: ignore[arg-type]
    assert not calls and detector.fitted


# Memory

MEASURE = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from gatecrash import features
from gatecrash.mixture import rows
from gatecrash.detectors import GMM, Mahalanobis, RelativeMahalanobis, Temperature, ZhengHong, distance, fit_all
from gatecrash.encoder import Encoder

features.ROWS //= 32
distance.CHUNK //= 32
rows.cells = lambda device: 1 << 17
torch.set_num_threads(1)
torch.manual_seed(0)

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(4, 512), nn.Tanh())
        self.left, self.right, self.head = nn.Identity(), nn.Identity(), nn.Linear(512, 10)
        with torch.no_grad():
            self.head.bias[0] += 9  # nearly all images are of one class

    def forward(self, x):
        z = self.features(x)
        return self.head(torch.cat([self.left(z[:, :256]), self.right(z[:, 256:])], dim=1))

network = Network().eval()
one, two, logits = Encoder(network, "features"), Encoder(network, ["left", "right"]), Encoder(network)
few = {"components": 5, "steps": 2}
detectors = {
    "distances": [Mahalanobis(one), RelativeMahalanobis(one)],
    "a mixture of two layers": [GMM(two, **few)],
    "mixtures of classes": [ZhengHong(one, **few)],
    "all": [GMM(one, **few), Mahalanobis(one), RelativeMahalanobis(one), ZhengHong(one, **few), Temperature(logits)],
}[sys.argv[1]]

def stream(count):
    for start in range(0, count, 256):
        yield torch.rand(min(256, count - start), 1, 2, 2), torch.arange(min(256, count - start)) % 10

for count in map(int, sys.argv[2:]):
    fit_all(detectors, stream(count))
    # The most that was ever resident; getrusage would count what the process that started this one had.
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("which", ["distances", "a mixture of two layers", "mixtures of classes", "all"])
def test_half_a_million_features_fit_in_two_gibibytes(which: str) -> None:
    few, many, all_of_them = 12_000, 24_000, 500_000  # with fewer, chunks that are not full yet would count as features
    command = [sys.executable, "-c", MEASURE, which, str(few), str(many)]
    exact = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # every tensor goes back when it is freed
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=exact).stdout
    with_few, with_many = (int(line) * 1024 for line in output.split())
    per_feature = (with_many - with_few) / (many - few)
    assert per_feature > 0.9 * 512 * 4  # the features themselves, or nothing was measured
    # Beside them a block while it is put together, and chunks: part, class means, centred, weighted, the one before.
    fixed = features.ROWS * 512 * 4 + 5 * distance.CHUNK * 8
    assert all_of_them * per_feature + fixed < 2 * 2**30
