"""Float32 that is float32: TF32 off inside the block, and as it was before outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from gatecrash.detectors import Card, Detector
from gatecrash.protocols import Latent, leaves
from gatecrash.speed import full_float32, is_exact
from small_models import Affine, blank

Flags = tuple[bool, bool]


def flags() -> Flags:
    """Whether convolutions, and whether products of matrices, may be rounded to TF32."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)])
def before(request: pytest.FixtureRequest) -> Iterator[Flags]:
    """The flags as a user may have set them."""
    found = flags()
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = found


class Watching(Detector):
    """A detector that notes the flags whenever it reads or judges."""

    card = Card(paper="none", year=2000, reads="features")

    def __init__(self) -> None:
        super().__init__(Affine(dtype=torch.float32))
        self.seen: list[Flags] = []

    def encode(self, x: Tensor) -> Latent:
        """As ever."""
        self.seen.append(flags())
        return super().encode(x)

    def judge(self, z: Latent) -> Tensor:
        """The mean pixel, (B,)."""
        self.seen.append(flags())
        return leaves(z)[0].mean(dim=1)


def test_nothing_is_rounded_inside_the_block_and_all_is_as_before_after_it(before: Flags) -> None:
    with full_float32():
        assert flags() == (False, False)
        with full_float32():
            assert flags() == (False, False)
        assert flags() == (False, False)
    assert flags() == before


def test_an_error_inside_the_block_leaves_nothing_switched(before: Flags) -> None:
    with pytest.raises(RuntimeError, match="inside"), full_float32():
        raise RuntimeError("inside")
    assert flags() == before


def test_scores_are_float32_and_a_reader_between_batches_has_its_own_flags(before: Flags) -> None:
    detector, between = Watching(), []

    def batches() -> Iterator[Tensor]:
        for batch in blank(6).split(2):
            between.append(flags())
            yield batch

    detector.scores(batches())
    assert detector.seen == 6 * [(False, False)]
    assert between == 3 * [before]


@pytest.fixture
def precisions() -> Iterator[Callable[[], list[str]]]:
    """What torch's newer interface says, which a test may change."""
    backends: Any = torch.backends
    parts = [backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    parts += [backends.mkldnn.matmul]
    yield lambda: [part.fp32_precision for part in parts]
    for part in parts:
        part.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("where", ["", "cudnn", "cudnn.conv", "cuda.matmul"])
def test_what_the_newer_interface_rounds_is_exact_inside_the_block_and_as_before_after_it(
    where: str, precisions: Callable[[], list[str]]
) -> None:
    part: Any = attrgetter(where)(torch.backends) if where else torch.backends
    part.fp32_precision = "tf32"
    before = precisions()
    assert not is_exact()
    with full_float32():
        assert is_exact()
        with full_float32():
            assert is_exact()
    assert precisions() == before


@pytest.mark.parametrize("precision", ["ieee", "none"])
def test_products_that_are_exact_by_the_newer_interface_are_so_after_the_block(
    precision: str, precisions: Callable[[], list[str]]
) -> None:
    backends: Any = torch.backends
    torch.set_float32_matmul_precision("high")
    backends.cuda.matmul.fp32_precision = precision
    before = precisions()
    with full_float32():
        assert is_exact()
    assert precisions() == before


@pytest.mark.parametrize("precision", ["high", "medium", "highest"])
def test_products_of_matrices_have_the_precision_they_had(precision: str, precisions: Callable[[], list[str]]) -> None:
    torch.set_float32_matmul_precision(precision)
    before = precisions()
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
        assert is_exact()
    assert torch.get_float32_matmul_precision() == precision
    assert precisions() == before


def test_what_is_exact_already_by_the_newer_interface_is_left_alone(precisions: Callable[[], list[str]]) -> None:
    backends: Any = torch.backends
    for part in (backends, backends.cudnn.conv, backends.cudnn.rnn):
        part.fp32_precision = "ieee"
    assert is_exact()
    before = precisions()
    with full_float32():
        assert precisions() == before
    assert precisions() == before
