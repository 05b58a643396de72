"""The dimension analysis, against exact probabilities, counts made by hand and the numbers of the paper."""

import json
from fractions import Fraction
from math import comb, exp, factorial, inf, log, log2

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from gatecrash import Encoder
from gatecrash.dimensions import LayerDimensions, dimension_table, dims_rows, log_covering, network_dimensions


def exact_covering(balls: int, boxes: int) -> Fraction:
    """F!·S(N, F) / F^N by inclusion and exclusion, in whole numbers."""
    return sum(
        ((-1) ** empty * comb(boxes, empty) * Fraction(boxes - empty, boxes) ** balls for empty in range(boxes + 1)),
        Fraction(0),
    )


def test_the_reference_is_the_papers_expression() -> None:
    stirling = 25  # S(5, 3)
    assert exact_covering(5, 3) == Fraction(factorial(3) * stirling, 3**5)


@pytest.mark.parametrize("boxes", [2, 3, 6, 12, 40, 100, 150])
def test_covering_is_an_upper_bound_that_is_tight_once_there_are_several_balls_per_box(boxes: int) -> None:
    for share in (1, 1.5, 2, 3, 5, 8, 12):
        balls = int(share * boxes)
        exact = exact_covering(balls, boxes)
        got = log_covering(log2(balls), log2(boxes))
        assert float(exact) <= exp(got) * (1 + 1e-12)
        assert exp(got) - float(exact) < (0.01 if boxes >= 100 else 0.13)
        if share >= 5:
            assert 0.98 < (1 - exp(got)) / float(1 - exact) <= 1 + 1e-9


def test_covering_is_the_coupon_collectors_limit_for_sizes_that_no_float_holds() -> None:
    for bits in (60, 5000, 10**6):
        # N = F·(log F + c) gives exp(−exp(−c))
        for c in (-2.0, 0.0, 3.0):
            got = log_covering(bits + log2(bits * log(2) + c), bits)
            assert got == pytest.approx(-exp(-c), rel=1e-4 if bits < 10**6 else 1e-2)


def test_covering_is_certain_or_impossible_far_from_the_limit() -> None:
    assert log_covering(8, 16) == -inf
    assert log_covering(16384, 16384) == -inf
    assert log_covering(16384 + 32, 16384) == 0
    assert log_covering(0, 0) == 0
    assert log_covering(1204224, 16384) == 0


def test_the_papers_resnet() -> None:
    whole = network_dimensions(resnet18(), (3, 224, 224), "avgpool")
    assert (whole.inputs, whole.outputs) == (150528, 512)
    assert (whole.input_bits, whole.output_bits) == (8 * 224 * 224 * 3, 32 * 512)
    assert 2**whole.output_bits < 2**whole.input_bits
    assert whole.ratio_bits == 16384 - 1204224
    assert whole.reduces
    assert whole.covering == 1


class Twice(nn.Module):
    """One ReLU that runs twice, one layer that never does, and one function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, stride=2)
        self.idle = nn.Linear(1, 1)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Flatten(), nn.Linear(18, 40), nn.BatchNorm1d(40))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 7, 7) to (B, 40)."""
        return torch.tanh(self.relu(self.block(self.relu(self.conv(x)))))


def test_every_layer_that_runs_is_listed_in_order() -> None:
    table = dimension_table(Twice(), (3, 7, 7))
    assert table == [
        LayerDimensions("conv", "Conv2d", 147, 18, 8 * 147, 32 * 18),
        LayerDimensions("relu", "ReLU", 18, 18, 32 * 18, 32 * 18),
        LayerDimensions("block.0", "Flatten", 18, 18, 32 * 18, 32 * 18),
        LayerDimensions("block.1", "Linear", 18, 40, 32 * 18, 32 * 40),
        LayerDimensions("block.2", "BatchNorm1d", 40, 40, 32 * 40, 32 * 40),
        LayerDimensions("relu", "ReLU", 40, 40, 32 * 40, 32 * 40),
    ]
    assert [part.reduces for part in table] == [True, False, False, False, False, False]


def test_a_flattened_image_is_still_pixels() -> None:
    flatten, linear = dimension_table(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2))
    assert (flatten.input_bits, flatten.output_bits) == (96, 96)
    assert (linear.input_bits, linear.output_bits) == (96, 160)
    assert linear.reduces
    assert linear.ratio_bits == 64
    assert linear.covering == 0


def test_a_module_without_calls_to_others_is_a_layer_even_with_children() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2)
            mixed: Tensor = self.attention(query=tokens, key=tokens, value=tokens)[0]
            return mixed

    assert dimension_table(Tokens(), (3, 2, 2)) == [
        LayerDimensions("attention", "MultiheadAttention", 12, 12, 96, 32 * 12)
    ]


def test_the_first_layer_reads_the_image_behind_an_encoders_normalisation() -> None:
    encoder = Encoder(Twice(), "conv", mean=[0.5] * 3, std=[0.2] * 3, pool="flatten")
    assert dimension_table(encoder, (3, 7, 7)) == dimension_table(Twice(), (3, 7, 7))
    assert network_dimensions(encoder, (3, 7, 7)).outputs == 18
    assert network_dimensions(encoder.model, (3, 7, 7), "conv").outputs == 2
    assert network_dimensions(encoder.model, (3, 7, 7), ["conv", "block.1"]).outputs == 42


def test_rows_end_with_the_whole_network_and_are_json() -> None:
    rows = dims_rows(Twice(), (3, 7, 7), "block.1")
    assert len(rows) == 7
    assert json.loads(json.dumps(rows)) == rows
    assert rows[-1] == {
        "layer": "image → block.1",
        "kind": "Twice",
        "inputs": 147,
        "outputs": 40,
        "log2_inputs": 1176,
        "log2_outputs": 1280,
        "log2_ratio": 104,
        "reduces": True,
        "covering": 0.0,
    }
    assert dims_rows(Twice(), (3, 7, 7))[-1]["layer"] == "image → output"


def test_the_model_is_left_as_it_is() -> None:
    model = Twice().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dims_rows(model, (3, 7, 7))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Pair(nn.Module):
    """A network of two images."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """(B, C, H, W), twice."""
        return first + second


def test_torchscript_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    for model in (torch.jit.script(network), nn.Sequential(torch.jit.script(network), nn.Linear(72, 2))):
        with pytest.raises(ValueError, match="is TorchScript, whose layers cannot be looked into"):
            dimension_table(model, (3, 8, 8))
    with pytest.raises(ValueError, match="is TorchScript, whose layers cannot be looked into"):
        Encoder(torch.jit.script(network), layer="0")


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input_shape must be \(C, H, W\), got \(7, 7\)"):
        dimension_table(Twice(), (7, 7))
    with pytest.raises(ValueError, match=r"Twice does not take images of shape \(1, 7, 7\): .*channels"):
        dimension_table(Twice(), (1, 7, 7))
    for shape in ((3, 200_000, 200_000), (1, 10**20, 28)):
        with pytest.raises(ValueError, match=r"images of shape \(.*\) are too large"):
            dimension_table(Twice(), shape)
    with pytest.raises(ValueError, match=r"Pair does not take images of shape \(3, 7, 7\): .*missing 1 required"):
        dimension_table(Pair(), (3, 7, 7))
    with pytest.raises(ValueError, match="Twice has no layer 'blok'"):
        dims_rows(Twice(), (3, 7, 7), "blok")


class Placed(nn.Module):
    """A layer with an embedding of positions added."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.linear = nn.Embedding(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.places(torch.arange(2)).sum(dim=0) + self.linear(x.flatten(1))


def test_an_embedding_of_positions_is_no_layer_of_the_image() -> None:
    assert [part.name for part in dimension_table(Placed(), (1, 2, 2))] == ["linear"]
