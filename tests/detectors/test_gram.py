from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from gatecrash.detectors import Mahalanobis, fit_all, gram
from gatecrash.detectors.gram import Gram, gram_entries, gram_rows
from gatecrash.encoder import Encoder
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

Array = npt.NDArray[np.float64]

BOTH = ["maps", "hidden"]
TEN = list(range(1, 11))
ENTRIES = pytest.mark.parametrize("entries", [False, True], ids=["rows", "entries"])


class Chosen(nn.Module):
    """Pixels, shifted and scaled, are the maps; the logits are those of the first pixels."""

    def __init__(self, scale: float = 1.0, shift: float = 0.0, classes: int = 2) -> None:
        super().__init__()
        self.scale, self.shift, self.classes = scale, shift, classes
        self.maps = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, K)."""
        self.maps(self.scale * (x - self.shift))
        return 5 * x.flatten(1)[:, : self.classes]


class Tokens(nn.Module):
    """The same maps as tokens (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, 2)."""
        self.maps(x.flatten(2).mT)
        return 5 * x.flatten(1)[:, :2]


def pixels(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Images (N, 3, 2, 2), uniform."""
    return torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# A slow reference, from the equations


def statistics(maps: Array, powers: list[int], entries: bool) -> Array:
    """The Gram statistics of the maps (C, HW) of one image, (P, R), by full matrices."""
    rows = []
    for p in powers:
        matrix = (maps**p) @ (maps**p).T
        values = matrix.ravel() if entries else matrix.sum(axis=1)
        rows.append(np.sign(values) * np.abs(values) ** (1 / p))
    return np.stack(rows)


def softmax(logits: Array) -> Array:
    return np.exp(logits) / np.exp(logits).sum()


def deviation(
    image: Array, logits: Array, inliers: list[Array], predicted: list[int], powers: list[int], entries: bool
) -> float:
    """The deviation of one layer of one image, over its largest softmax probability."""
    g = statistics(image, powers, entries)
    same = [maps for maps, label in zip(inliers, predicted, strict=True) if label == logits.argmax()] or inliers
    known = np.stack([statistics(maps, powers, entries) for maps in same])
    low, high = known.min(axis=0), known.max(axis=0)
    total = 0.0
    for index in np.ndindex(*g.shape):
        total += max(low[index] - g[index], 0) / abs(low[index]) + max(g[index] - high[index], 0) / abs(high[index])
    return total / float(softmax(logits).max())


def read(network: nn.Module, x: Tensor, layer: str) -> tuple[list[Array], Array]:
    """The maps (C, HW) of every image, and the logits."""
    with torch.no_grad():
        maps, logits = Encoder(network, [layer, None], pool=None)(x)
    return [image.reshape(image.shape[0], -1).numpy() for image in maps], logits.numpy()


def reference(
    network: nn.Module, layers: list[str], data: tuple[Tensor, Tensor, Tensor], powers: list[int], entries: bool
) -> Array:
    """τ of images from inliers and held-out inliers, layer by layer and image by image."""
    inliers, held_out, new = data
    total = np.zeros(len(new))
    for layer in layers:
        known, logits = read(network, inliers, layer)
        predicted = logits.argmax(axis=1).tolist()
        mean, scores = (
            np.array(
                [
                    deviation(*pair, known, predicted, powers, entries)
                    for pair in zip(*read(network, x, layer), strict=True)
                ]
            )
            for x in (held_out, new)
        )
        total += scores / mean.mean()
    return total


def naive(maps: Tensor, power: int, entries: bool) -> Tensor:
    """The equation in torch, for its gradient; maps (B, C, HW)."""
    matrix = maps**power @ (maps**power).mT
    values = matrix.flatten(1) if entries else matrix.sum(dim=2)
    return values.sign() * values.abs() ** (1 / power)


def fast(maps: Tensor, powers: list[int], entries: bool) -> Tensor:
    return (gram_entries if entries else gram_rows)(maps, powers)


# The score


@ENTRIES
@pytest.mark.parametrize("powers", [10, [1], [2, 5], [7, 3]], ids=str)
def test_the_score_is_what_the_equations_give(powers: int | list[int], entries: bool) -> None:
    network = trained_net(dtype=torch.float64)  # `maps` is positive, `hidden` has both signs and no places
    data = squares(40, 0, torch.float64)[0], squares(20, 1, torch.float64)[0], blank(6, 2, torch.float64)
    detector = Gram(network, layers=BOTH, powers=powers, entries=entries).fit(data[0], held_out=data[1])
    expected = reference(network, BOTH, data, TEN if powers == 10 else list(powers), entries)  # type: ignore[call-overload]
    torch.testing.assert_close(detector.scores(data[2]), torch.from_numpy(expected), rtol=1e-8, atol=0)


@ENTRIES
def test_maps_of_both_signs_keep_them(entries: bool) -> None:
    network = Chosen(shift=0.4)
    data = pixels(30, 0), pixels(20, 1), pixels(15, 2)
    detector = Gram(network, layers="maps", entries=entries).fit(data[0], held_out=data[1])
    expected = reference(network, ["maps"], data, TEN, entries)
    assert (expected > 0).any()
    torch.testing.assert_close(detector.scores(data[2]), torch.from_numpy(expected), rtol=1e-8, atol=0)


def test_the_row_sums_of_two_channels_by_hand() -> None:
    # Row sums of F^p (F^p)ᵀ for F = (3, −1)ᵀ: 3^p (3^p + (−1)^p) and (−1)^p (3^p + (−1)^p).
    rows = gram_rows(torch.tensor([[[3.0], [-1.0]]], dtype=torch.float64), [1, 2, 3])
    expected = torch.tensor([[[6, -2], [90**0.5, 10**0.5], [3 * 26 ** (1 / 3), -(26 ** (1 / 3))]]], dtype=torch.float64)
    torch.testing.assert_close(rows, expected)


def test_the_entries_of_two_channels_by_hand() -> None:
    maps = torch.tensor([[[3.0, 0.0], [-1.0, 2.0]]], dtype=torch.float64)
    expected = torch.tensor([[[9, -3, -3, 5], [9, -3, -3, 65 ** (1 / 3)]]], dtype=torch.float64)
    torch.testing.assert_close(gram_entries(maps, [1, 3]), expected)


@ENTRIES
def test_the_inliers_that_made_the_ranges_score_zero(entries: bool) -> None:
    x = squares(30)[0]
    detector = Gram(trained_net(), layers=BOTH, entries=entries).fit(x, held_out=squares(30, 1)[0])
    assert not detector.scores(x).any()
    assert detector.scores(blank()).min() > 0


@ENTRIES
def test_a_score_does_not_depend_on_the_batch(entries: bool) -> None:
    detector = Gram(trained_net(dtype=torch.float64), layers=BOTH, entries=entries).fit(squares(40)[0])
    x = blank(9)
    for size in (1, 4):
        torch.testing.assert_close(detector.scores(x, size), detector.scores(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_the_score_does_not_depend_on_the_features_units(scale: float) -> None:
    plain, scaled = (
        Gram(Chosen(s), layers="maps").fit(pixels(40, 0), held_out=pixels(20, 1)).scores(pixels(9, 2))
        for s in (1.0, scale)
    )
    torch.testing.assert_close(scaled, plain, rtol=1e-9, atol=0)


def test_tokens_and_vectors_are_maps() -> None:
    x = pixels(40, 0), pixels(20, 1), pixels(9, 2)
    maps, tokens = (Gram(net, layers="maps").fit(x[0], held_out=x[1]).scores(x[2]) for net in (Chosen(), Tokens()))
    assert torch.equal(maps, tokens)
    vectors = torch.tensor([[3.0, -1.0]])
    assert torch.equal(gram.as_maps(vectors), vectors[:, :, None])


def test_a_class_that_was_never_predicted_has_the_range_of_all() -> None:
    network, inliers = Chosen(classes=3), pixels(40, 0)
    inliers[:, 0, 1, 0] = 0.0
    new = pixels(9, 2)
    new[:, 0, 1, 0] = 1.0
    assert set(read(network, inliers, "maps")[1].argmax(axis=1)) == {0, 1}
    assert set(read(network, new, "maps")[1].argmax(axis=1)) == {2}
    detector = Gram(network, layers="maps").fit(inliers, held_out=pixels(20, 1))
    expected = reference(network, ["maps"], (inliers, pixels(20, 1), new), TEN, False)
    torch.testing.assert_close(detector.scores(new), torch.from_numpy(expected), rtol=1e-8, atol=0)


def test_a_channel_that_was_always_zero_deviates_by_its_value_over_a_millionth_of_the_largest_bound() -> None:
    inliers = torch.full((4, 2, 1, 1), 0.5, dtype=torch.float64)
    inliers[:, 1] = 0
    detector = Gram(Chosen(), layers="maps", powers=1).fit(inliers)
    x = torch.tensor([0.5, 0.1], dtype=torch.float64).reshape(1, 2, 1, 1)
    # Rows 0.5·0.6 against 0.25, and 0.1·0.6 against 0; of the logits 2.5 and 0.5.
    total = 0.05 / 0.25 + 0.06 / (1e-6 * 0.25)
    assert float(detector.scores(x)) == pytest.approx(total * (1 + np.exp(-2.0)), rel=1e-9)


# float32


@ENTRIES
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("kind", ["positive", "relu", "both signs"])
def test_float32_has_the_values_and_gradients_of_float64_at_every_power(scale: float, kind: str, entries: bool) -> None:
    maps = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    maps = {"positive": maps.abs(), "relu": maps.relu(), "both signs": maps}[kind]
    maps = (scale * maps).float()
    leaf, exact = maps.clone().requires_grad_(), maps.double().requires_grad_()
    for index, power in enumerate(TEN):
        value, wanted = fast(leaf, TEN, entries)[:, index], naive(exact, power, entries)
        torch.testing.assert_close(value.double(), wanted, rtol=1e-3, atol=0)
        (slope,), (wanted,) = torch.autograd.grad(value.sum(), leaf), torch.autograd.grad(wanted.sum(), exact)
        assert slope.isfinite().all()
        torch.testing.assert_close(slope.double(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().mean()))


@ENTRIES
def test_float32_is_exact_for_channels_and_places_of_very_different_size(entries: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    channels, places = torch.tensor([1e4, 1.0, 1e-3, 1e-5]), torch.tensor([1.0, 1e-4, 1e-2, 1e-5, 1.0, 1e-3])
    maps = (0.5 + torch.rand(3, 4, 6, generator=generator)) * channels[:, None] * places
    maps[:, 1, [0, 2, 4]] = 0  # one channel lives only where everything is small
    wanted = torch.stack([naive(maps.double(), power, entries) for power in TEN], dim=1)
    leaf = maps.requires_grad_()
    values = fast(leaf, TEN, entries)
    torch.testing.assert_close(values.double(), wanted, rtol=1e-3, atol=0)
    (slope,) = torch.autograd.grad(values.sum(), leaf)
    assert slope.isfinite().all()


@ENTRIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_and_cancelled_sums_have_finite_gradients(dtype: torch.dtype, entries: bool) -> None:
    zeros, dead = torch.zeros(3, 4), torch.tensor([[0.0] * 4, [1, 0, 0, 0], [0, 0, 2, 3]])
    cancelled = torch.tensor([[1.0, -1, 1, -1], [1, 1, 1, 1], [-2, -2, 0, 0]])
    opposite = torch.tensor([[1.0, 2, 3, 4], [-1, -2, -3, -4], [0, 0, 0, 0]])
    apart = torch.tensor([[1.0, 1e-30, 0, 0], [1e-30, 1.0, 1e-30, 0], [0, 1e-20, 1.0, 1e-38]])
    maps = torch.stack([zeros, dead, cancelled, opposite, apart]).to(dtype)
    for scale in (1e-6, 1.0, 1e4):
        leaf = (scale * maps).requires_grad_()
        values = fast(leaf, TEN, entries)
        (slope,) = torch.autograd.grad(values.sum(), leaf)
        assert values.isfinite().all()
        assert slope.isfinite().all()
        assert not values[0].any()


def test_a_root_is_a_straight_line_where_only_rounding_is_left() -> None:
    least = torch.tensor(1e-6, dtype=torch.float64)
    values = torch.tensor([-8.0, -1e-6, -5e-7, 0, 5e-7, 1e-6, 8], dtype=torch.float64).requires_grad_()
    roots = gram.signed_roots(values[None, None], [3], least).flatten()
    wanted = torch.tensor([-2, -0.01, -0.005, 0, 0.005, 0.01, 2], dtype=torch.float64)
    torch.testing.assert_close(roots, wanted)
    (slope,) = torch.autograd.grad(roots.sum(), values)
    torch.testing.assert_close(slope[2:5], torch.full((3,), 1e4, dtype=torch.float64))


def test_a_large_step_from_the_inliers_has_a_finite_score_and_gradient_in_float32() -> None:
    detector = Gram(Chosen(1e4, shift=0.3), layers="maps").fit(0.3 + 1e-3 * pixels(40, 0, torch.float32))
    x = pixels(9, 1, torch.float32).requires_grad_()
    scores = detector(x)
    (slope,) = torch.autograd.grad(scores.sum(), x)
    assert scores.min() > 0
    assert scores.isfinite().all()
    assert slope.isfinite().all()
    assert slope.flatten(1).any(dim=1).all()


def test_a_network_in_half_precision_is_read_in_float32() -> None:
    network = trained_net().bfloat16()
    detector = Gram(network, layers=BOTH).fit(squares(40)[0])
    assert detector.per_layer[0].lows.dtype == torch.float32
    scores = detector.scores(blank())
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


def test_autocast_does_not_reach_the_statistics() -> None:
    detector = Gram(Chosen(), layers="maps")
    maps, logits = pixels(5, 0, torch.float32), torch.zeros(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = detector.summary([maps, logits])[0]
    assert torch.equal(inside, detector.summary([maps, logits])[0])


# The gradient


@ENTRIES
@pytest.mark.parametrize("powers", [[1], [2], [3], [2, 5, 9]], ids=str)
def test_the_gradient_of_the_statistics_is_that_of_finite_differences(
    powers: list[int], entries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "CACHED", 25)  # two samples at a time
    tokens = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: fast(gram.as_maps(z), powers, entries), (tokens,), rtol=1e-5)


@ENTRIES
@pytest.mark.parametrize("layers", ["maps", "hidden", BOTH], ids=str)
def test_the_gradient_is_that_of_finite_differences(layers: str | list[str], entries: bool) -> None:
    detector = Gram(trained_net(dtype=torch.float64), layers=layers, entries=entries)
    detector.fit(squares(60, 0, torch.float64)[0])
    x = blank(3, 5, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(detector, (x,), eps=1e-7, rtol=1e-5)


# Fitting


def assert_same(first: Gram, second: Gram, rtol: float = 0.0) -> None:
    torch.testing.assert_close(first.scales, second.scales, rtol=rtol, atol=0)
    for one, other in zip(gram.ranges_of(first), gram.ranges_of(second), strict=True):
        for name in ("lows", "highs", "floor"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=0)


def without_tenths(x: Tensor) -> Tensor:
    return x[torch.arange(len(x)) % 10 != 9]


@ENTRIES
@pytest.mark.parametrize("size", [1, 7, 20, 60])
def test_ranges_are_the_same_however_the_inliers_come(size: int, entries: bool) -> None:
    network, x = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)[0]
    whole, parts = (Gram(network, layers=BOTH, entries=entries).fit(data) for data in (x, list(x.split(size))))
    assert_same(whole, parts, rtol=1e-12)


def test_pieces_of_a_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, held_out = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)[0], squares(7)[0].double()
    whole = Gram(network, layers=BOTH).fit(x), Gram(network, layers=BOTH).fit(x, held_out=held_out)
    monkeypatch.setattr(gram, "PIECE", 50)
    parts = Gram(network, layers=BOTH).fit(x), Gram(network, layers=BOTH).fit(x, held_out=held_out)
    for one, other in zip(whole, parts, strict=True):
        assert_same(one, other, rtol=1e-12)


def test_without_held_out_inliers_every_tenth_is_one() -> None:
    network, x = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)[0]
    aside = Gram(network, layers=BOTH).fit(x)
    told = Gram(network, layers=BOTH).fit(without_tenths(x), held_out=x[9::10])
    assert_same(aside, told, rtol=1e-12)
    assert (aside.scales != 1).all()


def test_with_held_out_inliers_none_is_set_aside() -> None:
    network, x, held_out = trained_net(), squares(60)[0], squares(30, 1)[0]
    detector = Gram(network, layers=BOTH).fit(x, held_out=held_out)
    assert not detector.scores(x).any()
    assert detector.scores(held_out).mean() == pytest.approx(2.0)  # each of two layers has mean 1
    assert_same(detector.fit(x), Gram(network, layers=BOTH).fit(x))


def test_inliers_beyond_what_may_be_kept_widen_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = trained_net(dtype=torch.float64), squares(60, 0, torch.float64)[0]
    row = 8 * (10 * 4 + 10 * 5 + 3)
    monkeypatch.setattr(gram, "KEPT_BYTES", 2 * row + 1)
    told = Gram(network, layers=BOTH).fit(torch.cat([without_tenths(x[:20]), x[20:]]), held_out=x[[9, 19]])
    for size in (7, 60):
        assert_same(Gram(network, layers=BOTH).fit(list(x.split(size))), told, rtol=1e-12)


def test_fewer_than_ten_inliers_and_held_out_ones_inside_the_ranges_leave_the_deviation_as_it_is() -> None:
    x = squares(9)[0]
    assert Gram(trained_net(), layers=BOTH).fit(x).scales.tolist() == [1, 1]
    assert Gram(trained_net(), layers=BOTH).fit(x, held_out=x).scales.tolist() == [1, 1]
    assert Gram(trained_net(), layers=BOTH).fit(squares(10)[0]).scales.tolist() != [1, 1]


def test_labels_are_not_needed_and_not_looked_at() -> None:
    x, y = squares(60)
    plain, labelled = (Gram(trained_net(), layers="maps").fit(data) for data in (x, (x, y.flip(0))))
    assert_same(plain, labelled)


def test_gram_learns_in_the_pass_of_other_detectors() -> None:
    network, calls = trained_net(), []
    network.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    shared = Gram(network, layers="maps")
    fit_all([shared, Mahalanobis(network, layers=BOTH), Gram(network, layers="hidden")], squares(60))
    assert calls == [60]
    assert_same(shared, Gram(network, layers="maps").fit(squares(60)))


# Taps, files


def test_the_layers_of_the_encoder_are_read_unpooled() -> None:
    network, x = trained_net(), squares(60)[0]
    named = Gram(network, layers=BOTH).fit(x)
    for encoder in (Encoder(network, BOTH), Encoder(network, [*BOTH, None], pool="flatten")):
        assert_same(Gram(encoder).fit(x), named)


@ENTRIES
@pytest.mark.parametrize("layers", ["maps", BOTH], ids=str)
def test_a_saved_detector_gives_the_same_scores_wherever_the_encoder_taps(
    layers: str | list[str], entries: bool, tmp_path: Path
) -> None:
    network, x = trained_net(), torch.cat([squares(9, 3)[0], blank(9)])
    detector = Gram(network, layers=layers, powers=[1, 4], entries=entries).fit(squares(60)[0])
    detector.save(tmp_path / "gram.safetensors")
    for encoder in (network, Encoder(network, "head"), Encoder(network, BOTH, pool="flatten")):
        again = Gram.load(tmp_path / "gram.safetensors", encoder)
        assert again.spec == detector.spec
        assert torch.equal(again.scores(x), detector.scores(x))


def test_options_are_stored_as_they_are_used() -> None:
    assert Gram(trained_net(), layers="maps", powers=3).options == {
        "layers": ["maps"], "powers": [1, 2, 3], "entries": False
    }  # fmt: skip
    assert Gram(trained_net(), layers=BOTH, powers=(4, 2, 4)).options["powers"] == [2, 4]


# Mistakes


@pytest.mark.parametrize("encoder", [trained_net(), Encoder(trained_net(), [None])], ids=["network", "output only"])
def test_without_a_layer_there_is_nothing_to_read(encoder: nn.Module) -> None:
    with pytest.raises(ValueError, match="none is named: Gram"):
        Gram(encoder)
    with pytest.raises(ValueError, match="none is named: Gram"):
        Gram(encoder, layers=[])


def test_layers_that_are_no_names_are_refused() -> None:
    with pytest.raises(ValueError, match="layers must be the names of layers, got 3"):
        Gram(trained_net(), layers=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("powers", [0, -1, [], [0, 1], [1.5], 2.5, True, "12"], ids=str)
def test_powers_that_are_none_are_refused(powers: int) -> None:
    with pytest.raises(ValueError, match="powers must be positive whole numbers"):
        Gram(trained_net(), layers="maps", powers=powers)


@pytest.mark.parametrize("entries", ["yes", 1, None])
def test_entries_are_a_switch(entries: bool) -> None:
    with pytest.raises(ValueError, match=f"^entries must be True or False, got {entries!r}$"):
        Gram(trained_net(), layers="maps", entries=entries)


def test_a_layer_that_does_not_exist_is_an_error_that_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'maps'"):
        Gram(trained_net(), layers="map")


def test_an_output_without_classes_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    with pytest.raises(
        ValueError, match=r"Gram needs logits \(B, K\) as the network's output, got shape \(12, 2, 4, 4\)"
    ):
        Gram(network, layers="0").fit(squares(12)[0])


def test_held_out_inliers_must_be_some() -> None:
    with pytest.raises(ValueError, match="held_out has no images"):
        Gram(trained_net(), layers="maps").fit(squares(12)[0], held_out=[])
